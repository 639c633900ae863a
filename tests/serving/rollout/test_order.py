"""Who goes first, on cases small enough to see."""

from __future__ import annotations

from serving.rollout.order import ContextAware, Fifo, Order, expected_length, expected_remaining
from serving.rollout.samples import Group, Sample
from tests.serving.rollout.groups import request


def group(number: int, *, longest: int | None = None, samples: int = 3, **more: int) -> list[Sample]:
    made = Group(request=request("abc"[number], samples=samples, **more), number=number, longest_finished=longest)
    made.samples = [Sample(group=made, index=index, seed=index) for index in range(samples)]
    return made.samples


def ordered(order: Order, samples: list[Sample]) -> list[str]:
    return [f"{s.sample_id.group_id}{s.index}" for s in sorted(samples, key=order.rank)]


def test_an_unknown_length_is_the_limit_and_a_known_one_the_longest_finished() -> None:
    (unknown, *_), (known, *_) = group(0), group(1, longest=30)
    known.tokens = [0] * 12
    assert (expected_length(unknown), expected_remaining(known)) == (100, 18)


def test_who_outgrew_the_longest_sibling_is_expected_to_reach_the_limit() -> None:
    (outgrown, *_) = group(0, longest=30)
    outgrown.tokens = [0] * 30
    assert expected_remaining(outgrown) == 70


def test_fifo_is_by_group_and_index() -> None:
    later, earlier = group(1), group(0)
    assert ordered(Fifo(), later + earlier) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_probes_first_the_shortest_of_them_ahead_then_the_longest_expected() -> None:
    first, second, known = group(0), group(1, max_tokens=50), group(2, longest=70)
    first[0].tokens = [0] * 8
    # b's probe has fewer tokens than a's; then unknown a (100), known c (70), unknown b (50).
    assert ordered(ContextAware(), [*first, *second, *known]) == [
        "b0", "a0", "a1", "a2", "c0", "c1", "c2", "b1", "b2",
    ]  # fmt: skip


def test_priority_and_deadline_come_before_length() -> None:
    for order in (Fifo(), ContextAware()):
        usual, urgent, due = group(0), group(1, priority=1), group(2, deadline_s=5)
        assert ordered(order, [usual[0], urgent[2], due[1]]) == ["b2", "c1", "a0"]


def test_a_probe_displaces_what_is_none_and_no_probe() -> None:
    (probe, sibling, _), (other, *_) = group(0), group(1)
    assert ContextAware().displaces(probe, sibling)
    assert not ContextAware().displaces(probe, other)
    assert not ContextAware().displaces(sibling, probe)


def test_a_longer_one_displaces_only_if_that_pays_for_reading_again() -> None:
    (waiting, *_), (running, *_) = group(0, longest=90), group(1, longest=60)
    running.tokens = [0] * 10  # 50 remain, and 20 tokens would be read again
    assert ContextAware().displaces(waiting, running)
    waiting.tokens = [0] * 20
    assert not ContextAware().displaces(waiting, running)


def test_fifo_displaces_for_priority_alone() -> None:
    (waiting, *_), (running, *_) = group(0), group(1)
    (urgent, *_) = group(2, priority=1)
    assert not Fifo().displaces(waiting, running)
    assert Fifo().displaces(urgent, running)
