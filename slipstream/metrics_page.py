"""docs/metrics.md, written from the collectors themselves: `python -m slipstream.metrics_page docs/metrics.md`.

What has no help text, or a name or a label that is not told here how to read, is a ValueError: new metrics are meant to
end up on the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.engine import EngineHealth
from serving.gateway.config import GatewaySettings
from serving.gateway.metrics import GatewayMetrics, HealthCollector
from serving.gateway.rollouts.book import RolloutBook
from serving.gateway.rollouts.metrics import RolloutCollector
from serving.installer import SwapLog
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.recorder import RecorderStats
from serving.sglang.collector import PoolCollector, SglangCollector
from serving.sglang.report import EngineReport
from serving.speedup import SpeedupMeter
from trainer.metrics import TrainerMetrics

PREFIX = "slipstream_"

UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "ratio": "ratio",
    "ratio_lower": "ratio",
    "ratio_upper": "ratio",
    "nats": "nats",
    "tokens": "tokens",
    "token": "seconds a token",
    "length": "tokens a verification",
    "role": "1 or 0",
    "timestamp_seconds": "Unix time in seconds",
    "version": "version number",
    "depth": "proposals",
    "accepted": "proposals",
    "proposals": "proposals",
    "looks": "looks",
    "rounds": "rounds",
    "verifications": "verifications",
    "swaps": "swaps",
    "moves": "moves",
    "verdicts": "trials",
    "reviews": "versions",
    "samples": "samples",
    "leases": "leases",
    "requests": "requests",
    "refusals": "requests",
    "fallbacks": "requests",
    "running": "requests",
    "waiting": "requests",
    "engines": "engines",
    "aborted": "requests",
    "in_flight": "requests",
    "traces": "traces",
    "captured": "traces",
    "appended": "traces",
    "dropped": "traces",
    "pending": "traces",
    "admissions": "traces",
    "evictions": "traces",
    "evicted": "groups",
    "unreadable": "groups",
    "entries": "stream entries",
    "steps": "steps",
    "decisions": "decisions",
    "positions": "positions",
    "errors": "errors",
    "failures": "failures",
    "alarms": "alarms",
    "restored": "times",
    "over": "times",
    **dict.fromkeys(("up", "fresh", "unchanged", "healthy", "alarm", "paused"), "1 or 0"),
}
"""What the end of a name says about its values. Times, sizes and shares are in base units: seconds, bytes, 0 to 1."""

LABELS = {
    "baseline": "one name, of what the speedup is measured against: `depth0_same_batch`",
    "model": "one name, of the model that the estimate rests on",
    "mode": "`speculative`, `control`; from the local engine also `with_prompt`",
    "batch": "1 to the number of slots (`--slots`); with SGLang `all`",
    "source": "`head`, `suffix`",
    "arm": "`both`, `suffix_only`",
    "position": "how many proposals deep, 1 to the deepest draft: `--depth`, `--suffix-depth`",
    "tenant": "the first 64 pairs of tenant and domain, half of them of one tenant at most, then `other`",
    "domain": "engine: as `tenant`; trainer: likewise the first SLIPSTREAM_TRAINER_MAX_DOMAINS; and `all`",
    "route": "the gateway's route templates, and `unmatched`",
    "code": "`api_key_missing`, `invalid_api_key`, `api_key_expired`, `key_is_read_only`, `key_is_not_read_only`, "
    "`admin_key_missing`, `admin_key_wrong`, `no_admin_key`, `not_declared`, `gateway_busy`, `engine_busy`, "
    "`concurrency_limit_exceeded`, `rate_limit_exceeded`, `host_not_allowed`",
    "status": "HTTP status codes that the gateway sends; 499: the client left",
    "reason": "`buffer_full`, `too_large`, `invalid`, `failed`, `closed`, `erased`, `expired`, "
    "`sampled_stream`, `sampled_memory`, `sampled_trainer`, `filtered`, `filter_failed`; with SGLang also `budget`, "
    "`unmarked`, `aborted`, `retracted`, `nothing_computed`, "
    "`inconsistent`, `target_moved`; of rollouts the words in the help text; of the plugin types of errors",
    "outcome": "the words in the help text",
    "operation": "`read`, `ack`, `lag`, `recent`, `take_over`, `dead_letter`, `rewards`",
    "role": "`canary`, `waiting`, `settled`; one at a time",
    "set": "`held_out`, `golden`",
    "bound": "`estimate`, `lower`, `upper`",
    "window": "`short`, `long`",
    "part": "`capture`, `depth`, `swap`",
    "state": "`undelivered`, `pending`, `acked`, `lost`, `erased`, `dead_lettered`, `expired`, `skipped`, "
    "`redelivered`, `foreign`; of rollouts `waiting`, `running`, `paused`",
}
"""What keeps the number of each label's values small."""

GATEWAY, LOCAL, SGLANG, TRAINER = "gateway", "local engine", "SGLang", "trainer"

