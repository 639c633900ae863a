"""Access control: which key opens which route, and how many requests it may make.

A route that is not in the table `ACCESS` is closed to all. Quotas are counted in this process, on the event loop:
two gateways with one key file count separately.
"""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.gateway.body import discard_body
from serving.gateway.config import ENV_PREFIX, GatewaySettings
from serving.gateway.errors import ApiError, deadline, engine_busy
from serving.gateway.keys import ApiKey, Keyring, OneKey
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.telemetry import exchange_of


class Access(StrEnum):
    """Who may reach a route."""

    OPEN = "open"
    """Everyone."""
    READ = "read"
    """Any API key; everyone where this gateway has no API keys."""
    WATCH = "watch"
    """A read-only API key, since the answers name all tenants; everyone where there are no API keys."""
    GENERATE = "generate"
    """An API key that is not read-only, within its limits; everyone where there are no API keys."""
    QUEUE = "queue"
    """As GENERATE, also while the engine is full: the work waits outside the engine's queue, or needs no slot."""
    OWN = "own"
    """As QUEUE, and not counted against the key's limits: a client must be able to follow what it has begun."""
    ADMIN = "admin"
    """The admin key; nobody where there is none."""


ACCESS = {
    "/v1/chat/completions": Access.GENERATE,
    "/v1/completions": Access.GENERATE,
    "/v1/responses": Access.GENERATE,
    "/v1/messages": Access.GENERATE,
    "/v1/embeddings": Access.GENERATE,
    "/v1/messages/count_tokens": Access.QUEUE,
    "/tokenize": Access.QUEUE,
    "/detokenize": Access.QUEUE,
    "/v1/tokenize": Access.QUEUE,
    "/v1/detokenize": Access.QUEUE,
    # The text of a rollout is for its tenant alone: a read-only key does not see it.
    "/v1/rollouts": Access.QUEUE,
    "/v1/rollouts/{rollout_id}": Access.OWN,
    "/v1/rollouts/{rollout_id}/samples": Access.OWN,
    "/v1/rollouts/{rollout_id}/rewards": Access.OWN,
    "/v1/rollouts/{rollout_id}/observations": Access.OWN,
    "/v1/models": Access.READ,
    "/v1/models/{model:path}": Access.READ,
    "/openapi.json": Access.READ,
    "/metrics": Access.WATCH,
    "/slipstream/live": Access.READ,
    "/slipstream/drafts": Access.READ,
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    # The page without its figures: its script asks the user for a key.
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
"""Access by the template of the route."""


class AccessControl:
    """ASGI middleware: lets a request through only if its key opens the route, within the key's limits."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        keyring: Keyring | OneKey | None,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        is_full: Callable[[], bool] = lambda: False,
        transfer_s: float = 120.0,
    ) -> None:
        """`routes`: the app's own list, later additions included. Without a keyring everyone is let in.

        While the engine `is_full`, requests to generate are refused before they are read, so that an overload costs
        little. `transfer_s` is the time for body and answer to travel, on top of the time for generating.
        """
        self.app = app
        self._routes, self._keyring, self._metrics, self._is_full = routes, keyring, metrics, is_full
        self._admin_key, self._is_trusted = settings.admin_key, settings.auth_elsewhere
        self._quota = Quota(settings.max_in_flight, max_of_key=settings.max_in_flight_of_key)
        self._limit_s, self._comment_s = settings.max_request_s + transfer_s, settings.stream_comment_s
        self._root_path = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        route = None
        for path in _paths(_normalised(scope["path"]), self._root_path):
            scope["path"] = path
            if (route := _route_of(self._routes, scope)) is not None:
                break
        if route is None:
            if path in ACCESS:
                # For the envelope of its protocol.
                exchange_of(Request(scope)).route = path
                message = "This path is not served with this engine and these settings; /v1/chat/completions always is."
                raise ApiError(404, message, code="not_found")
            fix = "the base URL of OpenAI's clients ends in /v1, and that of Anthropic's does not"
            raise ApiError(404, f"There is no such path here, see /openapi.json: {fix}.", code="not_found")
        request = Request(scope)
        exchange = exchange_of(request)
        # Set first, so that a refusal is logged and counted under its route, too.
        exchange.route, exchange.comment_s = getattr(route, "path", ""), self._comment_s
        try:
            release = self._admit(request)
        except ApiError as refusal:
            self._metrics.refusals.labels(refusal.code).inc()
            await discard_body(receive)
            raise
        try:
            async with deadline(self._limit_s) as limit:
                exchange.limit = limit
                await self.app(scope, receive, send)
        finally:
            release()

    def _admit(self, request: Request) -> Callable[[], None]:
        """Admit a request; returns what to call at its end. Raises ApiError (401, 403, 429) for a refused one."""
        match ACCESS.get(exchange_of(request).route):
            case Access.OPEN:
                pass
            case Access.ADMIN:
                check_admin_key(request, self._admin_key)
            case Access.READ:
                self._key_of(request)
            case Access.WATCH:
                key = self._key_of(request)
                if key is not None and not key.read_only and self._keyring is not None and self._keyring.has_tenants:
                    message = "This names other tenants: use a key made with `slipstream keys add --read-only`."
                    raise ApiError(403, message, code="key_is_not_read_only")
            case Access.OWN:
                self._writing_key_of(request)
            case Access.GENERATE | Access.QUEUE as access:
                key = self._writing_key_of(request)
                if access is Access.GENERATE and self._is_full():
                    raise engine_busy()
                return self._quota.take(key)
            case None:
                message = "This route is closed: it is missing in the gateway's access table."
                raise ApiError(403, message, code="not_declared")
        return lambda: None

    def _writing_key_of(self, request: Request) -> ApiKey | None:
        """The request's key, if it may generate; notes its tenant for the route."""
        key = self._key_of(request)
        if key is not None:
            if key.read_only:
                raise ApiError(403, "This key is read-only: it may not generate.", code="key_is_read_only")
            exchange = exchange_of(request)
            exchange.tenant, exchange.may_capture = key.tenant, key.capture
        return key

    def _key_of(self, request: Request) -> ApiKey | None:
        """The request's key; None where this gateway has no keys. Raises ApiError (401, 403)."""
        if self._keyring is None:
            if not self._is_trusted:
                check_host(request)
            return None
        secret = bearer(request) or _anthropic_key(request)
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


def _normalised(path: str) -> str:
    """The path as the routes have it: without the server's address, and without repeated slashes."""
    if not path.startswith("/"):
        path = path.partition("://")[2].partition("/")[2]
    return "/" + "/".join(filter(None, path.split("/")))


def _paths(path: str, root_path: str) -> Iterator[str]:
    """The paths to try for a request: without the prefix that a proxy may have left in, then as it is.

    Both are tried because a route of the gateway may itself begin with the prefix.
    """
    if root_path and f"{path}/".startswith(f"{root_path}/"):
        yield path.removeprefix(root_path) or "/"
    yield path


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """The route that the router will choose: the first whose path and method match, or else whose path does."""
    of_another_method = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route
        if match is Match.PARTIAL and of_another_method is None:
            of_another_method = route
    return of_another_method


def bearer(request: Request) -> bytes | None:
    """The bearer token of a request; None where there is none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers come decoded as Latin-1.
    return given.encode("latin-1") if scheme.lower() == "bearer" and given else None


def _anthropic_key(request: Request) -> bytes | None:
    """The key in the header that Anthropic's clients use, also when they ask for the models."""
    return request.headers.get("x-api-key", "").encode("latin-1") or None


def unauthorised(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def check_admin_key(request: Request, key: SecretStr | None) -> None:
    """Raise ApiError (401, 403) unless the request has the admin key; nothing opens a gateway that has none."""
    if key is None:
        message = f"This gateway has no admin key: set {ENV_PREFIX}ADMIN_KEY and restart it."
        raise ApiError(403, message, code="no_admin_key")
    given = bearer(request)
    if given is None:
        message = "This needs the admin key: send the header 'authorization: Bearer <key>'."
        raise unauthorised(message, "admin_key_missing")
    # As bytes, since a key need not be ASCII; in constant time, so that timing reveals nothing about the key.
    if not hmac.compare_digest(given, key.get_secret_value().encode()):
        raise ApiError(403, "This is not the admin key.", code="admin_key_wrong")


_OWN_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")
"""Names of this machine, for itself and for its containers, that nobody can have on the web."""


def check_host(request: Request) -> None:
    """Raise ApiError (403) for a Host header that is a foreign name: protects against DNS rebinding.

    Without keys the gateway trusts whoever reaches loopback. A page on the web can make its own name resolve to
    127.0.0.1; the browser then takes page and gateway for one site.
    """
    with suppress(ValueError):
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if host in _OWN_NAMES or ip_address(host):
            return
    message = "Without API keys this gateway answers only under localhost and IP addresses, not names: give it keys."
    raise ApiError(403, message, code="host_not_allowed")


_WINDOW_S = 60.0
_SLOT_RETRY_S = 1
"""Retry-after while all slots are taken. When one frees is unknown, and a retry each second does no harm."""


class Quota:
    """Limits on requests: at once and in a minute for each key, and at once for all keys together."""

    def __init__(
        self, max_in_flight: int, clock: Callable[[], float] = time.monotonic, *, max_of_key: int | None = None
    ) -> None:
        """`max_of_key` is for keys without a limit of their own; by default they may use the whole `max_in_flight`."""
        self._max_in_flight, self._clock = max_in_flight, clock
        self._max_of_key = max_of_key or max_in_flight
        # By digest: a key that is revoked and made again under the same name starts at zero.
        self._num_of: Counter[str] = Counter()
        self.begun_s: dict[str, deque[float]] = {}
        """Start times of each key's requests in the last minute, by digest."""

    def take(self, key: ApiKey | None) -> Callable[[], None]:
        """Count a request as running; returns what ends that. Raises ApiError (429) where a limit is reached."""
        owner = "" if key is None else key.sha256
        if self._num_of.total() >= self._max_in_flight:
            message = f"{self._max_in_flight} requests are under way here, which is the limit: retry later."
            raise ApiError(429, message, code="gateway_busy", retry_after_s=_SLOT_RETRY_S)
        if key is not None:
            limit = key.max_concurrent or self._max_of_key
            if self._num_of[owner] >= limit:
                message = f"This key may have {limit} requests under way at once, and all are taken: retry later."
                raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after_s=_SLOT_RETRY_S)
            if key.requests_per_minute is not None:
                self._count_into_rate(owner, key.requests_per_minute)
        self._num_of[owner] += 1

        def release() -> None:
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]

        return release

    def _count_into_rate(self, owner: str, limit: int) -> None:
        now_s = self._clock()
        if owner not in self.begun_s:
            # Revoked keys would otherwise stay here for ever.
            idle = [each for each, begun_s in self.begun_s.items() if begun_s[-1] <= now_s - _WINDOW_S]
            for each in idle:
                del self.begun_s[each]
        begun_s = self.begun_s.setdefault(owner, deque())
        while begun_s and begun_s[0] <= now_s - _WINDOW_S:
            begun_s.popleft()
        if len(begun_s) >= limit:
            # Until enough requests have left the window; more than one, if the limit was lowered meanwhile.
            wait_s = max(1, math.ceil(begun_s[-limit] + _WINDOW_S - now_s))
            message = f"This key may begin {limit} requests a minute: retry in {wait_s} s."
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
        begun_s.append(now_s)
