"""What a demo observed, and its figures: JSON for machines, sentences for people, and a picture."""

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

from serving.speedup import BASELINE, Speedup, Sums, measure
from slipstream.demo.servers import Scrape
from slipstream.demo.traffic import Stretch, Traffic
from speculator.redis.stream_accounting import StreamLag

NEAR_SWAP_S = 1.0
WINDOW_S = 60.0
"""The acceptance length of the picture and of the display is that of so many seconds."""
_FIRST_POINT_S = 20.0
"""The picture begins when there are enough rounds for a point."""
_NUM_BLOCKS = 20
"""Of a run, for the interval of the A/B."""


@dataclass(kw_only=True)
class DemoRun:
    """What a demo observed. Times in `…_s` are seconds of live traffic, without the turns of the plain server."""

    traffic: Traffic
    plain: Traffic
    """What the plain server was asked."""
    num_clients: int = 1
    num_prompts: int
    """That are different."""
    samples: list[Scrape] = field(default_factory=list)
    """Scrapes of the gateway, oldest first."""
    swaps_unix_s: list[float] = field(default_factory=list)
    started_unix_s: float = field(default_factory=time.time)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Of live traffic: from and to, unix time."""
    lag: StreamLag | None = None
    duration_s: float | None = None
    """None while it runs."""

    def at_s(self, unix_s: float) -> float:
        paused_s = sum(max(0.0, min(end, unix_s) - start) for start, end in self.pauses)
        return unix_s - self.started_unix_s - paused_s

    @property
    def live(self) -> list[Scrape]:
        """The scrapes while there was traffic."""
        return [one for one in self.samples if self.duration_s is None or one.at_s <= self.duration_s]

    @property
    def swaps_s(self) -> list[float]:
        """Swaps while there was traffic; the last versions arrive while the trainer catches up."""
        times_s = map(self.at_s, self.swaps_unix_s)
        return [at for at in times_s if self.duration_s is None or at <= self.duration_s]

    def between(self, start_s: float, end_s: float) -> Scrape | None:
        """What counters gained between the scrapes nearest to both times; None before there are two."""
        if len(self.samples) < 2:
            return None
        first, last = (min(self.samples, key=lambda one: abs(one.at_s - at)) for at in (start_s, end_s))
        return last.since(first) if last.at_s > first.at_s else None

    def head_added(self) -> Speedup:
        """Time a token with remembered text alone over time a token with the draft head beside it."""
        live = self.live
        ends = (
            sorted({round(number * (len(live) - 1) / _NUM_BLOCKS) for number in range(_NUM_BLOCKS + 1)}) if live else []
        )
        return measure([live[last].since(live[first]).head_ab for first, last in itertools.pairwise(ends)])

    def client_speedup(self) -> Speedup:
        """What the clients saw a second over what they saw of the plain server; a block is a stretch of either."""
        live, plain = self.traffic.stats.stretches, self.plain.stats.stretches
        blocks = [Sums() for _ in live]
        for block, before, stretch in zip(blocks, plain, live, strict=False):
            block.add(1, False, before.seconds, round(before.tokens))
            block.add(1, True, stretch.seconds, round(stretch.tokens))
        for after in plain[len(live) :] if blocks else ():
            blocks[-1].add(1, False, after.seconds, round(after.tokens))
        return measure(blocks)


def measured_speedup(sample: Scrape) -> float | None:
    """Of decode rounds, over the last two minutes, as the server reports it."""
    return sample.total("slipstream_speedup_measured_ratio") or None


def figures(run: DemoRun, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of a run, which begins with `settings`; figures that were never measured are null."""
    assert run.lag is not None
    assert run.duration_s is not None
    final, stats = run.samples[-1].total, run.traffic.stats
    end_s = run.duration_s
    first, last = run.between(0, 60), run.between(max(0.0, end_s - 120), end_s)
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
        "head_added": _head_added(run),
        "accepted": _accepted(run.samples[-1]),
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
            "end_to_end": _end_to_end(at_end),
        },
        "tokens_per_s": {"first_minute": _round_tokens_per_s(first), "last_two_minutes": _round_tokens_per_s(last)},
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
        "draft_version": int(final("slipstream_draft_version")),
        "host": host(),
    }
    return {name: _rounded(value) for name, value in document.items()}


