"""The benchmark's own counting, on drafts whose difference is made up."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from benchmarks.gate import MAX_CHANGE, candidates, rates_of
from speculator.acceptance import Acceptance
from tests.trainer.examples import config_for
from trainer.gate import GateDecision, Outcome


def scores(level: float, *, noise: float) -> list[Acceptance]:
    """Of a draft `level` times as good as another on 40 answers of 60 tokens."""
    rng = random.Random(round(1000 * level))
    lengths = [1.6 * level * math.exp(rng.gauss(0, noise)) for _ in range(40)]
    return [Acceptance(num_committed=60, num_rounds=60 / length) for length in lengths]


def test_only_pairs_that_are_hard_to_tell_apart_count() -> None:
    found = candidates([scores(level, noise=0.0) for level in (1.0, 1.1, 1.3)])
    assert sorted(round(one.change, 3) for one in found) == [-0.091, 0.1]
    assert all(abs(one.change) <= MAX_CHANGE for one in found)


def test_rates_follow_from_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path, tmp_path)
    known = candidates([scores(level, noise=0.03) for level in (1.0, 1.08)])
    careful = rates_of(known, config, num_traces=24, draws=50, effect_size=0.05)
    assert (careful.false_promotion, careful.false_refusal, careful.refused_though_no_worse) == (0.0, 0.0, 0.0)
    assert careful.promoted["+5% to +10%"] == 1.0

    always = GateDecision(outcome=Outcome.PROMOTE, reason="", incumbent=1)
    monkeypatch.setattr("benchmarks.gate.decide", lambda *_, **__: always)
    careless = rates_of(known, config, num_traces=24, draws=5, effect_size=0.05)
    assert (careless.false_promotion, careless.worst_false_promotion, careless.false_refusal) == (1.0, 1.0, 0.0)
