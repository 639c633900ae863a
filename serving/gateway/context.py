"""What every endpoint of one gateway shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine import Engine
from serving.gateway.config import GatewaySettings
from serving.gateway.live.metrics import GatewayMetrics
from serving.gateway.rollouts.interactive import Interactive


@dataclass(frozen=True, kw_only=True)
class Gateway:
    engine: Engine
    settings: GatewaySettings
    metrics: GatewayMetrics
    interactive: Interactive = field(default_factory=Interactive)
