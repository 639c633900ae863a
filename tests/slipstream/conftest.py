"""The toy target on disk, and two ways to run the command line: as a process, and quickly in this one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.cli.main import main
from speculator.host import free_port
from tests.fixtures.preloaded import ForkedProcess, Preloaded
from tests.fixtures.telemetry import prometheus
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import PATIENCE_S

TRAINER_ENV = {
    "SLIPSTREAM_TRAINER_PUBLISH_MIN_TOKENS": "50",
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "0.5",
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "0.5",
    "SLIPSTREAM_TRAINER_NICE": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    def run(*arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slipstream", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@functools.cache
def preloaded() -> Preloaded:
    """What `slipstream` is forked from, as a process of its own."""
    return Preloaded("tests.slipstream.preloaded", {**os.environ, **TRAINER_ENV})


def spawn(
    log: Path, *arguments: object, module: str = "slipstream", folder: Path | None = None, **environment: str
) -> ForkedProcess:
    """A command line as a process, on one thread, as `python -m MODULE` would run it."""
    variables = {**os.environ, **TRAINER_ENV, **environment}
    return preloaded().start([module, *map(str, arguments)], variables, log, folder=folder)


@contextmanager
def service(
    log: Path, *arguments: object, module: str = "slipstream", folder: Path | None = None, **environment: str
) -> Iterator[ForkedProcess]:
    """The process, until the block ends: then SIGTERM ends it, and without complaint."""
    process = spawn(log, *arguments, module=module, folder=folder, **environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(PATIENCE_S) == 0, log.read_text()[-4000:]
            finally:
                process.kill()


@dataclass(frozen=True, kw_only=True)
class WatchedDemo:
    """What `slipstream demo` on the toy target left behind, and the Prometheus that scraped it, still there to ask."""

    returncode: int
    stderr: str
    document: Path
    plot: Path
    prometheus_url: str
    """Empty where there is no Prometheus on this machine."""


@pytest.fixture(scope="session")
def watched_demo(run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedDemo]:
    """One demo for every test that looks at one. 48 s of live traffic: the speedup's interval needs five blocks of 6 s
    before the engine is started again.

    Its head pays within them: the target is an easy one, and there are no suffixes that know it sooner.
    """
    folder = tmp_path_factory.mktemp("demo")
    model = make_toy_model(folder / "toy", common=2.0)
    document, plot, prompts = folder / "out.json", folder / "out.png", folder / "prompts.jsonl"
    asked = [("first", f"question {number}") for number in range(2000)]
    asked += [("second", f"{number} is the answer to what?") for number in range(500)]
    prompts.write_text("".join(f"{json.dumps({'domain': of, 'prompt': text})}\n" for of, text in asked))
    ports = {"gateway": free_port(), "trainer": free_port()}
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        url = ""
        if shutil.which("prometheus") is not None:
            keys = {"gateway": folder / "kept" / "metrics.key"}
            url = running.enter_context(prometheus(folder / "prometheus", ports, keys=keys))
        for name, value in TRAINER_ENV.items():
            patch.setenv(name, value)
        patch.setenv("SLIPSTREAM_TRAINER_METRICS_PORT", str(ports["trainer"]))
        # As in a company whose proxy does not lead back to this machine.
        for name in ("NO_PROXY", "no_proxy", "http_proxy"):
            patch.delenv(name, raising=False)
        patch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        result = run_cli(
            *("demo", "--model", model, "--minutes", 0.8, "--json", document, "--plot", plot),
            *("--port", ports["gateway"], "--max-tokens", 40, "--context-length", 256, "--draft-vocab-size", 64),
            *("--dtype", "float32", "--suffix-depth", 0, "--keep", folder / "kept", "--prompts", prompts),
            timeout_s=280,
        )
        patch.undo()
        yield WatchedDemo(
            returncode=result.returncode,
            stderr=result.stderr,
            document=document,
            plot=plot,
            prometheus_url=url,
        )


class SampleEnd(NamedTuple):
    """How a command line ended, and what it printed."""

    code: int | str | None
    out: str
    err: str


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Callable[..., SampleEnd]:
    """Run a command line in this process."""

    def run(*arguments: object) -> SampleEnd:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return SampleEnd(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(invoke: Callable[..., SampleEnd]) -> Callable[..., str]:
    """Run a command line that must end with exit code 2 and one line, which is returned."""

    def run(*arguments: object) -> str:
        code, _, err = invoke(*arguments)
        printed = [line for line in err.splitlines() if line and not line.startswith("{")]
        assert code == 2, printed
        assert len(printed) == 1, printed
        return printed[0]

    return run
