"""What runs where, event by event."""

from __future__ import annotations

import pytest

from serving.rollout.order import ContextAware, Fifo, Order
from serving.rollout.samples import SampleState
from serving.rollout.scheduler import Policy, Scheduler
from speculator.errors import RequestError
from tests.serving.rollout.groups import names, request, sample

ROOMY = 10_000


def divided(chunk_tokens: int = 20) -> Scheduler:
    return Scheduler(Policy(order=ContextAware(), chunk_tokens=chunk_tokens))


def test_every_slot_is_filled_while_work_waits() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=3))
    scheduler.submit(request("b", samples=3))
    assert names(scheduler.next_for("x", 4, ROOMY)) == ["a0", "b0", "a1", "a2"]
    assert names(scheduler.next_for("y", 4, ROOMY)) == ["b1", "b2"]
    assert scheduler.next_for("z", 4, ROOMY) == []
    scheduler.check()


def test_a_lease_says_what_to_generate() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1, max_tokens=50))
    (first,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.progressed(first, (70, 71)) == "go on"
    scheduler.engine_lost("x")
    (second,) = scheduler.next_for("y", 1, ROOMY)
    assert second.prompt_token_ids == (*range(10), 70, 71)
    assert (second.num_generated, second.max_tokens, second.seed) == (2, 48, first.seed)


def test_the_longest_finished_sibling_reorders_what_waits() -> None:
    scheduler = divided(chunk_tokens=200)
    for name in "ab":
        scheduler.submit(request(name, samples=2))
    probe_a, probe_b = scheduler.next_for("x", 2, ROOMY)
    scheduler.finished(probe_a, (0,) * 30, "stop")
    scheduler.finished(probe_b, (0,) * 60, "stop")
    assert names(scheduler.next_for("x", 1, ROOMY)) == ["b1"]


def test_memory_is_reserved_by_the_chunk() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=4))
    # 10 of prompt and 20 of chunk each; half of the 100 that each may become: 60 each.
    leases = scheduler.next_for("x", 4, 130)
    assert names(leases) == ["a0", "a1"]
    assert scheduler.reserved_tokens("x") == 60
    scheduler.next_for("x", 2, 10)
    assert scheduler.progressed(leases[0], (0,) * 20) == "stop"  # 20 more do not fit into 10
    assert sample(scheduler, "a0").state is SampleState.PAUSED


def test_what_is_known_to_be_short_starts_where_the_unknown_would_not() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=3))
    (probe,) = scheduler.next_for("x", 1, 130)
    scheduler.finished(probe, (0,) * 30, "stop")
    assert names(scheduler.next_for("x", 3, 130)) == ["a1", "a2"]  # 10 and half of 30, but 30 for the chunk


def test_what_does_not_fit_holds_up_nobody() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=1, prompt_token_ids=tuple(range(500)), priority=1))
    scheduler.submit(request("b", samples=1))
    assert names(scheduler.next_for("x", 2, 100)) == ["b0"]
    assert names(scheduler.next_for("y", 2, 600)) == ["a0"]


def test_at_the_end_of_a_chunk_a_probe_gets_the_slot() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=2))
    probe, sibling = scheduler.next_for("x", 2, ROOMY)
    scheduler.submit(request("b", samples=1))
    assert scheduler.progressed(sibling, (0,) * 19) == "go on"
    assert scheduler.progressed(probe, (0,) * 20) == "go on"
    assert scheduler.progressed(sibling, (0,)) == "stop"
    assert names(scheduler.next_for("x", 1, ROOMY)) == ["b0"]


def test_one_free_slot_displaces_one_sample() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=3))
    _, second, third = scheduler.next_for("x", 3, ROOMY)
    scheduler.submit(request("b", samples=1))
    assert scheduler.progressed(second, (0,) * 20) == "stop"
    assert scheduler.progressed(third, (0,) * 20) == "go on"


def test_an_engine_that_dies_with_twenty_chunks_loses_what_it_had_not_reported() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.submit(request("a", samples=20))
    leases = scheduler.next_for("x", 20, ROOMY)
    for number, lease in enumerate(leases):
        scheduler.progressed(lease, (number,) * number)
    assert len(scheduler.engine_lost("x")) == 20
    scheduler.check()
    again = {lease.sample_id.number: lease for lease in scheduler.next_for("y", 20, ROOMY)}
    assert {index: lease.prompt_token_ids[10:] for index, lease in again.items()} == {
        number: (number,) * number for number in range(20)
    }
    # The dead engine's last words come late.
    assert scheduler.progressed(leases[3], (9, 9)) == "stop"
    assert scheduler.finished(leases[3], (9,), "stop") is None
    assert sample(scheduler, "a3").tokens == [3, 3, 3]


