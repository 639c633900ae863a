"""Kill trainer, engine and Redis with SIGKILL at random moments, and account for every acknowledged trace.

    python -m benchmarks.kills [--kills 120] [--fsync always] [--seed 0] [--quick] [--json FILE]

The services are `slipstream serve` and `slipstream train` on a toy target, forked from a process that has everything
imported (benchmarks/faults/witness.py), so that a life takes a moment to begin. Clients ask the engine; a producer of
its own appends further traces, some of them damaged. A trace is acknowledged when the append has returned without an
error to whoever made it; with `--fsync everysec`, the embedded server's setting, Redis may confirm an append a moment
before the operating system has it, with `always` it may not.

Afterwards everything is brought up once more, the trainer uses what waits, and each acknowledged trace must be in one
account: used by a durable step, set aside, counted as lost, or waiting. None may be used by two durable steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.common.report import Target, fill_in, finish, parser
from benchmarks.faults.accounts import Accounts, accounts_at_the_end, acknowledged_in
from benchmarks.faults.load import CHANGED, CUT, OK, Load, Window
from benchmarks.faults.loop import MODEL
from benchmarks.faults.service import DRAFT_VOCAB_SIZE, STREAM_MAX_BYTES, TRAINER_ENVIRONMENT, Service, wait
from benchmarks.faults.traces import corrupted
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import StreamError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.trace import decode_trace, encode_trace
from tests.fixtures.toy import make_toy_model

VICTIMS = ("trainer", "trainer", "redis", "redis", "engine")
LONGEST_PAUSE_S = 3.0


class Scene:
    """Redis, both services, and the producer beside them."""

    def __init__(self, folder: Path, fsync: str, rng: random.Random) -> None:
        self._fsync, self._rng = fsync, rng
        self._redis_dir, self._state = folder / "redis", folder / "state"
        model_dir = make_toy_model(folder / "toy")
        self.model_key = model_key(model_dir, target_fingerprint(model_dir))
        self.redis = self._start_redis()
        port = free_port()
        self.load = Load(f"http://127.0.0.1:{port}", MODEL, num_clients=3, pause_s=0.02)
        common = ["--model", str(model_dir), "--redis-url", self.redis.url, "--store", str(folder / "drafts")]
        self.engine = Service(
            folder,
            "engine",
            [
                *("serve", *common, "--name", MODEL, "--port", str(port), "--capture", "--dtype", "float64"),
                *("--draft-vocab-size", str(DRAFT_VOCAB_SIZE), "--context-length", "256", "--threads", "1"),
                *("--stream-max-bytes", str(STREAM_MAX_BYTES)),
            ],
        )
        self.trainer = Service(folder, "trainer", ["train", *common, "--state", str(self._state)])
        self.produced: set[str] = set()
        """Ids of the traces whose append Redis confirmed to the producer."""
        self._stopping = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        producer = threading.Thread(target=self._produce, name="producer")
        try:
            self.revive()
            wait(self._has_traces, "the first answers")
            producer.start()
            with self.load.running():
                yield
        finally:
            self._stopping.set()
            if producer.ident is not None:
                producer.join()
            for service in (self.engine, self.trainer):
                if service.is_alive:
                    service.end(signal.SIGKILL)
            self.redis.stop()

    def kill(self, victim: str) -> bool:
        """Kill it; False where it had ended by itself, as a service does that finds no Redis at its start."""
        if victim == "redis":
            os.kill(self.redis.pid, signal.SIGKILL)
            time.sleep(self._rng.uniform(0, 0.3))
            self.redis.stop()
            self.redis = self._start_redis()
            return True
        return self._service(victim).end(signal.SIGKILL) == -signal.SIGKILL

    def is_alive(self, victim: str) -> bool:
        self.revive()
        return victim == "redis" or self._service(victim).is_alive

    def _service(self, name: str) -> Service:
        return {"engine": self.engine, "trainer": self.trainer}[name]

    def revive(self) -> None:
        """Restart all processes that have ended, as a supervisor would."""
        for service in (self.engine, self.trainer):
            if not service.is_alive:
                service.start()

    def answers_again(self) -> bool:
        """Whether a request was answered in the last seconds; restarts processes that have ended."""
        self.revive()
        return bool(self.load.last(2).outcomes[OK])

    def stop_asking(self) -> None:
        self.load.stop()
        self._stopping.set()

    @contextlib.contextmanager
    def stream(self) -> Iterator[TraceStream]:
        with connect(self.redis.url) as client:
            yield TraceStream(client, self.model_key, max_bytes=STREAM_MAX_BYTES, consumer="witness")

    def is_settled(self) -> bool:
        """Whether the recorder's queue and the stream's backlog are empty; restarts processes that have ended."""
        self.revive()
        try:
            metrics = httpx.get(f"{self.load.url}/metrics", timeout=5, trust_env=False).text
            with self.stream() as stream:
                lag = stream.lag()
        except (httpx.HTTPError, StreamError):
            return False
        return "slipstream_traces_pending 0.0" in metrics and lag.pending + lag.undelivered == 0

    def accounts(self) -> tuple[Accounts, int]:
        """(the accounts, number of traces in the trainer's checkpoint)."""
        acknowledged = acknowledged_in(self.engine.notes()) | self.produced
        with self.stream() as stream:
            lag = stream.lag()
        return accounts_at_the_end(self._state, self.trainer.notes(), lag, acknowledged=acknowledged)

    def _start_redis(self) -> EmbeddedRedis:
        redis = EmbeddedRedis(self._redis_dir)
        with connect(redis.url) as client:
            client.config_set("appendfsync", self._fsync)
        return redis

    def _has_traces(self) -> bool:
        """Whether the stream has traces of the engine, from which the producer makes its own."""
        self.revive()
        body = {"model": MODEL, "prompt": "first", "max_tokens": 32}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{self.load.url}/v1/completions", json=body, timeout=30, trust_env=False)
        with self.stream() as stream:
            self._template = next((entry.payload for entry in stream.recent(1 << 20)), b"")
        return bool(self._template)

    def _produce(self) -> None:
        rng, number = random.Random(self._rng.random()), 0
        while not self._stopping.wait(0.04):
            number += 1
            trace_id = f"produced-{number}"
            payload = another(self._template, trace_id, rng)
            if number % 20 == 0:
                payload = rng.choice(list(corrupted(payload, rng).values()))
            while not self._stopping.is_set():
                # Repeat until Redis confirms the append: at least once.
                with contextlib.suppress(StreamError), self.stream() as stream:
                    stream.append(payload, trace_id=trace_id)
                    self.produced.add(trace_id)
                    break


def another(payload: bytes, trace_id: str, rng: random.Random) -> bytes:
    """The trace with another text and id."""
    trace = decode_trace(payload)
    tokens = np.random.default_rng(rng.getrandbits(32)).permutation(trace.token_ids)
    header = msgspec.structs.replace(trace.header, trace_id=trace_id)
    return encode_trace(dataclasses.replace(trace, header=header, token_ids=tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    accounts: Accounts
    counted: int
    """Traces as the trainer's checkpoint counts them."""
    victims: Counter[str]
    requests: Window
    settled_s: float
    """Seconds from the last answer until no trace waited."""


def run(folder: Path, *, num_kills: int, fsync: str, seed: int) -> Outcome:
    """Run the benchmark. Raises TimeoutError where services do not come back, or traces do not arrive."""
    started_s = time.monotonic()
    rng, victims = random.Random(seed), Counter[str]()
    scene = Scene(folder, fsync, rng)
    with scene.running():
        while sum(victims.values()) < num_kills:
            victim = rng.choice(VICTIMS)
            wait(partial(scene.is_alive, victim), f"the {victim} to be there")
            time.sleep(rng.uniform(0, LONGEST_PAUSE_S) ** 2 / LONGEST_PAUSE_S)
            if scene.kill(victim):
                victims[victim] += 1
            scene.revive()
        wait(scene.answers_again, "answers after the last kill")
        scene.stop_asking()
        settled_s = wait(scene.is_settled, "everything to be settled", timeout_s=600)
        scene.trainer.end(signal.SIGTERM)
        accounts, counted = scene.accounts()
    return Outcome(
        accounts=accounts,
        counted=counted,
        victims=victims,
        requests=scene.load.since(started_s),
        settled_s=settled_s,
    )


def main() -> None:
    options = parser("What becomes of traces where nothing lives for long", has_prompts=False, has_model=False)
    options.add_argument("--kills", type=int, help="default 120, quick 30")
    options.add_argument(
        "--fsync", choices=("always", "everysec"), default="always", help="of Redis's append-only file"
    )
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    fill_in(arguments, {"kills": (30, 120)})
    os.environ.update(TRAINER_ENVIRONMENT)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        outcome = run(Path(folder), num_kills=arguments.kills, fsync=arguments.fsync, seed=arguments.seed)
    accounts, requests, victims = outcome.accounts, outcome.requests, outcome.victims
    finish(
        [
            ("kills", ", ".join(f"{count} {name}" for name, count in sorted(victims.items()))),
            ("seconds in all, to settle in the end", f"{time.monotonic() - started_s:.0f}, {outcome.settled_s:.1f}"),
            ("requests", str(requests)),
            ("traces", str(accounts)),
            ("traces in the trainer's own count", str(outcome.counted)),
        ],
        [
            Target("kills", sum(victims.values()), arguments.kills),
            Target("lost_silently", accounts.silently_lost, 0, at_least=False),
            Target("used_twice", accounts.used_twice, 0, at_least=False),
            Target("counted_by_the_trainer", outcome.counted, accounts.used_in_all, at_least=False),
            Target("cut_or_changed_answers", requests.outcomes[CUT] + requests.outcomes[CHANGED], 0, at_least=False),
        ],
        {
            "kills": dict(victims),
            "fsync": arguments.fsync,
            "seed": arguments.seed,
            "traces": dataclasses.asdict(accounts),
            "counted_by_the_trainer": outcome.counted,
            "requests": dict(requests.outcomes),
            "settled_s": round(outcome.settled_s, 1),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
