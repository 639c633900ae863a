"""What /openapi.json says about keys; everything else in it is the framework's reading of the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from serving.gateway.auth.access import ACCESS, Access

_API_KEY, _ADMIN_KEY = "apiKey", "adminKey"
_SCHEMES = {
    _API_KEY: {"type": "http", "scheme": "bearer", "description": "As `slipstream keys add` made it."},
    _ADMIN_KEY: {"type": "http", "scheme": "bearer", "description": "The operator's key."},
}


def declare_keys(app: FastAPI, *, has_keys: bool) -> None:
    """Have the document name the key of each operation that asks for one; API keys only where this gateway has any."""
    made_of_routes = app.openapi

    def document() -> dict[str, Any]:
        made = made_of_routes()
        made.setdefault("components", {})["securitySchemes"] = _SCHEMES
        for route in app.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                for operation in made["paths"][route.path_format].values():
                    operation["security"] = _needed(ACCESS.get(route.path), has_keys)
        return made

    app.openapi = document  # type: ignore[method-assign]


def _needed(access: Access | None, has_keys: bool) -> list[dict[str, list[str]]]:
    if access is Access.OPEN:
        return []
    if access is Access.ADMIN:
        return [{_ADMIN_KEY: []}]
    return [{_API_KEY: []}] if has_keys else []
