"""`slipstream gateway`: the gateway as a service of its own, in front of an SGLang, or of routers before several.

Start: port → store → Redis → SGLang's health and the plugin's first report → what the routers let through → client →
gateway.
Stop:  gateway drains → client → Redis connection closes. While SGLang is away, requests get 503 and /ready says so;
when it is back, they are served again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from serving.gateway.config import GatewaySettings
from serving.gateway.server import bind
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.pool import PoolClient, check_routers, is_ready
from serving.sglang.report import EngineReport, commonest
from slipstream.start.effects import GATEWAY_IN_FRONT, check_variables
from slipstream.start.exposure import check_exposure
from slipstream.start.front import serve_in_front
from speculator.draft.checkpoint import model_key
from speculator.errors import ConfigError
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.versions.operator import DraftDesk
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_HTTP_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    sglang_urls: tuple[str, ...]
    engine_id: str | None
    """The one that SGLang was given: its report is found by it. None: an sglang-router is at each address, and behind
    each of them every engine that reports."""
    model_dir: Path
    """Only its name is used; weights are not read."""
    store: Path
    redis_url: str
    host: str
    port: int
    start_timeout_s: float


def run_gateway(options: GatewayOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, StreamError, StoreError or EngineDeadError when it cannot start.
    """
    check_variables(settings, GATEWAY_IN_FRONT)
    check_exposure(options.host, options.redis_url, settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        store = DraftStore(options.store)
        newest = store.latest()
        if newest is None:
            raise ConfigError(f"{options.store} holds no drafts: check --store, or run `slipstream draft init --store`")
        # The draft says which target it was made for: reading a large target's weights takes minutes.
        fingerprint = store.manifest(newest).target_fingerprint
        key = model_key(options.model_dir, fingerprint)
        pointer = DraftPointer(opened.enter_context(connect(options.redis_url)), key)
        engine_id = options.engine_id
        client = _single(options, engine_id, pointer) if engine_id else _pool(options, pointer, fingerprint)
        opened.callback(client.stop)
        client.start()
        drafts = DraftDesk(store, lambda: pointer, target_fingerprint=fingerprint)
        front = serve_in_front(
            options.sglang_urls, listener, client, settings=settings, drafts=drafts, target=fingerprint
        )
        asyncio.run(front)


def _single(options: GatewayOptions, engine_id: str, pointer: DraftPointer) -> SglangClient:
    """Once SGLang serves and its plugin reports. Raises ConfigError, EngineDeadError, StreamError."""
    depth: int | None = None
    version: int | None = None
    [url] = options.sglang_urls
    for http in _until_timeout(options):
        depth = depth or _depth(http, url)
        if depth is not None and (version := _versions(pointer).get(engine_id)) is not None:
            break
    if depth is None:
        raise ConfigError(f"no SGLang answers at {url}: start it, or check --sglang")
    if version is None:
        raise ConfigError(
            f"SGLang answers, but no engine {engine_id!r} reports to Redis: start SGLang with `slipstream sglang`, "
            "and both with the same --engine-id, --model and --redis-url"
        )
    return SglangClient(
        url,
        pointer,
        engine_id=engine_id,
        max_depth=depth,
        draft_version=version,
        # Whoever started it looks after its process; what we see of it is whether it answers.
        is_process_alive=lambda: True,
    )


def _pool(options: GatewayOptions, pointer: DraftPointer, fingerprint: str) -> PoolClient:
    """Once a router has an engine and a plugin reports. Raises ConfigError, EngineDeadError, StreamError."""
    serves = False
    version: int | None = None
    for http in _until_timeout(options):
        serves = serves or any(is_ready(http, router) for router in options.sglang_urls)
        if serves and (version := commonest(_versions(pointer).values())) is not None:
            break
    if not serves:
        places = " or ".join(options.sglang_urls)
        raise ConfigError(f"no sglang-router with an engine answers at {places}: check --sglang")
    if version is None:
        raise ConfigError(
            "the router has engines, but none reports to Redis: start them with `slipstream sglang`, and with the "
            "same --model and --redis-url"
        )
    pool = PoolClient(options.sglang_urls, pointer, draft_version=version)
    check_routers(options.sglang_urls, pool.info.model, fingerprint)
    return pool


def _versions(pointer: DraftPointer) -> dict[str, int]:
    """By the id of each engine that reports one."""
    reports = {engine_id: EngineReport.parse(fields) for engine_id, fields in pointer.engines().items()}
    return {engine_id: report.version for engine_id, report in reports.items() if report.version is not None}


def _until_timeout(options: GatewayOptions) -> Iterator[httpx.Client]:
    """The same client again and again."""
    deadline = time.monotonic() + options.start_timeout_s
    with httpx.Client(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
        while time.monotonic() < deadline:
            yield client
            time.sleep(_POLL_S)


def _depth(http: httpx.Client, url: str) -> int | None:
    """Of the SGLang there; None while it does not serve."""
    with suppress(httpx.TransportError, ValueError, KeyError, TypeError):
        if http.get(f"{url}/health").status_code == 200:
            return int(http.get(f"{url}/server_info").json()["speculative_num_steps"])
    return None
