"""Jobs on one pool: each gets tokens by its weight, none starves, and nobody saves up."""

from __future__ import annotations

import pytest

from serving.rollout.job_fairness import FairShares
from serving.rollout.order import ContextAware
from serving.rollout.samples import Lease
from serving.rollout.scheduler import Policy, Scheduler
from tests.serving.rollout.groups import names, request, sample

SLOTS, ROOMY = 4, 100_000


class Pool:
    """One engine with four slots, that adds ten tokens a turn to all that it runs; jobs are the first letters."""

    def __init__(self, chunk_tokens: int = 20) -> None:
        self.scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=chunk_tokens))
        self.running: list[Lease] = []
        self.tokens = dict.fromkeys("ab", 0)

    def submit(self, job: str, number: int, *, samples: int = 8, max_tokens: int = 200, weight: float = 1.0) -> None:
        name = f"{job}{number}"
        self.scheduler.submit(request(name, samples=samples, max_tokens=max_tokens, job=job, weight=weight))

    def turn(self) -> None:
        self.running += self.scheduler.next_for("x", SLOTS - len(self.running), ROOMY)
        for lease in list(self.running):
            left = lease.max_tokens - (len(self.scheduler.sample(lease.sample_id).tokens) - lease.num_generated)
            self.tokens[lease.sample_id.group_id[0]] += min(left, 10)
            if left <= 10:
                self.scheduler.finished(lease, (0,) * left, "length")
            elif self.scheduler.progressed(lease, (0,) * 10) == "go on":
                continue
            self.running.remove(lease)
        self.scheduler.check()


@pytest.mark.parametrize(("weight", "ratio"), [(1.0, 1.0), (3.0, 3.0)])
def test_tokens_are_shared_by_weight(weight: float, ratio: float) -> None:
    pool = Pool()
    for number in range(8):
        pool.submit("a", number)
        pool.submit("b", number, weight=weight)
    for _ in range(150):
        pool.turn()
    assert pool.tokens["b"] / pool.tokens["a"] == pytest.approx(ratio, rel=0.1)


def test_a_job_that_comes_late_gets_its_share_at_once_and_no_more() -> None:
    pool = Pool()
    for number in range(20):
        pool.submit("a", number)
    for _ in range(100):
        pool.turn()
    assert pool.tokens == {"a": 4000, "b": 0}
    for number in range(20):
        pool.submit("b", number)
    for _ in range(100):
        pool.turn()
    assert pool.tokens["b"] == pytest.approx(2000, rel=0.15), "it has no claim to what it did not use"
    assert pool.tokens["a"] + pool.tokens["b"] == 8000


def test_a_job_that_comes_back_has_saved_nothing_up() -> None:
    pool = Pool()
    pool.submit("a", 0, samples=4, max_tokens=20)
    for _ in range(2):
        pool.turn()
    assert pool.tokens == {"a": 80, "b": 0}
    for number in range(20):
        pool.submit("b", number)
    for _ in range(100):
        pool.turn()
    pool.tokens = dict.fromkeys("ab", 0)
    for number in range(1, 21):
        pool.submit("a", number)
    for _ in range(50):
        pool.turn()
    assert pool.tokens["a"] == pytest.approx(1000, rel=0.15)


def test_the_slots_of_an_engine_that_died_are_held_no_more() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=20))
    scheduler.submit(request("a", samples=2, job="a"))
    assert names(scheduler.next_for("x", 2, ROOMY)) == ["a0", "a1"]
    scheduler.engine_lost("x")
    leases = scheduler.next_for("y", 2, ROOMY)
    scheduler.submit(request("b", samples=1, job="b"))
    verdicts = [scheduler.progressed(lease, (0,) * 20) for lease in leases]
    assert verdicts == ["go on", "go on"], "two for one job are too few to give one up"


def test_a_job_alone_has_everything_and_is_not_interrupted() -> None:
    pool = Pool()
    pool.submit("a", 0, samples=4)
    for _ in range(20):
        pool.turn()
    assert pool.tokens["a"] == 800
    assert sample_leases(pool) == [1, 1, 1, 1]


def sample_leases(pool: Pool) -> list[int]:
    """How often each was begun: leases are numbered from 1 in the order in which they are given."""
    numbers = [pool.scheduler.sample(one.sample_id).lease for one in pool.scheduler._groups["a0"].samples]
    return [1 if number <= len(numbers) else 2 for number in numbers]


def test_urgency_goes_before_shares() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=20))
    scheduler.submit(request("a", samples=1, job="a"))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.progressed(lease, (0,) * 10)
    scheduler.submit(request("b", samples=1, job="b"))
    scheduler.submit(request("c", samples=1, job="a", priority=1))
    assert names(scheduler.next_for("y", 2, ROOMY)) == ["c0", "b0"]
    assert sample(scheduler, "a0").job == "a"


def test_jobs_that_are_gone_are_forgotten_in_the_end() -> None:
    shares = FairShares()
    for number in range(3000):
        shares.add_samples(str(number), 1)
        shares.charge(str(number), 10, 1.0)
        shares.sample_ended(str(number))
    assert len(shares._times) <= 1000
