"""`make containers`: build the images, bring the CPU variant up with `make up`, use it, restart Redis, take it down.

With `--sglang` then the GPU variant as well, with SGLang on the CPU. Outside of the test suite: it takes some minutes,
root and the disk of a few images. It works on a copy of the checkout, and removes what it made.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import httpx
import typer

from serving.local.kernels.build import available
from slipstream.demo.servers import Scrape
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.host import free_port
from speculator.redis.client import RedisKeys
from tests.containers.engine import Engine, missing
from tests.containers.sglang import SITE
from tests.deploy.compose import CPU, GPU, ROOT, argv, instructions, load
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import wait_until

_OURS = ("init", "gateway", "trainer")
_ENVIRONMENT = """\
COMPOSE_FILE={files}
SLIPSTREAM_MODEL=/models/toy
SLIPSTREAM_MODELS={models}
SLIPSTREAM_MODEL_NAME=toy
SLIPSTREAM_CAPTURE=1
SLIPSTREAM_PORT={port}
SLIPSTREAM_PROMETHEUS_PORT={prometheus_port}
"""
_CPU_FILES = "docker-compose.yml:deploy/compose.cpu.yml:here.yml"
_HERE = """\
services:
  # Where packages come from is this machine's to know.
  init: {build: {network: host}}
  # A draft within seconds.
  trainer:
    environment:
      SLIPSTREAM_TRAINER_PUBLISH_MIN_TOKENS: "50"
      SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S: "0.5"
      SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S: "0.5"
  # Debian has none.
  grafana: !reset null
"""
_SGLANG = """\
services:
  # The image that is built already: no part of it would use a card here.
  init: {{image: {cpu}, build: {{args: {{WITHOUT_GPU: "1"}}}}}}
  gateway: {{image: {cpu}}}
  trainer: {{image: {cpu}, deploy: {{resources: !reset null}}}}
  sglang:
    build: {{network: host}}
    deploy: !reset null
    command: {command}
    environment:
      OMP_NUM_THREADS: "1"
      TOKENIZERS_PARALLELISM: "false"
      # It would look for a C++ compiler at the first request.
      TORCHDYNAMO_DISABLE: "1"
