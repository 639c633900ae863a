"""Faults of traces are faults; what the table of faults says of those that were not tried."""

from __future__ import annotations

import random
from typing import cast

import pytest

from benchmarks.chaos import _NO_SMALL_DISK, _document, table
from benchmarks.faults import redis
from benchmarks.faults.fault import Observed
from benchmarks.faults.traces import corrupted
from speculator.errors import TraceError
from speculator.trace import decode_trace, encode_trace
from tests.fixtures.traces import make_trace


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


def test_a_trainer_can_use_no_corrupted_trace() -> None:
    payload = encode_trace(make_trace())
    broken = corrupted(payload, random.Random(0))
    other = decode_trace(broken.pop("of target 000…"))
    assert other.header.target_fingerprint != decode_trace(payload).header.target_fingerprint
    for damaged in broken.values():
        with pytest.raises(TraceError):
            decode_trace(damaged)
