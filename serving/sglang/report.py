"""The engine's report in Redis: what the plugin writes, what the gateway reads, and how a pool's reports are merged."""

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

Count = int | None
"""A count since the process began: summed over all engines, ended ones included."""
CountsBy = Mapping[str, int]
"""Such counts by a label."""
Mean = float | None
"""Averaged over engines. The averaged ends of intervals are at least as wide apart as the interval of the mean."""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """The plugin's last report; None for fields that it lacks. In a pool's report, fields of the types `Count`,
    `CountsBy` and `Mean` are merged as these say, others as `_merged` does.
    """

    version: int | None
    swaps: Count
    swap_failures: Count
    last_stall_ms: float | None
    steps: Count
    depth: int | None
    verifications: Count
    verified_tokens: Count
    """Divided by `verifications`: the acceptance length."""
    rounds: CountsBy
    """Decode steps by mode, speculative or control; `decode_ms` and `round_tokens` have the same keys."""
    decode_ms: CountsBy
    round_tokens: CountsBy
    proposals: CountsBy
    """Verified proposals of the head by position, and the accepted ones; then those of earlier text."""
    accepted: CountsBy
    text_proposals: CountsBy
    text_accepted: CountsBy
    accepted_text: CountsBy
    """Accepted proposals from earlier text, by whose text it was."""
    verifications_by_length: CountsBy
    """By source, what is measured and its upper bound in tokens, as "head/context/512"; so is `tokens_by_length`."""
    tokens_by_length: CountsBy
    text_tokens: int | None
    """Tokens of earlier text that are kept."""
    text_evicted: Count
    """Windows of earlier text that were evicted."""
    group_text: CountsBy
    """Tokens of prompt groups that engines share, by outcome."""
    group_texts_evicted: Count
    group_texts_unreadable: Count
    captured: Count
    appended: Count
    pending: int | None
    dropped_by_reason: CountsBy
    branch_rows: CountsBy
    """Rows of rejected proposals that were drawn for a trace, by outcome."""
    trace_bytes: Count
    trace_tokens: Count
    capture_share: Mean
    """Share of finished traces that sampling keeps."""
    acked: int | None
    """Traces that the trainer has acknowledged, of the stream of all engines."""
    speedup: Mean
    speedup_lower: Mean
    speedup_upper: Mean
    """Ends of the 95% interval of the measured speedup."""
    end_to_end: Mean
    """The speedup with prompts included, then the ends of its interval."""
    end_to_end_lower: Mean
    end_to_end_upper: Mean
    speedup_estimated: Mean
    baseline_ms_per_token: Mean
    watched: int | None
    """The version on trial; 0 where none is."""
    verdicts: CountsBy
    """How trials of versions ended."""
    last_verdict: str
    failures: Mapping[str, int]
    """Parts of the plugin that are off, as "part:type of the error"."""
    role: str
    """Its part in the trial of a version: canary, waiting, needs traffic, settled."""
    draft_accept_length: float | None
    """Recent accept length of the version in service."""
    target_version: int | None
    target_label: int | None
    """The newest version that a label of SGLang's weights has named."""
    process: str
    """"host:pid" of the scheduler."""
    running: int | None
    """Requests of its last step; 0 where that was long ago."""
    model: str
    context_length: int | None
    """With `model`, what the engine serves: a router does not report these."""
    heeds_seed: bool | None

    @classmethod
    def parse(cls, said: Mapping[str, str]) -> EngineReport:
        """Parse the fields of a report, without unreadable ones: plugin and gateway may differ in version."""
        return cls(
            **{field.name: _READERS[str(field.type)](said.get(field.name, "")) for field in dataclasses.fields(cls)}
        )


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _boolean(text: str) -> bool | None:
    return text == "1" if text else None


def _counts(text: str) -> dict[str, int]:
    parts = (part.partition("=") for part in text.split(","))
    return {key: int(count) for key, _, count in parts if count.isdecimal()}


_READERS: dict[str, Callable[[str], Any]] = {
    "int | None": _integer,
    "float | None": _number,
    "bool | None": _boolean,
    "str": str,
    "Mapping[str, int]": _counts,
    "Count": _integer,
    "CountsBy": _counts,
    "Mean": _number,
}
"""By the annotation of a field of `EngineReport`."""


def _fields(kind: str) -> tuple[str, ...]:
    """Names of the report's fields that are annotated with this."""
    return tuple(field.name for field in dataclasses.fields(EngineReport) if field.type == kind)


