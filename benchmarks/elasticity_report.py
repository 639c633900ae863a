"""The figures of benchmarks/elasticity.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from benchmarks.common import Spread, Target
from benchmarks.elasticity_window import Measured, Step, Window

ABSENT, YIELDING, PRIORITY, AGAIN = "absent", "yielding", "priority", "absent again"
P99_BOUND, IDLE_BOUND = 1.03, 0.60
NUM_RESAMPLED = 1000
LEAST_STEPS = 5
"""Of a shape without a trainer, before others are set against them."""


def p99(windows: Sequence[Sequence[float]]) -> float:
    return float(np.percentile(np.concatenate(windows), 99))


@dataclass(frozen=True)
class Ratio:
    """Of two 99th percentiles, with the 95% interval over resampled rounds."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Self:
        """By round, as they belong together."""
        rng = np.random.default_rng(0)

        def ratio(rounds: Sequence[int]) -> float:
            return p99([ours[one] for one in rounds]) / p99([base[one] for one in rounds])

        resampled = [ratio(rng.integers(len(ours), size=len(ours)).tolist()) for _ in range(NUM_RESAMPLED)]
        low, high = np.percentile(resampled, (2.5, 97.5))
        return cls(ratio(range(len(ours))), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:8.3f}  ({self.low:.3f} … {self.high:.3f})"


@dataclass(frozen=True)
class Absent:
    """The windows without a trainer, by round: what the others are set against."""

    gaps_ms: list[list[float]]
    latencies_ms: list[list[float]]
    idle_s: list[float]
    steps_s: Mapping[int, float]
    """Mean time of the engine's steps of a shape."""

    @classmethod
    def of(cls, ones: Sequence[Window], agains: Sequence[Window]) -> Self:
        pairs = list(zip(ones, agains, strict=True))
        by_shape: dict[int, list[float]] = defaultdict(list)
        for step in (step for window in (*ones, *agains) for step in window.steps):
            by_shape[step.shape].append(step.seconds)
        return cls(
            gaps_ms=[one.gaps_ms + again.gaps_ms for one, again in pairs],
            latencies_ms=[one.latencies_ms + again.latencies_ms for one, again in pairs],
            idle_s=[(one.idle_s + again.idle_s) / 2 for one, again in pairs],
            steps_s={shape: float(np.mean(them)) for shape, them in by_shape.items() if len(them) >= LEAST_STEPS},
        )

    def slowdown(self, steps: Sequence[Step]) -> float:
        """Time of these steps over that of as many of the same shapes here."""
        known = [step for step in steps if step.shape in self.steps_s]
        return sum(step.seconds for step in known) / sum(self.steps_s[step.shape] for step in known)


def line(window: Window) -> str:
    return (
        f"gap p99 {p99([window.gaps_ms]):6.1f} ms  latency p99 {p99([window.latencies_ms]):7.1f} ms  "
        f"idle {window.idle_s:5.1f} s  trainer {window.trainer_s:5.1f} s  others {window.others_s:5.1f} s  "
        f"learnt {window.learnt_tokens:.0f}  waited {window.waited_s:.1f} s"
    )


