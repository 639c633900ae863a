"""What the page at `/` shows, as JSON, for whoever may read (see `access`): figures, draft versions, events.

The page asks once a second rather than listening to a stream of events: an open stream is an answer in flight, and
each open page would then hold up the gateway's shutdown for the whole grace period; a page that asks also finds a
restarted gateway by itself. The figures are read once a second by the server, however many pages ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from serving.engine import DraftHost
from serving.gateway.errors import reply
from serving.gateway.live.board import Board
from serving.gateway.live.figures import Figures
from serving.gateway.operator.admin import Drafts
from speculator.host import now_ms

SAMPLE_S = 1.0
HISTORY_POINTS = 300
"""Five minutes."""

log = structlog.get_logger(__name__)


class Live:
    """Reads the figures of one gateway; `lifespan` keeps it reading while the app is served."""

    def __init__(self, host: DraftHost, registry: CollectorRegistry, *, shows_tokens: bool) -> None:
        """`shows_tokens`: answers can say which of their tokens were proposed by whom."""
        self._host, self._shows_tokens = host, shows_tokens
        self._figures = Figures(registry, max_points=HISTORY_POINTS)
        self._started_ms = now_ms()

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._figures.clear()
        self._started_ms = now_ms()
        reading = asyncio.create_task(self._read_on())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def document(self, since_ms: int) -> dict[str, Any]:
        """Everything of this moment, and the history after `since_ms`."""
        figures, state, info = self._figures, self._host.health(), self._host.info
        if not figures.points:
            figures.look(self._host.draft_version)
        return {
            "started_ms": self._started_ms,
            "now_ms": now_ms(),
            "model": info.model,
            "context_length": info.context_length,
            "shows_tokens": self._shows_tokens,
            "health": {
                "alive": state.alive,
                "ready": state.ready,
                "running": state.num_running,
                "waiting": state.num_waiting,
            },
            "draft_version": self._host.draft_version,
            "speedup": figures.speed(),
            "totals": figures.totals(),
            "positions": figures.positions(),
            "history": [point for point in figures.points if point.at_ms > since_ms],
        }

    async def _read_on(self) -> None:
        while True:
            try:
                self._figures.look(self._host.draft_version)
            except Exception:
                # The points' times tell the page that they are old; the next look may succeed.
                log.exception("live_figures_not_read")
            await asyncio.sleep(SAMPLE_S)


def live_routes(live: Live, drafts: Drafts | None) -> APIRouter:
    router = APIRouter(prefix="/slipstream")
    board = None if drafts is None else Board(drafts)

    @router.get("/live")
    async def show_live(request: Request) -> Response:
        """Speedup, acceptance, traffic, and their history after `?since=<ms>`; what the engine lacks is null.

        `history` has arrays: at_ms, measured speedup, the ends of its 95% interval, tokens a verification, tokens a
        second, draft version. `started_ms` changes when the gateway is started again.
        """
        since = request.query_params.get("since", "")
        return reply(live.document(int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0))

    @router.get("/drafts")
    async def show_drafts() -> Response:
        """Draft versions with state and gate figures, newest first, and the last events; acting on them is /admin's.

        `available` is false where this gateway was started without a draft store.
        """
        if board is None:
            return reply({"available": False, "versions": [], "events": []})
        return reply(await board.document())

    return router
