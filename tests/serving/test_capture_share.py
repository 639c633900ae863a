"""How much is captured: all while it can be taken, and never so much that something is lost for long."""

from __future__ import annotations

import random

import pytest

from serving.capture_share import CaptureShare, StreamFigures

FLOOR = 0.01
MIB = 1 << 20
CAP = 512 * MIB


def figures(
    *, unacked_bytes: float = 0, undelivered: int = 0, taken: int = 100, memory_share: float | None = None
) -> StreamFigures:
    return StreamFigures(
        unacked_bytes=unacked_bytes,
        max_bytes=CAP,
        undelivered=undelivered,
        taken=taken,
        memory_share=memory_share,
    )


def share_of(seen: StreamFigures) -> tuple[float, str]:
    policy = CaptureShare(FLOOR)
    policy.look(seen, 0.0)
    return policy.share, policy.reason


def test_everything_is_kept_where_there_is_room() -> None:
    assert share_of(figures(unacked_bytes=0.3 * CAP, memory_share=0.7))[0] == 1.0
    assert share_of(figures(memory_share=None))[0] == 1.0


def test_a_stream_that_fills_asks_for_less() -> None:
    shares = [share_of(figures(unacked_bytes=filled * CAP))[0] for filled in (0.3, 0.4, 0.5, 0.6, 0.8, 1.2)]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] == pytest.approx(FLOOR**0.4)
    assert shares[-2:] == pytest.approx([FLOOR, FLOOR])
    assert share_of(figures(unacked_bytes=0.6 * CAP))[1] == "sampled_stream"


def test_a_redis_that_fills_asks_for_less_and_the_smallest_share_counts() -> None:
    assert share_of(figures(memory_share=0.8)) == (pytest.approx(FLOOR**0.5), "sampled_memory")
    assert share_of(figures(memory_share=0.95))[0] == pytest.approx(FLOOR)
    assert share_of(figures(memory_share=0.95, unacked_bytes=0.4 * CAP))[1] == "sampled_memory"


def test_a_trainer_that_stops_is_noticed_and_so_is_its_return() -> None:
    policy, now_s, taken, waiting = CaptureShare(FLOOR), 0.0, 100, 30

    def look(num_taken: int, num_new: int) -> float:
        nonlocal now_s, taken, waiting
        now_s, taken, waiting = now_s + 1, taken + num_taken, max(waiting - num_taken, 0) + num_new
        policy.look(figures(undelivered=waiting, taken=taken), now_s)
        return policy.share

    assert [look(2, 2) for _ in range(40)] == [1.0] * 40
    stopped = [look(0, 2) for _ in range(300)]
    assert stopped == sorted(stopped, reverse=True)
    assert stopped[-1] == pytest.approx(FLOOR)
    assert policy.reason == "sampled_trainer"
    back = [look(4, 0) for _ in range(200)]
    assert back[-1] == 1.0


def test_a_trainer_that_kept_up_may_start_again_before_anything_is_left_out() -> None:
    policy = CaptureShare(FLOOR)
    for second in range(100):
        policy.look(figures(taken=20 * second + 1), float(second))
    shares = []
    for second in range(90):
        policy.look(figures(undelivered=20 * second, taken=2000), 100.0 + second)
        shares.append(policy.share)
    assert shares[:45] == [1.0] * 45
    assert shares[-1] == pytest.approx(FLOOR), "then it is gone"


def test_where_no_trainer_has_ever_read_only_the_room_counts() -> None:
    policy = CaptureShare(FLOOR)
    for second in range(600):
        policy.look(figures(undelivered=second, taken=0), float(second))
    assert policy.share == 1.0


def test_a_trainer_without_work_is_not_a_slow_one() -> None:
    """One trace a minute, and the trainer has it at once; then a burst arrives."""
    policy = CaptureShare(FLOOR)
    for minute in range(30):
        policy.look(figures(undelivered=1, taken=100 + minute), 60.0 * minute)
    policy.look(figures(undelivered=50, taken=130), 1801.0)
    assert policy.share == 1.0


@pytest.mark.parametrize("num_engines", [1, 40])
@pytest.mark.parametrize("overload", [0.5, 10.0])
def test_the_share_settles_where_as_much_is_captured_as_is_taken(num_engines: int, overload: float) -> None:
    """Engines that look for themselves, one after the other, at a trainer that acks every 30 s."""
    entry, taken_per_s = 2 * MIB, 4.0
    engines, rng = [CaptureShare(FLOOR) for _ in range(num_engines)], random.Random(0)
    offered = overload * taken_per_s / num_engines
    undelivered = taken = acked = captured = lost = 0
    for second in range(1200):
        for engine in engines:
            kept = sum(rng.random() < engine.share for _ in range(int(offered + rng.random())))
            undelivered, captured = undelivered + kept, captured + (kept if second >= 600 else 0)
        num = min(int(taken_per_s), undelivered)
        undelivered, taken = undelivered - num, taken + num
        acked = taken if second % 30 == 0 else acked
        unacked = (undelivered + taken - acked) * entry
        lost += unacked > CAP
        for engine in engines:
            engine.look(figures(unacked_bytes=unacked, undelivered=undelivered, taken=taken), float(second))
    assert lost == 0
    expected = 600 * taken_per_s * min(overload, 1.0)
    assert captured == pytest.approx(expected, rel=0.1)
    assert (undelivered > 0) == (overload > 1)
