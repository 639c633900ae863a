"""The figures of a demo run: JSON for machines, sentences for people, a picture of speedup and accept length."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.speedup import BASELINE
from slipstream.demo.demo import DemoRun
from slipstream.demo.scrape import Sample
from slipstream.demo.traffic import Stretch

WINDOW_S = 60.0
"""Every point is measured over this many seconds before it."""


@dataclass(frozen=True)
class Point:
    at_s: float
    accept_length: float | None
    speedup: float | None


def draw(
    points: list[Point], clients: list[tuple[float, float]], swaps_s: list[float], path: Path, *, title: str
) -> None:
    """Write a PNG of the run to `path`; `clients` are (seconds, speedup by a client's clock)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.2), sharex=True, layout="constrained")
    for axis, name, color in ((top, "speedup", "#1a7f37"), (bottom, "accept_length", "#1f6feb")):
        rows = [(point.at_s / 60, getattr(point, name)) for point in points if getattr(point, name) is not None]
        axis.plot([x for x, _ in rows], [y for _, y in rows], color=color, linewidth=2.2)
        for number, at_s in enumerate(swaps_s):
            axis.axvline(at_s / 60, color="#8c959f", linewidth=0.7, linestyle=":", label="" if number else "draft swap")
        axis.axhline(1.0, color="#57606a", linewidth=0.8)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if rows:
            axis.annotate(
                f"{rows[-1][1]:.2f}", rows[-1], xytext=(5, 0), textcoords="offset points", color=color, weight="bold"
            )
    if clients:
        times, ratios = zip(*clients, strict=True)
        top.plot(
            [at_s / 60 for at_s in times], ratios, "o", color="#bf3989", label="what a client saw, prompts included"
        )
    top.set_ylabel("speedup over plain decoding\n(line: decode rounds alone)")
    bottom.set_ylabel("acceptance length\n(tokens per verification)")
    bottom.set_xlabel("minutes of live traffic")
    top.set_title(title, loc="left", fontsize=11)
    if swaps_s or clients:
        top.legend(loc="best", frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


NEAR_SWAP_S = 1.0


def figures(run: DemoRun, *, model: str, minutes: float) -> dict[str, Any]:
    """The JSON document of a run; figures that were never measured are null."""
    assert run.final is not None
    assert run.lag is not None
    end_s = run.duration_s
    first = run.history.window(0, 60)
    last = run.history.window(max(0.0, end_s - 120), end_s)
    measured = last.speedup if last else None
    asked = run.traffic.stats.requests + run.plain.stats.requests
    captured = int(run.final.total("slipstream_traces_captured_total"))
    dropped = int(run.final.total("slipstream_traces_dropped_total"))
    trace_tokens = run.final.total("slipstream_trace_tokens_total")
    return {
        "model": model,
        "minutes": minutes,
        "requests": run.traffic.stats.requests,
        "failed_requests": run.traffic.stats.failed,
        "completion_tokens": run.traffic.stats.completion_tokens,
        "times_each_prompt_came": _rounded(asked / run.num_prompts if run.num_prompts else None),
        "swaps": len(run.swaps_s),
        "head_added": _head_added(run),
        "accepted": _accepted(run.final),
        "client_speedup": _client_speedup(run),
        "accept_length": {
            "first_minute": _rounded(first.accept_length if first else None),
            "last_two_minutes": _rounded(last.accept_length if last else None),
        },
        "speedup": {
            "measured_last_two_minutes": _rounded(measured.ratio if measured else None),
            "baseline": BASELINE,
            "baseline_ms_per_token": _rounded(measured.baseline_ms_per_token if measured else None),
            "baseline_rounds": measured.baseline_rounds if measured else 0,
            "speculative_rounds": measured.speculative_rounds if measured else 0,
        },
        "tokens_per_s": {
            "first_minute": _rounded(first.tokens_per_s if first else None),
            "last_two_minutes": _rounded(last.tokens_per_s if last else None),
        },
        "inter_token_ms": _gaps(run),
        "traces": {
            "captured": captured,
            "dropped": dropped,
            "trained": run.lag.acked - run.lag.dead_lettered,
            "dead_lettered": run.lag.dead_lettered,
            "lost": run.lag.lost,
            "waiting": run.lag.pending + run.lag.undelivered + int(run.final.total("slipstream_traces_pending")),
            "bytes_per_token": _rounded(
                run.final.total("slipstream_trace_bytes_total") / trace_tokens if trace_tokens else None
            ),
        },
        "draft_version": int(run.final.total("slipstream_draft_version")),
        "host": host(),
    }


def _head_added(run: DemoRun) -> dict[str, Any]:
    """The A/B of remembered text with the draft head against remembered text alone, over the whole run."""
    assert run.final is not None
    measured, total = run.head_added(), run.final.total
    asked = int(total("slipstream_head_ab_asked_rounds_total"))
    bounds = measured.ratio, measured.lower, measured.upper
    if measured.ratio is not None and asked + total("slipstream_draft_looks_total") == 0:
        bounds = 1.0, 1.0, 1.0  # both arms did the same
    return {
        **_bounded(*bounds),
        "asked_rounds": asked,
        "both_rounds": measured.speculative_rounds,
        "suffix_only_rounds": measured.baseline_rounds,
    }


def _accepted(final: Sample) -> dict[str, Any]:
    """Where accepted proposals came from, and how often the head was right about the next token where it was seen."""
    total = final.total
    asked, right = (
        total(f"slipstream_{name}_total", source="head", position="1") for name in ("proposals", "accepted")
    )
    probed, right_probes = (
        total("slipstream_draft_looks_total"),
        total("slipstream_draft_looks_total", outcome="accepted"),
    )
    seen = asked + probed
    return {
        "from_remembered_text": int(total("slipstream_accepted_total", source="suffix")),
        "from_head": int(total("slipstream_accepted_total", source="head")),
        "head_first_proposals": int(asked),
        "head_probes": int(probed),
        "head_hit_rate": _rounded((right + right_probes) / seen if seen else None),
    }


def _client_speedup(run: DemoRun) -> dict[str, Any]:
    measured, live, plain = run.client_speedup(), run.traffic.stats, run.plain.stats
    rate = _rate(live.stretches)
    return {
        **_bounded(measured.ratio, measured.lower, measured.upper),
        "tokens_per_s": rate,
        "tokens_per_s_per_client": None if rate is None else _rounded(rate / run.num_clients),
        "plain_tokens_per_s": _rate(plain.stretches),
        "plain_tokens_per_s_at_start": _rate(plain.stretches[:1]),
        "plain_tokens_per_s_at_end": _rate(plain.stretches[-1:]),
        "seconds": _rounded(sum(stretch.seconds for stretch in live.stretches)),
        "plain_seconds": _rounded(sum(stretch.seconds for stretch in plain.stretches)),
        "plain_stretches": len(plain.stretches),
        "plain_requests": plain.requests,
        "plain_failed_requests": plain.failed,
    }


def _bounded(estimate: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    """With its 95% interval."""
    return {"estimate": _rounded(estimate), "low": _rounded(low), "high": _rounded(high)}


def _rate(stretches: Sequence[Stretch]) -> float | None:
    """Tokens a second of all clients together."""
    seconds = sum(stretch.seconds for stretch in stretches)
    return _rounded(sum(stretch.tokens for stretch in stretches) / seconds) if seconds else None


def _gaps(run: DemoRun) -> dict[str, float | None]:
    gaps = np.array(run.traffic.stats.gaps).reshape(-1, 2)
    at_s, gap_ms = gaps[:, 0], 1000 * gaps[:, 1]
    near = np.zeros(len(gaps), bool)
    for swap in run.swaps_unix_s:
        # A gap belongs to the swap's second when any part of it does.
        near |= (at_s >= swap - NEAR_SWAP_S) & (at_s - gap_ms / 1000 <= swap + NEAR_SWAP_S)
    return {
        "p50": _rounded(float(np.percentile(gap_ms, 50)) if len(gaps) else None),
        "p99": _rounded(float(np.percentile(gap_ms, 99)) if len(gaps) else None),
        "max": _rounded(float(gap_ms.max()) if len(gaps) else None),
        "max_at_swap": _rounded(float(gap_ms[near].max()) if near.any() else None),
    }


def points(run: DemoRun) -> list[Point]:
    """One point every five seconds, each over the `WINDOW_S` seconds before it."""
    rows = []
    for at_s in range(20, int(run.duration_s) + 1, 5):
        window = run.history.window(max(0.0, at_s - WINDOW_S), at_s)
        if window is not None:
            rows.append(Point(at_s, window.accept_length, window.speedup.ratio))
    return rows


def client_points(run: DemoRun) -> list[tuple[float, float]]:
    """By the middle of each live stretch: its tokens a second over those of the plain stretches around it."""
    live, plain = run.traffic.stats.stretches, run.plain.stats.stretches
    rows = []
    for number, stretch in enumerate(live):
        rate, plain_rate = _rate([stretch]), _rate(plain[number : number + 2])
        if rate and plain_rate:
            rows.append((run.at_s((stretch.start_s + stretch.end_s) / 2), rate / plain_rate))
    return rows


def sentences(document: dict[str, Any]) -> str:
    """What the run showed, in plain language: what the head added and what a client saw come first."""
    head, accepted, client = document["head_added"], document["accepted"], document["client_speedup"]
    length, speed, traces = document["accept_length"], document["speedup"], document["traces"]
    lines = [
        _added(head),
        f"  The engine asked the head in {head['asked_rounds']} of {head['both_rounds']} rounds;",
        f"  {head['suffix_only_rounds']} others, in turns with these, had remembered text alone.",
        f"  Accepted proposals: {accepted['from_remembered_text']} from remembered text, "
        f"{accepted['from_head']} from the head.",
        f"  Asked or probed, the head named the next token in {_percent(accepted['head_hit_rate'])}.",
        "",
        f"A client's clock, against plain decoding: {_times(client)}.",
        f"  With drafts and learning {_whole(client['tokens_per_s'])} tokens a second, "
        f"{_whole(client['tokens_per_s_per_client'])} for each client;",
        f"  without either {_whole(client['plain_tokens_per_s'])} "
        f"({_whole(client['plain_tokens_per_s_at_start'])} at the start, "
        f"{_whole(client['plain_tokens_per_s_at_end'])} at the end).",
        "  Prompts, waiting and what the trainer takes are in it.",
        "",
        f"Decode rounds alone, without prompts: measured speedup {_shown(speed['measured_last_two_minutes'])} × "
        f"({speed['baseline_rounds']} control rounds).",
        f"One verification committed {_shown(length['first_minute'])} tokens in the first minute and "
        f"{_shown(length['last_two_minutes'])} in the last two.",
        f"{document['model']} answered {document['requests']} requests ({document['failed_requests']} failed) with "
        f"{document['completion_tokens']} tokens while its draft was replaced {document['swaps']} times.",
        f"Of {traces['captured']} traces {traces['trained']} were learned from or held out, "
        f"{traces['dropped']} dropped, "
        f"{traces['dead_lettered']} refused, {traces['lost']} lost, {traces['waiting']} still waiting.",
    ]
    if (came := document["times_each_prompt_came"]) is not None and came > 1:
        lines.append(
            f"Each prompt came {came:.2f} times: a remembered answer makes the next one to the same prompt faster. "
            "Give more prompts with --prompts."
        )
    return "\n".join(lines)


def _added(head: dict[str, Any]) -> str:
    if head["both_rounds"] and not head["asked_rounds"]:
        return f"The learned head added nothing, 1.00 ×. The A/B, with probes and chance: {_times(head)}."
    return f"Beside remembered text, the learned head added {_times(head)}."


def _times(bounded: dict[str, Any]) -> str:
    estimate, low, high = (bounded[name] for name in ("estimate", "low", "high"))
    if estimate is None:
        return "not measured"
    return f"{estimate:.2f} × ({'no interval' if low is None else f'95%: {low:.2f} … {high:.2f}'})"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "no case" if share is None else f"{share:.0%} of the cases"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def host() -> dict[str, Any]:
    """What the figures were measured on; no name of a machine or person."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text())):
        cpu = found[1]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
