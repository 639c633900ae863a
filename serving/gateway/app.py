"""Puts the gateway together."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException

from serving.engine import Engine
from serving.gateway.chat import chat_routes
from serving.gateway.completions import completion_routes
from serving.gateway.config import GatewaySettings
from serving.gateway.context import Gateway
from serving.gateway.errors import error_response
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.status import status_routes
from serving.gateway.telemetry import Telemetry, exchange_of


async def _routing_error(request: Request, failure: Exception) -> Response:
    """Unknown path, wrong method: the framework's own answer to those is not the envelope."""
    return error_response(exchange_of(request).fail(failure))


def create_app(engine: Engine, *, settings: GatewaySettings, registry: CollectorRegistry = REGISTRY) -> FastAPI:
    """The OpenAI-compatible app in front of `engine`.

    Its collectors are added to `registry`, and `/metrics` shows all of that registry; raises ValueError where the
    registry already serves a gateway.
    """
    gateway = Gateway(engine=engine, settings=settings, metrics=GatewayMetrics(registry))
    # The framework's pages of documentation load scripts from elsewhere; the schema itself stays at /openapi.json.
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(chat_routes(gateway))
    app.include_router(completion_routes(gateway))
    app.include_router(status_routes(gateway, registry))
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(Telemetry, metrics=gateway.metrics)
    return app
