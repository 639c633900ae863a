"""The engines of each lineage, behind one address each: which of them a request is for, and the base where it is away.

Who names a lineage comes first: the request, then its API key; then, where the operator wants it, what was measured
(serving/gateway/choice.py); else the base. All of them serve the same target, so that the text is the same and only
its speed differs: a lineage whose engines cannot take a request is no reason to refuse it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import structlog

from serving.gateway.choice import Choice
from serving.gateway.errors import ApiError
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.upstream import Upstream
from serving.gateway.verified import Verified
from speculator.errors import RequestError, UnreachableError
from speculator.lineages import BASE

log = structlog.get_logger(__name__)

_CHOSEN_BY = ("request", "key", "measured", "default")
AWAY_S = 5.0
"""For so long nobody asks engines that could not be reached, then one request does: each attempt may cost as long as
connecting may take."""


class Pools:
    """The base's engines and those of lineages by name. With a `choice`, it decides for requests that name none, and
    answers are measured.
    """

    def __init__(
        self, base: Upstream, lineages: Mapping[str, Upstream], metrics: GatewayMetrics, *, choice: Choice | None = None
    ) -> None:
        self._upstreams = {BASE: base, **lineages}
        self._metrics, self._choice = metrics, choice
        self._away_until_s: dict[str, float] = {}
        for name in lineages:
            metrics.lineage_fallbacks.labels(name)
        for name in self._upstreams:
            for chosen_by in _CHOSEN_BY:
                metrics.lineage_requests.labels(name, chosen_by)

    @property
    def measures(self) -> bool:
        return self._choice is not None

    def pick(self, asked: str | None, *, of_key: str | None, tenant: str, domain: str) -> str:
        """The lineage for a request. Raises RequestError where it asks for one that is not here.

        One that the key names and that is not here is passed over: the key's file may serve several gateways.
        """
        if asked is not None:
            if asked not in self._upstreams:
                known = ", ".join(self._upstreams)
                message = f"There is no such lineage here: there are {known}. Leave it out to have one chosen."
                raise RequestError(message, param="slipstream.lineage", code="lineage_not_found")
            return self._counted(asked, "request")
        if of_key is not None and of_key in self._upstreams:
            return self._counted(of_key, "key")
        if self._choice is None:
            return self._counted(BASE, "default")
        return self._counted(self._choice.pick(tenant, domain), "measured")

    def learn(self, tenant: str, domain: str, lineage: str, verified: Verified) -> None:
        """What an answer of that lineage's engines has committed."""
        if self._choice is not None:
            self._choice.learn(
                tenant,
                domain,
                lineage,
                num_tokens=verified.num_tokens,
                num_verifications=verified.num_verifications,
            )

    @asynccontextmanager
    async def answer(
        self, lineage: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, httpx.Response]]:
        """The lineage that answers, and its open response: see `Upstream.answer`."""
        async with AsyncExitStack() as opened:
            if lineage != BASE:
                try:
                    self._refuse_away(lineage)
                    own = await opened.enter_async_context(self._upstreams[lineage].answer(path, body, headers))
                except (UnreachableError, ApiError) as failure:
                    # 503 is said before anything is generated; every other status is about the request.
                    if isinstance(failure, ApiError) and failure.status != 503:
                        self._away_until_s.pop(lineage, None)
                        raise
                    self._note_away(lineage, failure)
                else:
                    self._away_until_s.pop(lineage, None)
                    yield lineage, own
                    return
            yield BASE, await opened.enter_async_context(self._upstreams[BASE].answer(path, body, headers))

    def _refuse_away(self, lineage: str) -> None:
        until_s = self._away_until_s.get(lineage)
        if until_s is None:
            return
        if time.monotonic() < until_s:
            raise UnreachableError("it could not be reached a moment ago")
        # This request tries it. Where it hangs, the others do not hang with it.
        self._away_until_s[lineage] = time.monotonic() + AWAY_S

    def _note_away(self, lineage: str, failure: Exception) -> None:
        self._metrics.lineage_fallbacks.labels(lineage).inc()
        now_s = time.monotonic()
        if now_s >= self._away_until_s.get(lineage, 0.0):
            log.warning("lineage away, the base answers", lineage=lineage, reason=str(failure), for_s=AWAY_S)
            self._away_until_s[lineage] = now_s + AWAY_S

    def _counted(self, lineage: str, chosen_by: str) -> str:
        self._metrics.lineage_requests.labels(lineage, chosen_by).inc()
        return lineage
