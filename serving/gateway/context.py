"""What every endpoint of one gateway shares."""

from __future__ import annotations

from dataclasses import dataclass

from serving.engine import Engine
from serving.gateway.config import GatewaySettings
from serving.gateway.metrics import GatewayMetrics


@dataclass(frozen=True, kw_only=True)
class Gateway:
    engine: Engine
    settings: GatewaySettings
    metrics: GatewayMetrics
