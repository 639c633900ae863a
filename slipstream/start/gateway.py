"""The gateway in front of SGLang: one that it starts itself, one that runs as a service, or routers before several.

Start: port → store → Redis → SGLang serves and its plugin reports → check of the routers → client → gateway.
Stop:  gateway drains → client → SGLang, where it was started here → Redis connection closes.

While an SGLang that runs as a service is down, requests and /ready get 503. When an SGLang that was started here ends,
running requests get an error and the process ends with one, so that a supervisor restarts both.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import redis
import structlog

from serving.answer_text import LocalTokenizer
from serving.capture.recorder import ErasureWatch
from serving.gateway.app import Rollouts, create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.live.live import ReadTrainerStatus
from serving.gateway.metrics import process_registry
from serving.gateway.server import GatewayServer, bind, raise_open_file_limit, serve_until_signal
from serving.gateway.upstream import Upstream
from serving.metrics import TargetMetrics
from serving.sglang.gateway_metrics import PoolCollector, SglangCollector
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.launcher import SglangProcess, SglangStart
from serving.sglang.outside.pool import PoolClient, check_routers, is_ready
from serving.sglang.outside.rollouts import PoolSettings, ServerPool
from serving.sglang.report import EngineReport, most_common
from serving.target import TargetLayout, TargetUpdater, read_layout
from slipstream.models import checked_fingerprint
from slipstream.start.exposure import check_exposure
from slipstream.start.sglang import checked_interpreter, with_draft
from speculator.draft.checkpoint import model_key
from speculator.draft.initialization import Text
from speculator.errors import ConfigError, StreamError
from speculator.host import exit_on_signal
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer, EndedGroups
from speculator.redis.trace_deletion import ErasureOrders
from speculator.redis.trace_stream import RewardStream
from speculator.target_folder import weight_files
from speculator.versions.lineage import ensure_lineage
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)

_POLL_S = 0.2
_HTTP_TIMEOUT_S = 5.0
_REDIS_PAUSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    sglang_urls: tuple[str, ...]
    engine_id: str | None
    """The --engine-id of the SGLang, under which it reports to Redis. None: each address is an sglang-router before all
    engines that report."""
    model_dir: Path
    """The target. Only its name is needed; tokenizer and weight shapes are used where the folder has them."""
    store: Path
    redis_url: str
    host: str
    port: int
    start_timeout_s: float


def run_gateway(
    options: GatewayOptions, settings: GatewaySettings, *, on_serving: Callable[[str], None] = lambda _: None
) -> None:
    """Serve until one of `stop_signals`; `on_serving` as of `serve_until_signal`.

    Raises ConfigError, StreamError, StoreError or EngineDeadError when it cannot start.
    """
    check_exposure(options.host, options.redis_url, settings)
    exit_on_signal()
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        store = DraftStore(options.store)
        newest = store.latest()
        if newest is None:
            raise ConfigError(f"{options.store} has no drafts: check --store, or run `slipstream drafts init --store`")
        # The draft has the target's fingerprint: computing it from a large target's weights takes minutes.
        fingerprint = store.manifest(newest).target_fingerprint
        redis_client = opened.enter_context(connect(options.redis_url))
        pointer = DraftPointer(redis_client, model_key(options.model_dir, fingerprint))
        engine_id = options.engine_id
        client = _single(options, engine_id, pointer) if engine_id else _pool(options, pointer, fingerprint)
        opened.callback(client.stop)
        serving = _serve(
            options.sglang_urls,
            listener,
            client,
            settings,
            store,
            redis_client,
            model_dir=options.model_dir,
            fingerprint=fingerprint,
            on_serving=on_serving,
        )
        asyncio.run(serving)


def run_sglang_server(
    start: SglangStart,
    settings: GatewaySettings,
    *,
    host: str,
    port: int,
    draft_vocab_size: int | None,
    vocab_texts: Sequence[Text],
    seed: int | None,
    start_timeout_s: float,
    shares_gpu: bool = False,
    on_serving: Callable[[str], None] = lambda _: None,
    trainer_status: ReadTrainerStatus | None = None,
) -> None:
    """Start SGLang, and serve in front of it until one of `stop_signals`. `shares_gpu` is as of `with_draft`,
    `on_serving` as of `serve_until_signal`. The page shows `trainer_status`, where this process keeps a trainer.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when SGLang ends.
    """
    check_exposure(host, start.redis_url, settings)
    # While SGLang starts: exit through every callback below.
    exit_on_signal()
    with ExitStack() as opened:
        listener = opened.enter_context(bind(host, port))
        python = checked_interpreter(start.python)
        store = DraftStore(start.store)
        fingerprint = checked_fingerprint(start.model_dir, store)
        redis_client = opened.enter_context(connect(start.redis_url))
        pointer = DraftPointer(redis_client, model_key(start.model_dir, fingerprint))
        newest = ensure_lineage(
            store, start.model_dir, fingerprint, draft_vocab_size=draft_vocab_size, seed=seed, texts=vocab_texts
        )
        # Unique to this start, so that orders in Redis for an earlier one do not apply.
        engine_id = f"{socket.gethostname()}-{os.getpid()}"
        options, version = with_draft(
            start, python, store, newest, fingerprint=fingerprint, engine_id=engine_id, shares_gpu=shares_gpu
        )
        process = opened.enter_context(SglangProcess(options))
        log.info("sglang started", python=str(python), pid=process.pid, sglang_url=process.url, draft_version=version)
        process.wait_until_healthy(start_timeout_s)
        client = SglangClient(
            process.url,
            pointer,
            engine_id=engine_id,
            draft_version=version,
            is_process_alive=lambda: process.is_alive,
        )
        opened.callback(client.stop)
        serving = _serve(
            (process.url,),
            listener,
            client,
            settings,
            store,
            redis_client,
            model_dir=start.model_dir,
            fingerprint=fingerprint,
            background=_until_ended(process),
            on_serving=on_serving,
            trainer_status=trainer_status,
        )
        asyncio.run(serving)


async def _serve(
    urls: tuple[str, ...],
    listener: socket.socket,
    client: SglangClient,
    settings: GatewaySettings,
    store: DraftStore,
    redis_client: redis.Redis,
    *,
    model_dir: Path,
    fingerprint: str,
    background: Coroutine[Any, Any, None] | None = None,
    on_serving: Callable[[str], None] = lambda _: None,
    trainer_status: ReadTrainerStatus | None = None,
) -> None:
    """Start `client` and serve the gateway on `listener` until a signal or the end of `background`. Requests go to the
    first reachable one of `urls`; `fingerprint` is the target's.

    Raises ConfigError where the limit of open files is too low, and what `background` raises.
    """
    client.target_layout = _layout(model_dir)
    client.start()
    key = model_key(model_dir, fingerprint)
    pointer = DraftPointer(redis_client, key)
    raise_open_file_limit(settings, each=2)
    registry = process_registry()
    figures = SglangCollector(lambda: client.report, lambda: client.draft_version)
    if not isinstance(client, PoolClient):
        registry.register(figures)
    else:
        registry.register(
            SglangCollector(lambda: client.exported, lambda: client.draft_version, lambda: client.exports)
        )
        registry.register(PoolCollector(lambda: client.num_engines, lambda: client.num_on_version))
    upstream = Upstream(*urls, max_connections=settings.max_in_flight)
    targets = TargetUpdater(client, TargetMetrics(registry), folder=settings.targets_dir)
    app = create_passthrough_app(
        client,
        upstream,
        settings=settings,
        registry=registry,
        drafts=DraftOperator(store, lambda: pointer, target_fingerprint=fingerprint),
        targets=targets,
        target=fingerprint,
        least_version=lambda: client.least_target_version,
        rollouts=_rollouts(urls, client, settings, redis_client, model_dir, fingerprint),
        engine_figures=figures,
        trainer_status=trainer_status,
    )
    name = f"{socket.gethostname()}:{listener.getsockname()[1]}"
    client.on_poll = erase_on_order(ErasureOrders(redis_client, key), app.state.erase, name)
    server = GatewayServer(app, listener, max_connections=settings.max_connections, idle_s=settings.idle_connection_s)
    try:
        await serve_until_signal(
            server,
            model=client.info.model,
            draft_version=client.draft_version,
            background=background,
            on_serving=on_serving,
        )
    finally:
        await upstream.close()


def erase_on_order(
    erasures: ErasureOrders, erase: Callable[[Collection[str]], None], gateway: str
) -> Callable[[], None]:
    """Returns a function that erases the tenants of new orders and reports it under the name `gateway`."""
    watch = ErasureWatch(erasures.orders, [erase])

    def poll() -> None:
        try:
            watch.poll()
        finally:
            # Also where it failed: without a report the gateway would count as stopped. The watch logs that Redis is
            # away. The rules of an older Redis configuration deny the key.
            with suppress(StreamError):
                erasures.report_gateway(gateway, watch.erased_ms)

    return poll


def _layout(model_dir: Path) -> Callable[[], TargetLayout] | None:
    """The shapes that new target weights must have; None where the folder has no weights to compare with."""
    try:
        weight_files(model_dir)
    except ConfigError:
        return None
    return partial(read_layout, model_dir)


def _rollouts(
    urls: tuple[str, ...],
    client: SglangClient,
    settings: GatewaySettings,
    redis_client: redis.Redis,
    model_dir: Path,
    fingerprint: str,
) -> Rollouts | None:
    """What `/v1/rollouts` needs; None where the model's folder has no tokenizer that can be loaded."""
    if not (model_dir / "tokenizer.json").is_file():
        log.warning("/v1/rollouts is not served: --model has no tokenizer.json", model=str(model_dir))
        return None
    try:
        tokenizer = LocalTokenizer(model_dir)
    except ConfigError as error:
        # SGLang may run code of the model, for example for its tokenizer.
        log.warning("/v1/rollouts is not served: --model's tokenizer cannot be loaded here", reason=str(error))
        return None
    key = model_key(model_dir, fingerprint)
    pool_settings = PoolSettings(
        tokenizer=tokenizer,
        target=fingerprint,
        share=settings.make_slots_share(),
        target_version=lambda: client.target_version,
        heeds_seed=lambda: client.info.heeds_seed,
        end_group=_tell_ended(EndedGroups(redis_client, key)),
    )
    pool = ServerPool(urls, isinstance(client, PoolClient), pool_settings)
    return Rollouts(
        pool=pool,
        slots_share=pool_settings.share,
        tokenizer=tokenizer,
        send_rewards=RewardStream(redis_client, key).append,
    )


