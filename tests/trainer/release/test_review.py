"""A version in service is compared once more with the one before it: what becomes of it, whatever fails meanwhile."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from prometheus_client import CollectorRegistry

from speculator.draft.checkpoint import draft_config_json, draft_state, target_fingerprint
from speculator.errors import DraftFileError, StoreError, UnknownDraftError
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import encode_trace
from speculator.versions.lifecycle import Lifecycle, VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.drafts import noise_like
from tests.trainer.answers import answer_traces
from tests.trainer.examples import config_for
from tests.trainer.reviewing import Pointer, accepted, partly_worse
from tests.trainer.stored import stored_of
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.live_review import (
    ACTOR,
    ALPHA,
    DOUBT,
    MIN_KEPT,
    POLL_INTERVAL_S,
    Review,
    ReviewOutcome,
    review_outcome,
)
from trainer.replay.reservoirs import Stored
from trainer.statistics import AcceptanceCounts, PairedScores, anytime_quantile, compare

WAY = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)
NUM_TRACES = 100


class Scene:
    """Version 1 is promoted. A draft is its version's number, and accepts as much as `change` says."""

    def __init__(self, root: Path) -> None:
        self.root, self.states, self.pointer = root, Lifecycle(root), Pointer()
        self.change: dict[int, float] = {1: 0.0}
        self.on_prompt: dict[bytes, float] = {}
        """How much more versions after the first accept of a prompt."""
        self.failure: Exception | None = None
        self.decoded: list[tuple[int, str]] = []
        self.now_s, self._num_sent = 0.0, 0
        self.come(1, VersionState.LIVE, VersionState.PROMOTED)
        self.start()

    def start(self, **changes: Any) -> None:
        """The trainer's process, perhaps another one."""
        self.registry = CollectorRegistry()
        self.review = Review(
            self.states,
            self.pointer,  # type: ignore[arg-type]
            config_for(self.root, self.root, **{"review_traces": NUM_TRACES, **changes}),
            TrainerMetrics(self.registry),
            Ranks(),
            load_draft=self.load,  # type: ignore[arg-type]
            clock=lambda: self.now_s,
            score=self.score,  # type: ignore[arg-type]
        )
        self.turn()

    def load(self, version: int) -> int:
        if self.failure is not None:
            raise self.failure
        return version

    def score(self, version: int, stored: Stored, _: TrainerConfig) -> AcceptanceCounts:
        self.decoded.append((version, stored.trace_id))
        on_prompt = self.on_prompt.get(stored.provenance.prompt_hash, 0.0) if version != 1 else 0.0
        return accepted(version, stored.trace_id, self.change[version] + on_prompt)

    def come(self, version: int, *states: VersionState, change: float = 0.0, actor: str = "engine:0") -> None:
        """A version comes into service."""
        self.change[version] = change
        if self.states.state(version) is None:
            for state in WAY:
                self.states.move(version, state, actor=actor)
        for state in states or (VersionState.LIVE,):
            self.states.move(version, state, actor=actor)

    def turn(self) -> None:
        self.now_s += POLL_INTERVAL_S
        self.review.take_turn()

    def serve(self, num_traces: int = 2 * NUM_TRACES) -> None:
        """Traces arrive, two for each turn of the loop."""
        for _ in range(0, num_traces, 2):
            self._num_sent += 2
            self.review.arrived([stored_of(f"t{self._num_sent - one}") for one in range(2)])
            self.turn()

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        events = [event.fields for event in self.states.events.tail(1000) if event.kind == "review"]
        return [(fields["version"], fields["outcome"]) for fields in events]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"slipstream_trainer_{name}", labels)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_version_that_an_operator_forced_is_rolled_back_where_it_is_ten_per_cent_worse(scene: Scene) -> None:
    scene.come(2, change=-0.1, actor="operator:ann")
    scene.pointer.version = 2
    scene.turn()
    scene.serve()
    [rolled_back, quarantined] = scene.states.history(2)[-2:]
    assert (rolled_back.state, quarantined.state) == (VersionState.ROLLED_BACK, VersionState.QUARANTINED)
    assert rolled_back.actor == ACTOR
    numbers = rolled_back.numbers
    assert (numbers["incumbent"], scene.pointer.version) == (1, 1)
    assert 6 <= int(numbers["num_traces"] or 0) <= 40
    assert -0.15 < float(numbers["change"] or 0) < float(numbers["upper"] or 0) < -0.02
    assert scene.outcomes == [(2, "rolled_back")]
    assert scene.metric("review_decisions_total", outcome="rolled_back") == 1
    assert scene.metric("review_traces_total") == numbers["num_traces"]
    assert scene.metric("review_change_ratio", bound="upper") == numbers["upper"]


