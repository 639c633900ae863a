"""`slipstream serve --engine local`: the gateway with the local engine, capture and hot swap in one process.

Start: port → Redis → target → store → engine → recorder and follower → gateway.
Stop:  gateway drains → follower → engine → group texts and recorder flush → Redis connections close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import redis
import structlog
import torch
from prometheus_client import CollectorRegistry

from serving.capture.filter import CaptureFilter
from serving.capture.recorder import ErasureWatch, TraceRecorder
from serving.capture.sampling import DEFAULT_FLOOR, CaptureSampler
from serving.engine import Engine
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.live.live import ReadTrainerStatus
from serving.gateway.metrics import process_registry
from serving.gateway.server import GatewayServer, bind, raise_open_file_limit, serve_until_signal
from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupTexts
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from serving.local.config import LocalEngineConfig, spare_cores
from serving.local.engine import LocalEngine
from serving.local.target.model import Target
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.speedup import SpeedupMeter
from serving.target import TargetUpdater
from slipstream.start.exposure import check_exposure
from speculator.draft.checkpoint import expected_shapes, model_key, target_fingerprint
from speculator.draft.initialization import Text
from speculator.errors import EngineDeadError
from speculator.host import exit_on_signal
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_deletion import ErasureOrders
from speculator.redis.trace_stream import RewardStream, TraceStream, cap_for
from speculator.versions.lineage import ensure_lineage, load_draft, version_to_serve
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)
_RECORDER_BUFFER_BYTES = 256 * 1024 * 1024
"""Bytes of traces kept in memory while Redis is down; newer ones beyond it are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    engine: LocalEngineConfig
    store: Path
    redis_url: str
    host: str
    port: int
    stream_max_bytes: int
    """0 computes the cap from the target's width."""
    draft_vocab_size: int | None
    vocab_texts: Sequence[Text]
    seed: int | None
    trace_ttl_hours: float = 0
    """0 sets no limit."""
    capture_filter: str | None = None
    """MODULE:FUNCTION; see serving/capture/filter.py."""
    share_groups: bool = False
    capture_floor: float = DEFAULT_FLOOR


def run_server(
    options: ServeOptions,
    settings: GatewaySettings,
    *,
    on_serving: Callable[[str], None] = lambda _: None,
    trainer_status: ReadTrainerStatus | None = None,
) -> None:
    """Serve until one of `stop_signals`; `on_serving` gets the address once requests are accepted, and must not block.
    The page shows `trainer_status`, where this process runs a trainer.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when the engine
    fails.
    """
    check_exposure(options.host, options.redis_url, settings)
    exit_on_signal()
    raise_open_file_limit(settings, each=1)
    config, ttl_s = options.engine, 3600 * options.trace_ttl_hours
    with ExitStack() as opened:

        def connection() -> redis.Redis:
            client: redis.Redis = opened.enter_context(connect(options.redis_url))
            return client

        listener = opened.enter_context(bind(options.host, options.port))
        store, registry = DraftStore(options.store), process_registry()
        fingerprint = target_fingerprint(config.model_dir)
        key = model_key(config.model_dir, fingerprint)
        pointer = DraftPointer(connection(), key)
        keep = CaptureFilter.load(options.capture_filter, config.model_dir) if config.capture else None
        target = _load_target(config)
        version = _version_to_serve(options, store, fingerprint)
        watch = LiveWatch(version)
        recorder = sharing = None
        if config.capture:
            max_bytes = options.stream_max_bytes or cap_for(config.model_dir)
            recorder = _recorder(options, TraceStream(connection(), key, max_bytes=max_bytes, ttl_s=ttl_s), keep)
            opened.callback(_close, recorder)
        if options.share_groups:
            texts = GroupTexts(connection(), key, ttl_s=ttl_s)
            sharing = GroupSharing(texts, vocab_size=len(target.embed), metrics=GroupTextMetrics())
            registry.register(sharing.metrics)
            opened.callback(sharing.close, timeout_s=5)
        engine = _engine(config, target, store, version, fingerprint, registry, recorder, watch, sharing)
        engine.start()
        opened.callback(engine.stop)
        app = create_app(
            engine,
            settings=settings,
            registry=registry,
            drafts=DraftOperator(store, lambda: pointer, target_fingerprint=fingerprint),
            targets=TargetUpdater(engine, TargetMetrics(registry), folder=settings.targets_dir),
            send_rewards=RewardStream(connection(), key).append if recorder else None,
            trainer_status=trainer_status,
        )
        # In the order in which text passes through them: text still on its way is removed at the next one.
        forget = [app.state.erase, *([sharing.forget] if sharing else []), engine.forget]
        forget += [recorder.forget] if recorder else []
        expire = partial(engine.expire, ttl_s) if ttl_s else lambda: None
        privacy = ErasureWatch(ErasureOrders(connection(), key).orders, forget, expire=expire)
        status = partial(_status, engine, recorder, privacy)
        follower = DraftFollower(
            engine, pointer, engine_id=config.engine_id, status=status, watch=watch, lifecycle=store.lifecycle
        )
        registry.register(VerdictCollector(lambda: follower.log))
        follower.start()
        opened.callback(lambda: follower.stop(is_in_order=engine.health().alive))
        server = GatewayServer(
            app, listener, max_connections=settings.max_connections, idle_s=settings.idle_connection_s
        )
        serving = serve_until_signal(
            server,
            model=config.model_name,
            draft_version=engine.draft_version,
            background=wait_for_failure(engine),
            on_serving=on_serving,
        )
        asyncio.run(serving)


