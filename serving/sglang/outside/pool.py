"""Several SGLang servers behind sglang-routers, seen from the gateway as one.

The routers forward requests and report health, but know nothing of drafts. The engines' reports in Redis say which
engines there are, what each serves and what it counted, so engines may join or leave at any time. `check_routers` tests
with one request what a router must let through.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from uuid import uuid4

import httpx
import msgspec
import structlog

from serving.engine import EngineInfo
from serving.request_metadata import OTHER_TARGET, POLICY_KEY, TARGET_KEY, RequestMetadata
from serving.sglang.outside.client import SglangClient
from serving.sglang.report import EngineReport, Pool
from speculator.errors import ConfigError, EngineDeadError, EngineError, StreamError
from speculator.redis.client import is_denied
from speculator.redis.control_plane import DraftPointer

log = structlog.get_logger(__name__)
_READINESS = "/readiness"
"""Where sglang-router answers 200 while it has a healthy worker; /health is about the router alone."""
_WORKERS = "/workers"
_READINESS_TIMEOUT_S = 2.0
"""A router answers from memory, and routers are queried one after another."""


def is_ready(http: httpx.Client, router: str) -> bool:
    """Whether the router at this address has an engine to send requests to."""
    with suppress(httpx.TransportError):
        return http.get(f"{router}{_READINESS}", timeout=_READINESS_TIMEOUT_S).status_code == 200
    return False


class _Worker(msgspec.Struct):
    url: str

    @property
    def server(self) -> str:
        """Its address, without the data-parallel rank that a router with `--dp-aware` adds: `http://host:port@rank`."""
        return re.sub(r"@\d+$", "", self.url.rstrip("/"))


class _Workers(msgspec.Struct):
    workers: list[_Worker] = []


def list_servers(http: httpx.Client, routers: Sequence[str]) -> list[str] | None:
    """The addresses of all servers, by the first router that lists any: one that has just started does not yet. None
    where no router answers.
    """
    servers: list[str] | None = None
    for router in routers:
        with suppress(httpx.HTTPError, msgspec.MsgspecError):
            answer = http.get(f"{router}{_WORKERS}").raise_for_status()
            found = msgspec.json.decode(answer.content, type=_Workers).workers
            if servers := [*dict.fromkeys(worker.server for worker in found)]:
                break
    return servers


class PoolClient(SglangClient):
    """Implements serving.engine.ServedEngine for every engine that reports under the pointer's model."""

    def __init__(
        self,
        routers: tuple[str, ...],
        pointer: DraftPointer,
        *,
        draft_version: int,
        poll_s: float = 1.0,
        target_timeout_s: float = 60.0,
    ) -> None:
        """`routers` are the addresses of one or several in front of the same engines.

        Raises EngineDeadError where no engine reports what it serves, StreamError.
        """
        self._routers, self._away = routers, set[str]()
        self._pool, self._reading = Pool(), threading.Lock()
        self._gateway = uuid4().hex
        self._exported_pool: Pool | None = None
        self._exported: EngineReport | None = None
        self._reports: Mapping[str, EngineReport] = {}
        super().__init__(
            routers[0],
            pointer,
            engine_id="",
            draft_version=draft_version,
            is_process_alive=lambda: True,
            poll_s=poll_s,
            target_timeout_s=target_timeout_s,
        )

    @property
    def num_engines(self) -> int:
        """Engines that reported lately: one that was killed counts until its report expires. 0 while Redis is away."""
        return len(self._reports) if self._report is not None else 0

    @property
    def num_on_version(self) -> int:
        """How many of them run the version that most of them run."""
        return sum(report.version == self._draft_version for report in self._reports.values())

    @property
    def exports(self) -> bool:
        """Whether the pool's metrics are this gateway's to export: one of all gateways before the pool does."""
        return self._exported_pool is not None

    @property
    def exported(self) -> EngineReport | None:
        """The report with counts from zero at the time at which this gateway began to export them."""
        return self._exported if self._report is not None else None

    def _servers(self) -> Sequence[str]:
        """The addresses of the servers; raises EngineError where no router lists any."""
        servers = list_servers(self._http, self._routers)
        if not servers:
            raise EngineError("no router lists any servers")
        return servers

    def _now(self) -> Mapping[str, EngineReport]:
        return self._reports

    def _ask_info(self) -> EngineInfo:
        """What the engines report: a router lists models without the length of their context."""
        report = Pool().merge(self._parsed())
        if report is None or not report.model or report.context_length is None:
            self._http.close()
            raise EngineDeadError("no engine reports its model in Redis")
        return EngineInfo(
            model=report.model,
            context_length=report.context_length,
            heeds_seed=bool(report.heeds_seed),
        )

    def _poll_server(self) -> None:
        """Whether a router has an engine to send requests to."""
        for router in self._routers:
            if is_ready(self._http, router):
                self._answered_s = time.monotonic()
                if router in self._away:
                    self._away.remove(router)
                    log.info("router back", router=router)
            elif router not in self._away:
                self._away.add(router)
                log.warning("router away, or without an engine", router=router)

    def _parsed(self) -> dict[str, EngineReport]:
        return {engine_id: EngineReport.parse(fields) for engine_id, fields in self._pointer.engines().items()}

    def _read_report(self) -> EngineReport | None:
        with self._reading:
            self._reports = self._parsed()
            self._note_report(self._pool.merge(self._reports))
            self._num_running = (self._report.running if self._report is not None else None) or 0
            if not self._may_export():
                self._exported_pool = self._exported = None
            else:
                self._exported_pool = self._exported_pool or Pool()
                self._exported = self._exported_pool.merge(self._reports)
        return self._report

    def _may_export(self) -> bool:
        try:
            return self._pointer.hold_pool_metrics(self._gateway)
        except StreamError as error:
            # The rules of an older Redis configuration deny the key.
            return self.exports or is_denied(error)


_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""A busy engine answers late."""


def check_routers(urls: tuple[str, ...], model: str, target: str) -> None:
    """Check that routers in front of the same engines pass on what the gateway says of a request.

    The engines behind them must serve the target with the fingerprint `target`. A router that is away is logged where
    another answers. Raises ConfigError, or EngineDeadError where no engine answers through any.
    """
    away: list[EngineDeadError] = []
    for url in urls:
        try:
            _check_router(url, model, target)
        except EngineDeadError as error:
            away.append(error)
    if len(away) == len(urls):
        raise away[0]
    for each in away:
        log.warning("router not checked, another answers", reason=str(each))


def _check_router(url: str, model: str, target: str) -> None:
    """Request one token as the gateway does; an answer under another id has lost the header and the fields of the body.

    Without them no opt-out and no tenant would reach an engine.
    """
    rid = f"slipstream-{uuid4().hex}"
    marks = RequestMetadata(rid=rid, cache_salt="default", policy={"capture": False, TARGET_KEY: target})
    ours = {"rid": rid, "cache_salt": marks.cache_salt, "custom_params": {POLICY_KEY: marks.policy}}
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, **ours}
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as router:
            answer = router.post("/v1/chat/completions", json=body, headers=marks.to_header())
        is_another = OTHER_TARGET in answer.text
        answered = None if is_another else answer.raise_for_status().json()["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineDeadError(f"no engine answers through {url}: {type(error).__name__}") from error
    if is_another:
        raise ConfigError(
            f"{url} serves another target than the drafts of --store are for: give the gateway engines that were "
            "started with the same --model"
        )
    if answered != rid:
        raise ConfigError(
            f"{url} loses the opt-out and the tenant that the gateway adds to a request: put sglang-router there, "
            "and behind it servers that were started with `slipstream sglang`"
        )
