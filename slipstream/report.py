"""The figures of a demo run: JSON for machines, sentences for people, points for the plot."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serving.speedup import BASELINE
from slipstream.demo import DemoRun
from slipstream.plot import WINDOW_S, Point

NEAR_SWAP_S = 1.0


def figures(run: DemoRun, *, model: str, minutes: float) -> dict[str, Any]:
    """The JSON document of a run; figures that were never measured are null."""
    assert run.final is not None
    assert run.lag is not None
    end_s = run.duration_s
    first = run.history.window(0, 60)
    last = run.history.window(max(0.0, end_s - 120), end_s)
    measured = last.speedup if last else None
    captured = int(run.final.total("slipstream_traces_captured_total"))
    dropped = int(run.final.total("slipstream_traces_dropped_total"))
    trace_tokens = run.final.total("slipstream_trace_tokens_total")
    return {
        "model": model,
        "minutes": minutes,
        "requests": run.traffic.stats.requests,
        "failed_requests": run.traffic.stats.failed,
        "completion_tokens": run.traffic.stats.completion_tokens,
        "swaps": len(run.swaps_s),
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


def sentences(document: dict[str, Any]) -> str:
    """What the run showed, in plain language."""
    length, speed, traces = document["accept_length"], document["speedup"], document["traces"]
    ratio = speed["measured_last_two_minutes"]
    lines = [
        f"{document['model']} answered {document['requests']} requests ({document['failed_requests']} failed) with "
        f"{document['completion_tokens']} tokens while its draft was replaced {document['swaps']} times.",
        f"One verification committed {_shown(length['first_minute'])} tokens in the first minute and "
        f"{_shown(length['last_two_minutes'])} in the last two.",
        f"Against plain decoding in the same two minutes that is a measured speedup of {_shown(ratio)} "
        f"({speed['baseline_rounds']} control rounds).",
        f"Of {traces['captured']} traces {traces['trained']} were learned from or held out, "
        f"{traces['dropped']} dropped, "
        f"{traces['dead_lettered']} refused, {traces['lost']} lost, {traces['waiting']} still waiting.",
    ]
    return "\n".join(lines)


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
