"""Wait until the servers of the demo and of benchmarks are ready, and parse their /metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving.speedup import HEAD_AB_ARMS, Sums
from slipstream.children import Child
from speculator.errors import ConfigError

_READY_TIMEOUT_S = 180.0


def wait_until_ready(url: str, children: Sequence[Child], *, timeout_s: float = _READY_TIMEOUT_S) -> None:
    """Wait until the gateway accepts requests.

    Raises ChildError where one of the children ends, ConfigError where it takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for child in children:
            child.check()
        # No proxy: the gateway is on this machine.
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise ConfigError(f"the gateway was not ready after {timeout_s:.0f} s: see `slipstream doctor`")


_COUNTED = ("_total", "_count", "_sum", "_bucket")
"""Suffixes of series that only grow."""


@dataclass(frozen=True)
class Scrape:
    """All series of one scrape: (name, sorted labels) → value. `at_s` is seconds since the traffic began."""

    at_s: float
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(repr=False)

    @classmethod
    def parse(cls, at_s: float, text: str) -> Scrape:
        values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(at_s, values)

    def since(self, first: Scrape) -> Scrape:
        """Increase of all series since `first`; `at_s` is the number of seconds between."""
        gained = {series: value - first.values.get(series, 0.0) for series, value in self.values.items()}
        return Scrape(self.at_s - first.at_s, gained)

    def continued_from(self, before: Scrape) -> Scrape:
        """This scrape with the counters of `before` added, after the engine was restarted and began at 0."""
        counted = {series: value for series, value in before.values.items() if series[0].endswith(_COUNTED)}
        together = {series: self.values.get(series, 0.0) + value for series, value in counted.items()}
        return Scrape(self.at_s, {**self.values, **together})

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` that carry `labels`."""
        return sum(value for (series, has), value in self.values.items() if series == name and labels.items() <= {*has})

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification of a drafting round, bonus included; control rounds do not count."""
        verifications = self.total("slipstream_verifications_total")
        return self.total("slipstream_verified_tokens_total") / verifications if verifications else None

    @property
    def head_ab(self) -> Sums:
        """Time and tokens of rounds with remembered text alone (baseline) and of those with the draft head as well."""
        return self._sums("slipstream_head_ab_rounds", "slipstream_head_ab_round_{}", "arm", HEAD_AB_ARMS)

    @property
    def rounds_ab(self) -> Sums:
        """Time and tokens of control rounds (baseline) and of drafting rounds."""
        return self._sums("slipstream_rounds", "slipstream_round_{}", "mode", ("control", "speculative"))

    def _sums(self, counted: str, measured: str, label: str, arms: Sequence[str]) -> Sums:
        """Time and tokens by batch size; `arms` are the values of `label`, the baseline's first."""
        sums = Sums()
        for (series, labels), rounds in self.values.items():
            of = dict(labels)
            if series == f"{counted}_total" and of[label] in arms:
                # A scrape during the first round of a batch size may have only one of the two series.
                seconds, tokens = (
                    self.values.get((f"{measured.format(what)}_total", labels), 0.0) for what in ("seconds", "tokens")
                )
                sums.add(int(of["batch"]), of[label] == arms[1], seconds, int(tokens), int(rounds))
        return sums
