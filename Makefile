# Every target sets up what it needs, once. `.venv` is the locked environment of everything but SGLang, which has its
# own `.venv-sglang`, because it pins versions of many packages that we leave open.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo test test-sglang chaos soak gpu gpu-wheels llama-cpp lint check format lock audit release test-wheel clean containers docs secrets site system-packages up

# Without bytecode on disk each process compiles what it imports anew: twice as long for our services.
export PYTHONDONTWRITEBYTECODE :=

PYTHON := .venv/bin/python
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
ARGS ?=
# One process a core. Each runs whole files, so that servers shared within a file start once, in the order of
# tests/conftest.py; ARGS="-n 0" for one process.
IN_PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
MINUTES ?= 10
# Debian packages; tests that need one are skipped where it is missing.
SYSTEM_PACKAGES := chromium g++ prometheus redis-tools

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: .venv/.installed ## .venv: all but SGLang, as locked; then .venv/bin/slipstream serve --model DIR_OR_ID --learn

demo: .venv/.installed ## serve a real model, learn from its traffic, measure what that brings; ARGS="--minutes 3"
	$(PYTHON) -m slipstream demo $(ARGS)

test: .venv/.installed ## all tests, on a real Redis; ARGS="-k name"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m pytest $(IN_PARALLEL) $(ARGS)

test-sglang: .venv-sglang/.installed .venv-sglang/versions/.unpacked ## the tests that run real SGLang on the CPU (10 GB of disk); ARGS="-k name"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE .venv-sglang/bin/python -m pytest tests/sglang $(IN_PARALLEL) $(ARGS)

chaos: .venv/.installed ## inject faults into the running loop, one after another, and report effects; ARGS="--quick"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m benchmarks.chaos $(ARGS)

# PYTHON=python3 uses an interpreter that has PyTorch and SGLang already.
gpu: ## checks and measurements that need a GPU, in five stages; ARGS="--stage 1 4 --device cpu --quick"
	@[ "$(origin PYTHON)" != file ] || $(MAKE) --no-print-directory .venv-sglang/.installed
	$(if $(filter file,$(origin PYTHON)),.venv-sglang/bin/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

gpu-wheels: $(UV) ## wheels for make gpu on a machine without a network, in parts of 60 MB
	python3 -m benchmarks.gpu.wheels --uv $(UV) $(ARGS)

# Compiled for this CPU. No other target depends on it: it takes five minutes on two cores.
llama-cpp: .venv/.installed ## install llama.cpp into .venv, for benchmarks.serving to compare with
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF" \
	  $(UV) pip install --quiet --python $(PYTHON) --require-hashes --no-binary llama-cpp-python -r deploy/llama-cpp.lock

soak: .venv/.installed ## run the loop under steady load and report memory and other growth; MINUTES=10
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PYTHON) -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

secrets: ## write .env and, into deploy/secrets, the passwords of docker-compose.yml, where there are none yet
	@[ -e .env ] || { cp .env.example .env && echo "wrote .env: choose the model in it"; }
	@deploy/secrets.sh

up: ## check what docker-compose.yml needs, build, start it in the background, wait until it serves; docs/how-to/compose.md
	@deploy/up.sh $(ARGS)

containers: .venv/.installed $(if $(findstring --sglang,$(ARGS)),.venv-sglang/.installed) ## build the images and try the CPU variant, in a Docker of its own without a registry (root, 25 GB); ARGS=--sglang: then SGLang on the CPU, too
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.containers $(ARGS)

lint: .venv/.installed ## formatting, rules, types, import contracts
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-cache

check: lint test ## what CI runs before the tests on SGLang

format: .venv/.installed ## rewrite the code in the project's format
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

docs: .venv/.installed ## regenerate the tables in docs/reference and the alert rules for Kubernetes
	$(PYTHON) -m docs.tables
	$(PYTHON) -m deploy.kubernetes.rules

