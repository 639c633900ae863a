"""The fleet that benchmarks.fleet_sim simulates keeps the promises of the policies that it runs."""

from __future__ import annotations

import dataclasses
import random

import pytest

from benchmarks.fleet_capture import Flow, settle
from benchmarks.fleet_inputs import ANSWER_TOKENS, trace_of_8b, version_bytes
from benchmarks.fleet_model import Setup, Spreading, Trial, spread_over, trials
from speculator.codec import decode_trace
from speculator.waves import WaveRules

KEPT = Trial(seconds=5.0, verifications=2000, is_kept=True)
BAD = Trial(seconds=2.0, verifications=800, is_kept=False)
SETUP = Setup(
    num_engines=12,
    version_bytes=1e9,
    store_bytes_per_s=1e9,
    engine_bytes_per_s=1e9,
    poll_s=0.5,
    look_s=2.0,
    report_s=2.0,
)


def _run(trial: Trial, **changes: float) -> Spreading:
    return spread_over(dataclasses.replace(SETUP, **changes), lambda: trial, random.Random(0))  # type: ignore[arg-type]


def test_a_good_version_reaches_all_by_way_of_the_waves() -> None:
    done = _run(KEPT)
    assert done.promoted_s is not None
    assert done.barred_s is None
    assert done.num_touched == SETUP.num_engines
    places = WaveRules().places
    assert done.waves == next(wave for wave in range(9) if places(wave) >= SETUP.num_engines)
    assert done.settled_s >= (done.waves + 1) * KEPT.seconds


def test_a_bad_version_stays_on_the_canary_for_its_trial_and_the_way_back() -> None:
    done = _run(BAD)
    assert done.promoted_s is None
    assert done.num_touched == 1
    assert done.barred_s is not None
    assert BAD.seconds <= done.exposed_s <= BAD.seconds + 2.5, "a second of reading the version before it, and polls"


def test_a_store_with_a_thin_line_holds_up_the_last_waves() -> None:
    thin, wide = _run(KEPT, store_bytes_per_s=2e8), _run(KEPT, store_bytes_per_s=1e10)
    assert thin.most_staging > 4
    assert thin.settled_s > wide.settled_s + 30


def test_verdicts_are_those_of_the_watch() -> None:
    common = {
        "accept_length": 2.0,
        "spread": 0.05,
        "batch": 16,
        "verifications_per_s": 500.0,
        "poll_s": 0.5,
        "count": 2,
    }
    good, useless = trials(0.1, **common), trials(-1.0, **common)  # type: ignore[arg-type]
    assert all(trial.is_kept for trial in good)
    assert not any(trial.is_kept for trial in useless)
    assert max(trial.seconds for trial in useless) <= 2.0


def _flow(traces_per_s: float, stream_max_bytes: int = 1 << 30) -> Flow:
    return settle(
        traces_per_s=traces_per_s,
        trainer_traces_per_s=10,
        trace_bytes=1e6,
        stream_max_bytes=stream_max_bytes,
        checkpoint_s=30,
        floor=0.01,
        seconds=900,
    )


def test_all_is_captured_while_the_trainer_keeps_up_and_less_instead_of_losing_when_not() -> None:
    enough, much, too_much = _flow(8), _flow(200), _flow(5000)
    assert (enough.share, enough.lost_share) == (1.0, 0.0)
    assert enough.learnt_share == pytest.approx(1.0)
    assert much.share == pytest.approx(10 / 200, rel=0.1)
    assert much.lost_share == 0.0
    assert too_much.share == pytest.approx(0.01), "the floor"
    assert too_much.lost_share == pytest.approx(1 - 10 / 50, rel=0.05)


def test_a_stream_that_holds_less_than_the_trainer_has_in_hand_is_sampled_though_that_keeps_up() -> None:
    """Between two checkpoints nothing is settled: 240 traces of 1 MB here."""
    small = _flow(8, stream_max_bytes=100_000_000)
    assert small.share < 0.5
    assert (small.lost_share, small.unsettled_share) == (0.0, 0.0)


def test_the_sizes_are_of_an_8b_target() -> None:
    encoded = trace_of_8b()
    assert decode_trace(encoded).aux_hidden.shape[1] == 3 * 4096
    assert 20_000 < len(encoded) / ANSWER_TOKENS < 22_000, "12.7 KB a position, and prompts have positions, too"
    assert 0.7e9 < version_bytes() < 0.9e9
