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

import structlog

from serving.gateway.config import GatewaySettings
from serving.gateway.server import bind
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.launcher import SglangProcess
from slipstream.new_draft import checked_fingerprint, version_folder
from slipstream.start.effects import GATEWAY_IN_FRONT, check_variables
from slipstream.start.exposure import check_exposure
from slipstream.start.front import serve_in_front
from slipstream.start.sglang_server import SglangStart, verified_version
from speculator.draft.checkpoint import model_key
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lineage import ensure_lineage
from speculator.versions.operator import DraftDesk
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SglangServeOptions(SglangStart):
    host: str
    port: int
    draft_vocab_size: int | None
    vocab_texts: tuple[str, ...]
    seed: int | None
    start_timeout_s: float


def run_sglang_server(options: SglangServeOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when SGLang ends.
    """
    check_variables(settings, GATEWAY_IN_FRONT)
    check_exposure(options.host, options.redis_url, settings)
    # While SGLang starts there is no event loop to hear it: leave by way of every callback below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        python = options.interpreter()
        store = DraftStore(options.store)
        fingerprint = checked_fingerprint(options.model_dir, store)
        key = model_key(options.model_dir, fingerprint)
        pointer = DraftPointer(opened.enter_context(connect(options.redis_url)), key)
        newest = ensure_lineage(
            store,
            options.model_dir,
            fingerprint,
            draft_vocab_size=options.draft_vocab_size,
            seed=options.seed,
            texts=options.vocab_texts,
        )
        version = verified_version(store, newest, fingerprint)
        # Of this start alone: an order that was given to an earlier one ends with it.
        engine_id = f"{socket.gethostname()}-{os.getpid()}"
        folder = version_folder(store, version)
        process = opened.enter_context(
            SglangProcess(options.process(python, folder, fingerprint=fingerprint, key=key, engine_id=engine_id))
        )
        log.info("sglang started", python=str(python), pid=process.pid, sglang_url=process.url, draft_version=version)
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
        ended = _until_ended(process)
        front = serve_in_front(
            (process.url,), listener, client, settings=settings, drafts=drafts, target=fingerprint, beside=ended
        )
        asyncio.run(front)


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
