"""What an hour of traffic with faults in it (benchmarks/hour.py) says about gate, trials, reviews and falls."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.answers import Traffic
from benchmarks.common import Spread, Target, finish
from benchmarks.falls import FLOOR, Best, Fall, by_minute, falls, lengths, ratios
from benchmarks.hour_faults import RANDOM, Fault, Faults, outcome, overrun
from benchmarks.replayed import ReplayEngine
from serving.hotswap import DraftFollower
from speculator.events import Event


@dataclass
class Hour:
    """What a run leaves behind."""

    engine: ReplayEngine
    traffic: Traffic
    follower: DraftFollower
    best: Best
    faults: Faults
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    failed_looks: int = 0


def gate_figures(events: Sequence[Event]) -> dict[str, Any]:
    """What the gate decided, and on how much."""
    judged = [event.fields for event in events if event.kind == "gate"]
    compared = [one for one in judged if one.get("lower") is not None]
    return {
        "outcomes": dict(Counter(one["outcome"] for one in judged)),
        "reasons": dict(Counter(one["reason"] for one in judged)),
        "held_out_traces_median": statistics.median(one["num_traces"] for one in compared) if compared else 0,
        "decisions": [
            {
                name: one.get(name)
                for name in ("outcome", "incumbent", "num_traces", "change", "lower", "upper", "seconds")
            }
            for one in judged
        ],
    }


def trial_figures(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What engines decided, in their order, with the numbers that it rests on."""
    return [
        {"version": event.fields["version"], "outcome": event.kind, "reason": event.fields["reason"]}
        | event.fields["numbers"]
        for event in events
        if event.actor.startswith("engine:") and event.kind in ("promoted", "rolled_back")
    ]


def review_figures(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What the trainer's second looks ended with, in their order."""
    return [event.fields for event in events if event.kind == "review"]


def good_rolled_back(events: Sequence[Event], faults: Sequence[Fault]) -> list[int]:
    """Versions that passed the gate, and were taken back by an engine or the trainer."""
    bad = {one.version for one in faults}
    rolled_back = (event.fields["version"] for event in events if event.kind == "rolled_back")
    return [version for version in rolled_back if version not in bad]


def counted(outcomes: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(outcomes).items())


def report(hour: Hour, arguments: argparse.Namespace, num_answers: int) -> None:
    engine, seen, events = hour.engine, hour.best.seen, hour.events
    window, faults = arguments.window, hour.faults.all
    randoms = frozenset(one.version for one in faults if one.name == RANDOM and one.version is not None)
    found = falls(seen, window)
    with_random = [one for one in found if one.versions & randoms]
    others = [one for one in found if not one.versions & randoms]
    gate, by_window = gate_figures(events), ratios(seen, window)
    trials = trial_figures(events)
    reviews, lost = review_figures(events), good_rolled_back(events, faults)
    outcomes, seconds = Counter(one["outcome"] for one in trials), [one.get("seconds", 0.0) for one in trials] or [0.0]
    tenth = 60 * arguments.minutes / 10
    at_start, at_end = (
        lengths([one for one in seen if low <= one.at_s < low + tenth]) for low in (0.0, 60 * arguments.minutes - tenth)
    )
    end_s = engine.clock_s
    rows: list[tuple[str, object]] = [
        ("virtual minutes, in minutes", f"{end_s / 60:.1f} in {hour.seconds / 60:.1f} ({end_s / hour.seconds:.1f}×)"),
        (
            "requests",
            f"{engine.num_requests}, {num_answers} different; each up to {max(hour.traffic.asked.values())} times",
        ),
        ("verifications, rounds", f"{len(seen)}, {engine.num_rounds}"),
        ("the gate", counted(one["outcome"] for one in gate["decisions"]) or "asked nothing"),
        ("  its held-out traces, median", gate["held_out_traces_median"]),
        ("engine: promoted, rolled back", f"{outcomes['promoted']}, {outcomes['rolled_back']}"),
        ("  seconds of a trial", Spread.of(seconds)),
        ("second looks", counted(one["outcome"] for one in reviews) or "none"),
        ("  traces until the end of one", Spread.of([one["num_traces"] for one in reviews] or [0])),
        ("  seconds of the trainer", Spread.of([one["seconds"] for one in reviews] or [0.0])),
        ("good drafts rolled back", len(lost)),
        ("publishing paused", sum(event.kind == "publishing_paused" for event in events)),
        *((f"{one.at_s / 60:.1f} min: {one.name}", outcome(one, engine)) for one in faults),
        ("accept length, first tenth → last", f"{at_start[0]:.2f} → {at_end[0]:.2f}; best {at_end[1]:.2f}"),
        (f"served / best, {window} verifications: lowest", f"{by_window.min():.3f}" if len(by_window) else "–"),
        ("  share of windows below 0.9", f"{(by_window < FLOOR).mean():.2%}" if len(by_window) else "–"),
        ("longest fall with random weights", _longest(with_random)),
        ("longest other fall", _longest(others)),
    ]
    finish(
        rows,
        [
            Target(
                "longest_fall_over_promised",
                max((one.overrun(randoms) for one in found), default=0.0),
                1.0,
                at_least=False,
            ),
            Target("worst_fault_over_promised", max(overrun(one, engine) for one in faults), 1.0, at_least=False),
            Target("good_rolled_back", len(lost), 0, at_least=False),
            Target("windows", len(by_window), 1),
        ],
        {
            "virtual_minutes": round(end_s / 60, 2),
            "seconds": round(hour.seconds, 1),
            "compress": arguments.compress,
            "requests": engine.num_requests,
            "different_answers": num_answers,
            "verifications": len(seen),
            "rounds": engine.num_rounds,
            "window": window,
            "failed_looks": hour.failed_looks,
            "gate": gate,
            "trials": trials,
            "reviews": reviews,
            "good_rolled_back": lost,
            "faults": [
                vars(one)
                | {"rounds": engine.rounds_of[one.version or 0], "seconds": engine.seconds_of[one.version or 0]}
                for one in faults
            ],
            "falls": [vars(one) | {"versions": sorted(one.versions)} for one in found],
            "lowest_ratio": float(by_window.min()) if len(by_window) else None,
            "by_minute": by_minute(seen),
        },
        arguments.json,
    )


def _longest(found: Sequence[Fall]) -> str:
    if not found:
        return "none"
    longest = max(found, key=lambda one: one.rounds)
    return (
        f"{longest.rounds} rounds, {longest.seconds:.1f} s, lowest {longest.lowest:.2f}, "
        f"at {longest.at_s / 60:.1f} min ({len(found)} falls)"
    )
