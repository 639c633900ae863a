"""The environment: every setting can be read, and no variable is there that nothing reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path

from slipstream.doctor.finding import Finding, failed, ok, skipped, warning
from slipstream.settings import PREFIX, unknown_variables
from speculator.errors import ConfigError

COMPOSE_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("MODEL", "MODEL_NAME", "MODELS", "CAPTURE", "DEPTH", "SGLANG_GPU", "SGLANG_MEMORY", "SGLANG_ARGS"),
        *("TRAINER_GPU", "REDIS_MEMORY", "PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "METRICS_KEPT"),
        *("TRACE_TTL_HOURS", "CAPTURE_FILTER", "CAPTURE_FLOOR", "DROP_PERSONAL_DATA"),
    )
)
"""Of .env.example: docker compose reads these, and `slipstream` some of them."""


def check_settings(known: Set[str]) -> Iterator[Finding]:
    from serving.gateway.config import load_settings as load_gateway
    from serving.sglang.settings import is_enabled
    from serving.sglang.settings import load_settings as load_plugin
    from slipstream.logs import load_settings as load_logs
    from speculator.tracing import is_wanted as load_spans
    from trainer.config import load_config

    nowhere = Path()
    num_faults = 0
    for load in (
        load_logs,
        load_spans,
        load_gateway,
        is_enabled,
        load_plugin,
        lambda: load_config(model_dir=nowhere, redis_url="", model_key="", store_dir=nowhere, state_dir=nowhere),
    ):
        try:
            load()
        except ConfigError as error:
            num_faults += 1
            yield failed("settings", str(error))
    for name in sorted((COMPOSE_VARIABLES - known) & os.environ.keys()):
        yield skipped("settings", f"{name} is docker compose's: nothing here reads it")
    unknown = unknown_variables(os.environ, known | COMPOSE_VARIABLES)
    for name, nearest in unknown.items():
        fix = f"is {nearest} meant?" if nearest else "unset it, docs/configuration.md has all that are read"
        yield warning("settings", f"nothing reads {name}: {fix}")
    if not num_faults and not unknown:
        yield ok("settings", f"{sum(name in known for name in os.environ)} {PREFIX}* variables set, all of them usable")
