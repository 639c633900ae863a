"""The gate's statistics against tables, brute force and simulation; and what it decides."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from speculator.draft.eagle3 import Eagle3Draft
from tests.fixtures.drafts import make_draft
from tests.trainer.examples import config_for
from tests.trainer.reviewing import accepted
from tests.trainer.stored import stored_of
from trainer.config import TrainerConfig
from trainer.ranks import Ranks
from trainer.release.gate import CandidateGate, GateDecision, GateOutcome, decide
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.reservoirs import Stored
from trainer.statistics import (
    MIN_TRACES,
    AcceptanceCounts,
    Comparison,
    PairedScores,
    by_prompt,
    compare,
    student_t_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "at_95", "at_975"),
    [
        (1, 6.313752, 12.706205),
        (2, 2.919986, 4.302653),
        (3, 2.353363, 3.182446),
        (4, 2.131847, 2.776445),
        (10, 1.812461, 2.228139),
        (23, 1.713872, 2.068658),
        (30, 1.697261, 2.042272),
        (1000, 1.646379, 1.962339),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees: int, at_95: float, at_975: float) -> None:
    assert student_t_quantile(0.95, degrees) == pytest.approx(at_95, abs=1e-6)
    assert student_t_quantile(0.975, degrees) == pytest.approx(at_975, abs=1e-6)


def pair(candidate: tuple[float, float], incumbent: tuple[float, float]) -> PairedScores:
    """(committed tokens, verifications) of each."""
    return PairedScores(
        *(AcceptanceCounts(num_committed=tokens, num_rounds=rounds) for tokens, rounds in (candidate, incumbent))
    )


def sampled(rng: random.Random, change: float, count: int, noise: float = 0.1) -> list[PairedScores]:
    """Traces of different lengths and difficulties, on which the drafts differ by `change`, more or less."""
    pairs = []
    for _ in range(count):
        tokens, length = rng.randint(40, 120), rng.uniform(1.2, 2.2)
        ratio = (1 + change) * math.exp(rng.gauss(-(noise**2) / 2, noise))
        pairs.append(pair((tokens, tokens / (length * ratio)), (tokens, tokens / length)))
    return pairs


def test_lengths_are_ratios_of_sums() -> None:
    found = compare([pair((10, 4), (10, 5)), pair((30, 10), (32, 16)), pair((0, 0), (0, 0))])
    assert found.num_traces == 2
    assert found.candidate_length == pytest.approx(40 / 14)
    assert found.incumbent_length == pytest.approx(42 / 21)
    assert found.change == pytest.approx(40 / 14 / 2 - 1)


def test_the_error_is_that_of_all_resamples() -> None:
    """The bootstrap over all n^n resamples, whose deviation is smaller by √((n − 1)/n)."""
    pairs = sampled(random.Random(3), 0.05, 5, noise=0.03)
    found = compare(pairs)
    assert found.lower is not None
    error = (found.change - found.lower) / student_t_quantile(0.95, 4)
    changes = [compare(list(resample)).change for resample in itertools.product(pairs, repeat=5)]
    mean = sum(changes) / len(changes)
    deviation = math.sqrt(sum((change - mean) ** 2 for change in changes) / len(changes))
    assert error == pytest.approx(deviation * math.sqrt(5 / 4), rel=0.03)


@pytest.mark.parametrize("count", [MIN_TRACES, 24])
def test_a_bound_is_wrong_in_one_case_of_twenty(count: int) -> None:
    rng = random.Random(0)
    # What the sums tend to: lengths and ratios are drawn independently of each other.
    many = compare(sampled(rng, 0.0, 200_000)).change
    found = [compare(sampled(rng, 0.0, count)) for _ in range(2000)]
    too_high = sum(one.lower is not None and one.lower > many for one in found) / len(found)
    too_low = sum(one.upper is not None and one.upper < many for one in found) / len(found)
    assert 0.03 < too_high < 0.07
    assert 0.03 < too_low < 0.07


def test_answers_to_one_prompt_are_summed() -> None:
    answers = [(b"p", pair((10, 4), (10, 5))), (b"q", pair((9, 3), (9, 9))), (b"p", pair((30, 10), (32, 16)))]
    assert by_prompt(answers) == [pair((40, 14), (42, 21)), pair((9, 3), (9, 9))]


class GateScene:
    """The gate, and a candidate that is a tenth better than version 1 on any trace; version 2 is two tenths better."""

    def __init__(self, root: Path) -> None:
        self.held_out = HeldOut(share=0.5, max_traces=100, max_bytes=1e9, max_tenant_share=1.0, seed=0)
        self.golden = GoldenSet(max_traces=100, max_bytes=1e9, max_tenant_share=1.0)
        incumbents, self.candidate = {1: make_draft(1), 2: make_draft(2)}, make_draft(3)

        def score(draft: Eagle3Draft, one: Stored, _: TrainerConfig) -> AcceptanceCounts:
            return accepted(1, one.trace_id, {incumbents[1]: 0.0, incumbents[2]: 0.2}.get(draft, 0.1))

        sets, config = (self.held_out, self.golden), config_for(root, root)
        self.gate = CandidateGate(*sets, config, Ranks(), load_draft=incumbents.__getitem__, score=score)

    def judge(self, incumbent: int = 1) -> tuple[int, GateOutcome]:
        """(number of fresh prompts, outcome)."""
        judged = self.gate.judge(self.candidate, incumbent=incumbent)
        assert judged is not None
        assert judged.fresh is not None
        return judged.fresh.num_traces, judged.outcome


def test_the_gate_counts_prompts(tmp_path: Path) -> None:
    """Eight answers to each of a few prompts."""
    scene, found = GateScene(tmp_path), []
    for prompt in range(MIN_TRACES):
        for index in range(8):
            scene.held_out.keep(stored_of(f"{prompt}-{index}", prompt_hash=b"%d" % prompt))
        found.append(scene.judge())
    assert found == [(1, GateOutcome.HOLD), (2, GateOutcome.HOLD), (3, GateOutcome.HOLD), (4, GateOutcome.PROMOTE)]


def test_golden_traces_count_as_fresh_while_the_pool_is_young(tmp_path: Path) -> None:
    scene = GateScene(tmp_path)
    for prompt in range(MIN_TRACES):
        scene.golden.keep(stored_of(f"{prompt}", prompt_hash=b"%d" % prompt))
    assert scene.judge() == (MIN_TRACES, GateOutcome.PROMOTE)
    scene.held_out.is_young = False
    assert scene.judge() == (0, GateOutcome.HOLD)


def test_another_incumbent_is_scored_anew(tmp_path: Path) -> None:
    """What is known of the former one says nothing about it."""
    scene = GateScene(tmp_path)
    for prompt in range(MIN_TRACES):
        scene.held_out.keep(stored_of(f"{prompt}", prompt_hash=b"%d" % prompt))
    assert scene.judge() == (MIN_TRACES, GateOutcome.PROMOTE)
    assert scene.judge(incumbent=2) == (MIN_TRACES, GateOutcome.REFUSE)


def test_a_candidate_that_is_not_finite_is_refused_however_it_decodes(tmp_path: Path) -> None:
    scene = GateScene(tmp_path)
    for prompt in range(MIN_TRACES):
        scene.held_out.keep(stored_of(f"{prompt}", prompt_hash=b"%d" % prompt))
    scene.candidate.fc.weight.data[0, 0] = math.inf
    found = scene.gate.judge(scene.candidate, incumbent=1)
    assert found is not None
    assert (found.outcome, found.reason, found.fresh) == (GateOutcome.REFUSE, "not finite", None)


def test_one_trace_or_none_bounds_nothing() -> None:
    for pairs in ([], [pair((10, 4), (10, 5))]):
        found = compare(pairs)
        assert (found.num_traces, found.lower, found.upper) == (len(pairs), None, None)
        assert decision(found).outcome is GateOutcome.HOLD


def comparison(change: float, margin: float, num_traces: int = 24) -> Comparison:
    return Comparison(
        num_traces=num_traces,
        candidate_length=1.5 * (1 + change),
        incumbent_length=1.5,
        change=change,
        lower=change - margin,
        upper=change + margin,
    )


def decision(fresh: Comparison, golden: Comparison | None = None) -> GateDecision:
    return decide(fresh, golden, incumbent=7, epsilon=0.02, golden_epsilon=0.05)


@pytest.mark.parametrize(
    ("fresh", "golden", "outcome"),
    [
        (comparison(0.03, 0.02), None, GateOutcome.PROMOTE),
        (comparison(0.005, 0.02), comparison(0.0, 0.02), GateOutcome.PROMOTE),
        (comparison(0.005, 0.03), None, GateOutcome.HOLD),
        (comparison(0.0, 0.0), None, GateOutcome.HOLD),
        (comparison(-0.01, 0.005), None, GateOutcome.REFUSE),
        (comparison(-0.01, 0.02), None, GateOutcome.HOLD),
        (comparison(0.3, 0.02, MIN_TRACES - 1), None, GateOutcome.HOLD),
        (comparison(-0.3, 0.02, MIN_TRACES - 1), None, GateOutcome.HOLD),
        (comparison(0.3, 0.02), comparison(-0.10, 0.04), GateOutcome.REFUSE),
        (comparison(0.3, 0.02), comparison(-0.10, 0.06), GateOutcome.PROMOTE),
        (comparison(0.3, 0.02), comparison(-0.04, 0.01), GateOutcome.PROMOTE),
        (comparison(0.3, 0.02), comparison(-0.10, 0.04, MIN_TRACES - 1), GateOutcome.PROMOTE),
    ],
)
def test_what_is_decided(fresh: Comparison, golden: Comparison | None, outcome: GateOutcome) -> None:
    found = decision(fresh, golden)
    assert found.outcome is outcome
    assert found.is_vetoed is (outcome is GateOutcome.REFUSE and golden is not None)
    assert found.reason
    assert found.incumbent == 7


def test_a_decision_has_all_its_numbers() -> None:
    numbers = decision(comparison(0.3, 0.1), comparison(-0.1, 0.2, 5)).numbers
    assert (numbers["incumbent"], numbers["num_traces"], numbers["golden_num_traces"]) == (7, 24, 5)
    assert (numbers["change"], numbers["golden_change"]) == (0.3, -0.1)
    assert {"lower", "upper", "golden_lower", "golden_upper", "candidate_length", "seconds"} <= numbers.keys()
    assert "golden_change" not in decision(comparison(0.3, 0.1)).numbers
