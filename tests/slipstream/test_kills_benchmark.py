"""The accounts of `benchmarks.kills`: what its figures mean."""

from __future__ import annotations

from benchmarks.faults.accounts import durable_uses, settle


def test_a_life_that_goes_on_from_a_checkpoint_undoes_what_came_after_it() -> None:
    notes = ["resumed start", "used 1", "saving a", "used 2", "saving b", "used 3", "resumed a", "used 2", "saving c"]
    assert durable_uses(notes, "c") == ({"1": 1, "2": 1}, 2)
    assert durable_uses(notes, "a") == ({"1": 1}, 3), "the last checkpoint was not written"
    assert durable_uses(["used 1", "resumed start", "used 1", "saving a"], "a") == ({"1": 1}, 1)


def test_a_trace_that_two_durable_steps_used_is_noticed() -> None:
    notes = ["used 1", "saving a", "resumed a", "used 1", "saving b"]
    accounts = settle(acknowledged={"1"}, notes=notes, last_saved="b", waiting=0, lost=0)
    assert accounts.used_twice == 1


def test_a_trace_is_lost_silently_where_no_account_has_it() -> None:
    notes = ["used 1", "dead 2", "saving a", "used 3"]
    acknowledged = {"1", "2", "3", "4", "5"}

    def silently(waiting: int, lost: int) -> tuple[int, int, int]:
        found = settle(acknowledged=acknowledged, notes=notes, last_saved="a", waiting=waiting, lost=lost)
        assert (found.used, found.dead_lettered, found.used_twice, found.undone) == (1, 1, 0, 1)
        return found.waiting, found.lost, found.silently_lost

    assert silently(0, 0) == (0, 0, 3)
    assert silently(1, 1) == (1, 1, 1)
    assert silently(2, 1) == (2, 1, 0)
    assert silently(0, 5) == (0, 3, 0)
