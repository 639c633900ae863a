"""`slipstream gateway`: the gateway as a service of its own, in front of an SGLang that runs elsewhere.

Start: port → store → Redis → SGLang's health and the plugin's first report → client → gateway.
Stop:  gateway drains → client → Redis connection closes. While SGLang is away, requests get 503 and /ready says so;
when it is back, they are served again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from serving.gateway.config import GatewaySettings
from serving.gateway.server import bind
from serving.sglang.client import EngineReport, SglangClient
from slipstream.exposure import check_exposure
from slipstream.front import check_settings, serve_in_front
from speculator.checkpoint import model_key
from speculator.drafts import DraftDesk
from speculator.errors import ConfigError
from speculator.store import DraftStore
from speculator.stream import DraftPointer, connect

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_HTTP_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    sglang_url: str
    engine_id: str
    """The one that SGLang was given: its report is found by it."""
    model_dir: Path
    """Only its name is used; weights are not read."""
    store: Path
    redis_url: str
    host: str
    port: int
    start_timeout_s: float


def run_gateway(options: GatewayOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, StreamError or StoreError when it cannot start."""
    check_settings(settings)
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
        depth, version = _wait_for_sglang(options, pointer)
        client = SglangClient(
            options.sglang_url,
            pointer,
            engine_id=options.engine_id,
            max_depth=depth,
            draft_version=version,
            # Whoever started it looks after its process; what we see of it is whether it answers.
            is_process_alive=lambda: True,
        )
        opened.callback(client.stop)
        client.start()
        drafts = DraftDesk(store, lambda: pointer, target_fingerprint=fingerprint)
        asyncio.run(serve_in_front(options.sglang_url, listener, client, settings=settings, drafts=drafts))


def _wait_for_sglang(options: GatewayOptions, pointer: DraftPointer) -> tuple[int, int]:
    """(proposals a round, draft version) once SGLang serves and its plugin reports. Raises ConfigError, StreamError."""
    deadline = time.monotonic() + options.start_timeout_s
    depth = version = None
    with httpx.Client(base_url=options.sglang_url, timeout=_HTTP_TIMEOUT_S, trust_env=False) as sglang:
        while time.monotonic() < deadline:
            depth = depth or _depth(sglang)
            if depth is not None:
                fields = pointer.engines().get(options.engine_id)
                version = None if fields is None else EngineReport.parse(fields).version
                if version is not None:
                    return depth, version
            time.sleep(_POLL_S)
    if depth is None:
        raise ConfigError(f"no SGLang answers at {options.sglang_url}: start it, or check --sglang")
    raise ConfigError(
        f"SGLang answers, but no engine {options.engine_id!r} reports to Redis: start SGLang with `slipstream sglang`, "
        "and both with the same --engine-id, --model and --redis-url"
    )


def _depth(sglang: httpx.Client) -> int | None:
    """None while it does not serve."""
    with suppress(httpx.TransportError, ValueError, KeyError, TypeError):
        if sglang.get("/health").status_code == 200:
            return int(sglang.get("/server_info").json()["speculative_num_steps"])
    return None