_COUNTS, _COUNTS_BY, _MEANS = map(_fields, ("Count", "CountsBy", "Mean"))
MOST_SILENT = 100
"""Silent engines that are remembered, since their counts go on if they report again. Others count as ended."""


class Pool:
    """The last report of each engine of a pool; for one thread at a time.

    Counts are those since each engine's first report here: a gateway that starts again begins at zero, since for
    Prometheus any other fall of a counter is a reset after which all of it is new. They never fall: those of an engine
    that has ended stay in the sum. Current values are of the engines that report now.
    """

    def __init__(self) -> None:
        self._last: dict[str, EngineReport] = {}
        """By engine, the longest silent first."""
        self._ended: EngineReport | None = None
        """Counts of processes that have ended, less what engines had counted before their first report."""

    def merge(self, reports: Mapping[str, EngineReport]) -> EngineReport | None:
        """Merge reports by engine id into one for the pool; None without any."""
        for engine_id, report in reports.items():
            before = self._last.pop(engine_id, None)
            if before is None:
                self._end(_negative(report))
            elif _has_started_again(before, report):
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


def _negative(report: EngineReport) -> EngineReport:
    """The report with each count negated."""
    values: dict[str, Any] = {name: -count for name in _COUNTS if (count := getattr(report, name)) is not None}
    values |= {name: {key: -count for key, count in getattr(report, name).items()} for name in _COUNTS_BY}
    return replace(report, **values)


def _has_started_again(before: EngineReport, report: EngineReport) -> bool:
    """Whether the engine has restarted and counts from zero; a restarted container may keep its host and pid."""
    return report.process != before.process or (report.steps or 0) < (before.steps or 0)


def most_common(numbers: Iterable[int]) -> int | None:
    """The most frequent number, among equals the highest; None of none."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number)) if counts else None


def _merged(ever: Sequence[EngineReport], now: Sequence[EngineReport]) -> EngineReport:
    values: dict[str, Any] = {name: _total(_known(ever, name)) for name in _COUNTS}
    values |= {name: _total_by(getattr(report, name) for report in ever) for name in _COUNTS_BY}
    values["failures"] = _total_by(report.failures for report in now)
    values |= {name: _mean(_known(now, name)) for name in _MEANS}
    values |= {name: max(_known(now, name), default=None) for name in ("last_stall_ms", "depth", "watched", "acked")}
    version = most_common(_known(now, "version"))
    return replace(
        now[0],
        **values,
        version=version,
        # Roles differ between engines; `slipstream drafts list` shows them.
        role="",
        draft_accept_length=_mean(_known([each for each in now if each.version == version], "draft_accept_length")),
        pending=_total(_known(now, "pending")),
        running=_total(_known(now, "running")),
        text_tokens=_total(_known(now, "text_tokens")),
        last_verdict=next((report.last_verdict for report in now if report.last_verdict), ""),
        target_version=min(_known(now, "target_version"), default=None),
        target_label=max(_known(now, "target_label"), default=None),
        model=next((report.model for report in now if report.model), ""),
        context_length=min(_known(now, "context_length"), default=None),
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


def swap_fields(swaps: SwapLog) -> Fields:
    fields: Fields = {"swaps": swaps.num_installed, "swap_failures": swaps.num_failed}
    if swaps.installed:
        fields["last_stall_ms"] = round(swaps.installed[-1][1].stall_ms, 3)
    return fields


def group_text_fields(metrics: GroupTextMetrics) -> Fields:
    return {
        "group_text": ",".join(f"{outcome}={count}" for outcome, count in metrics.tokens.items()),
        "group_texts_evicted": metrics.evicted,
        "group_texts_unreadable": metrics.unreadable,
    }


def speedup_fields(speedup: Speedup, end_to_end: Speedup) -> Fields:
    """Fields of both speedups, without those that have not been measured yet."""
    fields: Fields = {}
    if speedup.ratio is not None and speedup.baseline_ms_per_token is not None:
        fields["speedup"] = round(speedup.ratio, 4)
        fields["baseline_ms_per_token"] = round(speedup.baseline_ms_per_token, 4)
    if speedup.lower is not None and speedup.upper is not None:
        fields |= {"speedup_lower": round(speedup.lower, 4), "speedup_upper": round(speedup.upper, 4)}
    of_requests = {"": end_to_end.ratio, "_lower": end_to_end.lower, "_upper": end_to_end.upper}
    return fields | {f"end_to_end{end}": round(value, 4) for end, value in of_requests.items() if value is not None}