async def wait_for_failure(engine: Engine, *, poll_s: float = 1.0) -> None:
    """Wait until the engine fails, checking every `poll_s` seconds, and raise EngineDeadError. It ends this process, so
    that a supervisor restarts it.
    """
    while (health := engine.health()).alive:  # noqa: ASYNC110 - its thread knows of no event loop
        await asyncio.sleep(poll_s)
    raise EngineDeadError(f"the engine failed ({health.detail}): the log says why")


def _recorder(options: ServeOptions, stream: TraceStream, keep: CaptureFilter | None) -> TraceRecorder:
    return TraceRecorder(
        stream,
        max_buffer_bytes=_RECORDER_BUFFER_BYTES,
        reason_to_drop=keep.reason_to_drop if keep else None,
        ttl_s=3600 * options.trace_ttl_hours,
        sampler=CaptureSampler(stream, floor=options.capture_floor) if options.capture_floor < 1 else None,
    )


def _close(recorder: TraceRecorder) -> None:
    recorder.close(timeout_s=10)
    log.info("recorder closed", **asdict(recorder.stats()))


def _version_to_serve(options: ServeOptions, store: DraftStore, fingerprint: str) -> int:
    """The version of the store with which to begin; a store without one gets a fresh draft."""
    newest = ensure_lineage(
        store,
        options.engine.model_dir,
        fingerprint,
        draft_vocab_size=options.draft_vocab_size,
        seed=options.seed,
        texts=options.vocab_texts,
    )
    return version_to_serve(store, newest)


def _engine(
    config: LocalEngineConfig,
    target: Target,
    store: DraftStore,
    version: int,
    fingerprint: str,
    registry: CollectorRegistry,
    recorder: TraceRecorder | None,
    watch: LiveWatch,
    sharing: GroupSharing | None,
) -> LocalEngine:
    """The engine with this version of the draft, its figures in the registry. It is not started."""
    draft, meter = load_draft(store, version, embed=target.embed, target_fingerprint=fingerprint), SpeedupMeter()
    engine = LocalEngine(
        config,
        target=target,
        draft=draft.to(target.embed.dtype),
        draft_version=version,
        target_fingerprint=fingerprint,
        load_draft=partial(
            store.load,
            expected_fingerprint=fingerprint,
            expected_d2t=draft.d2t.cpu(),
            expected_shapes=expected_shapes(draft.config),
        ),
        metrics=EngineMetrics(registry),
        meter=meter,
        on_trace=recorder.submit if recorder else None,
        on_round=watch.observe,
        sharing=sharing,
    )
    figures = ServingCollector(
        meter,
        recorder.stats if recorder else None,
        estimate=engine.estimated_speedup.ratio,
        end_to_end=engine.end_to_end.measure,
        head=engine.head_ab.measure,
        by_length=engine.acceptance_by_length,
    )
    registry.register(figures)
    return engine


def _status(engine: LocalEngine, recorder: TraceRecorder | None, privacy: ErasureWatch) -> dict[str, str | int | float]:
    """Fields of the engine's report in Redis, besides its draft version."""
    share = {"capture_share": round(recorder.stats().share, 4)} if recorder else {}
    about = {"target_version": engine.target_version, "asleep": int(engine.is_head_asleep)}
    return {**about, **engine.load.report(), **share, **privacy.poll()}


def _load_target(config: LocalEngineConfig) -> Target:
    torch.set_num_threads(config.num_threads or spare_cores())
    return Target(
        config.model_dir,
        num_slots=config.num_slots,
        context_length=config.context_length,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, config.dtype),
        device=config.device,
    )