def _end_to_end(sample: Scrape) -> dict[str, float | None]:
    """The speedup that requests see, as the server reports it; with its 95% interval."""
    names = {"estimate": "", "low": "_lower", "high": "_upper"}
    return {name: sample.total(f"slipstream_speedup_end_to_end_ratio{end}") or None for name, end in names.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _head_added(run: DemoRun) -> dict[str, Any]:
    """The A/B of remembered text with the draft head against remembered text alone, over the whole run."""
    measured, total = run.head_added(), run.samples[-1].total
    asked = int(total("slipstream_head_ab_asked_rounds_total"))
    bounds = _bounds(measured)
    if measured.ratio is not None and asked + total("slipstream_draft_looks_total") == 0:
        bounds = dict.fromkeys(bounds, 1.0)  # both arms did the same
    return {
        **bounds,
        "asked_rounds": asked,
        "both_rounds": measured.speculative_rounds,
        "suffix_only_rounds": measured.baseline_rounds,
    }


def _accepted(final: Scrape) -> dict[str, Any]:
    """Where accepted proposals came from, and how often the head was right about the next token where it was seen."""
    total = final.total
    head_first = {"source": "head", "position": "1"}
    asked, probed = total("slipstream_proposals_total", **head_first), total("slipstream_draft_looks_total")
    right = total("slipstream_accepted_total", **head_first) + total("slipstream_draft_looks_total", outcome="accepted")
    return {
        "from_remembered_text": int(total("slipstream_accepted_total", source="suffix")),
        "from_head": int(total("slipstream_accepted_total", source="head")),
        "head_first_proposals": int(asked),
        "head_probes": int(probed),
        "head_hit_rate": right / (asked + probed) if asked + probed else None,
    }


def _client_speedup(run: DemoRun) -> dict[str, Any]:
    live, plain = run.traffic.stats, run.plain.stats
    rate = _tokens_per_s(live.stretches)
    return {
        **_bounds(run.client_speedup()),
        "tokens_per_s": rate,
        "tokens_per_s_per_client": rate / run.num_clients if rate else None,
        "plain_tokens_per_s": _tokens_per_s(plain.stretches),
        "plain_tokens_per_s_at_start": _tokens_per_s(plain.stretches[:1]),
        "plain_tokens_per_s_at_end": _tokens_per_s(plain.stretches[-1:]),
        "seconds": sum(stretch.seconds for stretch in live.stretches),
        "plain_seconds": sum(stretch.seconds for stretch in plain.stretches),
        "plain_stretches": len(plain.stretches),
        "plain_requests": plain.requests,
        "plain_failed_requests": plain.failed,
    }


def _bounds(measured: Speedup) -> dict[str, float | None]:
    """With its 95% interval."""
    return {"estimate": measured.ratio, "low": measured.lower, "high": measured.upper}


def _tokens_per_s(stretches: Sequence[Stretch]) -> float | None:
    """Of all clients together."""
    seconds = sum(stretch.seconds for stretch in stretches)
    return sum(stretch.tokens for stretch in stretches) / seconds if seconds else None


def _round_tokens_per_s(window: Scrape | None) -> float | None:
    """Tokens that decode rounds committed a second."""
    return window.total("slipstream_round_tokens_total") / window.at_s if window else None


def _gaps(run: DemoRun) -> dict[str, float | None]:
    gaps = np.array(run.traffic.stats.gaps).reshape(-1, 2)
    if not len(gaps):
        return dict.fromkeys(("p50", "p99", "max", "max_at_swap"))
    at_s, gap_ms = gaps[:, 0], 1000 * gaps[:, 1]
    near = np.zeros(len(gaps), bool)
    for swap in run.swaps_unix_s:
        # A gap belongs to the swap's second when any part of it does.
        near |= (at_s >= swap - NEAR_SWAP_S) & (at_s - gap_ms / 1000 <= swap + NEAR_SWAP_S)
    return {
        "p50": float(np.percentile(gap_ms, 50)),
        "p99": float(np.percentile(gap_ms, 99)),
        "max": float(gap_ms.max()),
        "max_at_swap": float(gap_ms[near].max()) if near.any() else None,
    }


def progress(run: DemoRun) -> dict[str, str]:
    """The figures so far, for the display of a running demo; empty before the first scrape."""
    if not run.samples:
        return {}
    sample = run.samples[-1]
    minute = run.between(sample.at_s - WINDOW_S, sample.at_s)
    return {
        "what the head added, so far": _times(_bounds(run.head_added())),
        "a client's speedup, so far": _times(_bounds(run.client_speedup())),
        "the server's end-to-end speedup": _times(_end_to_end(sample)),
        "measured speedup of decode rounds": _shown(measured_speedup(sample), ".2f", "×"),
        "acceptance length": _shown(minute.accept_length if minute else None, ".2f"),
        "tokens a second": _shown(_round_tokens_per_s(minute), ".0f"),
        "draft version": f"{sample.total('slipstream_draft_version'):.0f}",
        "swaps": str(len(run.swaps_unix_s)),
        "traces captured": f"{sample.total('slipstream_traces_captured_total'):.0f}",
        "traces used": str(run.lag.acked) if run.lag else "–",
        "failed requests": str(run.traffic.stats.failed),
    }


def sentences(document: Mapping[str, Any]) -> str:
    """What the run showed, in plain language: what the head added and what a client saw come first."""
    head, accepted, client = document["head_added"], document["accepted"], document["client_speedup"]
    length, speed, traces = document["accept_length"], document["speedup"], document["traces"]
    if head["both_rounds"] and not head["asked_rounds"]:
        added = f"The learned head added nothing, 1.00 ×: it was not asked. With probes and chance: {_times(head)}."
    else:
        added = f"Beside remembered text, the learned head added {_times(head)}."
    plain = (_shown(client[f"plain_tokens_per_s{when}"], ".0f") for when in ("", "_at_start", "_at_end"))
    lines = [
        added,
        f"  The engine asked the head in {head['asked_rounds']} of {head['both_rounds']} rounds. In turns with these,",
        f"  {head['suffix_only_rounds']} other rounds had remembered text alone.",
        f"  Accepted proposals: {accepted['from_remembered_text']} from remembered text, "
        f"{accepted['from_head']} from the head.",
        f"  Asked or probed, the head was right about {_shown(accepted['head_hit_rate'], '.0%')} of the next tokens.",
        "",
        f"A client's clock, against plain decoding: {_times(client)}.",
        f"  With drafts and learning {_shown(client['tokens_per_s'], '.0f')} tokens a second, "
        f"{_shown(client['tokens_per_s_per_client'], '.0f')} for each client;",
        "  without either {} ({} at the start, {} at the end).".format(*plain),
        "  This includes prompts, waiting, and what the trainer takes from serving.",
        f"The server's own end-to-end speedup: {_times(speed['end_to_end'])}.",
        "  Against stretches in which it served all requests plainly, with the trainer beside it.",
        "",
        f"Decode rounds alone, without prompts: measured speedup {_shown(speed['measured_last_two_minutes'], '.2f')} × "
        f"({speed['baseline_rounds']} control rounds).",
        f"One verification committed {_shown(length['first_minute'], '.2f')} tokens in the first minute and "
        f"{_shown(length['last_two_minutes'], '.2f')} in the last two.",
        f"{document['model']} answered {document['requests']} requests ({document['failed_requests']} failed) with "
        f"{document['completion_tokens']} tokens while its draft was replaced {document['swaps']} times.",
        f"Of {traces['captured']} traces {traces['trained']} were learned from or held out, "
        f"{traces['dropped']} dropped, {traces['dead_lettered']} refused, {traces['lost']} lost, "
        f"{traces['waiting']} still waiting.",
    ]
    if (came := document["times_each_prompt_came"]) > 1:
        lines.append(
            f"Each prompt came {came:.2f} times: a remembered answer makes the next one to the same prompt faster. "
            "Give more prompts with --prompts."
        )
    return "\n".join(lines)


def _times(bounds: Mapping[str, float | None]) -> str:
    estimate, low, high = (bounds[name] for name in ("estimate", "low", "high"))
    if estimate is None:
        return "not measured"
    return f"{estimate:.2f} × ({'no interval' if low is None else f'95%: {low:.2f} … {high:.2f}'})"


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def draw(run: DemoRun, path: Path, *, title: str) -> None:
    """Write a PNG to `path`: speedups and acceptance length over time, swaps marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    samples = [one for one in run.live if one.at_s >= _FIRST_POINT_S]
    windows = [run.between(max(0.0, one.at_s - WINDOW_S), one.at_s) for one in samples]
    lengths = [window.accept_length if window else None for window in windows]
    lines = {
        "speedup over plain decoding\n(line: decode rounds alone)": ("#1a7f37", map(measured_speedup, samples)),
        "acceptance length\n(tokens per verification)": ("#1f6feb", lengths),
    }
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.2), sharex=True, layout="constrained")
    for axis, (label, (color, values)) in zip(axes, lines.items(), strict=True):
        rows = [(one.at_s / 60, value) for one, value in zip(samples, values, strict=True) if value is not None]
        axis.plot([at for at, _ in rows], [value for _, value in rows], color=color, linewidth=2.2)
        for number, at_s in enumerate(run.swaps_s):
            axis.axvline(at_s / 60, color="#8c959f", linewidth=0.7, linestyle=":", label="" if number else "draft swap")
        axis.axhline(1.0, color="#57606a", linewidth=0.8)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylabel(label)
        if rows:
            axis.annotate(
                f"{rows[-1][1]:.2f}", rows[-1], xytext=(5, 0), textcoords="offset points", color=color, weight="bold"
            )
    clients = _client_points(run)
    if clients:
        axes[0].plot(*zip(*clients, strict=True), "o", color="#bf3989", label="what a client saw, prompts included")
    if clients or run.swaps_s:
        axes[0].legend(loc="best", frameon=False, fontsize=9)
    axes[0].set_title(title, loc="left", fontsize=11)
    axes[1].set_xlabel("minutes of live traffic")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _client_points(run: DemoRun) -> list[tuple[float, float]]:
    """(minutes, ratio) in the middle of each live stretch: its tokens a second over those of the plain ones beside."""
    live, plain = run.traffic.stats.stretches, run.plain.stats.stretches
    rows = []
    for number, stretch in enumerate(live):
        rate, plain_rate = _tokens_per_s([stretch]), _tokens_per_s(plain[number : number + 2])
        if rate and plain_rate:
            rows.append((run.at_s((stretch.start_s + stretch.end_s) / 2) / 60, rate / plain_rate))
    return rows


def host() -> dict[str, Any]:
    """What the figures were measured on; no name of a machine or person."""
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
