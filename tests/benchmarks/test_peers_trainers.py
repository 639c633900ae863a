"""How this project's trainer is compared with others at equal tokens and at equal CPU seconds."""

from __future__ import annotations

import pytest

from benchmarks.peers_trainers import OURS, Runs, ours_after, ratios_of

CURVE = [(0.0, 0, 1.0), (4.0, 1000, 1.2), (8.0, 2000, 1.3), (16.0, 4000, 1.4)]


def test_ours_is_read_within_the_seconds_of_the_other() -> None:
    run = {"curve": CURVE}
    assert ours_after(run, 7.9) == 1.2
    assert ours_after(run, 8.0) == 1.3
    assert ours_after(run, 100.0) == 1.4


def test_the_strongest_of_the_others_counts_at_tokens_and_at_seconds() -> None:
    runs: Runs = {
        "a": {"accept_length": 1.25, "cpu_s": 16.0},
        "b": {"accept_length": 1.2, "cpu_s": 4.0},
        OURS: {"accept_length": 1.3, "cpu_s": 8.0, "curve": CURVE},
    }
    equal, timed = ratios_of(runs)
    assert equal == pytest.approx(1.3 / 1.25)
    assert timed == pytest.approx(1.2 / 1.2), "the quick one, after its four seconds"
