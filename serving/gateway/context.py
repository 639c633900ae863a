"""What every endpoint of one gateway shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine import Engine
from serving.gateway.config import GatewaySettings
from serving.gateway.interactive import Interactive
from serving.gateway.metrics import GatewayMetrics


@dataclass(frozen=True, kw_only=True)
class Gateway:
    engine: Engine
    settings: GatewaySettings
    metrics: GatewayMetrics
    interactive: Interactive = field(default_factory=Interactive)
