"""The reports of several engines as one.

Counts never fall: what an engine had counted when it ended stays in the sum. What a report says about now is of the
engines that report now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serving.sglang.report.read import EngineReport

_COUNTS = (
    *("swaps", "swap_failures", "steps", "verifications", "verified_tokens"),
    *("captured", "appended", "trace_bytes", "trace_tokens"),
)
_COUNTS_BY = (
    *("rounds", "decode_ms", "round_tokens", "proposals", "accepted"),
    *("dropped_by_reason", "verdicts"),
)
_MEANS = (
    *("speedup", "speedup_lower", "speedup_upper", "speedup_estimated", "baseline_ms_per_token"),
    "capture_share",
)
"""The mean of the intervals' ends contains the interval of the mean."""

MOST_SILENT = 100
"""Engines that do not report, and are remembered: who reports again goes on counting. Of more the oldest have ended."""


class Pool:
    """What each engine of a pool last said; for one thread at a time."""

    def __init__(self) -> None:
        self._last: dict[str, EngineReport] = {}
        """By engine; who has been silent for longest comes first."""
        self._ended: EngineReport | None = None
        """What was counted by processes that do not come back."""

    def take(self, reports: Mapping[str, EngineReport]) -> EngineReport | None:
        """One report of all that there are by engine id; None where there is none."""
        for engine_id, report in reports.items():
            before = self._last.pop(engine_id, None)
            if before is not None and _has_started_again(before, report):
                self._end(before)
            self._last[engine_id] = report
        while len(self._last) - len(reports) > MOST_SILENT:
            self._end(self._last.pop(next(iter(self._last))))
        if not reports:
            return None
        ended = [] if self._ended is None else [self._ended]
        return _merged([*ended, *self._last.values()], list(reports.values()))

    def _end(self, report: EngineReport) -> None:
        self._ended = report if self._ended is None else _merged([self._ended, report], [report])


def _has_started_again(before: EngineReport, report: EngineReport) -> bool:
    """And counts from zero; a container that does has its old host and pid."""
    return report.process != before.process or (report.steps or 0) < (before.steps or 0)


def commonest(numbers: Iterable[int]) -> int | None:
    """Of equally common ones the highest; None of none."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number)) if counts else None


def _merged(ever: Sequence[EngineReport], now: Sequence[EngineReport]) -> EngineReport:
    values: dict[str, Any] = {name: _total(_known(ever, name)) for name in _COUNTS}
    values |= {name: _total_by(getattr(report, name) for report in ever) for name in _COUNTS_BY}
    values["failures"] = _total_by(report.failures for report in now)
    values |= {name: _mean(_known(now, name)) for name in _MEANS}
    values |= {name: max(_known(now, name), default=None) for name in ("last_stall_ms", "depth", "watched")}
    version = commonest(_known(now, "version"))
    return replace(
        now[0],
        **values,
        version=version,
        # Each engine has a part of its own, which `slipstream drafts list` shows.
        role="",
        draft_accept_length=_mean(_known([each for each in now if each.version == version], "draft_accept_length")),
        refused=frozenset(version for report in now for version in report.refused),
        pending=_total(_known(now, "pending")),
        running=_total(_known(now, "running")),
        last_verdict=next((report.last_verdict for report in now if report.last_verdict), ""),
        target_version=min(_known(now, "target_version"), default=None),
        model=next((report.model for report in now if report.model), ""),
        context_length=min(_known(now, "context_length"), default=None),
        max_depth=min(_known(now, "max_depth"), default=None),
        process="",
        heeds_seed=all(report.heeds_seed for report in now),
    )


def _known(reports: Iterable[EngineReport], name: str) -> list[Any]:
    return [value for report in reports if (value := getattr(report, name)) is not None]


def _total(values: Sequence[int]) -> int | None:
    return sum(values) if values else None


def _total_by(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
