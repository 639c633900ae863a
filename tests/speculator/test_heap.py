"""What the allocator has given out and what it keeps."""

from __future__ import annotations

import pytest

from speculator.heap import heap

MIB = 1 << 20


def test_what_is_held_is_in_use_and_what_was_freed_is_not() -> None:
    before = heap()
    if before is None:
        pytest.skip("the C library does not tell")
    held = [bytearray(MIB) for _ in range(32)]
    during = heap()
    assert during is not None
    assert 32 * MIB <= during.used - before.used < 40 * MIB
    del held
    after = heap()
    assert after is not None
    assert abs(after.used - before.used) < 4 * MIB
    assert after.free >= 0
