"""Several engines and a trainer on one Redis and one store, as processes; benchmarks/fleet.py tells what is tried."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from torch import Tensor

from benchmarks.faults.accounts import Accounts, accounts_at_the_end, acknowledged_in
from benchmarks.faults.load import Load
from benchmarks.services import STREAM_MAX_BYTES, Service, wait
from benchmarks.versions import add_version, num_that_ran
from speculator.checkpoint import model_key, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import StreamError
from speculator.ledger import StreamLag
from speculator.lifecycle import State
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.ports import free_port
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream

MODEL = "fleet"
CLIENTS = 2
"""An engine."""
KNOWN_VERIFICATIONS = 500


class Fleet:
    """The processes, and what is in the store. Use with `running`."""

    def __init__(
        self, folder: Path, model_dir: Path, questions: Sequence[str], num_engines: int, *, is_toy: bool
    ) -> None:
        self.folder, self.model_dir = folder, model_dir
        self.fingerprint = target_fingerprint(model_dir)
        self.key = model_key(model_dir, self.fingerprint)
        self.store = DraftStore(folder / "drafts")
        self.redis = EmbeddedRedis(folder / "redis")
        common = ["--model", str(model_dir), "--redis-url", self.redis.url, "--store", str(self.store.root)]
        ports = [free_port() for _ in range(num_engines)]
        own = ["--name", MODEL, "--capture", "--dtype", dtype_of(is_toy=is_toy), "--context-length", "512"]
        own += ["--threads", "1", "--suffix-depth", "0", "--stream-max-bytes", str(STREAM_MAX_BYTES)]
        self.engines = [
            Service(folder, f"engine-{number}", ["serve", *common, *own, "--port", str(port)], always_drafts=is_toy)
            for number, port in enumerate(ports)
        ]
        self.trainer = Service(folder, "trainer", ["train", *common, "--state", str(folder / "state")])
        self.loads = [
            Load(f"http://127.0.0.1:{port}", MODEL, num_clients=CLIENTS, pause_s=0.02, questions=questions)
            for port in ports
        ]

    @property
    def services(self) -> list[Service]:
        return [*self.engines, self.trainer]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            with contextlib.ExitStack() as loads:
                self.revive()
                wait(self.is_ready, "all engines to be ready", 180)
                for load in self.loads:
                    loads.enter_context(load.running())
                yield
        finally:
            for service in self.services:
                service.close()
            self.redis.stop()

    def revive(self) -> None:
        for service in self.services:
            if not service.is_alive:
                service.start()

    def is_ready(self) -> bool:
        try:
            return all(
                httpx.get(f"{load.url}/ready", timeout=5, trust_env=False).status_code == 200 for load in self.loads
            )
        except httpx.TransportError:
            return False

    def kill_redis(self) -> None:
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()
        self.redis = EmbeddedRedis(self.folder / "redis")

    # -- drafts

    def add(self, state: dict[str, Tensor], draft: Eagle3Draft) -> int:
        """A version that has passed the gate on paper."""
        return add_version(self.store, state, draft, self.fingerprint)

    def publish(self, version: int) -> None:
        with self.pointer() as pointer:
            pointer.publish(version)

    @contextlib.contextmanager
    def pointer(self) -> Iterator[DraftPointer]:
        with connect(self.redis.url) as client:
            yield DraftPointer(client, self.key)

    def reports(self) -> dict[int, dict[str, str]]:
        """By engine, of those that live."""
        with contextlib.suppress(StreamError), self.pointer() as pointer:
            found = pointer.engines()
            by_pid = {engine_id.rpartition("-")[2]: report for engine_id, report in found.items()}
            return {
                number: by_pid[str(engine.pid)]
                for number, engine in enumerate(self.engines)
                if str(engine.pid) in by_pid and engine.is_alive
            }
        return {}

    def canary(self, version: int) -> int | None:
        """The engine that says that it is this version's canary."""
        said = {"version": str(version), "role": "canary"}
        return next((number for number, report in self.reports().items() if said.items() <= report.items()), None)

    def all_run(self, version: int) -> bool:
        reports = self.reports()
        return len(reports) == len(self.engines) and {one["version"] for one in reports.values()} == {str(version)}

    def know_their_draft(self) -> bool:
        """Whether each has something to compare the next one with; a planner that has just begun hardly drafts."""
        known = self.verifications().values()
        return len(known) == len(self.engines) and min(known) >= KNOWN_VERIFICATIONS

    def verifications(self) -> dict[int, int]:
        """Of the draft in service, by engine, of those that live."""
        return {number: int(report["baseline_verifications"]) for number, report in self.reports().items()}

    def ran(self, version: int) -> int:
        """How many engines ever had it in service."""
        return num_that_ran(version, [engine.log for engine in self.engines])

    def state(self, version: int) -> State | None:
        return self.store.lifecycle.state(version)

    # -- traces

    def lag(self) -> StreamLag:
        with connect(self.redis.url) as client:
            return TraceStream(client, self.key, max_bytes=STREAM_MAX_BYTES, consumer="witness").lag()

    def is_settled(self) -> bool:
        self.revive()
        try:
            pages = [httpx.get(f"{load.url}/metrics", timeout=5, trust_env=False).text for load in self.loads]
            lag = self.lag()
        except (httpx.HTTPError, StreamError):
            return False
        return all("slipstream_traces_pending 0.0" in page for page in pages) and lag.pending + lag.undelivered == 0

    def accounts(self) -> Accounts:
        """Needs the trainer to have ended."""
        acknowledged = set[str]().union(*(acknowledged_in(engine.notes()) for engine in self.engines))
        state_dir, notes = self.folder / "state", self.trainer.notes()
        return accounts_at_the_end(state_dir, notes, self.lag(), acknowledged=acknowledged)[0]

    # -- answers

    def outcomes(self, since_s: float, *, but: int | None = None) -> Counter[str]:
        loads = (load for number, load in enumerate(self.loads) if number != but)
        return sum((load.since(since_s).outcomes for load in loads), Counter[str]())


def dtype_of(*, is_toy: bool) -> str:
    return "float64" if is_toy else "bfloat16"
