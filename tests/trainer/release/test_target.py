"""A target that moves, seen from the trainer: what is forgotten, drawn less often, judged by, and written down."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send
from tests.trainer.examples import config_for, promote, record
from tests.trainer.replay.test_buffer import BASES, draw, fill, ids, replay_of
from tests.trainer.stored import stored_of
from tests.trainer.trainers import MakeTrainer
from trainer.checkpoint import load_checkpoint
from trainer.config import TrainerConfig
from trainer.release.gate import GateDecision
from trainer.replay.buffer import Admission
from trainer.statistics import Comparison


def at(version: int, name: str) -> object:
    return stored_of(name, target_version=version)


# -- the replay ----------------------------------------------------------------------------------------------------


def test_traces_of_a_target_that_is_far_away_are_forgotten_and_not_taken() -> None:
    replay = replay_of(max_target_lag=2)
    fill(replay, [stored_of(str(version), target_version=version) for version in range(4)])
    replay.add(stored_of("waits", target_version=0), domain="default")
    gone = replay.follow_target(4)
    assert sorted(stored.trace_id for stored in gone) == ["0", "waits"], "2α versions behind, waiting or not"
    assert replay.add(stored_of("late", target_version=0), domain="default") is Admission.OLD_TARGET
    assert replay.add(stored_of("new", target_version=4), domain="default") is Admission.NEW
    assert sorted(replay.members) == ["1", "2", "3"]


def test_a_trace_that_is_found_again_too_late_is_not_restored() -> None:
    """It would have no weight at all in the draw."""
    replay = replay_of(max_target_lag=2)
    replay.follow_target(4)
    replay.restore(stored_of("old", target_version=0), domain="default")
    assert list(replay.members) == []
    replay.restore(stored_of("kept", target_version=1), domain="default")
    assert ids(draw(replay, 1)) == ["kept"]


def test_traces_beyond_alpha_are_drawn_less_often() -> None:
    replay = replay_of(max_target_lag=2)
    fill(replay, [stored_of(f"{version}-{n}", target_version=version) for version in (1, 2, 4) for n in range(4)])
    replay.follow_target(4)
    drawn = Counter(name[0] for _ in range(600) for name in ids(draw(replay, 1)))
    assert 0.4 < drawn["1"] / drawn["4"] < 0.62, "3 versions behind: half the weight"
    assert 0.8 < drawn["2"] / drawn["4"] < 1.25, "2 versions behind: the whole weight"
    assert BASES > 0


def test_an_old_targets_trace_does_not_take_the_place_of_a_newer_one_of_the_same_text() -> None:
    replay = replay_of(max_target_lag=2)
    fill(replay, [stored_of("new", text="same", target_version=2)])
    for version, expected in ((1, "new"), (3, "newer")):
        name = {1: "old", 3: "newer"}[version]
        replay.add(stored_of(name, text="same", target_version=version), domain="default")
        assert list(replay.members) == [expected]


# -- the whole trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path, redis_url: str) -> Callable[..., TrainerConfig]:
    """Half of all texts are held out, and two are golden."""
    apart = {"holdout_share": 0.5, "golden_traces": 2, "max_tenant_share": 1.0, "max_target_lag": 1}
    return lambda **changes: config_for(model_dir, tmp_path, redis_url=redis_url, **{**apart, **changes})


def of_version(traces: list[Trace], version: int) -> list[Trace]:
    """Their own texts, too: a repetition would go where the first one went."""
    return [
        dataclasses.replace(
            trace,
            token_ids=(trace.token_ids + version) % 40,
            header=msgspec.structs.replace(
                trace.header, trace_id=f"{version}-{trace.header.trace_id}", target_version=version
            ),
        )
        for trace in traces
    ]


def versions_of(kept: object) -> set[int]:
    return {stored.provenance.target_version for stored in kept}  # type: ignore[attr-defined]


def test_drafts_are_judged_by_the_newest_target_alone(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    send(stream, of_version(traces, 0))
    trainer.read(block_ms=0)
    assert versions_of(trainer.admission.held_out) == versions_of(trainer.admission.golden) == {0}
    num_old = len(trainer.admission.held_out) + len(trainer.admission.golden)
    trainer.learner.history = 5000
    send(stream, of_version(traces[:4], 1))
    trainer.read(block_ms=0)
    assert trainer.learner.history < 100, "what is published forgets the target of before sooner"
    judges = [*trainer.admission.held_out, *trainer.admission.golden]
    assert versions_of(judges) == {1}
    assert num_old > 0
    learnt_from = {stored.trace_id for stored in trainer.replay.waiting}
    assert len(learnt_from) + len(judges) == len(traces) + 4, "what judged before is learnt from"
    # One that comes late is no judge any more.
    send(stream, of_version(traces, 0)[:1])
    trainer.read(block_ms=0)
    assert versions_of([*trainer.admission.held_out, *trainer.admission.golden]) == {1}
    send(stream, of_version(traces, 5))
    trainer.read(block_ms=0)
    assert versions_of(trainer.replay.waiting) <= {5}
    assert trainer.metrics.registry.get_sample_value("slipstream_trainer_target_version") == 5
    assert set(trainer.source.unused_trace_ids) <= set(trainer.replay.waiting_trace_ids), "the others can be acked"
    trainer.close()


def test_what_waits_to_be_learnt_from_does_not_judge_again_after_a_restart(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    """A checkpoint lists it with what is held out."""
    trainer = start()
    send(stream, of_version(traces, 0))
    trainer.read(block_ms=0)
    send(stream, of_version(traces[:4], 1))
    trainer.read(block_ms=0)
    trainer.checkpoint()
    trainer.close()
    again = start()
    assert versions_of([*again.admission.held_out, *again.admission.golden]) == {1}
    assert versions_of(again.replay.waiting) == {0}
    again.close()


def test_the_version_is_in_the_manifest_and_survives_a_restart(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    trainer = start(decide=promote)
    send(stream, of_version(traces, 3))
    trainer.read(block_ms=0)
    trainer.step()
    trainer.publish()
    store = DraftStore(tmp_path / "store")
    newest = store.latest()
    assert newest is not None
    assert [store.manifest(version).target_version for version in (1, newest)] == [0, 3]
    trainer.close()
    saved = load_checkpoint(tmp_path / "state")
    assert saved is not None
    assert saved[1].target_version == 3
    again = start()
    assert again.admission.target_version == 3
    send(stream, of_version(traces, 1))
    again.read(block_ms=0)
    assert versions_of(again.replay.waiting) <= {3}
    assert versions_of([*again.admission.held_out, *again.admission.golden]) == {3}
    again.close()


def test_a_version_in_service_is_reviewed_on_the_newest_target_alone(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    trainer = start(decide=promote)
    send(stream, of_version(traces[1:], 1))
    trainer.read(block_ms=0)
    trainer.step()
    trainer.publish()
    DraftStore(tmp_path / "store").lifecycle.move(2, VersionState.LIVE, actor="engine:0")
    trainer.review.take_turn()
    assert trainer.review.version == 2
    for version, is_reviewed_on in ((0, False), (1, True)):
        send(stream, of_version(traces[:1], version))
        trainer.read(block_ms=0)
        assert trainer.review.has_work is is_reviewed_on
    trainer.close()


def test_a_count_that_begins_again_is_noticed_and_not_repeated_with_every_trace(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.replay.admission._MANY_OLDER", 3)

    def warnings_after(version: int) -> list[int]:
        send(stream, of_version(traces[:1], version))
        with capture_logs() as logs:
            trainer.read(block_ms=0)
        return [line["num_traces"] for line in logs if line["event"].startswith("all traces are of older targets")]

    trainer = start()
    assert warnings_after(20) == []
    assert [warnings_after(version) for version in range(8)] == [[], [], [3], [], [], [6], [], []]
    assert warnings_after(21) == []
    assert [warnings_after(version) for version in range(8, 11)] == [[], [], [3]], "in a row"
    trainer.close()


def test_an_operators_recording_of_another_version_goes_on_judging_and_is_not_learnt_from(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    settings = {"golden": record(tmp_path / "golden.rec", traces[:2])}
    trainer = start(**settings)
    recorded = trainer.admission.golden.trace_ids
    assert len(recorded) == 2
    send(stream, of_version(traces[2:], 1))
    trainer.read(block_ms=0)
    assert trainer.admission.golden.trace_ids == recorded
    assert not trainer.admission.held_out.is_young, "it does not pass for fresh traffic of this target"
    assert versions_of([*trainer.replay.waiting, *trainer.admission.held_out]) == {1}
    trainer.step()
    trainer.checkpoint()
    trainer.close()
    again = start(**settings)
    assert (again.admission.target_version, again.admission.golden.trace_ids) == (1, recorded)
    again.close()


def test_an_incumbent_of_an_older_target_is_given_up_on_less_evidence(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    epsilons: list[float] = []

    def decide(fresh: Comparison, golden: Comparison | None, *, epsilon: float, **asked: Any) -> GateDecision:
        epsilons.append(epsilon)
        return promote(fresh, golden, **asked)

    trainer = start(decide=decide)
    for version in (0, 1, 1):
        send(stream, of_version(traces, version))
        trainer.read(block_ms=0)
        trainer.step()
        assert trainer.candidates.publish()
        trainer.candidates.announce()
    config = config_for(tmp_path, tmp_path)
    # Each candidate is asked about twice: with held-out traces, and with golden ones too.
    wanted = [config.gate_epsilon, config.moved_epsilon, config.gate_epsilon]
    assert epsilons == [epsilon for epsilon in wanted for _ in range(2)]
    trainer.close()
