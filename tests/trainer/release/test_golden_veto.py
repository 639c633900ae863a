"""Traffic has left the golden set behind: its veto ends, and not before its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from speculator.versions.store import DraftStore
from tests.trainer.answers import answer_traces, renamed
from tests.trainer.examples import config_for, promote, record
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.release.gate import GateDecision, GateOutcome
from trainer.statistics import Comparison


def veto(fresh: Comparison, golden: Comparison | None, *, incumbent: int, **_: float) -> GateDecision:
    """It asks for the golden set, and then refuses."""
    if golden is None:
        return promote(fresh, golden, incumbent=incumbent)
    return GateDecision(outcome=GateOutcome.REFUSE, reason="golden", incumbent=incumbent, fresh=fresh, golden=golden)


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path, redis_url: str) -> Callable[..., TrainerConfig]:
    apart = {"golden_traces": 4, "max_tenant_share": 1.0, "holdout_share": 0.5}
    return lambda **changes: config_for(model_dir, tmp_path, redis_url=redis_url, **{**apart, **changes})


@pytest.fixture(scope="module")
def traffic(model_dir: Path) -> list[Trace]:
    return [renamed(trace, f"{n}") for n, trace in enumerate(answer_traces(model_dir, num_traces=8, seed=5))]


def golden(trainer: Trainer) -> list[str]:
    return trainer.admission.golden.trace_ids


def read(trainer: Trainer, stream: TraceStream, traces: list[Trace]) -> None:
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    trainer.read(block_ms=0)
    trainer.step()


def test_a_veto_that_lasts_too_long_ends_with_a_new_golden_set(
    settings: Callable[..., TrainerConfig],
    stream: TraceStream,
    traffic: list[Trace],
    tmp_path: Path,
    redis_client: redis.Redis,
) -> None:
    now_s, rule = [1000.0], [veto]

    def decide(fresh: Comparison, golden: Comparison | None, **asked: Any) -> GateDecision:
        return rule[0](fresh, golden, **asked)

    config = settings(golden_patience_s=3600.0)
    first = Trainer(config, CollectorRegistry(), decide=decide, clock=lambda: now_s[0])
    read(first, stream, traffic[:4])
    assert golden(first) == ["0", "1"]
    first.publish()
    first.checkpoint()
    first.close()

    now_s[0] += 3599
    trainer = Trainer(config, CollectorRegistry(), decide=decide, clock=lambda: now_s[0])
    assert golden(trainer) == ["0", "1"]
    trainer.step()
    trainer.publish()
    assert golden(trainer) == ["0", "1"], "not yet"
    now_s[0] += 1
    trainer.publish()
    assert golden(trainer) == []
    [renewed] = DraftStore(tmp_path / "store").lifecycle.events.tail(1)
    assert (renewed.kind, renewed.fields) == ("golden_renewed", {"num_traces": 2, "vetoed_s": 3600})
    assert set(trainer.replay.waiting_trace_ids) == {"0", "1"}, "they are learnt from now"
    # What was read before the restart and not used comes first.
    read(trainer, stream, traffic[4:6])
    trainer.read(block_ms=0)
    renewed_with = golden(trainer)
    assert len(set(renewed_with) - {"0", "1"}) == 2
    trainer.publish()
    assert golden(trainer) == renewed_with, "patience begins anew"
    rule[0] = promote
    trainer.publish()
    assert DraftPointer(redis_client, "toy").published() == 2
    assert trainer.candidates.vetoed_since_s is None, "a promotion ends it"
    trainer.close()


def test_patience_is_no_longer_where_the_clock_is_set_back(
    settings: Callable[..., TrainerConfig], stream: TraceStream, traffic: list[Trace]
) -> None:
    now_s = [1_000_000.0]
    config = settings(golden_patience_s=3600.0)
    trainer = Trainer(config, CollectorRegistry(), decide=veto, clock=lambda: now_s[0])
    read(trainer, stream, traffic[:4])
    for passed_s in (0, -6 * 3600, 3600):
        assert golden(trainer) == ["0", "1"]
        now_s[0] += passed_s
        trainer.publish()
    assert golden(trainer) == []
    trainer.close()


def test_an_operators_recording_is_not_given_up(
    settings: Callable[..., TrainerConfig],
    stream: TraceStream,
    traffic: list[Trace],
    tmp_path: Path,
) -> None:
    recording = record(tmp_path / "golden.rec", traffic[6:])
    trainer = Trainer(settings(golden=recording, golden_patience_s=0.0), CollectorRegistry(), decide=veto)
    read(trainer, stream, traffic[:2])
    for _ in range(2):
        trainer.publish()
    assert golden(trainer) == ["6", "7"]
    trainer.close()