@dataclass(frozen=True)
class Beside:
    """What a variant with a trainer did to serving, and with the idle time."""

    gap_p99: Ratio
    latency_p99: Ratio
    mean_gap: Spread
    steps: Spread
    idle_cpu_share: Spread
    learnt_tokens: Spread
    idle_learning_share: Spread
    waited_s: Spread

    @classmethod
    def of(cls, ours: Sequence[Window], absent: Absent, *, alone_per_s: float, num_cores: int) -> Self:
        """`alone_per_s`: tokens that the yielding trainer learns from in a second of its own."""
        by_round = list(zip(ours, absent.gaps_ms, absent.idle_s, strict=True))
        return cls(
            gap_p99=Ratio.of([one.gaps_ms for one in ours], absent.gaps_ms),
            latency_p99=Ratio.of([one.latencies_ms for one in ours], absent.latencies_ms),
            mean_gap=Spread.of([float(np.mean(one.gaps_ms) / np.mean(gaps_ms)) for one, gaps_ms, _ in by_round]),
            steps=Spread.of([absent.slowdown(one.steps) for one in ours]),
            idle_cpu_share=Spread.of([one.trainer_s / idle_s for one, _, idle_s in by_round]),
            learnt_tokens=Spread.of([one.learnt_tokens for one in ours]),
            # Idle seconds of all cores together over their number: so long the whole machine was idle, as it were.
            idle_learning_share=Spread.of(
                [one.learnt_tokens / (alone_per_s * idle_s / num_cores) for one, _, idle_s in by_round]
            ),
            waited_s=Spread.of([one.waited_s for one in ours]),
        )

    def rows(self, name: str) -> list[tuple[str, object]]:
        return [
            (f"{name}: gap p99 over absent", self.gap_p99),
            (f"{name}: request p99 over absent", self.latency_p99),
            (f"{name}: mean gap over absent, by round", self.mean_gap),
            (f"{name}: the engine's steps over absent's of the same shapes, by round", self.steps),
            (f"{name}: trainer CPU over idle CPU", self.idle_cpu_share),
            (f"{name}: tokens learnt from, a window", self.learnt_tokens),
            (f"{name}: the same over what idle time allows", self.idle_learning_share),
            (f"{name}: waited for the engine, s a window", self.waited_s),
        ]

    def document(self) -> dict[str, Any]:
        return {
            "gap_p99_ratio": asdict(self.gap_p99),
            "latency_p99_ratio": asdict(self.latency_p99),
            "gap_mean_ratio": self.mean_gap.to_dict(),
            "step_ratio": self.steps.to_dict(),
            "idle_cpu_share": self.idle_cpu_share.to_dict(),
            "learnt_tokens": self.learnt_tokens.to_dict(),
            "idle_learning_share": self.idle_learning_share.to_dict(),
        }

    def targets(self) -> list[Target]:
        return [
            Target("gap_p99_ratio", self.gap_p99.value, P99_BOUND, at_least=False),
            Target("latency_p99_ratio", self.latency_p99.value, P99_BOUND, at_least=False),
            Target("idle_cpu_share", self.idle_cpu_share.median, IDLE_BOUND),
        ]


@dataclass(frozen=True)
class Report:
    rows: list[tuple[str, object]]
    targets: list[Target]
    document: dict[str, Any]

    @classmethod
    def of(cls, measured: Measured, num_cores: int) -> Self:
        """Exits where the machine was not quiet enough to say anything."""
        windows, alone_per_s = measured.windows, float(np.mean(measured.alone_per_s))
        ones, agains = windows[ABSENT], windows[AGAIN]
        if any(window.idle_s <= window.others_s for window in (*ones, *agains)):
            raise SystemExit("other programs used more CPU than was idle without a trainer: nothing can be said")
        absent = Absent.of(ones, agains)
        num_gaps, num_requests = (sum(map(len, them)) // 2 for them in (absent.gaps_ms, absent.latencies_ms))
        gap_noise = Ratio.of([one.gaps_ms for one in ones], [again.gaps_ms for again in agains])
        latency_noise = Ratio.of([one.latencies_ms for one in ones], [again.latencies_ms for again in agains])
        rows: list[tuple[str, object]] = [
            (f"{len(ones)} rounds, {num_requests} requests and {num_gaps} gaps a variant", ""),
            ("absent: gap p99, ms", f"{p99(absent.gaps_ms):8.1f}"),
            ("absent: request p99, ms", f"{p99(absent.latencies_ms):8.1f}"),
            ("absent: idle CPU, s a window", Spread.of(absent.idle_s)),
            ("absent: CPU of other programs, s a window", Spread.of([one.others_s for one in (*ones, *agains)])),
            ("absent over absent again: gap p99", gap_noise),
            ("absent over absent again: request p99", latency_noise),
            ("the yielding trainer alone: tokens learnt from a second", f"{alone_per_s:8.0f}"),
        ]
        document: dict[str, Any] = {
            "rounds": len(ones),
            "requests": num_requests,
            "gaps": num_gaps,
            "alone_tokens_per_s": round(alone_per_s, 1),
            "absent": {"gap_p99_ratio": asdict(gap_noise), "latency_p99_ratio": asdict(latency_noise)},
        }
        found = {
            name: Beside.of(windows[name], absent, alone_per_s=alone_per_s, num_cores=num_cores)
            for name in (YIELDING, PRIORITY)
            if name in windows
        }
        for name, beside in found.items():
            rows += beside.rows(name)
            document[name] = beside.document()
        return cls(rows, found[YIELDING].targets(), document)
