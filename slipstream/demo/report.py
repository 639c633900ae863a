"""Observations of a demo and its figures as JSON; summary.py writes sentences from them, plot.py plots them."""

from __future__ import annotations

import itertools
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.metrics import TEXTS
from serving.speedup import BASELINE, Speedup, Sums, measure
from slipstream.demo.chapters import RESTART, SHIFT, Chapter, PoisonedDraft
from slipstream.demo.servers import Scrape
from slipstream.demo.traffic import Stretch, Traffic
from speculator.redis.stream_accounting import StreamLag
from speculator.versions.lifecycle import Number

Bounds = Mapping[str, float | None]
"""`median`, `low`, `high`: a ratio over a stretch of time, with its 95% interval."""

NEAR_SWAP_S = 1.0
LAST_S = 120.0
"""Figures called "last" cover the last two minutes."""
SOURCES = ("head", *TEXTS)
_MINUTE_S = 60.0
_RECOVERY_WINDOW_S = 30.0
"""The accept length after the shift is that of so many seconds, or of a quarter of a shorter chapter."""
_NUM_BLOCKS = 20
"""Parts into which a period is divided for the confidence interval of an A/B."""


@dataclass
class ChapterRun:
    """Start and end of a chapter, in seconds of live traffic."""

    chapter: Chapter
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class DemoRun:
    """Observations of a demo. Times in `…_s` are seconds of live traffic, without the time of the plain server."""

    traffic: Traffic
    plain: Traffic
    """Traffic of the plain server."""
    num_clients: int = 1
    num_prompts: int
    """Number of different prompts."""
    begun_with: int = 1
    """Draft version at the start."""
    chapters: list[ChapterRun] = field(default_factory=list)
    poisoned: PoisonedDraft | None = None
    verdict: tuple[str, Mapping[str, Number]] | None = None
    """Why the poisoned draft was rolled back, and the figures that decided it."""
    published_at: Scrape | None = None
    """The scrape before the poisoned draft was published, and `judged_by` the one that found the verdict."""
    judged_by: Scrape | None = None
    samples: list[Scrape] = field(default_factory=list)
    """Scrapes of the gateway, oldest first."""
    swaps_unix_s: list[float] = field(default_factory=list)
    drift_alarms_unix_s: list[float] = field(default_factory=list)
    """Times at which the trainer raised a drift alarm about all traffic."""
    started_unix_s: float = field(default_factory=time.time)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """(start, end) of pauses of live traffic, unix time."""
    lag: StreamLag | None = None
    duration_s: float | None = None
    """None while it runs."""

    def at_s(self, unix_s: float) -> float:
        paused_s = sum(max(0.0, min(end, unix_s) - start) for start, end in self.pauses)
        return unix_s - self.started_unix_s - paused_s

    @property
    def live(self) -> list[Scrape]:
        """Scrapes during live traffic."""
        return [one for one in self.samples if self.duration_s is None or one.at_s <= self.duration_s]

    @property
    def swaps_s(self) -> list[float]:
        """Times of draft swaps during live traffic; later ones come while the trainer catches up."""
        times_s = map(self.at_s, self.swaps_unix_s)
        return [at for at in times_s if self.duration_s is None or at <= self.duration_s]

    def between(self, start_s: float, end_s: float) -> Scrape | None:
        """Increase of all counters between the scrapes nearest to both times; None before there are two."""
        if len(self.samples) < 2:
            return None
        first, last = (min(self.samples, key=lambda one: abs(one.at_s - at)) for at in (start_s, end_s))
        return last.since(first) if last.at_s > first.at_s else None

    def both_over_suffix(self, start_s: float, end_s: float) -> Speedup:
        """Time a token with earlier text alone over time a token with the draft head beside it."""
        return measure([window.head_ab for window in self._blocks(start_s, end_s)])

    def both_over_plain(self, start_s: float, end_s: float) -> Speedup:
        """Time a token in control rounds over time a token in drafting rounds."""
        return measure([window.rounds_ab for window in self._blocks(start_s, end_s)])

    def _blocks(self, start_s: float, end_s: float) -> list[Scrape]:
        """Increase of all counters in each of twenty parts of that time."""
        within = [one for one in self.samples if start_s <= one.at_s <= end_s]
        last = len(within) - 1
        ends = sorted({round(number * last / _NUM_BLOCKS) for number in range(_NUM_BLOCKS + 1)}) if within else []
        return [within[end].since(within[start]) for start, end in itertools.pairwise(ends)]

    def client_speedup(self) -> Speedup:
        """The clients' tokens a second over those from the plain server, by pairs of neighbouring stretches."""
        live, plain = self.traffic.stats.stretches, self.plain.stats.stretches
        blocks = [Sums() for _ in live]
        for block, before, stretch in zip(blocks, plain, live, strict=False):
            block.add(1, False, before.seconds, round(before.tokens))
            block.add(1, True, stretch.seconds, round(stretch.tokens))
        for after in plain[len(live) :] if blocks else ():
            blocks[-1].add(1, False, after.seconds, round(after.tokens))
        return measure(blocks)


