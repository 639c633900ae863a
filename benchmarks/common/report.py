"""Options, table output and exit code of every benchmark."""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.demo.report import host
from slipstream.demo.topics import Prompt, built_in_prompts, cycle_prompts, read_prompts
from slipstream.models import BUNDLED_MODEL
from speculator.errors import ConfigError


def parser(description: str, *, has_prompts: bool = True, has_model: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have, and those for prompts and a model.

    From now on SIGTERM ends this process in order, with the servers that it has started.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="fewer repeats; at most three minutes, SGLang's more")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    if has_prompts:
        options.add_argument(
            "--prompts", type=_prompts_file, metavar="FILE.jsonl", help='lines with "domain" and "prompt"'
        )
    if has_model:
        options.add_argument("--model", default=BUNDLED_MODEL, help="directory, id or bundled name")
    return options


def _prompts_file(name: str) -> Path:
    try:
        read_prompts(Path(name))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(name)


def refusing(main: Callable[[], None]) -> Callable[[], None]:
    """`main`, which a ConfigError ends with one line and exit code 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return run


def fill_in(arguments: argparse.Namespace, defaults: Mapping[str, tuple[Any, Any]]) -> None:
    """Give options that were left out their (quick, full) default."""
    for name, (quick, full) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else full)


def prompts_of(path: Path | None) -> list[Prompt]:
    """The prompts of the file, or the built-in ones."""
    return read_prompts(path) if path else built_in_prompts()


def pick_prompts(path: Path | None, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts in a random order that is the same for the same seed."""
    source = cycle_prompts(prompts_of(path), seed)
    return [next(source) for _ in range(count)]


def shuffled_prompts(path: Path | None) -> list[Prompt]:
    """All prompts that differ, in a random order that is always the same."""
    prompts = list(dict.fromkeys(prompts_of(path)))
    return random.Random(0).sample(prompts, len(prompts))


def in_order(names: Iterable[str], turn: int) -> list[str]:
    """The names in their order; each turn begins with the next one."""
    names = list(names)
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def percentile(values: Sequence[float], percent: int) -> float:
    """Percentile 1 … 99 of at least one value, interpolated, and never beyond the least and the largest."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:8.2f}  ({self.low:.2f} … {self.high:.2f})"

    def to_dict(self) -> dict[str, float]:
        return {"median": round(self.median, 4), "min": round(self.low, 4), "max": round(self.high, 4)}


@dataclass(frozen=True)
class Median:
    """Median of many short measurements, and its bootstrapped 95% interval."""

    value: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float], *, resamples: int = 2000) -> Median:
        dice = random.Random(0)
        medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(resamples))
        tail = resamples // 40
        return cls(statistics.median(values), medians[tail], medians[-1 - tail])

    def __str__(self) -> str:
        return f"{self.value:8.3f}  ({self.lower:.3f} … {self.upper:.3f})"

    def to_dict(self) -> dict[str, float]:
        return {"median": round(self.value, 4), "lower": round(self.lower, 4), "upper": round(self.upper, 4)}


@dataclass(frozen=True)
class Target:
    """A figure with a target: `value` must be at least (or at most) `bound`."""

    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'met ' if self.met else 'MISS'}  {self.name}: {self.value:.3f} {sign} {self.bound}"


def finish(rows: list[tuple[str, object]], targets: list[Target], document: dict[str, Any], path: Path | None) -> None:
    """Write the JSON, print the table and the targets, and exit 1 when a target falls short."""
    document = {**document, "targets": {target.name: target.met for target in targets}, "host": host()}
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for target in targets:
        print(target)
    sys.exit(0 if all(target.met for target in targets) else 1)
