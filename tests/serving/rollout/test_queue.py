"""What waits, and what is left of it when it waits no more."""

from __future__ import annotations

import gc
import weakref

from serving.rollout.order import Fifo
from serving.rollout.queue import WaitingQueue
from serving.rollout.samples import Group, Sample
from tests.serving.rollout.groups import request


def samples(number: int, count: int) -> list[Sample]:
    group = Group(request=request(str(number), samples=count), number=number)
    return [Sample(group=group, index=index, seed=index) for index in range(count)]


def test_an_engine_takes_what_it_has_read_before_and_anything_rather_than_nothing() -> None:
    queue, order = WaitingQueue(), Fifo()
    probe, *others = samples(0, 4)
    for number, one in enumerate(others):
        one.last_engine = ("x", "y", "z")[number]
    for one in others:
        queue.put(one, order.rank(one))

    def take(engine: str) -> Sample | None:
        return queue.take(
            lambda _: True, lambda _: False, cost=lambda one: one.unread_at(engine) > one.unread_elsewhere(engine)
        )

    assert take("y") is others[1]
    queue.put(probe, order.rank(probe))
    assert take("z") is probe, "what goes first does, wherever it has been"
    assert take("y") is others[0]
    assert take("y") is others[2]
    assert take("y") is None


def test_what_is_left_to_another_engine_is_not_taken_because_it_costs_little() -> None:
    queue, order = WaitingQueue(), Fifo()
    _, first, second = samples(0, 3)
    for one in (first, second):
        queue.put(one, order.rank(one))
    taken = queue.take(lambda _: True, lambda _: False, lambda one: one is second, cost=lambda one: one is first)
    assert taken is first
    assert second in queue


def test_a_group_stays_where_its_prompt_was_read() -> None:
    first, second = samples(0, 2)
    assert first.unread_at("x") == first.unread_elsewhere("x") == first.context
    first.group.engines.add("x")
    assert second.unread_at("x") == 0
    assert second.unread_at("y") == second.context > second.unread_elsewhere("y")
    assert second.unread_elsewhere("x") == second.context, "it has been read here alone"


def test_samples_that_have_ended_are_let_go_while_a_better_one_waits() -> None:
    queue, order = WaitingQueue(), Fifo()
    (best,) = samples(0, 1)
    queue.put(best, order.rank(best))
    groups = list[weakref.ref[Group]]()
    for number in range(1, 101):
        cancelled = samples(number, 10)
        groups.append(weakref.ref(cancelled[0].group))
        for sample in cancelled:
            queue.put(sample, order.rank(sample))
        for sample in cancelled:
            queue.discard(sample)
    del cancelled, sample
    gc.collect()
    assert sum(group() is not None for group in groups) < 10
    others = samples(101, 3)
    for one in reversed(others):
        queue.put(one, order.rank(one))
    assert [queue.take(lambda _: True, lambda _: False) for _ in range(5)] == [best, *others, None]