def test_good_versions_are_kept_and_then_left_alone(scene: Scene) -> None:
    for version in range(2, 12):
        scene.come(version, change=0.0)
        scene.turn()
        scene.serve()
        scene.states.move(version, VersionState.PROMOTED, actor="engine:0")
    assert [outcome for _, outcome in scene.outcomes] == 10 * ["kept"]
    num_decoded = len(scene.decoded)
    assert num_decoded < 10 * 2 * NUM_TRACES
    scene.serve()
    assert len(scene.decoded) == num_decoded
    assert not scene.review.has_work


def test_a_version_is_seen_also_where_the_clock_was_set_back(scene: Scene) -> None:
    scene.now_s -= 3600.0
    scene.come(2)
    scene.turn()
    assert scene.review.version == 2


def share_of_verdicts(
    share: float, loss: float, *, draws: int = 80, traces: int = 100
) -> dict[ReviewOutcome | None, float]:
    """Of versions that lose so much on such a share of the traces: what becomes of them, looked at every second one."""
    counts: Counter[ReviewOutcome | None] = Counter()
    for draw in range(draws):
        rng, pairs = random.Random(draw), list[PairedScores]()
        outcome: ReviewOutcome | None = None
        while outcome is None and len(pairs) < traces:
            pairs += [partly_worse(rng, share=share, loss=loss) for _ in range(2)]
            found = compare(pairs, quantile=partial(anytime_quantile, alpha=ALPHA), doubt=DOUBT)
            outcome = review_outcome(found, epsilon=0.02, is_last=len(pairs) == traces)
        counts[outcome] += 1
    return {outcome: count / draws for outcome, count in counts.items()}


def test_traces_on_which_both_do_the_same_prove_little_while_they_are_few() -> None:
    assert share_of_verdicts(0.0, 0.0, draws=1, traces=MIN_KEPT - 2) == {ReviewOutcome.UNDECIDED: 1.0}
    assert share_of_verdicts(0.0, 0.0, draws=1) == {ReviewOutcome.KEPT: 1.0}


@pytest.mark.parametrize(
    ("share", "loss", "most_kept"), [(0.2, 0.3, 0.01), (0.1, 0.5, 0.02), (0.05, 0.6, 0.15), (0.2, 0.1, 0.03)]
)
def test_a_loss_on_a_part_of_the_traffic_is_not_kept_before_it_shows(
    share: float, loss: float, most_kept: float
) -> None:
    assert share_of_verdicts(share, loss).get(ReviewOutcome.KEPT, 0.0) <= most_kept


def test_a_gain_on_a_part_of_the_traffic_makes_up_for_a_loss_on_the_rest() -> None:
    """Just as good, by a fifth of the traces; the four fifths that come first are a little worse."""
    pairs = [partly_worse(random.Random(one), share=1.0, loss=0.03) for one in range(8)]
    found = compare(pairs, quantile=partial(anytime_quantile, alpha=ALPHA), doubt=DOUBT)
    assert found.change == pytest.approx(-0.03)
    assert review_outcome(found, epsilon=0.02, is_last=False) is None


def test_answers_to_one_prompt_count_as_one(scene: Scene) -> None:
    """A version as good as the other: better on some prompts, worse on others, the worse ones first."""
    scene.come(2)
    scene.turn()
    for group in range(12):
        prompt_hash = b"%d" % group
        scene.on_prompt[prompt_hash] = -0.08 if group < 3 else 0.04
        siblings = [stored_of(f"{group}-{index}", prompt_hash=prompt_hash) for index in range(8)]
        scene.review.arrived(siblings)
        for _ in siblings:
            scene.turn()
    assert scene.outcomes == []
    assert len(scene.decoded) == 2 * 4 * 12, "of each prompt a few answers are decoded"


def test_the_budget_counts_prompts(scene: Scene) -> None:
    scene.start(review_traces=6)
    scene.come(2)
    scene.turn()
    scene.turn()
    for group in range(6):
        assert scene.outcomes == []
        scene.review.arrived([stored_of(f"{group}-{index}", prompt_hash=b"%d" % group) for index in range(4)])
        scene.turn()
        scene.turn()
    assert scene.outcomes == [(2, "undecided")]


def test_a_version_that_comes_right_after_a_verdict_takes_nothing_over(scene: Scene) -> None:
    scene.come(2)
    scene.turn()
    while not scene.outcomes:
        scene.serve(2)
    scene.come(3)
    scene.turn()
    assert scene.outcomes == [(2, "kept")]
    scene.serve(4)
    assert {version for version, _ in scene.decoded[-4:]} == {3, 1}


