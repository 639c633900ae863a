"""Reads the gateway's /metrics and turns counters into figures over windows of time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import HEAD_AB_ARMS
from serving.speedup import Speedup, Sums, measure


@dataclass(frozen=True)
class Sample:
    """All series of one scrape: (name, sorted labels) → value. `at_s` is seconds since the traffic began."""

    at_s: float
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(repr=False)

    @classmethod
    def parse(cls, at_s: float, text: str) -> Sample:
        values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(at_s, values)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` that carry `labels`."""
        wanted = set(labels.items())
        return sum(value for (series, has), value in self.values.items() if series == name and wanted <= set(has))

    @cached_property
    def rounds(self) -> Sums:
        """Plain rounds and drafting ones, but for those that read a piece of a prompt."""
        return self._sums("slipstream_rounds", "slipstream_round", "mode", ("control", "speculative"))

    @cached_property
    def head_ab(self) -> Sums:
        """Rounds with remembered text alone, and those with the draft head beside it."""
        return self._sums("slipstream_head_ab_rounds", "slipstream_head_ab_round", "arm", HEAD_AB_ARMS)

    def _sums(self, counts: str, costs: str, label: str, arms: tuple[str, str]) -> Sums:
        sums = Sums()
        for (series, labels), rounds in self.values.items():
            if series == f"{counts}_total" and (arm := dict(labels)[label]) in arms:
                # The first round of a batch size may be half counted.
                seconds, tokens = (
                    self.values.get((f"{costs}_{of}_total", labels), 0.0) for of in ("seconds", "tokens")
                )
                sums.add(int(dict(labels)["batch"]), arm == arms[1], seconds, int(tokens), int(rounds))
        return sums


@dataclass(frozen=True)
class Window:
    """What happened between two scrapes."""

    first: Sample
    last: Sample

    def delta(self, name: str, **labels: str) -> float:
        return self.last.total(name, **labels) - self.first.total(name, **labels)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification of a drafting round, bonus included; control rounds do not count."""
        chains = self.delta("slipstream_verifications_total")
        return self.delta("slipstream_verified_tokens_total") / chains if chains else None

    @property
    def tokens_per_s(self) -> float:
        return self.delta("slipstream_round_tokens_total") / max(self.last.at_s - self.first.at_s, 1e-9)

    @property
    def speedup(self) -> Speedup:
        """Measured: drafting rounds against the depth-0 rounds of the same window, batch size by batch size."""
        return measure([Sums().merge(self.last.rounds).merge(self.first.rounds, -1)])

    @property
    def head_ab(self) -> Sums:
        """Rounds with remembered text alone against those with the draft head beside it, batch size by batch size."""
        return Sums().merge(self.last.head_ab).merge(self.first.head_ab, -1)


class History:
    """The scrapes of one run, oldest first."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def blocks(self, num: int, *, end_s: float) -> list[Window]:
        """All until then in so many windows with equally many scrapes; fewer where it is short."""
        samples = [sample for sample in self.samples if sample.at_s <= end_s]
        ends = sorted({round(number * (len(samples) - 1) / num) for number in range(num + 1)}) if samples else []
        return [Window(samples[first], samples[last]) for first, last in itertools.pairwise(ends)]

    def window(self, start_s: float, end_s: float) -> Window | None:
        """The window between the scrapes nearest to both times; None before there are two."""
        if len(self.samples) < 2:
            return None
        first, last = (min(self.samples, key=_distance_to(at)) for at in (start_s, end_s))
        return Window(first, last) if last.at_s > first.at_s else None


def _distance_to(at_s: float) -> Callable[[Sample], float]:
    return lambda sample: abs(sample.at_s - at_s)
