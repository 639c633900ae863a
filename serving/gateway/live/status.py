"""Read-only routes: models, health, metrics, the page's files, the OpenAPI document."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from serving.engine import ServedEngine
from serving.gateway.access import ACCESS, Access
from serving.gateway.errors import ApiError, reply, unavailable
from serving.gateway.openai.generation import check_model


def status_routes(engine: ServedEngine, registry: CollectorRegistry) -> APIRouter:
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

    # A path, because model names contain slashes.
    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        check_model(engine.info, model)
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


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    # So that after an upgrade no browser mixes old and new files.
    "cache-control": "no-cache",
}


def page_routes(root_path: str = "") -> APIRouter:
    """The live page at `/`: static files under a strict content security policy.

    Its links are relative, since a proxy may serve it below `root_path`.

    The browser loads scripts and styles only from this server, connects only to it, and no site may frame the page. So
    an admin key that is typed into the page cannot leak elsewhere.
    """
    router = APIRouter(include_in_schema=False)
    folder = files("serving.gateway.live") / "page"
    found = {file.name: file for file in folder.iterdir()}
    found |= {f"vendor/{file.name}": file for file in (folder / "vendor").iterdir()}
    # Other files in the folder, such as licences or an editor's backups, are not served.
    contents = {
        name: (file.read_bytes(), _TYPES[ending])
        for name, file in found.items()
        if (ending := name.rpartition(".")[2]) in _TYPES
    }

    index, _ = contents.pop("index.html")

    @router.get("/")
    async def page(request: Request) -> Response:
        if root_path and request.scope["raw_path"] == root_path.encode():
            # Without the final slash, relative links would resolve one level too high.
            return RedirectResponse(f"{root_path}/")
        return Response(index, media_type="text/html", headers=_HEADERS)

    @router.get("/page/{name:path}")
    async def page_file(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, "There is no such file.", code="not_found")
        content, kind = contents[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    return router


_SCHEMES = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "As `slipstream keys add` made it."},
    "adminKey": {"type": "http", "scheme": "bearer", "description": "The operator's key."},
}


def declare_keys(app: FastAPI, *, has_keys: bool) -> None:
    """Add to the OpenAPI document which key each operation needs; API keys only if this gateway has any."""
    made_of_routes = app.openapi

    def needed(access: Access | None) -> list[dict[str, list[str]]]:
        if access is Access.ADMIN:
            return [{"adminKey": []}]
        return [{"apiKey": []}] if has_keys and access is not Access.OPEN else []

    def document() -> dict[str, Any]:
        made = made_of_routes()
        made.setdefault("components", {})["securitySchemes"] = _SCHEMES
        for route in app.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                for operation in made["paths"][route.path_format].values():
                    operation["security"] = needed(ACCESS.get(route.path))
        return made

    app.openapi = document  # type: ignore[method-assign]
