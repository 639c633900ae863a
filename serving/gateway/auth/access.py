"""Who may reach which route. What is not in the table below is reached by nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.gateway.auth.credentials import bearer, check_admin_key, check_host, unauthorised
from serving.gateway.auth.keyring import Keyring
from serving.gateway.auth.keys import ApiKey
from serving.gateway.auth.quota import Quota
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, engine_busy
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai.body import discard_body
from serving.gateway.openai.limits import deadline
from serving.gateway.telemetry import exchange_of


class Access(StrEnum):
    OPEN = "open"
    """Everyone."""
    READ = "read"
    """Any API key; everyone where this gateway has no API keys."""
    WATCH = "watch"
    """A read-only API key, since what is told names all tenants; everyone where there are no API keys."""
    GENERATE = "generate"
    """An API key that is not read-only, within its limits; everyone where there are no API keys."""
    QUEUE = "queue"
    """The same, also while the engine is full: what is asked for waits beside its queue."""
    OWN = "own"
    """The same, beyond the key's limits too: what was begun has to be looked after, or it would be cancelled."""
    ADMIN = "admin"
    """The admin key; nobody where there is none."""


_TRANSFER_S = 120.0
"""For a body to arrive and an answer to leave, beside the time for making it."""

ACCESS = {
    "/v1/chat/completions": Access.GENERATE,
    "/v1/completions": Access.GENERATE,
    # What a rollout has said is for the tenant that asked: a key that only reads sees none of it.
    "/v1/rollouts": Access.QUEUE,
    "/v1/rollouts/{rollout_id}": Access.OWN,
    "/v1/rollouts/{rollout_id}/samples": Access.OWN,
    "/v1/rollouts/{rollout_id}/rewards": Access.OWN,
    "/v1/models": Access.READ,
    "/v1/models/{model:path}": Access.READ,
    "/openapi.json": Access.READ,
    "/metrics": Access.WATCH,
    "/slipstream/live": Access.READ,
    "/slipstream/drafts": Access.READ,
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    # The page without its figures: it asks for a key itself.
    "/": Access.OPEN,
    "/page/{name:path}": Access.OPEN,
    "/v1/target-version": Access.ADMIN,
    "/admin/drafts": Access.ADMIN,
    "/admin/drafts/events": Access.ADMIN,
    "/admin/drafts/rollback": Access.ADMIN,
    "/admin/drafts/unpin": Access.ADMIN,
    "/admin/drafts/{version}": Access.ADMIN,
    "/admin/drafts/{version}/promote": Access.ADMIN,
    "/admin/drafts/{version}/pin": Access.ADMIN,
    "/admin/drafts/{a}/diff/{b}": Access.ADMIN,
}
"""By the template of the route."""


class Gate:
    """ASGI middleware: a request goes on to its route only where its key opens that, and within the key's limits."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        keyring: Keyring | None,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """`routes`: the app's own list, later additions included. Without a keyring, who reaches the port is let in.

        While the engine `is_full`, nothing is generated: an overload should cost little more than saying so.
        """
        self.app = app
        self._routes, self._keyring, self._metrics, self._is_full = routes, keyring, metrics, is_full
        self._admin_key, self._is_trusted = settings.admin_key, settings.auth_elsewhere
        self._quota = Quota(settings.max_in_flight, max_of_key=settings.max_in_flight_of_key)
        self._limit_s = settings.max_request_s + _TRANSFER_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        scope["path"] = _usual(scope["path"])
        route = _chosen(self._routes, scope)
        if route is None:
            raise HTTPException(404)
        scope["route"] = route  # a refusal is logged and counted under it, too
        request = Request(scope)
        try:
            release = self._admit(route, request)
        except ApiError as refusal:
            self._metrics.refusals.labels(refusal.code).inc()
            await discard_body(receive)
            raise
        try:
            async with deadline(self._limit_s) as limit:
                exchange_of(request).limit = limit
                await self.app(scope, receive, send)
        finally:
            release()

    def _admit(self, route: BaseRoute, request: Request) -> Callable[[], None]:
        """What is to be called at the request's end; raises ApiError (401, 403, 429) for one that may not go on."""
        access = ACCESS.get(getattr(route, "path", ""))
        if access is Access.OPEN:
            return _nothing
        if access is Access.ADMIN:
            check_admin_key(request, self._admin_key)
            return _nothing
        if access is Access.READ:
            self._key_of(request)
            return _nothing
        if access is Access.WATCH:
            key = self._key_of(request)
            if key is not None and not key.read_only:
                message = "This names other tenants: a key that `slipstream keys add --read-only` made opens it."
                raise ApiError(403, message, code="key_is_not_read_only")
            return _nothing
        if access in (Access.GENERATE, Access.QUEUE, Access.OWN):
            key = self._writing_key_of(request)
            if access is Access.GENERATE and self._is_full():
                raise engine_busy()
            return _nothing if access is Access.OWN else self._quota.take(key)
        raise ApiError(403, "Nobody may reach this: it is not in the gateway's table of access.", code="not_declared")

    def _writing_key_of(self, request: Request) -> ApiKey | None:
        """One that is not read-only, with its tenant noted for the route."""
        key = self._key_of(request)
        if key is not None:
            if key.read_only:
                raise ApiError(403, "This key may read, and not generate.", code="key_is_read_only")
            exchange = exchange_of(request)
            exchange.tenant, exchange.may_capture = key.tenant, key.capture
        return key

    def _key_of(self, request: Request) -> ApiKey | None:
        """None where this gateway has no keys; raises ApiError (401, 403)."""
        if self._keyring is None:
            if not self._is_trusted:
                check_host(request)
            return None
        secret = bearer(request)
        if secret is None:
            raise unauthorised(
                "This needs an API key: send the header 'authorization: Bearer <key>'.", "api_key_missing"
            )
        key = self._keyring.find(secret)
        if key is None:
            raise unauthorised("This API key is not known here, or was revoked.", "invalid_api_key")
        if key.is_expired(time.time()):
            raise unauthorised("This API key has expired.", "api_key_expired")
        return key


def _usual(path: str) -> str:
    """The path as the routes have it: without the server's address, and without slashes too many."""
    if not path.startswith("/"):
        path = path.partition("://")[2].partition("/")[2]
    return "/" + "/".join(filter(None, path.split("/")))


def _chosen(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route that the router will choose: the first whose path and method match, or else whose path does."""
    of_another_method = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        if match is Match.PARTIAL and of_another_method is None:
            of_another_method = route
    return of_another_method


def _nothing() -> None:
    """Nothing was counted in."""