def measured_speedup(sample: Scrape) -> float | None:
    """Measured speedup of decode rounds over the last two minutes, as the server reports it."""
    return sample.total("slipstream_speedup_measured_ratio") or None


def figures(run: DemoRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of a run, which begins with `settings`; figures that were never measured are null."""
    assert run.lag is not None
    assert run.duration_s is not None
    final, stats = run.samples[-1].total, run.traffic.stats
    end_s = run.duration_s
    last_s = max(0.0, end_s - LAST_S)
    first, last = run.between(0, _MINUTE_S), run.between(last_s, end_s)
    at_end = run.live[-1] if run.live else run.samples[0]
    trace_tokens = final("slipstream_trace_tokens_total")

    def rounds(mode: str) -> int:
        return int(last.total("slipstream_rounds_total", mode=mode)) if last else 0

    document = {
        **settings,
        "requests": stats.requests,
        "failed_requests": stats.failed,
        "completion_tokens": stats.completion_tokens,
        "times_each_prompt_came": (stats.requests + run.plain.stats.requests) / run.num_prompts,
        "swaps": len(run.swaps_s),
        "ab": {
            "both_over_suffix": bounds(run.both_over_suffix(last_s, end_s)),
            "both_over_plain": bounds(run.both_over_plain(last_s, end_s)),
            "both_over_suffix_whole_run": bounds(run.both_over_suffix(0.0, end_s)),
            "asked_rounds": int(final("slipstream_head_ab_asked_rounds_total")),
            "both_rounds": int(final("slipstream_head_ab_rounds_total", arm="both")),
            "suffix_only_rounds": int(final("slipstream_head_ab_rounds_total", arm="suffix_only")),
        },
        "accepted_by_source": accepted_by_source(run.samples[-1]),
        "head": _head(run.samples[-1]),
        "chapters": [chapter_figures(run, chapter) for chapter in run.chapters],
        "poisoned": poisoned_figures(run),
        "client_speedup": _client_speedup(run),
        "accept_length": {
            "first_minute": first.accept_length if first else None,
            "last_two_minutes": last.accept_length if last else None,
        },
        "speedup": {
            "measured_last_two_minutes": measured_speedup(at_end),
            "baseline": BASELINE,
            "baseline_ms_per_token": 1000 * at_end.total("slipstream_baseline_seconds_per_token") or None,
            "baseline_rounds": rounds("control"),
            "speculative_rounds": rounds("speculative"),
            "end_to_end": end_to_end(at_end),
        },
        "tokens_per_s": {"first_minute": round_tokens_per_s(first), "last_two_minutes": round_tokens_per_s(last)},
        "inter_token_ms": _gaps(run),
        "traces": {
            "captured": int(final("slipstream_traces_captured_total")),
            "dropped": int(final("slipstream_traces_dropped_total")),
            "trained": run.lag.acked - run.lag.dead_lettered,
            "dead_lettered": run.lag.dead_lettered,
            "lost": run.lag.lost,
            "waiting": run.lag.pending + run.lag.undelivered + int(final("slipstream_traces_pending")),
            "bytes_per_token": final("slipstream_trace_bytes_total") / trace_tokens if trace_tokens else None,
        },
        "begun_with_version": run.begun_with,
        "draft_version": int(final("slipstream_draft_version")),
        "host": host(),
    }
    return {name: _rounded(value) for name, value in document.items()}


def chapter_figures(run: DemoRun, chapter: ChapterRun) -> dict[str, Any]:
    """Figures of one chapter: accepted tokens by source, speedups and rates of both A/Bs; of the shift also its drift,
    of the restart its first minute.
    """
    window = run.between(chapter.start_s, chapter.end_s)
    over_suffix = bounds(run.both_over_suffix(chapter.start_s, chapter.end_s))
    over_plain = bounds(run.both_over_plain(chapter.start_s, chapter.end_s))
    accepted = accepted_by_source(window) if window else dict.fromkeys(SOURCES, 0)
    swaps = [at_s for at_s in map(run.at_s, run.swaps_unix_s) if chapter.start_s <= at_s <= chapter.end_s]
    return {
        "name": chapter.chapter.name,
        "start_s": chapter.start_s,
        "end_s": chapter.end_s,
        "accept_length": window.accept_length if window else None,
        "accepted_by_source": accepted,
        "head_share": accepted["head"] / sum(accepted.values()) if any(accepted.values()) else None,
        "both_over_suffix": over_suffix,
        "both_over_plain": over_plain,
        "tokens_per_s_of_rounds": _by_arm(window, over_suffix["median"], over_plain["median"]),
        "swaps": len(swaps),
        **_further(run, chapter),
    }


def _further(run: DemoRun, chapter: ChapterRun) -> dict[str, Any]:
    """Figures that only this chapter has."""
    if chapter.chapter is SHIFT:
        return {"drift": _drift(run, chapter.start_s, chapter.end_s)}
    if chapter.chapter is RESTART:
        minute_end_s = min(chapter.start_s + _MINUTE_S, chapter.end_s)
        return {"both_over_suffix_first_minute": bounds(run.both_over_suffix(chapter.start_s, minute_end_s))}
    return {}


def _drift(run: DemoRun, start_s: float, end_s: float) -> dict[str, float | None]:
    """The drift alarm and the accept length after a shift at `start_s`; times are seconds since then, null if never.

    `recovered_after_s` is when the accept length, after its lowest, was again what it was in the minute before; 0 where
    it never fell below that.
    """
    alarms_s = [at_s - start_s for at_s in map(run.at_s, run.drift_alarms_unix_s) if start_s <= at_s <= end_s]
    minute = run.between(max(0.0, start_s - _MINUTE_S), start_s)
    before = minute.accept_length if minute else None
    window_s = min(_RECOVERY_WINDOW_S, (end_s - start_s) / 4)
    ends_s = [one.at_s for one in run.samples if start_s + window_s <= one.at_s <= end_s]
    windows = [(at_s, run.between(at_s - window_s, at_s)) for at_s in ends_s]
    lengths = [(at_s, one.accept_length) for at_s, one in windows if one and one.accept_length is not None]
    lowest_s, lowest = min(lengths, key=lambda point: point[1], default=(0.0, None))
    recovered_s = None
    if before is not None and lowest is not None:
        back = (at_s - start_s for at_s, length in lengths if at_s >= lowest_s and length >= before)
        recovered_s = 0.0 if lowest >= before else next(back, None)
    return {
        "alarm_after_s": min(alarms_s, default=None),
        "accept_length_before": before,
        "accept_length_lowest": lowest,
        "recovered_after_s": recovered_s,
    }


def _by_arm(window: Scrape | None, over_suffix: float | None, over_plain: float | None) -> dict[str, float | None]:
    """Tokens a second of round time: measured with both sources, derived for earlier text alone and for no drafts."""
    seconds = window.total("slipstream_round_seconds_total", mode="speculative") if window else 0.0
    tokens = window.total("slipstream_round_tokens_total", mode="speculative") if window else 0.0
    both = tokens / seconds if seconds else None
    return {
        "plain": both / over_plain if both and over_plain else None,
        "suffix_only": both / over_suffix if both and over_suffix else None,
        "both": both,
    }


def accepted_by_source(sample: Scrape) -> dict[str, int]:
    """Accepted proposals by source: the head, or earlier text of the request, its prompt group or its tenant."""
    texts = {text: int(sample.total("slipstream_accepted_text_total", text=text)) for text in TEXTS}
    return {"head": int(sample.total("slipstream_accepted_total", source="head")), **texts}


def poisoned_figures(run: DemoRun) -> dict[str, Any] | None:
    """When and why the poisoned draft was rolled back; None where none was published.

    `rounds` are those that used or probed it, as the engine counted them; where the trainer's review rolled it back, an
    upper bound.
    """
    if run.poisoned is None:
        return None
    reason, numbers = run.verdict or (None, {})
    rounds = numbers.get("draft_rounds")
    if run.verdict and rounds is None and run.published_at and run.judged_by:
        rounds = _num_asked(run.judged_by.since(run.published_at))
    return {
        "version": run.poisoned.version,
        "parent": run.poisoned.parent,
        "taken_back": run.verdict is not None,
        "reason": reason,
        "rounds": rounds,
        "all_rounds": numbers.get("rounds"),
        "seconds": numbers.get("seconds"),
    }


def _num_asked(window: Scrape) -> int:
    """Number of rounds that used or probed the head."""
    asked = window.total("slipstream_proposals_total", source="head", position="1")
    return int(asked + window.total("slipstream_draft_probes_total"))


def end_to_end(sample: Scrape) -> Bounds:
    """The server's end-to-end speedup with its 95% interval."""
    names = {"median": "", "low": "_lower", "high": "_upper"}
    return {name: sample.total(f"slipstream_speedup_end_to_end_ratio{end}") or None for name, end in names.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _head(final: Scrape) -> dict[str, Any]:
    """The head's hit rate on the next token, in rounds that used or probed it."""
    total = final.total
    head_first = {"source": "head", "position": "1"}
    asked, probed = total("slipstream_proposals_total", **head_first), total("slipstream_draft_probes_total")
    right = total("slipstream_accepted_total", **head_first)
    right += total("slipstream_draft_probes_total", outcome="accepted")
    return {
        "first_proposals": int(asked),
        "probes": int(probed),
        "hit_rate": right / (asked + probed) if asked + probed else None,
    }


def _client_speedup(run: DemoRun) -> dict[str, Any]:
    live, plain = run.traffic.stats, run.plain.stats
    rate = tokens_per_s(live.stretches)
    return {
        **bounds(run.client_speedup()),
        "tokens_per_s": rate,
        "tokens_per_s_per_client": rate / run.num_clients if rate else None,
        "plain_tokens_per_s": tokens_per_s(plain.stretches),
        "plain_tokens_per_s_at_start": tokens_per_s(plain.stretches[:1]),
        "plain_tokens_per_s_at_end": tokens_per_s(plain.stretches[-1:]),
        "seconds": sum(stretch.seconds for stretch in live.stretches),
        "plain_seconds": sum(stretch.seconds for stretch in plain.stretches),
        "plain_stretches": len(plain.stretches),
        "plain_requests": plain.requests,
        "plain_failed_requests": plain.failed,
    }


def bounds(measured: Speedup) -> Bounds:
    return {"median": measured.ratio, "low": measured.lower, "high": measured.upper}


def tokens_per_s(stretches: Sequence[Stretch]) -> float | None:
    """Tokens a second of all clients together."""
    seconds = sum(stretch.seconds for stretch in stretches)
    return sum(stretch.tokens for stretch in stretches) / seconds if seconds else None


def round_tokens_per_s(window: Scrape | None) -> float | None:
    """Tokens that decode rounds committed a second."""
    return window.total("slipstream_round_tokens_total") / window.at_s if window else None


def _gaps(run: DemoRun) -> dict[str, float | None]:
    gaps = np.array(run.traffic.stats.gaps).reshape(-1, 2)
    if not len(gaps):
        return dict.fromkeys(("p50", "p99", "max", "max_at_swap"))
    at_s, gap_ms = gaps[:, 0], 1000 * gaps[:, 1]
    near = np.zeros(len(gaps), bool)
    for swap in run.swaps_unix_s:
        # A gap counts as near a swap when any part of it is within NEAR_SWAP_S.
        near |= (at_s >= swap - NEAR_SWAP_S) & (at_s - gap_ms / 1000 <= swap + NEAR_SWAP_S)
    return {
        "p50": float(np.percentile(gap_ms, 50)),
        "p99": float(np.percentile(gap_ms, 99)),
        "max": float(gap_ms.max()),
        "max_at_swap": float(gap_ms[near].max()) if near.any() else None,
    }


def host() -> dict[str, Any]:
    """Hardware and software that the figures were measured on, without names of machine or user."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return {
        "cpu": found[1] if found else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
