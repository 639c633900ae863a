"""Two real SGLang servers with the plugin behind real sglang-routers, and gateways in front of those."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from speculator.host import free_port
from tests.sglang.server import SglangServer, dtype_flags, speculative_flags

MODEL = "pooled"
ENGINES = ("first", "second")


_WITHOUT_SGLANG = "import sys; sys.modules['sglang'] = None; from sglang_router.cli import main; main()"
"""As in an environment of its own: the router's launcher imports SGLang where there is one, and that takes long."""


def find_router() -> list[str] | None:
    """The command of this environment's router, or of one on the PATH."""
    if importlib.util.find_spec("sglang_router") is not None:
        return [sys.executable, "-c", _WITHOUT_SGLANG]
    on_path = shutil.which("sglang-router")
    return None if on_path is None else [on_path]


def router_command(router: Sequence[str], *, port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
    """As docs/how-to/many-engines.md says, on loopback and with closer looks at the engines' health."""
    return [
        *(*router, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers),
        *("--policy", "round_robin", "--disable-circuit-breaker", "--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"),
    ]


@dataclass
class Pooled:
    """The processes of a pool; `kill` and `start` take the names of `ENGINES`, `routers` and `gateways`."""

    folder: Path
    model_dir: Path
    store: Path
    redis_url: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further settings of the plugin."""
    flags: Sequence[str] = ()
    """Further flags of SGLang."""
    num_fronts: int = 1
    """Routers before the engines, and gateways that know all routers."""

    def __post_init__(self) -> None:
        router = find_router()
        assert router is not None, "no sglang-router: make test-sglang installs it"
        self._router = router
        self.routers = tuple(f"router-{number}" for number in range(self.num_fronts))
        self.gateways = tuple(f"gateway-{number}" for number in range(self.num_fronts))
        self._ports = {name: free_port() for name in (*ENGINES, *self.routers, *self.gateways)}
        self._metrics_ports = {name: free_port() for name in self.routers}
        self.engines: dict[str, SglangServer] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = self.url_of(self.gateways[0])

    @contextlib.contextmanager
    def running(self) -> Iterator[Pooled]:
        try:
            with ThreadPoolExecutor(len(ENGINES)) as threads:
                list(threads.map(self.start_engine, ENGINES))
            for name in (*self.routers, *self.gateways):
                self.start(name)
            self.wait_for(self._all_serve, "routers and gateways")
            yield self
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
            for server in self.engines.values():
                server.__exit__()

    def start_engine(self, name: str) -> None:
        """Returns once it serves."""
        values = {
            "ENABLED": "1",
            "REDIS_URL": self.redis_url,
            "STORE": str(self.store),
            "ENGINE_ID": name,
            "CAPTURE": "1",
            "CAPTURE_UNMARKED": "0",
            "POLL_S": "0.1",
            **self.settings,
        }
        server = SglangServer(
            self.model_dir,
            log_path=self.folder / f"{name}.log",
            flags=[
                *speculative_flags(self.store / "versions" / "000001", num_steps=2),
                *("--served-model-name", MODEL, *dtype_flags(), *self.flags),
            ],
            env={
                **{f"SLIPSTREAM_{key}": value for key, value in values.items()},
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            },
            port=self._ports[name],
        )
        self.engines[name] = server.__enter__()

    def start(self, name: str) -> None:
        if name in self.routers:
            command = router_command(
                self._router,
                port=self._ports[name],
                metrics_port=self._metrics_ports[name],
                workers=[self.url_of(engine) for engine in ENGINES],
            )
        else:
            command = [
                *(sys.executable, "-m", "slipstream", "gateway", "--pool"),
                *(word for router in self.routers for word in ("--sglang", self.url_of(router))),
                *("--model", str(self.model_dir), "--store", str(self.store), "--redis-url", self.redis_url),
                *("--port", str(self._ports[name])),
            ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        """Every process of it at once, as a machine that loses its power."""
        if name in self.engines:
            os.killpg(self.engines[name].pid, signal.SIGKILL)
            self.engines.pop(name).__exit__()
        else:
            self._processes[name].kill()
            self._processes[name].wait()

    def num_running(self, engine: str) -> int:
        """Requests that an engine has, by its own count."""
        loads = httpx.get(f"{self.url_of(engine)}/v1/loads", params={"include": "core"}, trust_env=False).json()[
            "loads"
        ]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", trust_env=False).text

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> float:
        """Seconds until it is true."""
        started_s = time.monotonic()
        while not condition():
            if (waited_s := time.monotonic() - started_s) > timeout_s:
                logs = {path.name: path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")}
                raise AssertionError(f"waited {waited_s:.0f} s for {what}: {logs}")
            time.sleep(0.05)
        return time.monotonic() - started_s

    def serves(self, name: str) -> bool:
        """Whether a gateway is ready, or a router sees every engine."""
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            if name in self.gateways:
                return httpx.get(f"{self.url_of(name)}/ready", timeout=2, trust_env=False).status_code == 200
            seen = httpx.get(f"{self.url_of(name)}/readiness", trust_env=False).json()
            return int(seen["healthy_workers"]) == len(ENGINES)
        return False

    def _all_serve(self) -> bool:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        return all(self.serves(name) for name in self._processes)

    @property
    def router_url(self) -> str:
        return self.url_of(self.routers[0])

    def url_of(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"
