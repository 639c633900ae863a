"""The real model, a fresh draft for it, and a rule for where SGLang is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.draft.checkpoint import target_fingerprint
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

_RUN_WITHOUT_SGLANG = {"test_ops.py"}

# `make test` has an environment without SGLang, `make test-sglang` one with it.
collect_ignore = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore += [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _RUN_WITHOUT_SGLANG
    ]


elif not torch.cuda.is_available():
    # Triton's own functions are either compiled or interpreted, from its first import on. What SGLang has in Triton is
    # neither run nor changed by this.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")


# What SGLang and its GPU libraries say when a test imports them into its own process on a machine without a GPU.
_ON_IMPORT = (
    r"ignore:cutlass\..* is deprecated:DeprecationWarning",
    r"ignore:builtin type Swig.* has no __module__ attribute:DeprecationWarning",
    r"ignore:Only CUDA.* support (AWQ|GGUF quantization) currently:UserWarning",
    r"ignore:Triton is not supported on current platform:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in _ON_IMPORT:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2, converted once into the cache."""
    return resolve_model(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def draft_store(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    """A store with version 1: a fresh, random draft for the model."""
    store = DraftStore(tmp_path_factory.mktemp("drafts"))
    ensure_lineage(store, model_dir, target_fingerprint(model_dir))
    return store


@pytest.fixture(scope="module")
def store(draft_store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    """A copy of it, to be written to."""
    return DraftStore(shutil.copytree(draft_store.root, tmp_path_factory.mktemp("store") / "drafts"))


@pytest.fixture(scope="session")
def draft_dir(draft_store: DraftStore) -> Path:
    """The random draft as a checkpoint that SGLang loads."""
    return draft_store.root / "versions" / f"{draft_store.latest():06d}"