"""


class Deployment:
    """The CPU variant in a copy of the checkout, as somebody would have it who follows docs/how-to/compose.md."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self._engine = folder / "checkout", engine
        files = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in filter(None, files):
            if (ROOT / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        self.model = make_toy_model(folder / "models" / "toy", hidden_size=256, common=2.0)
        self._port, self._prometheus_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        (self.folder / "here.yml").write_text(_HERE)

    def choose(self, files: str) -> None:
        """Write .env, with these compose files."""
        ports = {"port": self._port, "prometheus_port": self._prometheus_port}
        (self.folder / ".env").write_text(_ENVIRONMENT.format(files=files, models=self.model.parent, **ports))

    def call(self, *words: str, check: bool = True, timeout_s: float = 1200) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self._engine.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done

    def compose(self, *words: str) -> str:
        return self.call("docker", "compose", *words).stdout

    def ask(self, text: str, *, key: str | None = None) -> httpx.Response:
        body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def secret(self, name: str) -> str:
        return (self.folder / "deploy" / "secrets" / name).read_text()

    def gateway(self) -> Scrape:
        headers = {"authorization": f"Bearer {self.secret('gateway_metrics')}"}
        return Scrape.parse(0, httpx.get(f"{self._url}/metrics", headers=headers).text)

    def trainer(self) -> Scrape:
        read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9101/metrics').read().decode())"
        return Scrape.parse(0, self.compose("exec", "-T", "trainer", "python", "-c", read))

    def num_traces(self) -> int:
        """In Redis."""
        stream = RedisKeys(model_key=model_key(self.model, target_fingerprint(self.model))).traces
        login = ("--no-auth-warning", "--user", "trainer", "--pass", self.secret("redis_trainer"))
        return int(self.compose("exec", "-T", "redis", "redis-cli", *login, "XLEN", stream))

    def inspect(self, service: str, what: str) -> str:
        container = self.compose("ps", "--quiet", "--all", service).strip()
        return self.call("docker", "inspect", "--format", what, container).stdout.strip()


def check(deployment: Deployment, say: Callable[[str], None]) -> None:
    """Raises AssertionError for whatever does not hold."""
    _refuses_what_is_missing(deployment, say)
    deployment.call("make", "up")
    services = load(CPU, {"SLIPSTREAM_MODEL": "/models/toy"})["services"]
    images = {services[name]["image"] for name in _OURS}
    sizes = {image: deployment.call("docker", "image", "inspect", "--format", "{{.Size}}", image) for image in images}
    say("up: " + ", ".join(f"{image} of {int(size.stdout) / 1e9:.2f} GB" for image, size in sizes.items()))
    assert deployment.inspect("trainer", "{{.HostConfig.CpuShares}}") == "64"

    assert deployment.ask("what is a draft?").status_code == 401
    key = deployment.secret("gateway_client")
    answer = deployment.ask("what is a draft?", key=key)
    assert answer.status_code == 200, answer.text
    say(f"an answer through the gateway with its key: {json.dumps(answer.json()['choices'][0]['message']['content'])}")
    if available():
        log = deployment.compose("logs", "--no-log-prefix", "gateway")
        [line] = [line for line in log.splitlines() if "kernels of our own" in line]
        assert "with kernels of our own" in line, line
        say(f"the gateway's log: {line}")

    _learns(deployment, say)
    captured = deployment.gateway().total("slipstream_traces_captured_total")
    wait_until(lambda: deployment.trainer().total("slipstream_trainer_known_traces") >= captured)
    known, in_redis = deployment.trainer().total("slipstream_trainer_known_traces"), deployment.num_traces()
    deployment.compose("down")
    deployment.call("make", "up")
    assert deployment.num_traces() >= in_redis > 0, f"{deployment.num_traces()} of {in_redis} traces are left in Redis"
    deployment.ask("and again?", key=key).raise_for_status()
    wait_until(lambda: deployment.trainer().total("slipstream_trainer_known_traces") > known)
    say(f"down and up: {in_redis} traces in Redis as before, and the trainer knows its {known:.0f} and the next one")


def check_sglang(deployment: Deployment, say: Callable[[str], None]) -> None:
    """Raises AssertionError for whatever does not hold of the GPU variant, with SGLang on the CPU."""
    deployment.choose("docker-compose.yml")
    if shutil.which("nvidia-smi") is None:
        said = _refusals(deployment)
        for wanted in ("nvidia-smi finds no GPU", "Docker cannot use a GPU"):
            [line] = [line for line in said if line.startswith(wanted)]
            say(f"make up refused: {line}")
    chosen = {"SLIPSTREAM_MODEL": "/models/toy", "SLIPSTREAM_MODEL_NAME": "toy"}
    sglang = load(GPU, {**chosen, "SLIPSTREAM_SGLANG_ARGS": "--skip-server-warmup"})["services"]["sglang"]
    before, after = (words := argv(sglang["command"]))[: (end := words.index("--"))], words[end:]
    command = json.dumps([*before, "--device", "cpu", "--dtype", "float32", *after])
    cpu, image = load(CPU, chosen)["services"]["gateway"]["image"], sglang["image"]
    (deployment.folder / "sglang.yml").write_text(_SGLANG.format(command=command, cpu=cpu))
    deployment.choose("docker-compose.yml:here.yml:sglang.yml")
    deployment.call("make", "up")
    size = deployment.call("docker", "image", "inspect", "--format", "{{.Size}}", image)
    say(f"up: {image} of {int(size.stdout) / 1e9:.2f} GB")
    answer = deployment.ask("what is a draft?", key=deployment.secret("gateway_client"))
    assert answer.status_code == 200, answer.text
    say(f"SGLang's answer through the gateway: {json.dumps(answer.json()['choices'][0]['message']['content'])}")
    _learns(deployment, say)


def _learns(deployment: Deployment, say: Callable[[str], None]) -> None:
    numbers, key = iter(range(1_000_000)), deployment.secret("gateway_client")

    def in_service() -> bool:
        deployment.ask(f"question {next(numbers)}", key=key).raise_for_status()
        return deployment.gateway().total("slipstream_draft_version") >= 2

    wait_until(in_service, timeout_s=240)
    version = deployment.gateway().total("slipstream_draft_version")
    say(f"the trainer published version {version:.0f}, and the gateway serves with it, after {next(numbers)} answers")
    denied = [line for line in deployment.compose("logs").splitlines() if re.search("(?i)no permissions|noperm", line)]
    assert not denied, denied[0]


def _refusals(deployment: Deployment) -> list[str]:
    done = deployment.call("deploy/up.sh", check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()


def _refuses_what_is_missing(deployment: Deployment, say: Callable[[str], None]) -> None:
    found = _refusals(deployment)
    assert [word for word in ("there is no .env", "deploy/secrets/") if not any(word in line for line in found)] == []
    deployment.call("make", "secrets")
    deployment.choose(_CPU_FILES)
    (deployment.model / "model.safetensors").chmod(0o600)
    found += (closed := _refusals(deployment))
    assert ["may not be read by user 10001" in line for line in closed] == [True]
    (deployment.model / "model.safetensors").chmod(0o644)
    assert not deployment.call("docker", "ps", "--all", "--quiet").stdout
    for line in found:
        say(f"make up refused: {line}")


def main(
    sglang: Annotated[
        bool, typer.Option("--sglang", help="Then the GPU variant, too, with SGLang on the CPU.")
    ] = False,
) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        typer.echo(f"{time.monotonic() - began:5.0f} s  {text}")

    folder = Path(tempfile.mkdtemp(prefix="slipstream-containers-"))
    without = f"there is no {SITE}: make test-sglang installs it" if sglang and not SITE.is_dir() else None
    if reason := missing(folder) or without:
        folder.rmdir()
        typer.echo(f"containers: skipped: {reason}")
        return
    engine = Engine(folder)
    try:
        engine.unpack()
        say("Debian's packages are unpacked")
        engine.start()
        services = load(CPU, {"SLIPSTREAM_MODEL": "/models/toy"})["services"]
        python = instructions(ROOT / "deploy" / "slipstream.Dockerfile")[1][1].split()[0]
        engine.make_images(python, services["redis"]["image"], services["prometheus"]["image"])
        say("a daemon runs, with base images made of them")
        deployment = Deployment(folder, engine)
        try:
            check(deployment, say)
            if sglang:
                deployment.compose("down", "--volumes")
                base = [rest for name, rest in instructions(ROOT / "deploy" / "sglang.Dockerfile") if name == "FROM"][
                    -1
                ]
                engine.make_sglang_image(base)
                say(f"a stand-in for {base}")
                check_sglang(deployment, say)
        except AssertionError:
            with suppress(AssertionError):
                typer.echo(deployment.compose("logs", "--tail", "60"), err=True)
            raise
        deployment.compose("down", "--volumes")
        say(f"down. {(time.monotonic() - began) / 60:.1f} minutes in all")
    finally:
        engine.close()
        # Only then: while something is mounted there, more than the folder would be removed.
        shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)
