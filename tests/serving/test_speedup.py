"""The measured speedup, by hand."""

from __future__ import annotations

import pytest

from serving.speedup import ControlShare, SpeedupMeter, speedup


def test_the_ratio_compares_equal_batch_sizes() -> None:
    meter = SpeedupMeter()
    # Batch 1: plainly 10 ms a token; drafting commits 8 tokens in 40 ms, so they would have taken 80 ms.
    meter.add(batch=1, drafted=False, seconds=0.010, committed=1)
    meter.add(batch=1, drafted=True, seconds=0.040, committed=8)
    # Batch 2: plainly 6 ms a token; drafting commits 10 tokens in 60 ms: no gain.
    meter.add(batch=2, drafted=False, seconds=0.012, committed=2)
    meter.add(batch=2, drafted=True, seconds=0.060, committed=10)
    # Batch 3 has no baseline and does not count.
    meter.add(batch=3, drafted=True, seconds=1.0, committed=1)
    measured = meter.measure()
    assert measured.ratio == pytest.approx((0.080 + 0.060) / (0.040 + 0.060))
    assert measured.baseline_ms_per_token == pytest.approx(140 / 18)
    assert (measured.baseline_rounds, measured.speculative_rounds) == (2, 3)


def test_without_a_baseline_there_is_no_ratio() -> None:
    assert speedup({(1, True): 1.0}, {(1, True): 5}, baseline_rounds=0, speculative_rounds=1).ratio is None


def test_rounds_leave_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("serving.speedup.time.monotonic", lambda: now[0])
    meter = SpeedupMeter(window_s=10)
    meter.add(batch=1, drafted=False, seconds=1, committed=1)
    now[0] = 11
    meter.add(batch=1, drafted=True, seconds=1, committed=1)
    assert meter.measure().baseline_rounds == 0


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.02, 120, 280), (1.0, 10_000, 10_000)])
def test_the_control_share_is_kept(share: float, low: int, high: int) -> None:
    control = ControlShare(share)
    assert low <= sum(control.is_control() for _ in range(10_000)) <= high
