"""Plot of a demo: accepted tokens by source, speedups of both A/Bs and acceptance length over the chapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.demo.report import SOURCES, DemoRun, accepted_by_source, tokens_per_s
from speculator.errors import ConfigError

_WINDOW_S = 45.0
"""Each point covers so many seconds before it, within its chapter."""
_COLOURS = {"head": "#1a7f37", "own": "#79c0ff", "group": "#d2a8ff", "tenant": "#1f6feb"}
_LABELS = {"head": "draft head", "own": "own text", "group": "prompt group", "tenant": "tenant's text"}


def check_format(path: Path) -> None:
    """Raise ConfigError where `draw` cannot write a file of this name."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"{path} is no picture that can be drawn: end its name in .png, or in one of {', '.join(kinds)}"
        )


def draw(run: DemoRun, path: Path, *, title: str) -> None:
    """Write a picture to `path`, a PNG unless its name ends otherwise; swaps and chapters are marked.

    Raises ConfigError where it cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9.5, 8.6), sharex=True, layout="constrained")
    _draw_sources(axes[0], run)
    _draw_ratios(axes[1], run)
    _draw_lengths(axes[2], run)
    for axis in axes:
        for number, chapter in enumerate(run.chapters):
            if number % 2:
                axis.axvspan(chapter.start_s / 60, chapter.end_s / 60, color="#57606a", alpha=0.07, linewidth=0)
        for at_s in run.swaps_s:
            axis.axvline(at_s / 60, color="#8c959f", linewidth=0.7, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
    for chapter in run.chapters:
        middle = (chapter.start_s + chapter.end_s) / 120
        axes[0].annotate(
            chapter.chapter.title, (middle, 1.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8.5
        )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes[-1].set_xlabel("minutes of live traffic; dotted: the draft was swapped")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another file") from None
    finally:
        plt.close(figure)


def _windows(run: DemoRun) -> list[tuple[float, float]]:
    """(start, end) of each point's window, in seconds."""
    found = []
    for chapter in run.chapters:
        for one in run.live:
            if chapter.start_s + min(_WINDOW_S, chapter.end_s - chapter.start_s) / 2 <= one.at_s <= chapter.end_s:
                found.append((max(chapter.start_s, one.at_s - _WINDOW_S), one.at_s))
    return found


def _draw_sources(axis: Any, run: DemoRun) -> None:
    rows: list[tuple[float, list[float]]] = []
    for start_s, end_s in _windows(run):
        window = run.between(start_s, end_s)
        accepted = accepted_by_source(window) if window else {}
        if total := sum(accepted.values()):
            rows.append((end_s / 60, [accepted[source] / total for source in SOURCES]))
    if rows:
        columns = list(zip(*(shares for _, shares in rows), strict=True))
        axis.stackplot(
            [at for at, _ in rows],
            *columns,
            labels=[_LABELS[source] for source in SOURCES],
            colors=[_COLOURS[source] for source in SOURCES],
            alpha=0.85,
        )
        axis.legend(loc="lower left", ncols=4, frameon=True, fontsize=8.5)
    axis.set_ylim(0, 1)
    axis.set_ylabel("accepted tokens\nby source")


def _draw_ratios(axis: Any, run: DemoRun) -> None:
    windows = _windows(run)
    lines = {
        "both ÷ plain decoding": ("#1a7f37", [run.both_over_plain(*window).ratio for window in windows]),
        "both ÷ earlier text alone": ("#1f6feb", [run.both_over_suffix(*window).ratio for window in windows]),
    }
    for label, (colour, values) in lines.items():
        _line(axis, windows, values, colour, label)
    if clients := _client_points(run):
        axis.plot(*zip(*clients, strict=True), "o", color="#bf3989", label="a client's clock, prompts included")
    axis.axhline(1.0, color="#57606a", linewidth=0.8)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(loc="lower left", ncols=3, frameon=True, fontsize=8.5)
    axis.set_ylabel("speedup of rounds\n(A/B slices of this run)")


def _draw_lengths(axis: Any, run: DemoRun) -> None:
    windows = _windows(run)
    found = [run.between(*window) for window in windows]
    _line(axis, windows, [window.accept_length if window else None for window in found], "#1f6feb", None)
    axis.axhline(1.0, color="#57606a", linewidth=0.8)
    axis.grid(axis="y", alpha=0.25)
    axis.set_ylabel("acceptance length\n(tokens per verification)")


def _line(
    axis: Any, windows: Sequence[tuple[float, float]], values: Sequence[float | None], colour: str, label: str | None
) -> None:
    rows = [(end_s / 60, value) for (_, end_s), value in zip(windows, values, strict=True) if value is not None]
    axis.plot([at for at, _ in rows], [value for _, value in rows], color=colour, linewidth=2, label=label)
    if rows:
        axis.annotate(
            f"{rows[-1][1]:.2f}", rows[-1], xytext=(5, 0), textcoords="offset points", color=colour, weight="bold"
        )


def _client_points(run: DemoRun) -> list[tuple[float, float]]:
    """(minutes, ratio) of each live stretch: its tokens a second over those of the plain stretches before and after."""
    live, plain = run.traffic.stats.stretches, run.plain.stats.stretches
    rows = []
    for number, stretch in enumerate(live):
        rate, plain_rate = tokens_per_s([stretch]), tokens_per_s(plain[number : number + 2])
        if rate and plain_rate:
            rows.append((run.at_s((stretch.start_s + stretch.end_s) / 2) / 60, rate / plain_rate))
    return rows
