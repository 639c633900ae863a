"""One key sends poison: traces whose labels are nonsense, many for each honest one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from speculator.draft.eagle3 import Eagle3Draft
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from speculator.versions.store import DraftStore
from tests.trainer.answers import answer_traces, renamed
from tests.trainer.examples import acceptance, config_for, record
from trainer.loop import Trainer

NUM_HONEST, NUM_POISON, NUM_GOLDEN = 24, 120, 16
CAP = 0.5


@pytest.fixture(scope="module")
def honest(model_dir: Path) -> list[Trace]:
    traces = answer_traces(model_dir, num_traces=NUM_HONEST + NUM_GOLDEN, seed=3)
    return [renamed(trace, f"honest-{number}", tenant="honest") for number, trace in enumerate(traces)]


def poisoned(trace: Trace, number: int) -> Trace:
    """Its labels are another permutation of the vocabulary each time, and its text is another."""
    rng = np.random.default_rng(number)
    size = int(trace.target_topk_ids.max()) + 1
    ids = trace.target_topk_ids
    return dataclasses.replace(
        renamed(trace, f"poison-{number}", tenant="poison"),
        token_ids=rng.integers(6, size, trace.token_ids.shape, dtype=np.int32),
        target_topk_ids=np.where(ids >= 0, rng.permutation(size).astype(np.int32)[ids], ids),
    )


def test_poison_gets_its_share_of_the_mix_and_the_golden_score_holds(
    honest: list[Trace],
    model_dir: Path,
    tmp_path: Path,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    """Against the same traffic without a cap, and against the draft that it began with."""
    stream = TraceStream(redis_client, "toy", max_bytes=10**8)
    golden = honest[NUM_HONEST:]
    recording = record(tmp_path / "golden.rec", golden)
    traffic = [poisoned(honest[number % NUM_HONEST], number) for number in range(NUM_POISON)]
    for number in range(NUM_HONEST):
        traffic.insert(6 * number, honest[number])

    def learn(cap: float) -> tuple[Trainer, Counter[str]]:
        redis_client.flushall()
        folder = tmp_path / str(cap)
        config = config_for(
            model_dir, folder, redis_url=redis_url, max_tenant_share=cap, golden=recording, golden_traces=NUM_GOLDEN
        )
        trainer = Trainer(config, CollectorRegistry())
        for trace in traffic:
            stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
        while trainer.replay.num_waiting or stream.lag().undelivered:
            trainer.read(block_ms=0)
            trainer.step()
        for _ in range(60):
            trainer.step()
        return trainer, Counter(trainer.training.tenants.tokens)

    def score(draft: Eagle3Draft) -> float:
        return acceptance(draft, golden, depth=4).length

    capped, mix = learn(CAP)
    uncapped, flood = learn(1.0)
    assert mix["poison"] / mix.total() < CAP + 0.05
    assert flood["poison"] / flood.total() > 0.75, "it is most of the traffic"
    before, with_cap, without = map(
        score, (capped.training.load_draft(1), capped.learner.averaged, uncapped.learner.averaged)
    )
    assert with_cap > 1.1 * before
    assert with_cap > without
    # The gate judges by what a draft does for the golden set, whosever traffic it learned from.
    uncapped.publish()
    assert (DraftStore(tmp_path / "1.0" / "store").versions() == [1, 2]) is (without > before)
    for trainer in (capped, uncapped):
        trainer.close()