def test_samples_that_are_too_old_are_returned_or_aborted_as_asked() -> None:
    scheduler = divided()
    for name, staleness in {"a": 1, "b": 1, "c": None}.items():
        scheduler.submit(
            request(name, samples=1, max_staleness=staleness, when_stale="abort" if name == "b" else "return")
        )
    leases = scheduler.next_for("x", 3, ROOMY)
    for lease in leases:
        scheduler.progressed(lease, (1, 2))
    assert scheduler.announce_target(1, "x") == []
    scheduler.submit(request("d", samples=1, max_staleness=0))
    ended = {one.sample_id.group_id: one for one in scheduler.announce_target(2, "x")}
    assert {name: (one.state, one.reason) for name, one in ended.items()} == {
        "a": (SampleState.STALE, "stale"),
        "b": (SampleState.ABORTED, "stale"),
    }
    assert ended["a"].stop == leases[0].number
    assert sample(scheduler, "a0").tokens == [1, 2]
    assert scheduler.progressed(leases[0], (3,)) == "stop"
    (fresh,) = scheduler.next_for("x", 1, ROOMY)
    assert (names([fresh]), fresh.target_version) == (["d0"], 2)
    scheduler.check()


def test_a_sample_is_as_old_as_its_first_tokens() -> None:
    """An engine moves before it is told here: what was asked for under the old target may be of the new one wholly."""
    scheduler = divided()
    scheduler.submit(request("a", samples=4, max_staleness=0))
    old, late, fresh, thrown_out = scheduler.next_for("x", 4, ROOMY)
    assert scheduler.target_seen(old, 0) == []
    scheduler.progressed(old, (1,))
    assert [one.stop for one in scheduler.target_seen(fresh, 1)] == [old.number]
    scheduler.progressed(fresh, (1,))
    assert sample(scheduler, "a2").target_version == 1
    assert not scheduler.is_behind(fresh, 1)
    assert scheduler.target_seen(late, 0) == [] == scheduler.target_seen(old, 2)
    assert scheduler.is_behind(late, 0), "on its way since before the move"
    scheduler.preempted(late)
    (late,) = scheduler.next_for("x", 1, ROOMY)
    assert late.target_version == 1
    scheduler.preempted(thrown_out)
    (again,) = scheduler.next_for("x", 1, ROOMY)
    assert (names([again]), again.target_version) == (["a3"], 1)
    assert [one.sample_id.number for one in scheduler.target_seen(fresh, 2)] == [2], "mixed"
    scheduler.check()


def test_what_an_engine_of_an_older_target_says_is_as_new_as_its_lease() -> None:
    """The lease was given under target 2, which the engine serves; its label may still say 1."""
    scheduler = divided()
    scheduler.announce_target(2, "x")
    scheduler.submit(request("a", samples=1, max_staleness=0))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.target_seen(lease, 1) == []
    assert (lease.target_version, sample(scheduler, "a0").target_version) == (2, 2)
    assert not scheduler.is_behind(lease, 1)


def test_a_group_is_over_with_the_last_sample_that_it_needs() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=3, num_needed=2))
    first, second, _ = scheduler.next_for("x", 3, ROOMY)
    scheduler.finished(first, (1,), "stop")
    assert scheduler.redundant("a") == []
    scheduler.finished(second, (1,), "stop")
    assert [end.reason for end in scheduler.redundant("a")] == ["redundant"]


@pytest.mark.parametrize(("num_said", "reason"), [(5, None), (6, "length"), (7, "length")])
def test_what_the_environment_says_ends_a_sample_that_it_fills(num_said: int, reason: str | None) -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1, max_tokens=10, turn_tokens=5))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.turn_ended(lease, (1,) * 4)
    end = scheduler.observed(lease.sample_id, (2,) * num_said)
    assert (None if end is None else end.reason) == reason
    scheduler.check()


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "done"), (4, "length")])
def test_a_sample_that_its_environment_ends_is_done_if_it_had_room_left(max_tokens: int, reason: str) -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1, max_tokens=max_tokens, turn_tokens=5))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.turn_ended(lease, (1,) * 4)
    assert scheduler.done(lease.sample_id).reason == reason


