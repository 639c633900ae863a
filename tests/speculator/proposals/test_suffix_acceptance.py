"""The model begins with calibration's estimates, corrects them by verdicts, and steps back where it fails."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from speculator.proposals.draft_tree import ROOT
from speculator.proposals.suffix_acceptance import NOBODY_ASKED, SuffixAcceptance
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter

USUAL: dict[str, Any] = {"is_first": True, "age": 100, "source": 0, "support": NOBODY_ASKED}


def told(
    model: SuffixAcceptance, token: int, calibrated: float, *, accepted: bool, before: int = 5, **about: Any
) -> None:
    learned, features = model.predict(token, before, calibrated, **{**USUAL, **about})
    model.add(calibrated, learned, features, accepted=accepted)


def probability(model: SuffixAcceptance, token: int, calibrated: float = 0.5, before: int = 5, **about: Any) -> float:
    return model.predict(token, before, calibrated, **{**USUAL, **about})[0]


@pytest.mark.parametrize("calibrated", [0.002, 0.1, 0.5, 0.9, 0.998])
def test_a_model_that_has_learned_nothing_says_what_calibration_says(calibrated: float) -> None:
    model = SuffixAcceptance()
    assert model.is_used
    assert probability(model, 7, calibrated) == pytest.approx(calibrated)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"token": 7}, {"token": 8}),
        ({"before": 1}, {"before": 2}),
        ({"support": 4}, {"support": 0}),
        ({"age": 3}, {"age": 9000}),
        ({"source": 0}, {"source": 2}),
        ({"is_first": True}, {"is_first": False}),
        ({"calibrated": 0.7}, {"calibrated": 0.3}),
    ],
    ids=lambda about: next(iter(about)),
)
def test_it_tells_apart_what_differs_in_one_feature(good: dict[str, Any], bad: dict[str, Any]) -> None:
    """Calibration says the same of both kinds, or the opposite: of ten each, nine and one are accepted."""
    model, dice, usual = SuffixAcceptance(), random.Random(0), {"token": 7, "calibrated": 0.5}
    for _ in range(400):
        told(model, **{**usual, **good}, accepted=dice.random() < 0.9)
        told(model, **{**usual, **bad}, accepted=dice.random() < 0.1)
    assert model.is_used
    assert probability(model, **{**usual, **good}) == pytest.approx(0.9, abs=0.12)
    assert probability(model, **{**usual, **bad}) == pytest.approx(0.1, abs=0.12)


@pytest.mark.parametrize(("weight", "bound"), [(-1000.0, 0.002), (1000.0, 0.998)])
def test_weights_of_hundreds_of_thousands_of_equal_verdicts_stay_within_the_bounds(weight: float, bound: float) -> None:
    model = SuffixAcceptance()
    model._weights[:] = [weight] * len(model._weights)
    assert probability(model, 7) == bound


def test_it_steps_back_while_calibration_is_the_better_one_and_returns() -> None:
    """Tokens whose fate turns around each time mislead it; calibration, which says a half of each, is not misled."""
    model = SuffixAcceptance()
    for accepted in itertools.islice(itertools.cycle([True, False]), 200):
        told(model, 7, 0.5, accepted=accepted)
    assert not model.is_used
    for _ in range(400):
        told(model, 7, 0.5, accepted=True)
    assert model.is_used


def test_no_verdict_makes_it_certain() -> None:
    model = SuffixAcceptance()
    for accepted in [True] * 3000 + [False] * 3:
        told(model, 7, 0.998, accepted=accepted)
        told(model, 8, 0.0, accepted=not accepted)
    for token in (7, 8):
        assert 0 < probability(model, token) < 1


def answered(drafter: SuffixDrafter, rounds: int, tenant: str = "a") -> None:
    """Requests that write 7 behind 50 51 whenever it came there before, and never 8 behind 60 61."""
    fresh = itertools.count(1000)
    for _ in range(rounds):
        request = drafter.start([50, 51, 7, 900, 60, 61, 8, 901], tenant=tenant, shared=True)
        for fork, after in (([50, 51], 7), ([60, 61], next(fresh))):
            request.commit(fork)
            request.propose(8)
            request.commit([after, next(fresh)])


def proposed(drafter: SuffixDrafter, fork: list[int], token: int, tenant: str = "a") -> float:
    """The probability of `token` behind these, in a new request that has seen it there."""
    request = drafter.start([*fork, token, 900], tenant=tenant)
    request.commit(fork)
    tree = request.propose(8).tree
    node = tree.child(ROOT, token)
    return 0.0 if node is None else tree.probabilities[node]


def test_trees_leave_out_what_the_model_has_seen_fail() -> None:
    """Calibration knows kinds, of which both tokens are one: it cannot tell them apart."""
    learning, calibrated = (SuffixDrafter(SuffixConfig(learns=learns)) for learns in (True, False))
    answered(learning, 60)
    answered(calibrated, 60)
    spread = {
        drafter: proposed(drafter, [50, 51], 7) - proposed(drafter, [60, 61], 8) for drafter in (learning, calibrated)
    }
    assert spread[learning] > spread[calibrated] + 0.2


def test_what_a_tenant_has_taught_stays_with_it() -> None:
    drafter, untouched = SuffixDrafter(), SuffixDrafter()
    answered(drafter, 60)
    assert proposed(drafter, [60, 61], 8, tenant="b") == proposed(untouched, [60, 61], 8, tenant="b") > 0