site: .venv/.installed ## build the site into dist/site; fails on a broken link or an unknown flag, setting or metric
	$(PYTHON) -m sphinx -q -E -W --keep-going -c docs . dist/site

lock: $(UV) ## compile the lock files again from pyproject.toml (names, versions and hashes only)
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 --extra otel pyproject.toml -o requirements.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 --extra demo --extra dev pyproject.toml -o requirements-dev.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 --extra sglang --extra router --extra demo --extra dev pyproject.toml -o requirements-sglang.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 -c requirements-dev.lock deploy/build.in -o deploy/build.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 -c requirements-dev.lock deploy/llama-cpp.in -o deploy/llama-cpp.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 deploy/audit.in -o deploy/audit.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 deploy/release.in -o deploy/release.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 --no-deps -c requirements-sglang.lock deploy/sglang.in -o deploy/sglang.lock
	$(UV) pip compile -q --universal --generate-hashes --python-version 3.11 -c requirements-dev.lock deploy/router.in -o deploy/router.lock

release: .venv-release/.installed $(UV) ## dist/: source archive, wheel and SBOM of what is committed, checked
	@deploy/release.sh .venv-release/bin $(UV)

test-wheel: $(UV) ## the wheel in an empty environment, and a demo of a minute from it; MINUTES=1
	@deploy/test-wheel.sh $(UV) $(if $(filter command line,$(origin MINUTES)),$(MINUTES),1)

audit: .venv-audit/.installed ## look up known vulnerabilities of all locked packages at osv.dev
	@deploy/audit.sh .venv-audit/bin/pip-audit requirements*.lock deploy/*.lock

system-packages: ## install Debian packages that some tests need (apt-get, root); prometheus takes port 9090
	@if dpkg -s $(SYSTEM_PACKAGES) >/dev/null 2>&1; then exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES); \
	else echo "not installed (needs root and apt-get), tests that need them are skipped: $(SYSTEM_PACKAGES)" >&2; fi

clean: ## remove the environments
	rm -rf .venv .venv-sglang .venv-audit .venv-release .tools dist

# Install uv where it is missing, with --target, which also works where the system's pip is externally managed.
.tools/bin/uv:
	@python3 -m pip --version >/dev/null 2>&1 || { echo "python3 has no pip: install python3-pip, or uv itself" >&2; exit 2; }
	python3 -m pip install --quiet --disable-pip-version-check --target .tools uv

define install
@[ -x $(@D)/bin/python ] || $(UV) venv --quiet --python '>=3.11' $(@D)
$(UV) pip sync --quiet --python $(@D)/bin/python --require-hashes $<
$(UV) pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation --editable .
@touch $@
endef

.venv/.installed: requirements-dev.lock pyproject.toml | $(UV)
	$(install)

.venv-sglang/.installed: requirements-sglang.lock pyproject.toml | $(UV)
	$(install)

# Other SGLang versions, unpacked only for tests to read: the functions that the plugin hooks must be in them, too.
.venv-sglang/versions/.unpacked: $(wildcard tests/sglang/versions/*.lock) .venv-sglang/.installed
	for lock in tests/sglang/versions/*.lock; do \
	  $(UV) pip install --quiet --target $(@D)/$$(basename $$lock .lock) --no-deps --require-hashes --link-mode copy \
	    --python-version 3.12 --python-platform x86_64-manylinux_2_34 -r $$lock || exit; \
	done
	@touch $@

# In an environment of its own, so that the audited packages are not part of the auditor.
.venv-audit/.installed: deploy/audit.lock
.venv-release/.installed: deploy/release.lock
.venv-audit/.installed .venv-release/.installed: | $(UV)
	@[ -x $(@D)/bin/python ] || $(UV) venv --quiet --python '>=3.11' $(@D)
	$(UV) pip sync --quiet --python $(@D)/bin/python --require-hashes $<
	@touch $@