def test_deadlines_and_cancelling_end_samples_wherever_they_are() -> None:
    scheduler = divided()
    scheduler.submit(request("a", deadline_s=10.0))
    scheduler.submit(request("b"))
    scheduler.next_for("x", 1, ROOMY)
    assert scheduler.expire(9.0) == []
    assert [(one.reason, one.stop) for one in scheduler.expire(10.0)] == [("deadline", 1), ("deadline", None)]
    assert [one.reason for one in scheduler.cancel("b")] == ["cancelled", "cancelled"]
    assert scheduler.counts() == {SampleState.ABORTED: 4}
    assert scheduler.next_for("x", 9, ROOMY) == []
    scheduler.check()


def test_a_group_is_forgotten_when_it_has_ended_and_its_name_is_free_again() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1))
    scheduler.cancel("a")
    scheduler.forget("a")
    scheduler.submit(request("a", samples=1))
    assert scheduler.counts() == {SampleState.WAITING: 1}


def test_a_name_that_is_in_use_is_refused() -> None:
    scheduler = divided()
    scheduler.submit(request("a"))
    with pytest.raises(RequestError, match="already"):
        scheduler.submit(request("a"))


@pytest.mark.parametrize("order", [Fifo(), ContextAware()])
def test_what_is_urgent_gets_memory_at_the_end_of_a_chunk(order: Order) -> None:
    scheduler = Scheduler(Policy(order=order, chunk_tokens=16))
    for number in range(25):
        scheduler.submit(request(f"small-{number}", samples=16, max_tokens=40 + number))
    running = scheduler.next_for("x", 100, 2000)
    assert 10 < len(running) < 100, "memory is short, slots are not"
    scheduler.submit(request("urgent", samples=1, priority=9, prompt_token_ids=(0,) * 1200, max_tokens=60))
    stopped = [scheduler.progressed(lease, (0,) * 16) for lease in running].count("stop")
    assert 10 < stopped < len(running), "as many as have to, and no more"
    assert names(scheduler.next_for("x", 100 - len(running) + stopped, 2000 - scheduler.reserved_tokens("x")))[0] == (
        "urgent0"
    )
    scheduler.check()


def test_what_is_not_more_urgent_goes_into_the_gap() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1, max_tokens=100))
    (first,) = scheduler.next_for("x", 9, 200)
    scheduler.submit(request("b", samples=1, prompt_token_ids=(0,) * 150))
    scheduler.submit(request("c", samples=1, max_tokens=20))
    assert names(scheduler.next_for("x", 8, 170)) == ["c0"]
    assert scheduler.progressed(first, (0,) * 20) == "go on"


def test_nothing_less_urgent_begins_while_memory_is_being_freed() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=3))
    assert len(scheduler.next_for("x", 9, 300)) == 3
    scheduler.submit(request("b", samples=1, max_tokens=20))
    scheduler.submit(request("c", samples=1, priority=9, prompt_token_ids=(0,) * 250))
    assert scheduler.next_for("x", 6, 210) == [], "b would fit"
    scheduler.cancel("c")
    assert names(scheduler.next_for("x", 6, 210)) == ["b0"]


def test_what_never_fits_here_stops_nothing_here() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=2, max_tokens=100))
    (first, _) = scheduler.next_for("x", 2, 200)
    scheduler.submit(request("b", samples=1, priority=9, prompt_token_ids=(0,) * 500))
    assert scheduler.progressed(first, (0,) * 20) == "go on"
    scheduler.submit(request("c", samples=1, max_tokens=20))
    assert names(scheduler.next_for("x", 1, 120)) == ["c0"]
    assert names(scheduler.next_for("y", 1, 600)) == ["b0"]


def test_what_fits_nowhere_runs_alone() -> None:
    """Where the engine's cache holds less than the model's context it would wait for ever."""
    scheduler = divided()
    scheduler.submit(request("a", samples=2, prompt_token_ids=(0,) * 90))
    scheduler.submit(request("b", samples=1, max_tokens=20))
    (short,) = scheduler.next_for("x", 4, 100)
    assert names([short]) == ["b0"], "what fits goes first"
    assert scheduler.next_for("x", 3, 70) == []
    scheduler.finished(short, (0,), "stop")
    (lease,) = scheduler.next_for("x", 4, 100)
    assert names([lease]) == ["a0"]
    for _ in range(3):
        assert scheduler.next_for("x", 3, 100 - scheduler.reserved_tokens("x")) == []
        assert scheduler.progressed(lease, (0,) * 20) == "go on"
    scheduler.check()
    scheduler.next_for("y", 0, ROOMY)
    assert scheduler.progressed(lease, (0,) * 20) == "stop", "another engine has the room"
    assert names(scheduler.next_for("y", 4, ROOMY)) == ["a0", "a1"]