def _tell_ended(ended: EndedGroups) -> Callable[[str, str], None]:
    """Returns a function that tells engines of a prompt group's end, without waiting. For the event loop.

    While Redis is away it gives up for `_REDIS_PAUSE_S` at a time: the calls would take all threads of the loop, for
    seconds each, and keep rollouts from starting and the gateway from stopping.
    """
    away_until_s, newest = 0.0, ("", "")

    def tell(tenant: str, group_id: str) -> None:
        nonlocal away_until_s
        if time.monotonic() < away_until_s:
            return
        try:
            ended.add(tenant, group_id)
        except StreamError as error:
            away_until_s = time.monotonic() + _REDIS_PAUSE_S
            # Engines then drop the group's text later, when they need the room.
            log.info("cannot tell engines that a prompt group has ended", reason=str(error))

    def end_group(tenant: str, group_id: str) -> None:
        nonlocal newest
        if newest == (tenant, group_id):
            return  # told on behalf of another server of the pool
        newest = tenant, group_id
        asyncio.get_running_loop().run_in_executor(None, tell, tenant, group_id)

    return end_group


def _single(options: GatewayOptions, engine_id: str, pointer: DraftPointer) -> SglangClient:
    """Wait until SGLang serves and its plugin reports; return its client. Raises ConfigError, EngineDeadError or
    StreamError.
    """
    serves = False
    version: int | None = None
    [url] = options.sglang_urls
    for http in _until_timeout(options):
        serves = serves or _is_healthy(http, url)
        if serves and (version := _versions(pointer).get(engine_id)) is not None:
            break
    if not serves:
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
        draft_version=version,
        # Another service started the process; the gateway only sees whether it answers.
        is_process_alive=lambda: True,
    )


