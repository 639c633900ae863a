"""The operator's endpoints: draft versions and what happened to them, for whoever has the admin key (see `access`).

Every request is answered off the event loop: a store may lie on a network, and so does Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, reply, unavailable
from serving.gateway.openai.body import read_body
from serving.gateway.openai.schema import Strict, request_body
from speculator.errors import DraftError, LifecycleError, StoreError, StreamError, UnknownDraftError

ACTOR = "operator:admin"
_MAX_EVENTS = 1000

T = TypeVar("T")


class Drafts(Protocol):
    """What the endpoints need of `speculator.versions.operator.DraftDesk`; whatever it returns can be encoded as
    JSON."""

    def overview(self) -> Any: ...

    def show(self, version: int) -> Any: ...

    def diff(self, a: int, b: int) -> Any: ...

    def events(self, count: int) -> Any: ...

    def promote(self, version: int, *, actor: str) -> Any: ...

    def rollback(self, *, actor: str, reason: str, version: int | None = None) -> Any: ...

    def pin(self, version: int, *, actor: str) -> Any: ...

    def unpin(self, *, actor: str) -> Any: ...


class RollbackBody(Strict):
    version: Annotated[int, Field(ge=1)] | None = None
    """Default: the version that engines should run."""
    reason: Annotated[str, Field(min_length=1, max_length=500)]


def admin_routes(drafts: Drafts, settings: GatewaySettings) -> APIRouter:
    router = APIRouter(prefix="/admin/drafts")

    @router.get("")
    async def list_drafts() -> Response:
        return await _answer(drafts.overview)

    @router.get("/events")
    async def list_events(request: Request) -> Response:
        count = _number(request.query_params.get("count", "100"), "count")
        return await _answer(lambda: drafts.events(min(count, _MAX_EVENTS)))

    @router.get("/{version}")
    async def show_draft(version: str) -> Response:
        number = _number(version, "version")
        return await _answer(lambda: drafts.show(number))

    @router.get("/{a}/diff/{b}")
    async def compare_drafts(a: str, b: str) -> Response:
        first, second = _number(a, "a"), _number(b, "b")
        return await _answer(lambda: drafts.diff(first, second))

    @router.post("/rollback", openapi_extra=request_body(RollbackBody))
    async def roll_back(request: Request) -> Response:
        body = await read_body(request, RollbackBody, max_bytes=settings.max_body_bytes)
        return await _answer(lambda: drafts.rollback(actor=ACTOR, reason=body.reason, version=body.version))

    @router.post("/unpin")
    async def unpin() -> Response:
        return await _answer(lambda: drafts.unpin(actor=ACTOR))

    @router.post("/{version}/promote")
    async def promote(version: str) -> Response:
        number = _number(version, "version")
        return await _answer(lambda: drafts.promote(number, actor=ACTOR))

    @router.post("/{version}/pin")
    async def pin(version: str) -> Response:
        number = _number(version, "version")
        return await _answer(lambda: drafts.pin(number, actor=ACTOR))

    return router


async def _answer(ask: Callable[[], Any]) -> Response:
    document = await run_in_threadpool(_translated, ask)
    return reply(document)


def _translated(ask: Callable[[], T]) -> T:
    """What the store, its states and Redis refuse, in words that were written for operators."""
    try:
        return ask()
    except UnknownDraftError as error:
        raise ApiError(404, str(error), code="draft_not_found", param="version") from error
    except (LifecycleError, DraftError) as error:
        raise ApiError(409, str(error), code="draft_not_usable", param="version") from error
    except (StoreError, StreamError) as error:
        raise unavailable(str(error), code="drafts_unavailable") from error


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ApiError(400, f"{name} must be a whole number.", code="invalid_value", param=name)
    return int(text)