_INTRODUCTION = """\
<!-- Written by `python -m slipstream.metrics_page docs/metrics.md` from the collectors; a test compares. -->

# Metrics

The gateway serves them at `/metrics`, its own and the engine's: the local engine counts in the same process, and with
SGLang the plugin's reports come through Redis, about a second old. The trainer serves its own where `slipstream train
--metrics-port 9101` asks for it, on the loopback interface unless SLIPSTREAM_TRAINER_METRICS_HOST says otherwise; of
several ranks on a machine each takes the next port. SGLang's own metrics (`sglang:…`) are on SGLang's port. `process_…`
and `python_…` are the Prometheus client's.

Counters end in `_total` and begin at 0 when a process starts, those with known label values with every one of them, so
that `increase()` sees the first event. A histogram `x` is `x_bucket`, `x_sum` and `x_count`. A gauge without a value
(the measured speedup before there was a plain round) is absent, not 0.

Recording rules and alerts are in `deploy/prometheus/rules`, the dashboards in `deploy/grafana`
([docs/dashboards.md](dashboards.md) has every query with a value from a live run).
"""


@dataclass(frozen=True, kw_only=True)
class Described:
    """One metric, as it is queried."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help_text: str
    exposed_by: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Raises ValueError for a name whose end says nothing."""
        words = self.name.removesuffix("_total").removeprefix(PREFIX).split("_")
        for start in range(len(words)):
            if (unit := UNITS.get("_".join(words[start:]))) is not None:
                return unit
        raise ValueError(f"the end of {self.name} is no unit: rename it, or add the word to UNITS")


def describe() -> list[Described]:
    """Every metric of ours, in the order in which its collectors name it.

    Raises ValueError where two exposers disagree about one.
    """
    found: dict[str, Described] = {}
    for exposer, registry in _registries().items():
        for one in _described(exposer, registry):
            known = found.get(one.name)
            if known is None:
                found[one.name] = one
                continue
            if (known.kind, known.labels, known.help_text) != (one.kind, one.labels, one.help_text):
                raise ValueError(f"{one.name} differs between {known.exposed_by} and {exposer}")
            found[one.name] = Described(
                name=one.name,
                kind=one.kind,
                labels=one.labels,
                help_text=one.help_text,
                exposed_by=(*known.exposed_by, exposer),
            )
    return list(found.values())


def render(metrics: list[Described]) -> str:
    """The page. Raises ValueError for a metric without help, unit or bounded labels."""
    parts = [_INTRODUCTION]
    for title, exposers in (("Gateway", {GATEWAY}), ("Engine", {LOCAL, SGLANG}), ("Trainer", {TRAINER})):
        parts.append(
            f"## {title}\n\n| name | type | labels | unit | what it says | exposed by |\n|---|---|---|---|---|---|"
        )
        parts += [_row(metric) for metric in metrics if exposers & set(metric.exposed_by)]
        parts.append("")
    parts.append("## Labels\n\n| label | values |\n|---|---|")
    used = {label for metric in metrics for label in metric.labels}
    parts += [f"| `{label}` | {values} |" for label, values in LABELS.items() if label in used]
    return "\n".join(parts) + "\n"


def _row(metric: Described) -> str:
    for label in metric.labels:
        if label not in LABELS:
            raise ValueError(f"nothing says how many values {label!r} of {metric.name} can have: add it to LABELS")
    if not metric.help_text:
        raise ValueError(f"{metric.name} has no help text")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    exposers = ", ".join(metric.exposed_by)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.help_text} | {exposers} |"


def _registries() -> dict[str, CollectorRegistry]:
    """The collectors as the services register them, each beside nothing else."""
    registries = {name: CollectorRegistry() for name in (GATEWAY, LOCAL, SGLANG, TRAINER)}
    GatewayMetrics(registries[GATEWAY])
    health = EngineHealth(alive=True, ready=True, num_running=0, num_waiting=0)
    registries[GATEWAY].register(HealthCollector(lambda: health))
    registries[GATEWAY].register(RolloutCollector(RolloutBook([], GatewaySettings())))
    EngineMetrics(registries[LOCAL])
    GroupTextMetrics(registries[LOCAL])
    recorder = RecorderStats(
        captured=0, appended=0, dropped_by_reason={}, pending=0, bytes_appended=0, tokens_appended=0
    )
    registries[LOCAL].register(ServingCollector(SpeedupMeter(), lambda: recorder))
    registries[LOCAL].register(VerdictCollector(SwapLog))
    registries[SGLANG].register(SglangCollector(lambda: EngineReport.parse({}), lambda: 0))
    registries[SGLANG].register(PoolCollector(lambda: 0, lambda: 0))
    for name in (LOCAL, SGLANG):
        TargetMetrics(registries[name])
    TrainerMetrics(registries[TRAINER])
    return registries


def _described(exposer: str, registry: CollectorRegistry) -> Iterable[Described]:
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith(PREFIX):
                yield Described(
                    name=f"{family.name}_total" if family.type == "counter" else family.name,
                    kind=family.type,
                    labels=_labels(collector, family),
                    help_text=family.documentation,
                    exposed_by=(exposer,),
                )


def _labels(collector: Collector, family: Metric) -> tuple[str, ...]:
    """The client knows them also where there is no sample yet, and does not tell."""
    owner = collector if isinstance(collector, MetricWrapperBase) else family
    return tuple(getattr(owner, "_labelnames", ()))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(describe()))
