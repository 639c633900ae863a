"""What the table of faults says of those that were not tried."""

from __future__ import annotations

from typing import cast

from benchmarks.chaos import _NO_SMALL_DISK, _document, table
from benchmarks.faults import redis
from benchmarks.faults.fault import Observed


def test_what_was_left_out_holds_neither_nor_is_broken() -> None:
    faults = [redis.killed, redis.paused, redis.out_of_memory, redis.on_a_full_disk]
    seen = {
        redis.killed.name: Observed(told="all well", checks={"served": True}),
        redis.paused.name: Observed(told="not so", checks={"served": False}),
        redis.on_a_full_disk.name: _NO_SMALL_DISK,
    }
    rows = cast("list[dict[str, object]]", _document(faults, seen)["faults"])
    assert [row["holds"] for row in rows] == [True, False, False, None]
    assert [line.rsplit(" | ", 1)[-1] for line in table(faults, seen)[2:]] == [
        "yes |",
        "**no**: served |",
        "**no** |",
        "– |",
    ]
