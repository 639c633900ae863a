"""The loop as its users run it: Redis, `slipstream serve` and `slipstream train`, each a process that may be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.faults.load import Load, Window
from slipstream.children import Child
from slipstream.demo.servers import Scrape, wait_until_ready
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_stream import TraceStream
from speculator.versions.store import DraftStore
from tests.fixtures.faults import small_disk

MODEL = "toy"
STREAM_MAX_BYTES = 16 << 20
TRAINER_ENVIRONMENT = {
    "SLIPSTREAM_TRAINER_PUBLISH_MIN_TOKENS": "50",
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "2",
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "0.5",
    "SLIPSTREAM_TRAINER_STREAM_MAX_BYTES": str(STREAM_MAX_BYTES),
    # Normal priority, so that waits for the trainer do not time out on a busy machine.
    "SLIPSTREAM_TRAINER_NICE": "0",
}
START_S = 120.0
CALM_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Books:
    """Appended traces as the engine counts them, and as the stream does."""

    captured: float
    appended: float
    dropped: float
    waiting: float
    lag: StreamLag


class Loop:
    """Redis, server and trainer with clients; use with `running`. Redis and the store have a small disk each, where
    disks may be mounted.
    """

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        serve_options: tuple[str, ...],
        *,
        disk_bytes: int = 256 << 20,
        patience: float = 1.0,
    ) -> None:
        """A disk must hold 20 versions of the draft and ten forged ones. Waits time out after `patience` times as long
        as with a toy model.
        """
        self.folder, self.model_dir = folder, model_dir
        self._disk_bytes, self._patience = disk_bytes, patience
        self.fingerprint = target_fingerprint(model_dir)
        self.model_key = model_key(model_dir, self.fingerprint)
        self._serve_options = serve_options
        self._port, self._trainer_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.load = Load(self.url, MODEL, num_clients=4, pause_s=0.1)
        self.redis_dir, self.store_dir = folder / "redis", folder / "drafts"
        self.store = DraftStore(self.store_dir)
        self.redis: EmbeddedRedis
        self.serve: Child
        self.train: Child
        self.away: Child | None = None
        """A process that a fault has ended on purpose."""

    @contextlib.contextmanager
    def running(self) -> Iterator[bool]:
        """Start everything, with clients sending requests and a second draft version in service. Yields whether there
        are small disks.
        """
        os.environ.update(TRAINER_ENVIRONMENT)
        with contextlib.ExitStack() as opened:
            disks = [
                opened.enter_context(small_disk(folder, self._disk_bytes))
                for folder in (self.redis_dir, self.store_dir)
            ]
            self.start_redis()
            opened.callback(lambda: self.redis.stop())
            self.start_serve()
            opened.callback(lambda: self.serve.stop())
            self.start_train()
            opened.callback(lambda: self.train.stop())
            opened.enter_context(self.load.running())
            self.wait_for_swap(1)
            yield all(disks)

    # -- processes

    def start_redis(self) -> None:
        self.redis = EmbeddedRedis(self.redis_dir)

    def start_serve(self) -> None:
        options = ("--name", MODEL, "--port", str(self._port), "--capture", *self._serve_options)
        self.serve = self._child("serve", *options, "--stream-max-bytes", str(STREAM_MAX_BYTES))
        wait_until_ready(self.url, [self.serve], timeout_s=self._patience * START_S)

    def start_train(self) -> None:
        state = str(self.folder / "state")
        self.train = self._child("train", "--state", state, "--metrics-port", str(self._trainer_port))
        self.wait(lambda: self._scraped(self._trainer_port) is not None, "the trainer to be up", START_S)

    def _child(self, name: str, *options: str) -> Child:
        common = ("--model", str(self.model_dir), "--redis-url", self.redis.url, "--store", str(self.store_dir))
        return Child(name, [name, *common, *options], log_path=self.folder / f"{name}.log")

    def kill(self, child: Child) -> None:
        self.away = child
        os.kill(child.pid, signal.SIGKILL)
        child.stop()

    # -- looking

    def metrics(self) -> Scrape:
        sample = self._scraped(self._port)
        assert sample is not None, "the gateway does not answer"
        return sample

    def trainer_metrics(self) -> Scrape:
        sample = self._scraped(self._trainer_port)
        assert sample is not None, "the trainer does not answer"
        return sample

    def lag(self) -> StreamLag:
        with self.stream() as stream:
            return stream.lag()

    @contextlib.contextmanager
    def stream(self) -> Iterator[TraceStream]:
        with connect(self.redis.url) as client:
            yield TraceStream(client, self.model_key, max_bytes=STREAM_MAX_BYTES, consumer="faults")

    @contextlib.contextmanager
    def pointer(self) -> Iterator[DraftPointer]:
        with connect(self.redis.url) as client:
            yield DraftPointer(client, self.model_key)

    def books(self, *, stream_first: bool = False) -> Books:
        """Read both counts while appends go on. Between a reading with the stream first and a later one with the stream
        last, the stream's count must grow at least as much as the engine's.
        """
        lag = self.lag() if stream_first else None
        sample = self.metrics()
        return Books(
            captured=sample.total("slipstream_traces_captured_total"),
            appended=sample.total("slipstream_traces_appended_total"),
            dropped=sample.total("slipstream_traces_dropped_total"),
            waiting=sample.total("slipstream_traces_pending"),
            lag=lag or self.lag(),
        )

    def calm(self) -> Window:
        """Requests of the last seconds, before a fault."""
        return self.load.last(CALM_S)

    def version(self) -> int:
        return int(self.metrics().total("slipstream_draft_version"))

    # -- waiting

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> float:
        """Wait until the condition is true; returns the seconds. Raises TimeoutError, or ChildError where a process has
        ended.
        """
        started_s = time.monotonic()
        while not condition():
            for child in (getattr(self, name, None) for name in ("serve", "train")):
                if child is not None and child is not self.away:
                    child.check()
            if (waited_s := time.monotonic() - started_s) > self._patience * timeout_s:
                raise TimeoutError(f"waited {waited_s:.0f} s for {what}")
            time.sleep(0.05)
        return time.monotonic() - started_s

    def wait_until_settled(self, timeout_s: float = 60.0) -> float:
        """Wait until the recorder's queue is empty and the trainer has acked more than before."""
        acked = self.lag().acked
        return self.wait(
            lambda: self.metrics().total("slipstream_traces_pending") < 3 and self.lag().acked > acked,
            "traces to reach the trainer",
            timeout_s,
        )

    def wait_for_answers(self, count: int = 20, timeout_s: float = 30.0) -> Window:
        """Wait until so many further requests have ended."""
        started_s = time.monotonic()
        self.wait(lambda: len(self.load.since(started_s).requests) >= count, f"{count} answers", timeout_s)
        return self.load.since(started_s)

    def wait_for_swap(self, after: int, timeout_s: float = 90.0) -> float:
        return self.wait(lambda: self.version() > after, f"a version after {after}", timeout_s)

    @staticmethod
    def _scraped(port: int) -> Scrape | None:
        try:
            return Scrape.parse(0, httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False).text)
        except httpx.TransportError:
            return None
