"""Reads the gateway's /metrics and turns counters into figures over windows of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from serving.speedup import Key, Speedup, speedup


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
        return speedup(
            self._by_batch("slipstream_round_seconds_total"),
            {key: int(value) for key, value in self._by_batch("slipstream_round_tokens_total").items()},
            baseline_rounds=int(self.delta("slipstream_rounds_total", mode="control")),
            speculative_rounds=int(self.delta("slipstream_rounds_total", mode="speculative")),
        )

    def _by_batch(self, name: str) -> dict[Key, float]:
        sums: dict[Key, float] = defaultdict(float)
        for sample, sign in ((self.last, 1), (self.first, -1)):
            for (series, labels), value in sample.values.items():
                if series == name:
                    has = dict(labels)
                    # Others read a prompt beside.
                    if has["mode"] in ("speculative", "control"):
                        sums[int(has["batch"]), has["mode"] == "speculative"] += sign * value
        return sums


class History:
    """The scrapes of one run, oldest first."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def window(self, start_s: float, end_s: float) -> Window | None:
        """The window between the scrapes nearest to both times; None before there are two."""
        if len(self.samples) < 2:
            return None
        first, last = (min(self.samples, key=_distance_to(at)) for at in (start_s, end_s))
        return Window(first, last) if last.at_s > first.at_s else None


def _distance_to(at_s: float) -> Callable[[Sample], float]:
    return lambda sample: abs(sample.at_s - at_s)
