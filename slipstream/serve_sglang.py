"""`slipstream serve --engine sglang`: SGLang with the plugin, a draft to begin with, and the gateway in front.

Start: port → interpreter → Redis → store → SGLang → client → gateway.
Stop:  gateway drains → client → SGLang → Redis connection closes. When SGLang ends by itself, the gateway tells who
waits and we end with an error, for a supervisor to start both again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import ENV_PREFIX, GatewaySettings
from serving.gateway.lifetime import serve_until_signal
from serving.gateway.server import GatewayServer, bind
from serving.gateway.upstream import Upstream
from serving.sglang.client import SglangClient
from serving.sglang.collector import SglangCollector
from serving.sglang.interpreter import check_interpreter, find_interpreter
from serving.sglang.launcher import SglangOptions, SglangProcess
from slipstream.draft import version_folder
from speculator.checkpoint import model_key, target_fingerprint
from speculator.drafts import DraftDesk
from speculator.errors import ConfigError
from speculator.lineage import ensure_lineage, version_to_serve
from speculator.store import DraftStore
from speculator.stream import DraftPointer, connect

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SglangServeOptions:
    python: Path | None
    """The interpreter that has SGLang; None looks for one."""
    model_dir: Path
    model_name: str
    dtype: str
    device: str
    depth: int
    capture: bool
    control_share: float
    context_window: int
    capture_bytes_per_s: int
    store: Path
    redis_url: str
    host: str
    port: int
    stream_max_bytes: int
    draft_vocab_size: int
    vocab_texts: tuple[str, ...]
    seed: int
    start_timeout_s: float
    extra: tuple[str, ...]
    """Arguments for SGLang itself."""


def run_sglang_server(options: SglangServeOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when SGLang ends.
    """
    if "default_max_tokens" in settings.model_fields_set:
        raise ConfigError(
            f"{ENV_PREFIX}DEFAULT_MAX_TOKENS is for --engine local, SGLang has a limit of its own: unset it"
        )
    # While SGLang starts there is no event loop to hear it: leave by way of every callback below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        python = find_interpreter(options.python)
        check_interpreter(python)
        fingerprint = target_fingerprint(options.model_dir)
        key = model_key(options.model_dir, fingerprint)
        pointer = DraftPointer(opened.enter_context(connect(options.redis_url)), key)
        store = DraftStore(options.store)
        version = _first_version(options, store, fingerprint)
        # Of this start alone: an order that was given to an earlier one ends with it.
        engine_id = f"{socket.gethostname()}-{os.getpid()}"
        folder = version_folder(store, version)
        process = opened.enter_context(
            SglangProcess(_process_options(options, python, folder, fingerprint, key, engine_id))
        )
        log.info("sglang started", python=str(python), pid=process.pid, draft_version=version)
        process.wait_until_healthy(options.start_timeout_s)
        client = SglangClient(
            process.url,
            pointer,
            engine_id=engine_id,
            max_depth=options.depth,
            draft_version=version,
            is_process_alive=lambda: process.is_alive,
        )
        opened.callback(client.stop)
        client.start()
        drafts = DraftDesk(store, lambda: pointer, target_fingerprint=fingerprint)
        asyncio.run(_serve(options, settings, listener, client, process, drafts))


def _first_version(options: SglangServeOptions, store: DraftStore, fingerprint: str) -> int:
    """`version_to_serve`, verified before SGLang loads it."""
    newest = ensure_lineage(
        store,
        options.model_dir,
        fingerprint,
        draft_vocab_size=options.draft_vocab_size,
        seed=options.seed,
        texts=options.vocab_texts,
    )
    version = version_to_serve(store, newest)
    store.load(version, expected_fingerprint=fingerprint)
    return version


def _process_options(
    options: SglangServeOptions, python: Path, draft_dir: Path, fingerprint: str, key: str, engine_id: str
) -> SglangOptions:
    return SglangOptions(
        python=python,
        model_dir=options.model_dir,
        model_name=options.model_name,
        draft_dir=draft_dir,
        depth=options.depth,
        dtype=options.dtype,
        device=options.device,
        redis_url=options.redis_url,
        store=options.store,
        engine_id=engine_id,
        model_key=key,
        target_fingerprint=fingerprint,
        capture=options.capture,
        control_share=options.control_share,
        context_window=options.context_window,
        capture_bytes_per_s=options.capture_bytes_per_s,
        stream_max_bytes=options.stream_max_bytes,
        extra=options.extra,
    )


async def _serve(
    options: SglangServeOptions,
    settings: GatewaySettings,
    listener: socket.socket,
    client: SglangClient,
    process: SglangProcess,
    drafts: DraftDesk,
) -> None:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(SglangCollector(lambda: client.report, lambda: client.draft_version))
    upstream = Upstream(process.url)
    app = create_passthrough_app(client, upstream, settings=settings, registry=registry, drafts=drafts)
    server = GatewayServer(app, listener)
    try:
        await serve_until_signal(
            server, model=options.model_name, draft_version=client.draft_version, beside=_until_ended(process)
        )
    finally:
        await upstream.close()


async def _until_ended(process: SglangProcess) -> None:
    """Wait for SGLang's main process to end and raise why it did."""
    over = asyncio.Event()
    loop, descriptor = asyncio.get_running_loop(), os.pidfd_open(process.pid)
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    log.error("sglang ended")
    await asyncio.to_thread(process.check)
