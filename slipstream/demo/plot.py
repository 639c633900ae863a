"""The demo's picture: speedups and acceptance length over time, swaps marked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
