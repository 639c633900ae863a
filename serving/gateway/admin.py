"""The operator's endpoints, which the admin key opens: draft versions, and a new version of the target.

Every request is answered off the event loop, since the store and Redis may lie across a network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from serving.engine import TargetReport
from serving.gateway.body import Strict, read_body, request_body
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, reply, unavailable
from speculator.errors import (
    DraftError,
    EngineBusyError,
    EngineDeadError,
    EngineError,
    LifecycleError,
    RequestError,
    StoreError,
    StreamError,
    TargetError,
    UnknownDraftError,
)

ACTOR = "operator:admin"
MAX_VERSION = 999_999_999
_MAX_EVENTS = 1000


class Drafts(Protocol):
    """What the endpoints need of `speculator.versions.operator.DraftOperator`; all results can be encoded as JSON."""

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
        return await _answer(drafts.events, min(count, _MAX_EVENTS))

    @router.get("/{version}")
    async def show_draft(version: str) -> Response:
        return await _answer(drafts.show, _number(version, "version"))

    @router.get("/{a}/diff/{b}")
    async def compare_drafts(a: str, b: str) -> Response:
        return await _answer(drafts.diff, _number(a, "a"), _number(b, "b"))

    @router.post("/rollback", openapi_extra=request_body(RollbackBody))
    async def roll_back(request: Request) -> Response:
        body = await read_body(request, RollbackBody, max_bytes=settings.max_body_bytes)
        return await _answer(drafts.rollback, actor=ACTOR, reason=body.reason, version=body.version)

    @router.post("/unpin")
    async def unpin() -> Response:
        return await _answer(drafts.unpin, actor=ACTOR)

    @router.post("/{version}/promote")
    async def promote(version: str) -> Response:
        return await _answer(drafts.promote, _number(version, "version"), actor=ACTOR)

    @router.post("/{version}/pin")
    async def pin(version: str) -> Response:
        return await _answer(drafts.pin, _number(version, "version"), actor=ACTOR)

    return router


async def _answer(call: Callable[..., Any], *numbers: int, **named: Any) -> Response:
    """Run `call` in a thread and answer with its result. Messages of store, states and Redis are passed on unchanged:
    they are written for operators.
    """
    try:
        return reply(await run_in_threadpool(call, *numbers, **named))
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


class Targets(Protocol):
    """What the endpoint needs of `serving.target.TargetUpdater`."""

    def announce(self, version: int, path: str | None) -> TargetReport: ...


class TargetVersionBody(Strict):
    version: Annotated[int, Field(ge=1, le=MAX_VERSION)]
    """Newer than the one in service: the training step, for instance."""
    path: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Folder with the new weights, below the one that is allowed; left out where the engine moves by itself."""


def target_routes(targets: Targets, settings: GatewaySettings, on_target_update: Callable[[int], object]) -> APIRouter:
    """`on_target_update` is called on the event loop with each version that has come into service."""
    router = APIRouter()

    @router.post("/v1/target-version", openapi_extra=request_body(TargetVersionBody))
    async def announce(request: Request) -> Response:
        """Answers once the new target is in service: {version, previous, stall_ms}."""
        body = await read_body(request, TargetVersionBody, max_bytes=settings.max_body_bytes)
        try:
            report = await run_in_threadpool(targets.announce, body.version, body.path)
        except TargetError as error:
            raise ApiError(409, str(error), code="target_refused") from error
        except EngineBusyError as error:
            raise ApiError(
                409, "Another update of the target runs: try again when it has ended.", code="target_is_moving"
            ) from error
        except (EngineDeadError, RequestError):
            raise
        except (EngineError, StreamError) as error:
            # The message names the server that did not take the weights.
            raise unavailable(str(error), code="target_unavailable") from error
        on_target_update(report.version)
        return reply(report)

    return router