def test_a_sample_that_fails_on_an_engine_goes_on_at_another() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.preempted(lease, has_failed=True)
    scheduler.next_for("y", 0, ROOMY)
    (again,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.preempted(again, has_failed=True)  # the other takes nothing
    scheduler.submit(request("b", samples=1, priority=1))
    assert names(scheduler.next_for("y", 1, ROOMY)) == ["b0"]
    assert scheduler.next_for("x", 1, ROOMY) == []
    (elsewhere,) = scheduler.next_for("y", 1, ROOMY)
    scheduler.preempted(elsewhere, has_failed=True)
    assert scheduler.next_for("y", 1, ROOMY) == []
    (third,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.progressed(third, (1,))
    scheduler.preempted(third)
    (fourth,) = scheduler.next_for("x", 1, ROOMY)
    assert names([fourth]) == ["a0"]
    scheduler.progressed(fourth, (0,) * 18)
    scheduler.preempted(fourth)
    assert names(scheduler.next_for("y", 1, ROOMY)) == ["a0"], "it has new tokens since it failed there"


def test_an_engine_that_comes_back_reads_everything_again() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.progressed(lease, (1, 2))
    scheduler.engine_lost("x")
    scheduler.next_for("x", 1, ROOMY)
    assert scheduler.num_read_again == 12


def test_an_engine_that_comes_back_has_not_read_the_groups_prompt() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=2))
    scheduler.next_for("x", 1, ROOMY)
    assert sample(scheduler, "a1").unread_at("x") == 0
    scheduler.engine_lost("x")
    assert sample(scheduler, "a1").unread_at("x") == 10


def test_a_refused_sample_takes_its_group_along_only_before_its_first_token() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=3))
    (first, *_) = scheduler.next_for("x", 3, ROOMY)
    scheduler.progressed(first, (1,))
    assert [end.sample_id.number for end in scheduler.refuse(first.sample_id)] == [0]
    assert [end.sample_id.number for end in scheduler.refuse(sample(scheduler, "a1").sample_id)] == [1, 2]
    scheduler.check()


def test_tokens_beyond_the_end_of_a_chunk_are_reserved() -> None:
    scheduler = divided(chunk_tokens=20)
    scheduler.next_for("elsewhere", 0, ROOMY)
    scheduler.submit(request("a", samples=1, max_tokens=90))
    (lease,) = scheduler.next_for("x", 1, 90)
    # 10 of prompt and 20 of the chunk; the last round of it brings 8 more than that, and 20 follow.
    assert scheduler.progressed(lease, (0,) * 28) == "go on"
    assert (scheduler.reserved_tokens("x"), scheduler.free_tokens("x")) == (58, 32)
    assert scheduler.progressed(lease, (0,) * 28) == "go on"
    assert (scheduler.reserved_tokens("x"), scheduler.free_tokens("x")) == (86, 4)
    assert scheduler.progressed(lease, (0,) * 24) == "stop", "10 more would be needed"
    assert scheduler.free_tokens("x") == 90


def test_a_sample_that_is_thrown_out_goes_on_anywhere_with_its_tokens() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=2))
    first, second = scheduler.next_for("x", 2, ROOMY)
    scheduler.progressed(second, (5, 6, 7))
    scheduler.preempted(second)
    (again,) = scheduler.next_for("y", 1, ROOMY)
    assert (again.sample_id, again.num_generated) == (second.sample_id, 3)
    assert scheduler.progressed(first, (1,)) == "go on"


def test_a_chunk_ends_at_the_limit_at_the_latest() -> None:
    scheduler = divided(chunk_tokens=64)
    scheduler.submit(request("a", samples=1, max_tokens=100))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.reserved_tokens("x") == 10 + 64
    assert scheduler.progressed(lease, (0,) * 64) == "go on"
    assert scheduler.reserved_tokens("x") == 10 + 100


def test_a_sample_that_failed_here_and_waits_for_another_engine_takes_nobodys_slot() -> None:
    scheduler = divided()
    scheduler.submit(request("a", samples=1, priority=1))
    (lease,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.preempted(lease, has_failed=True)
    scheduler.submit(request("c", samples=1, priority=2))
    assert names(scheduler.next_for("y", 1, ROOMY)) == ["c0"]
    scheduler.submit(request("b", samples=1))
    (other,) = scheduler.next_for("x", 1, ROOMY)
    assert names([other]) == ["b0"]
    assert scheduler.progressed(other, (0,) * 20) == "go on"
