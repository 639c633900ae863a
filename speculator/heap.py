"""What the C library's allocator has given out, and what it keeps for later: a leak makes the one grow, not the other.

Resident memory has both. Freed pieces lie between used ones, and the largest moment so far has left its room behind; so
it goes on creeping up for a long time while nothing more is used.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """Of glibc's <malloc.h>."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap(NamedTuple):
    """Bytes. Small Python objects are not among them: their allocator maps its memory itself."""

    used: int
    free: int


def heap() -> Heap | None:
    """Of all threads together; None where the C library is not glibc 2.33 or newer."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return Heap(used=found.uordblks + found.hblkhd, free=found.fordblks)


class HeapCollector(Collector):
    """This process's memory, told apart; asked when scraped. Names of metrics begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            f"{self._prefix}_heap_bytes",
            "Memory that the C library's allocator has given out, and that it keeps for later; a leak shows in used",
            labels=["part"],
        )
        if (found := heap()) is not None:
            for part, num_bytes in found._asdict().items():
                gauge.add_metric([part], num_bytes)
        yield gauge
        yield GaugeMetricFamily(
            f"{self._prefix}_python_blocks", "Small Python objects that are in use", sys.getallocatedblocks()
        )
