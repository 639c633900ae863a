"""The toy target on disk, and two ways to run the command line: as a process, and quickly in this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from slipstream.cli import main
from tests.toy import make_toy_model

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


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run a command line that must end with exit code 2 and one line, which is returned."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("{")]
        assert ended.value.code == 2, printed
        assert len(printed) == 1, printed
        return printed[0]

    yield run
    structlog.reset_defaults()
