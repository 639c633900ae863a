"""`POST /v1/target-version`: the target has moved, or is to move, for whoever has the admin key (see `access`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from serving.engine import TargetReport
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, reply, unavailable
from serving.gateway.openai.body import read_body
from serving.gateway.openai.schema import Strict, request_body
from speculator.errors import EngineBusyError, StreamError, TargetError

MAX_VERSION = 999_999_999


class Targets(Protocol):
    """What the endpoint needs of `serving.target.TargetDesk`."""

    def announce(self, version: int, path: str | None) -> TargetReport: ...


class TargetVersionBody(Strict):
    version: Annotated[int, Field(ge=1, le=MAX_VERSION)]
    """Newer than the one in service: the training step, for instance."""
    path: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Folder with the new weights, below the one that is allowed; left out where the engine moves by itself."""


def target_routes(targets: Targets, settings: GatewaySettings, on_moved: Callable[[int], object]) -> APIRouter:
    """`on_moved` is told, on the event loop, a version that has come into service."""
    router = APIRouter()

    @router.post("/v1/target-version", openapi_extra=request_body(TargetVersionBody))
    async def announce(request: Request) -> Response:
        """Answers once the new target is in service: {version, previous, stall_ms}."""
        body = await read_body(request, TargetVersionBody, max_bytes=settings.max_body_bytes)
        report = await run_in_threadpool(_announce, targets, body)
        on_moved(report.version)
        return reply(report)

    return router


def _announce(targets: Targets, body: TargetVersionBody) -> TargetReport:
    try:
        return targets.announce(body.version, body.path)
    except TargetError as error:
        raise ApiError(409, str(error), code="target_refused") from error
    except EngineBusyError as error:
        raise ApiError(409, "The target is being moved already.", code="target_is_moving") from error
    except StreamError as error:
        raise unavailable(str(error), code="target_unavailable") from error
