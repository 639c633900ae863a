"""`slipstream serve`: the gateway with the local engine behind it, capture and hot swap beside it.

Start: port → Redis → target → store → engine → recorder and follower → gateway.
Stop:  gateway drains → follower → engine → group texts and recorder flush → Redis connections close.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import redis
import structlog
import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from serving.capture.privacy import CaptureFilter, ErasureWatch, Forget
from serving.capture.recorder import TraceRecorder
from serving.capture.sampling import DEFAULT_FLOOR, CaptureSampler
from serving.engine import Engine
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.metrics import process_registry
from serving.gateway.server import GatewayServer, bind, make_room, serve_until_signal
from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import DEFAULT_TTL_S, GroupTexts
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from serving.local.config import LocalEngineConfig, spare_cores
from serving.local.engine import LocalEngine
from serving.local.target.model import Target
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.speedup import SpeedupMeter
from serving.target import TargetDesk
from slipstream.start.exposure import check_exposure
from speculator.draft.checkpoint import expected_shapes, model_key, target_fingerprint
from speculator.errors import EngineDeadError
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_deletion import Erasures
from speculator.redis.trace_stream import RewardStream, TraceStream
from speculator.versions.lineage import ensure_lineage, load_draft, version_to_serve
from speculator.versions.operator import DraftDesk
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)
_RECORDER_BUFFER_BYTES = 256 * 1024 * 1024
"""Traces kept in memory while Redis is away; the newest beyond it are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    engine: LocalEngineConfig
    store: Path
    redis_url: str
    host: str
    port: int
    stream_max_bytes: int
    draft_vocab_size: int | None
    vocab_texts: tuple[str, ...]
    seed: int | None
    trace_ttl_hours: float = 0
    """0 sets no limit."""
    capture_filter: str | None = None
    """MODULE:FUNCTION; see serving/capture/privacy.py."""
    share_groups: bool = False
    capture_floor: float = DEFAULT_FLOOR

    @property
    def trace_ttl_s(self) -> float:
        return 3600 * self.trace_ttl_hours


@dataclass(frozen=True, kw_only=True)
class Site:
    """One target, its drafts and its keys in Redis; what is opened for it closes with the stack."""

    options: ServeOptions
    opened: ExitStack
    store: DraftStore
    fingerprint: str
    key: str
    registry: CollectorRegistry

    @classmethod
    def of(cls, options: ServeOptions, opened: ExitStack) -> Site:
        store, model_dir = DraftStore(options.store), options.engine.model_dir
        fingerprint = target_fingerprint(model_dir)
        return cls(
            options=options,
            opened=opened,
            store=store,
            fingerprint=fingerprint,
            key=model_key(model_dir, fingerprint),
            registry=process_registry(),
        )

    def connect(self) -> redis.Redis:
        client: redis.Redis = self.opened.enter_context(connect(self.options.redis_url))
        return client


def open_recorder(site: Site) -> TraceRecorder | None:
    options = site.options
    if not options.engine.capture:
        return None
    stream = TraceStream(site.connect(), site.key, max_bytes=options.stream_max_bytes, ttl_s=options.trace_ttl_s)
    is_sampled = options.capture_floor < 1
    keep = CaptureFilter.load(options.capture_filter, options.engine.model_dir)
    recorder = TraceRecorder(
        lambda: stream,
        max_buffer_bytes=_RECORDER_BUFFER_BYTES,
        reason_to_drop=None if keep is None else keep.reason_to_drop,
        ttl_s=options.trace_ttl_s,
        sampler=CaptureSampler(lambda: stream, floor=options.capture_floor) if is_sampled else None,
    )
    site.opened.callback(_close_recorder, recorder)
    return recorder


def open_sharing(site: Site, *, vocab_size: int) -> GroupSharing | None:
    if not site.options.share_groups:
        return None
    ttl_s = min(site.options.trace_ttl_s or DEFAULT_TTL_S, DEFAULT_TTL_S)
    texts = GroupTexts(site.connect(), site.key, ttl_s=ttl_s)
    sharing = GroupSharing(texts, vocab_size=vocab_size, metrics=GroupTextMetrics(site.registry))
    site.opened.callback(sharing.close, timeout_s=5)
    return sharing


def open_app(
    site: Site,
    settings: GatewaySettings,
    engine: LocalEngine,
    pointer: DraftPointer,
    *,
    takes_rewards: bool,
) -> FastAPI:
    return create_app(
        engine,
        settings=settings,
        registry=site.registry,
        drafts=DraftDesk(site.store, lambda: pointer, target_fingerprint=site.fingerprint),
        targets=TargetDesk(engine, TargetMetrics(site.registry), folder=settings.targets_dir),
        send_rewards=RewardStream(site.connect(), site.key).append if takes_rewards else None,
    )