def _pool(options: GatewayOptions, pointer: DraftPointer, fingerprint: str) -> PoolClient:
    """Wait until a router has an engine and a plugin reports; return the pool's client. Raises ConfigError,
    EngineDeadError or StreamError.
    """
    serves = False
    version: int | None = None
    for http in _until_timeout(options):
        serves = serves or any(is_ready(http, router) for router in options.sglang_urls)
        if serves and (version := most_common(_versions(pointer).values())) is not None:
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
    """The draft version that each engine reports, by engine id."""
    reports = {engine_id: EngineReport.parse(fields) for engine_id, fields in pointer.engines().items()}
    return {engine_id: report.version for engine_id, report in reports.items() if report.version is not None}


def _until_timeout(options: GatewayOptions) -> Iterator[httpx.Client]:
    """Yield an HTTP client every _POLL_S seconds until `start_timeout_s` is over."""
    deadline = time.monotonic() + options.start_timeout_s
    with httpx.Client(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
        while time.monotonic() < deadline:
            yield client
            time.sleep(_POLL_S)


def _is_healthy(http: httpx.Client, url: str) -> bool:
    with suppress(httpx.TransportError):
        return http.get(f"{url}/health").status_code == 200
    return False


async def _until_ended(process: SglangProcess) -> None:
    """Wait for SGLang's main process to end and raise why it did."""
    # Not by a pidfd, which gVisor and some containers lack.
    while process.is_alive:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    log.error("sglang ended")
    await asyncio.to_thread(process.check)
