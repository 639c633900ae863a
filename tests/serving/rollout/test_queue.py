"""What waits, and what is left of it when it waits no more."""

from __future__ import annotations

import gc
import weakref

from serving.rollout.order import Fifo
from serving.rollout.samples import Group, Sample
from serving.rollout.scheduler import WaitingQueue
from tests.serving.rollout.groups import request


def samples(number: int, count: int) -> list[Sample]:
    group = Group(request=request(str(number), samples=count), number=number)
    return [Sample(group=group, index=index, seed=index) for index in range(count)]


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
