"""The processes of benchmarks/sglang_pool.py, and the drafts that they are given."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engines import answers_of, engine_with
from benchmarks.faults.accounts import Accounts, accounts_at_the_end
from benchmarks.live import trained
from benchmarks.pool_traffic import OK, Load, Witness
from benchmarks.services import Service
from benchmarks.versions import add_first, add_version, num_that_ran
from slipstream.topics import Prompt
from speculator.checkpoint import model_key, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import StreamError
from speculator.fresh import fresh_draft
from speculator.ledger import StreamLag
from speculator.lifecycle import State
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.trace import Trace
from tests.sglang.pooled import ENGINES, MODEL, Pooled

CLIENTS = 4
MAX_TOKENS = 48
STREAM_MAX_BYTES = 1 << 30
TRAINER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "2",
    "SLIPSTREAM_TRAINER_KEEP_VERSIONS": "1000",
    # It learns and reviews; which versions come, and when, is the benchmark's to say.
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "100000",
}


def learnt(model_dir: Path, prompts: Sequence[Prompt], num_steps: Sequence[int]) -> list[Eagle3Draft]:
    """Drafts that have learnt the target's own answers to these prompts, for so many steps each."""
    traces: list[Trace] = []
    settings = {"dtype": "float32", "depth": 0, "suffix_depth": 0}
    torch.set_num_threads(os.cpu_count() or 1)
    with engine_with(
        model_dir, fresh_draft(model_dir, seed=0), os.cpu_count() or 1, settings=settings, on_trace=traces.append
    ) as engine:
        asked = [engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
        asyncio.run(answers_of(engine, asked, MAX_TOKENS))
    return [trained(model_dir, traces, count)[0] for count in num_steps]


class Scene:
    """Redis, two SGLang servers, two routers, two gateways, trainer, clients and a witness. Use with `running`."""

    def __init__(self, folder: Path, model_dir: Path, prompts: Sequence[Prompt], first: Eagle3Draft) -> None:
        """`first` is the draft in service."""
        self.folder, self._fingerprint = folder, target_fingerprint(model_dir)
        self._key = model_key(model_dir, self._fingerprint)
        self.redis = EmbeddedRedis(folder / "redis")
        self.store = DraftStore(folder / "drafts")
        self.first = add_first(self.store, first, self._fingerprint)
        self.pointer = DraftPointer(connect(self.redis.url), self._key)
        self.pointer.publish(self.first)
        self._stream = TraceStream(connect(self.redis.url), self._key, max_bytes=STREAM_MAX_BYTES, consumer="benchmark")
        self.pool = Pooled(folder, model_dir, self.store.root, self.redis.url, settings={"POLL_S": "0.5"}, num_fronts=2)
        gateways = [self.pool.url_of(name) for name in self.pool.gateways]
        self.load = Load(gateways, MODEL, prompts, num_clients=CLIENTS, max_tokens=MAX_TOKENS)
        self.witness = Witness(self.redis.url, self._key)
        places = ["--redis-url", self.redis.url, "--store", str(self.store.root), "--state", str(folder / "state")]
        self.trainer = Service(folder, "trainer", ["train", "--model", str(model_dir), *places])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as opened:
            opened.callback(lambda: self.redis.stop())
            opened.callback(self.trainer.close)
            opened.enter_context(self.pool.running())
            self.trainer.start()
            opened.enter_context(self.witness.running())
            opened.enter_context(self.load.running())
            yield

    def kill_redis(self) -> None:
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()

    def start_redis(self) -> None:
        self.redis = EmbeddedRedis(self.folder / "redis")

    # -- drafts

    def add(self, state: Mapping[str, Tensor], draft: Eagle3Draft) -> int:
        """A version that has passed the gate on paper."""
        return add_version(self.store, state, draft, self._fingerprint)

    def state(self, version: int) -> State | None:
        return self.store.lifecycle.state(version)

    def reports(self) -> dict[str, dict[str, str]]:
        """By engine; none while Redis is away."""
        with contextlib.suppress(StreamError):
            return self.pointer.engines()
        return {}

    def versions(self) -> dict[str, int]:
        return {name: int(report["version"]) for name, report in self.reports().items()}

    def all_run(self, version: int) -> bool:
        return self.versions() == dict.fromkeys(ENGINES, version)

    def know_their_draft(self, num_verifications: int) -> bool:
        """Whether each engine knows the version in service from so many, to compare the next one with."""
        known = [int(report["baseline_verifications"]) for report in self.reports().values()]
        return len(known) == len(ENGINES) and min(known) >= num_verifications

    def ran(self, version: int) -> int:
        """How many engines ever had it in service."""
        return num_that_ran(version, [self.folder / f"{name}.log" for name in ENGINES])

    # -- requests and traces

    def answered(self, count: int, what: str) -> None:
        """Wait until `count` more requests have come to their end."""
        before = self.load.since(0)[OK]
        self.pool.wait_for(lambda: self.load.since(0)[OK] >= before + count, what)

    def lag(self) -> StreamLag | None:
        """None while Redis is away."""
        with contextlib.suppress(StreamError):
            return self._stream.lag()
        return None

    def num_waiting(self) -> int:
        """Traces that the trainer has not acknowledged; many while Redis is away."""
        lag = self.lag()
        return STREAM_MAX_BYTES if lag is None else lag.pending + lag.undelivered

    def accounts(self) -> Accounts:
        """Needs the trainer to have ended."""
        state_dir, notes = self.folder / "state", self.trainer.notes()
        return accounts_at_the_end(state_dir, notes, self._stream.lag(), acknowledged=self.witness.trace_ids)[0]
