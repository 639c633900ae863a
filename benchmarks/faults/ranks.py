"""Trainer processes under `torchrun` that are killed again and again, and what has become of every trace in the end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.faults.accounts import Accounts, accounts_at_the_end
from benchmarks.faults.traces import corrupted
from benchmarks.kills import another
from benchmarks.resident import SERVICE_ENV
from benchmarks.services import STREAM_MAX_BYTES, TRAINER_ENVIRONMENT, wait
from speculator.checkpoint import model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.redis_client import connect
from speculator.stream import TraceStream
from tests.toy import make_toy_model
from tests.trainer.answers import answer_traces

WORLDS = ((2, False), (1, False), (2, True))
"""Numbers of processes, one after the other on one checkpoint, and whether each keeps its part only."""
MOMENTS = ("as it starts", "during a checkpoint", "at any moment")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    accounts: Accounts
    counted: int
    """Traces in the trainer's own count."""
    kills: Counter[str]
    back_s: list[float]
    """From a kill of a rank until all have resumed, where no other kill came in between."""


class Notes:
    """What the ranks write down (benchmarks/faults/witness.py), and which process each of them is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self, first: int = 0) -> list[str]:
        return self.path.read_text().splitlines()[first:]

    def pids(self, first: int) -> dict[int, int]:
        """By rank, of those that have started since."""
        started = (line.split() for line in self.lines(first) if line.startswith("alive "))
        return {int(rank): int(pid) for _, rank, pid in started}

    def count(self, kind: str, first: int) -> int:
        return sum(line.startswith(f"{kind} ") for line in self.lines(first))


class World:
    """So many ranks under one torchrun, with Redis and a producer beside them."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        folder.mkdir()
        self._folder, self._rng = folder, rng
        self._model_dir = make_toy_model(folder / "toy")
        self._key = model_key(self._model_dir, target_fingerprint(self._model_dir))
        self._redis = EmbeddedRedis(folder / "redis")
        self._payloads = [encode_trace(trace) for trace in answer_traces(self._model_dir, num_traces=8)]
        self.notes = Notes(folder / "notes")
        self.state_dir = folder / "state"
        self.produced: set[str] = set()
        self.size = 0
        self._torchrun: subprocess.Popen[bytes] | None = None
        self.life = 0
        """The first line that the ranks that live now may have written."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        stopping = threading.Event()
        producer = threading.Thread(target=self._produce, args=(stopping,), name="producer")
        producer.start()
        try:
            yield
        finally:
            stopping.set()
            producer.join()

    def start(self, size: int, *, sharded: bool) -> None:
        self.size, self.life = size, len(self.notes.lines())
        words = [
            *("--model", str(self._model_dir), "--redis-url", self._redis.url),
            *("--store", str(self._folder / "drafts"), "--state", str(self.state_dir)),
        ]
        with (self._folder / "log").open("ab") as log:
            self._torchrun = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"),
                    *("--nproc-per-node", str(size), "-m", "benchmarks.rank", "train", str(self.notes.path), *words),
                ],
                env={
                    **os.environ,
                    **SERVICE_ENV,
                    **TRAINER_ENVIRONMENT,
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "SLIPSTREAM_TRAINER_SHARDED": str(sharded),
                },
                stdout=log,
                stderr=log,
            )

    def has(self, kind: str) -> bool:
        """Every rank of this life has noted it."""
        return self.notes.count(kind, self.life) >= self.size

    def kill_rank(self, moment: str) -> bool:
        """False where it was gone already."""
        wait(partial(self.has, "alive" if moment == MOMENTS[0] else "resumed"), f"{self.size} ranks: {self._tail()}")
        if moment == MOMENTS[1]:
            seen = self.notes.count("saving", self.life)
            _wait_closely(lambda: self.notes.count("saving", self.life) > seen)
            time.sleep(self._rng.uniform(0, 0.02))
        else:
            time.sleep(self._rng.uniform(0, 1.5))
        pids = self.notes.pids(self.life)
        life = len(self.notes.lines())
        try:
            os.kill(pids[self._rng.randrange(self.size)], signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.life = life
        return True

    def end(self, number: int) -> None:
        """Send a signal to torchrun; returns once all ranks have ended, too."""
        assert self._torchrun is not None
        self._torchrun.send_signal(number)
        self._torchrun.wait(60)
        for pid in self.notes.pids(0).values():
            wait(partial(_is_gone, pid), f"rank {pid} to end with torchrun")

    def is_settled(self) -> bool:
        with self.stream() as stream:
            lag = stream.lag()
        return lag.pending + lag.undelivered == 0

    @contextlib.contextmanager
    def stream(self) -> Iterator[TraceStream]:
        with connect(self._redis.url) as client:
            yield TraceStream(client, self._key, max_bytes=STREAM_MAX_BYTES, consumer="witness")

    def close(self) -> None:
        if self._torchrun is not None and self._torchrun.poll() is None:
            self.end(signal.SIGKILL)
        self._redis.stop()

    def _produce(self, stopping: threading.Event) -> None:
        rng = random.Random(self._rng.random())
        with self.stream() as stream:
            while not stopping.wait(0.08):
                trace_id = f"produced-{len(self.produced) + 1}"
                payload = another(rng.choice(self._payloads), trace_id, rng)
                if len(self.produced) % 20 == 19:
                    payload = rng.choice(list(corrupted(payload, rng).values()))
                stream.append(payload, trace_id=trace_id)
                self.produced.add(trace_id)

    def _tail(self) -> str:
        return (self._folder / "log").read_text()[-2000:]


def run_kills(folder: Path, *, num_kills: int, seed: int) -> Outcome:
    """Raises TimeoutError where the ranks do not come back, or traces do not arrive."""
    rng, kills = random.Random(seed), Counter[str]()
    back_s: list[float] = []
    world = World(folder, rng)
    try:
        with world.running():
            for turn, (size, sharded) in enumerate(WORLDS):
                print(f"killing: {size} processes{', sharded' if sharded else ''}", flush=True)
                world.start(size, sharded=sharded)
                until = num_kills * (turn + 1) // len(WORLDS)
                while (num := _of_ranks(kills)) < until:
                    if not world.kill_rank(moment := MOMENTS[num % len(MOMENTS)]):
                        continue
                    kills[moment] += 1
                    if MOMENTS[(num + 1) % len(MOMENTS)] != MOMENTS[0]:  # else the next kill is on their way back
                        back_s.append(wait(partial(world.has, "resumed"), "the ranks to come back"))
                wait(partial(world.has, "resumed"), "the ranks to come back")
                if turn + 1 < len(WORLDS):
                    world.end(signal.SIGKILL)
                    kills["torchrun"] += 1
        wait(world.is_settled, "everything to be settled")
        world.end(signal.SIGTERM)
        with world.stream() as stream:
            lag = stream.lag()
        accounts, counted = accounts_at_the_end(world.state_dir, world.notes.lines(), lag, acknowledged=world.produced)
    finally:
        world.close()
    return Outcome(accounts=accounts, counted=counted, kills=kills, back_s=back_s)


def _of_ranks(kills: Counter[str]) -> int:
    return sum(kills[moment] for moment in MOMENTS)


def _wait_closely(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("no checkpoint comes")
        time.sleep(0.001)


def _is_gone(pid: int) -> bool:
    """Ended, though nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