def open_privacy(
    site: Site,
    erase_rollouts: Forget,
    engine: LocalEngine,
    recorder: TraceRecorder | None,
    sharing: GroupSharing | None,
) -> ErasureWatch:
    """What the process keeps of its traffic: rollouts, text for suffix drafts, and traces on their way."""
    ttl_s = site.options.trace_ttl_s
    # What still arrives would go into what the engine forgets.
    forget = [
        erase_rollouts,
        *([sharing.forget] if sharing else []),
        engine.forget,
        *([recorder.forget] if recorder else []),
    ]
    expire = partial(engine.expire, ttl_s) if ttl_s else lambda: None
    return ErasureWatch(Erasures(site.connect(), site.key).orders, forget, expire=expire)


def first_version(site: Site) -> int:
    newest = ensure_lineage(
        site.store,
        site.options.engine.model_dir,
        site.fingerprint,
        draft_vocab_size=site.options.draft_vocab_size,
        seed=site.options.seed,
        texts=site.options.vocab_texts,
    )
    return version_to_serve(site.store, newest)


def load_target(config: LocalEngineConfig) -> Target:
    torch.set_num_threads(config.num_threads or spare_cores())
    return Target(
        config.model_dir,
        num_slots=config.num_slots,
        context_length=config.context_length,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, config.dtype),
        device=config.device,
    )


def open_engine(
    site: Site,
    target: Target,
    version: int,
    recorder: TraceRecorder | None,
    watch: LiveWatch,
    sharing: GroupSharing | None,
) -> LocalEngine:
    store, fingerprint = site.store, site.fingerprint
    draft = load_draft(store, version, embed=target.embed, target_fingerprint=fingerprint).to(target.embed.dtype)
    meter = SpeedupMeter()
    engine = LocalEngine(
        site.options.engine,
        target=target,
        draft=draft,
        draft_version=version,
        target_fingerprint=fingerprint,
        load_draft=partial(
            store.load,
            expected_fingerprint=fingerprint,
            expected_d2t=draft.d2t.cpu(),
            expected_shapes=expected_shapes(draft.config),
        ),
        metrics=EngineMetrics(site.registry),
        meter=meter,
        on_trace=recorder.submit if recorder else None,
        on_round=watch.observe,
        sharing=sharing,
    )
    estimate = engine.estimated_speedup.ratio
    site.registry.register(ServingCollector(meter, recorder.stats if recorder else None, estimate))
    return engine


def _close_recorder(recorder: TraceRecorder) -> None:
    recorder.close(timeout_s=10)
    log.info("recorder closed", **asdict(recorder.stats()))


_LOOK_S = 1.0
"""Between two looks at whether the engine lives."""


def run_server(options: ServeOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when the engine
    fails.
    """
    check_exposure(options.host, options.redis_url, settings)
    make_room(settings, each=1)
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        site = Site.of(options, opened)
        client = site.connect()
        pointer = DraftPointer(client, site.key)
        recorder = open_recorder(site)
        target = load_target(options.engine)
        version = first_version(site)
        watch = LiveWatch(version)
        sharing = open_sharing(site, vocab_size=target.embed.shape[0])
        engine = open_engine(site, target, version, recorder, watch, sharing)
        engine.start()
        opened.callback(engine.stop)
        app = open_app(site, settings, engine, pointer, takes_rewards=recorder is not None)
        privacy = open_privacy(site, app.state.erase, engine, recorder, sharing)
        follower = DraftFollower(
            engine,
            pointer,
            engine_id=options.engine.engine_id,
            status=partial(_status, engine, recorder, privacy),
            watch=watch,
            lifecycle=site.store.lifecycle,
        )
        site.registry.register(VerdictCollector(lambda: follower.log))
        follower.start()
        opened.callback(lambda: follower.stop(is_in_order=engine.health().alive))
        server = GatewayServer(app, listener, max_connections=settings.max_connections)
        asyncio.run(
            serve_until_signal(
                server,
                model=options.engine.model_name,
                draft_version=engine.draft_version,
                beside=until_it_fails(engine),
            )
        )


async def until_it_fails(engine: Engine) -> None:
    """An engine that has failed serves nobody, and is not started again here: whoever started this process does that.

    Raises EngineDeadError.
    """
    while (health := engine.health()).alive:  # noqa: ASYNC110 - its thread knows of no event loop
        await asyncio.sleep(_LOOK_S)
    raise EngineDeadError(f"the engine ended ({health.detail}): the log says why")


def _status(engine: LocalEngine, recorder: TraceRecorder | None, privacy: ErasureWatch) -> dict[str, str | int | float]:
    """What the engine's report says beside its version."""
    return {
        "target_version": engine.target_version,
        **engine.load.report(),
        **({"capture_share": round(recorder.stats().share, 4)} if recorder else {}),
        **privacy.look(),
    }
