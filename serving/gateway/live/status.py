"""What is served here and how it is doing: models, liveness, readiness, metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from serving.engine import DraftHost
from serving.gateway.errors import ApiError, reply, unavailable


def status_routes(engine: DraftHost, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter()
    created_s = int(time.time())

    def described_model() -> dict[str, Any]:
        info = engine.info
        return {
            "id": info.model,
            "object": "model",
            "created": created_s,
            "owned_by": "slipstream",
            "max_model_len": info.context_length,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        return reply({"object": "list", "data": [described_model()]})

    # A path, because names of models have slashes in them.
    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        if model != engine.info.model:
            message = f"This server does not serve the model {model[:100]!r}: it serves {engine.info.model!r}."
            raise ApiError(404, message, code="model_not_found", param="model")
        return reply(described_model())

    @router.get("/health")
    async def health() -> Response:
        state = engine.health()
        if not state.alive:
            raise unavailable(f"The engine is dead: {state.detail}", code="engine_dead")
        return reply({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        state = engine.health()
        if not (state.alive and state.ready):
            raise unavailable(f"The engine is not ready: {state.detail}", code="engine_not_ready")
        return reply(
            {
                "status": "ready",
                "draft_version": engine.draft_version,
                "num_running": state.num_running,
                "num_waiting": state.num_waiting,
            }
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
