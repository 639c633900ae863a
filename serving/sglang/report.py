"""The engine's report in Redis: what the plugin writes, what the gateway reads, and many as one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.hotswap.follower import SwapLog
from serving.metrics import GroupTextMetrics
from serving.speedup import Speedup


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What the plugin last said; None for what it did not say."""

    version: int | None
    refused: frozenset[int]
    """Versions that can never be installed there."""
    swaps: int | None
    swap_failures: int | None
    last_stall_ms: float | None
    steps: int | None
    depth: int | None
    verifications: int | None
    verified_tokens: int | None
    """Over verifications: the acceptance length."""
    rounds: Mapping[str, int]
    """Decode steps by mode, speculative or control; so are their time and the tokens that they committed."""
    decode_ms: Mapping[str, int]
    round_tokens: Mapping[str, int]
    proposals: Mapping[str, int]
    """Verified proposals of the head by position, and the accepted ones; then those of earlier text."""
    accepted: Mapping[str, int]
    text_proposals: Mapping[str, int]
    text_accepted: Mapping[str, int]
    verifications_by_length: Mapping[str, int]
    """By source, what is as long and up to how many tokens, as "head/context/512"; so are the tokens."""
    tokens_by_length: Mapping[str, int]
    text_tokens: int | None
    """Of earlier text, that are kept."""
    text_evicted: int | None
    """Windows of earlier text that made room for others."""
    group_text: Mapping[str, int]
    """Tokens of prompt groups that engines share, by what became of them."""
    group_text_lags: Mapping[str, int]
    """Pieces of them that took no longer, by seconds; all of them took `group_text_lag_ms`."""
    group_text_lag_ms: int | None
    group_texts_evicted: int | None
    group_texts_unreadable: int | None
    captured: int | None
    appended: int | None
    pending: int | None
    dropped_by_reason: Mapping[str, int]
    branch_rows: Mapping[str, int]
    """Of rejected proposals, that were drawn for a trace, by what became of them."""
    trace_bytes: int | None
    trace_tokens: int | None
    capture_share: float | None
    """Of finished traces, that sampling keeps."""
    speedup: float | None
    speedup_lower: float | None
    speedup_upper: float | None
    """Ends of the 95% interval of the measured speedup."""
    end_to_end: float | None
    """The speedup that requests see; so are the ends of its interval."""
    end_to_end_lower: float | None
    end_to_end_upper: float | None
    speedup_estimated: float | None
    baseline_ms_per_token: float | None
    watched: int | None
    """The version on trial; 0 where none is."""
    verdicts: Mapping[str, int]
    """How trials of versions ended."""
    last_verdict: str
    failures: Mapping[str, int]
    """Parts of the plugin that are off, as "part:type of the error"."""
    role: str
    """Its part in the trial of a version: canary, waiting, settled."""
    draft_accept_length: float | None
    """Of the version in service, lately."""
    target_version: int | None
    target_label: int | None
    """The newest version that a label of SGLang's weights has named."""
    process: str
    """"host:pid" of the scheduler."""
    running: int | None
    """Requests of its last step; 0 where that was long ago."""
    model: str
    context_length: int | None
    max_depth: int | None
    """What it serves, which behind a router nobody else says."""
    heeds_seed: bool | None

    @classmethod
    def parse(cls, said: Mapping[str, str]) -> EngineReport:
        """Leave out what cannot be read: the plugin may be another version than this gateway."""
        return cls(
            **{field.name: _READERS[str(field.type)](said.get(field.name, "")) for field in dataclasses.fields(cls)}
        )


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _yes(text: str) -> bool | None:
    return text == "1" if text else None


def _versions(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(",") if part.isdecimal())


def _counts(text: str) -> dict[str, int]:
    parts = (part.partition("=") for part in text.split(","))
    return {key: int(count) for key, _, count in parts if count.isdecimal()}


_READERS: dict[str, Callable[[str], Any]] = {
    "int | None": _whole,
    "float | None": _number,
    "bool | None": _yes,
    "str": str,
    "frozenset[int]": _versions,
    "Mapping[str, int]": _counts,
}
"""By the type of a field, as it is written above."""
_COUNTS = (
    *("swaps", "swap_failures", "steps", "verifications", "verified_tokens"),
    *("captured", "appended", "trace_bytes", "trace_tokens", "text_evicted"),
    *("group_text_lag_ms", "group_texts_evicted", "group_texts_unreadable"),
)
_COUNTS_BY = (
    *("rounds", "decode_ms", "round_tokens", "proposals", "accepted", "text_proposals", "text_accepted"),
    *("verifications_by_length", "tokens_by_length", "dropped_by_reason", "verdicts", "group_text", "group_text_lags"),
    "branch_rows",
)
_MEANS = (
    *("speedup", "speedup_lower", "speedup_upper", "speedup_estimated", "baseline_ms_per_token"),
    *("end_to_end", "end_to_end_lower", "end_to_end_upper"),
    "capture_share",
)
"""The mean of the intervals' ends contains the interval of the mean."""
MOST_SILENT = 100
"""Engines that do not report, and are remembered: who reports again goes on counting. Of more the oldest have ended."""


class Pool:
    """What each engine of a pool last said; for one thread at a time.

    Counts never fall: what an engine had counted when it ended stays in the sum. What a report says about now is of the
    engines that report now.
    """

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
        text_tokens=_total(_known(now, "text_tokens")),
        last_verdict=next((report.last_verdict for report in now if report.last_verdict), ""),
        target_version=min(_known(now, "target_version"), default=None),
        target_label=max(_known(now, "target_label"), default=None),
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


Fields = dict[str, str | int | float]


def of_swaps(swaps: SwapLog) -> Fields:
    fields: Fields = {"swaps": swaps.num_installed, "swap_failures": swaps.num_failed}
    if swaps.installed:
        fields["last_stall_ms"] = round(swaps.installed[-1][1].stall_ms, 3)
    return fields


def of_group_text(metrics: GroupTextMetrics) -> Fields:
    return {
        "group_text": ",".join(f"{outcome}={count}" for outcome, count in metrics.tokens.items()),
        "group_text_lags": ",".join(f"{most_s}={count}" for most_s, count in metrics.lags.items()),
        "group_text_lag_ms": round(1000 * metrics.lag_s),
        "group_texts_evicted": metrics.evicted,
        "group_texts_unreadable": metrics.unreadable,
    }


def of_speedup(speedup: Speedup, end_to_end: Speedup) -> Fields:
    """What has not been measured yet is left out."""
    fields: Fields = {}
    if speedup.ratio is not None and speedup.baseline_ms_per_token is not None:
        fields["speedup"] = round(speedup.ratio, 4)
        fields["baseline_ms_per_token"] = round(speedup.baseline_ms_per_token, 4)
    if speedup.lower is not None and speedup.upper is not None:
        fields |= {"speedup_lower": round(speedup.lower, 4), "speedup_upper": round(speedup.upper, 4)}
    of_requests = {"": end_to_end.ratio, "_lower": end_to_end.lower, "_upper": end_to_end.upper}
    return fields | {f"end_to_end{end}": round(value, 4) for end, value in of_requests.items() if value is not None}