def test_the_budget_ends_what_the_traces_do_not_decide(scene: Scene) -> None:
    scene.come(2, change=-0.02)
    scene.turn()
    scene.serve()
    assert scene.outcomes == [(2, "undecided")]
    assert len(scene.decoded) == 2 * NUM_TRACES
    assert scene.states.state(2) is VersionState.LIVE


def test_a_version_that_an_engine_promoted_meanwhile_is_rolled_back_all_the_same(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.turn()
    scene.serve(4)
    scene.states.move(2, VersionState.PROMOTED, actor="engine:0")
    scene.serve()
    assert scene.states.state(2) is VersionState.QUARANTINED
    assert scene.states.last_good() == 1


def test_a_quick_promotion_between_two_looks_does_not_hide_a_version(scene: Scene) -> None:
    scene.come(2, VersionState.LIVE, VersionState.PROMOTED, change=-0.1)
    scene.turn()
    scene.serve()
    assert scene.states.state(2) is VersionState.QUARANTINED


def test_killed_in_the_middle_it_begins_anew_with_what_is_on_trial(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.turn()
    scene.serve(4)
    assert scene.states.state(2) is VersionState.LIVE
    scene.start()
    scene.serve()
    assert scene.states.state(2) is VersionState.QUARANTINED
    scene.come(3, VersionState.LIVE, VersionState.PROMOTED)
    scene.start()
    scene.serve()
    assert scene.outcomes == [(2, "rolled_back")], "what was promoted before the start is left alone"


def test_states_that_cannot_be_read_stop_nothing(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    path = scene.root / "states" / "000002.json"
    whole = path.read_bytes()
    path.write_text("damaged")
    scene.turn()
    scene.serve(10)
    assert scene.decoded == []
    path.write_bytes(whole)
    scene.turn()
    scene.serve(4)
    path.write_text("damaged")
    scene.serve()
    assert scene.outcomes == []
    path.write_bytes(whole)
    scene.turn()
    assert scene.outcomes == [(2, "rolled_back")], "the verdict was not lost"
    assert scene.states.state(2) is VersionState.QUARANTINED


@pytest.mark.parametrize("failure", [UnknownDraftError("pruned"), DraftFileError("damaged")])
def test_a_draft_that_is_gone_ends_its_review(scene: Scene, failure: Exception) -> None:
    scene.come(2, change=-0.1)
    scene.turn()
    scene.failure = failure
    scene.serve(10)
    assert scene.outcomes == [(2, "withdrawn")]
    scene.failure = None
    scene.come(3, change=-0.1)
    scene.turn()
    scene.serve()
    assert scene.outcomes == [(2, "withdrawn"), (3, "rolled_back")]


def test_a_draft_that_cannot_be_loaded_now_is_asked_for_again(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.turn()
    scene.failure = StoreError("disk away")
    scene.serve(10)
    assert scene.outcomes == []
    scene.failure = None
    scene.serve()
    assert scene.outcomes == [(2, "rolled_back")]


def test_without_redis_the_verdict_waits(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.pointer.version = 2
    scene.turn()
    scene.pointer.is_away = True
    scene.serve()
    assert scene.states.state(2) is VersionState.LIVE, "an operator may have pinned it"
    scene.pointer.is_away = False
    scene.turn()
    assert (scene.states.state(2), scene.pointer.version) == (VersionState.QUARANTINED, 1)
    assert scene.outcomes == [(2, "rolled_back")]


def test_a_version_that_the_operator_has_pinned_stays(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.pointer.pin = 2
    scene.turn()
    scene.serve()
    assert scene.states.state(2) is VersionState.LIVE
    assert scene.outcomes == [(2, "withdrawn")]


def test_a_newer_version_takes_its_place_with_evidence_of_its_own(scene: Scene) -> None:
    scene.come(2, VersionState.LIVE, VersionState.PROMOTED, change=0.1)
    scene.turn()
    scene.serve(4)
    scene.come(3, change=-0.02)
    scene.turn()
    scene.serve()
    assert scene.outcomes == [(2, "withdrawn"), (3, "rolled_back")]
    assert scene.states.history(3)[-1].numbers["incumbent"] == 2
    assert {version for version, _ in scene.decoded[-10:]} == {3, 2}


@pytest.mark.parametrize("removed", [False, True])
def test_a_version_whose_incumbent_is_barred_is_compared_with_the_one_before(scene: Scene, removed: bool) -> None:
    scene.come(2, VersionState.LIVE, VersionState.PROMOTED, change=0.1)
    scene.start()
    scene.come(3, change=-0.3)
    scene.turn()
    scene.serve(4)
    scene.states.bar(2, actor="operator:ann", reason="")
    assert not removed or scene.states.forget(2)
    scene.turn()
    assert scene.outcomes == []
    scene.serve()
    assert scene.outcomes == [(3, "rolled_back")]
    assert scene.states.history(3)[-1].numbers["incumbent"] == 1
    assert {version for version, _ in scene.decoded[-4:]} == {3, 1}


def test_what_an_engine_rolls_back_is_not_reviewed_further(scene: Scene) -> None:
    scene.come(2, change=-0.1)
    scene.turn()
    scene.serve(4)
    scene.states.bar(2, actor="engine:0", reason="slow")
    scene.turn()
    scene.serve()
    assert scene.outcomes == [(2, "withdrawn")]
    assert len(scene.decoded) == 8
    scene.states.move(2, VersionState.SCORED, actor="operator:ann")
    scene.come(2, change=0.1)
    scene.turn()
    scene.serve()
    assert scene.outcomes[-1] == (2, "kept"), "released, it comes anew"


def test_a_text_counts_once_and_erased_ones_not_at_all(scene: Scene) -> None:
    scene.come(2)
    scene.turn()
    scene.review.arrived([stored_of(f"again-{one}", text="the same") for one in range(9)])
    scene.review.arrived([stored_of("other", tenant="gone"), stored_of("another")])
    scene.review.forget(lambda provenance: provenance.tenant == "gone")
    for _ in range(9):
        scene.turn()
    assert scene.decoded == [(2, "again-0"), (1, "again-0"), (2, "another"), (1, "another")]


def test_the_first_version_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.states.bar(1, actor="operator:ann", reason="")
    scene.come(2, change=-0.1)
    scene.turn()
    scene.serve()
    assert scene.decoded == []


def test_it_can_be_turned_off(scene: Scene) -> None:
    scene.start(review_traces=0)
    scene.come(2, change=-0.1)
    scene.turn()
    scene.serve()
    assert scene.decoded == []


def test_a_real_trainer_rolls_back_noise_that_was_forced_into_service(
    redis_client: redis.Redis, redis_url: str, model_dir: Path, tmp_path: Path
) -> None:
    """With a target, drafts, a store and Redis: a draft that has learnt, then noise in its place."""
    traces = answer_traces(model_dir, num_traces=24, seed=3)
    stream, pointer = TraceStream(redis_client, "toy", max_bytes=10**8), DraftPointer(redis_client, "toy")
    now_s = [0.0]
    config = config_for(model_dir, tmp_path, redis_url=redis_url, max_waiting_traces=32)
    trainer = Trainer(config, CollectorRegistry(), clock=lambda: now_s[0])
    store = DraftStore(tmp_path / "store")

    def turn() -> None:
        now_s[0] += POLL_INTERVAL_S
        trainer.read(block_ms=0)
        trainer.review.take_turn()
        trainer.restart_after_rollback()

    def force(state: dict[str, Any]) -> int:
        config_json = draft_config_json(trainer.learner.draft.config)
        fingerprint = target_fingerprint(model_dir)
        version = store.write(state, config_json, parent=1, target_fingerprint=fingerprint, info={}).version
        admit(store, version, target_fingerprint=fingerprint, actor="operator:ann", reason="")
        pointer.publish(version)
        store.lifecycle.move(version, VersionState.LIVE, actor="engine:0")
        turn()
        return version

    def send(prefix: str) -> None:
        for trace in traces:
            again = dataclasses.replace(
                trace, header=msgspec.structs.replace(trace.header, trace_id=f"{prefix}-{trace.header.trace_id}")
            )
            stream.append(encode_trace(again), trace_id=again.header.trace_id)

    send("first")
    trainer.read(block_ms=0)
    for _ in range(40):
        trainer.step()
    learnt = trainer.learner.averaged
    good = force(draft_state(learnt))
    store.lifecycle.move(good, VersionState.PROMOTED, actor="engine:0")
    turn()
    bad = force(noise_like(learnt))
    send("second")
    for _ in range(len(traces)):
        turn()
    assert store.lifecycle.state(bad) is VersionState.QUARANTINED
    assert store.lifecycle.history(bad)[-2].actor == ACTOR
    assert (store.lifecycle.state(good), pointer.desired()) == (VersionState.PROMOTED, good)
    assert trainer.learner.num_steps == 40, "its own weights do not descend from the bad one"
    trainer.close()
