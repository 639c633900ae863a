"""`slipstream serve`: the gateway with the local engine behind it, capture and hot swap beside it.

Start: port → Redis → store → target → engine → recorder and follower → gateway.
Stop:  gateway drains → follower → engine → group texts and recorder flush → Redis connections close.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from serving.capture_share import DEFAULT_FLOOR
from serving.forgetting import ErasureWatch, Forget
from serving.gateway.app import create_app
from serving.gateway.config import ENV_PREFIX, GatewaySettings
from serving.gateway.descriptors import make_room
from serving.gateway.lifetime import serve_until_signal
from serving.gateway.server import GatewayServer, bind
from serving.group_text import GroupSharing
from serving.hotswap import DraftFollower
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target import Target
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.personal import PersonalData
from serving.recorder import TraceRecorder
from serving.sampler import CaptureSampler
from serving.speedup import SpeedupMeter
from serving.target_guard import TargetGuard
from serving.targets import TargetDesk
from serving.watch import LiveWatch
from slipstream.exposure import check_exposure
from speculator.checkpoint import expected_shapes, model_key, target_fingerprint
from speculator.drafts import DraftDesk
from speculator.erasures import Erasures
from speculator.errors import ConfigError
from speculator.fleet import Fleet
from speculator.group_store import DEFAULT_TTL_S, GroupTexts
from speculator.lineage import ensure_lineage, load_draft, version_to_serve
from speculator.pointer import DraftPointer
from speculator.pulse import Pulse
from speculator.redis_client import connect
from speculator.rewards import RewardStream
from speculator.store import DraftStore
from speculator.stream import TraceStream

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
    draft_vocab_size: int
    vocab_texts: tuple[str, ...]
    seed: int
    trace_ttl_hours: float = 0
    """0 sets no limit."""
    drop_personal_data: bool = False
    share_groups: bool = False
    capture_floor: float = DEFAULT_FLOOR
    pulse_dir: Path | None = None

    @property
    def trace_ttl_s(self) -> float:
        return 3600 * self.trace_ttl_hours


def run_server(options: ServeOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, StreamError, StoreError or DraftError when it cannot start."""
    check_exposure(options.host, options.redis_url, settings)
    if settings.lineages or settings.choose_lineages:
        raise ConfigError(f"{ENV_PREFIX}LINEAGES and …CHOOSE_LINEAGES are for a gateway in front of SGLang: unset them")
    make_room(settings, each=1)
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        config = options.engine
        fingerprint = target_fingerprint(config.model_dir)
        store = DraftStore(options.store)
        key = model_key(config.model_dir, fingerprint, store.lineage)
        client = opened.enter_context(connect(options.redis_url))
        pointer = DraftPointer(client, key)
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        recorder = None
        if config.capture:
            stream = TraceStream(
                opened.enter_context(connect(options.redis_url)),
                key,
                max_bytes=options.stream_max_bytes,
                ttl_s=options.trace_ttl_s,
            )
            recorder = TraceRecorder(
                lambda: stream,
                max_buffer_bytes=_RECORDER_BUFFER_BYTES,
                reason_to_drop=PersonalData.of_model(config.model_dir).reason if options.drop_personal_data else None,
                ttl_s=options.trace_ttl_s,
                sampler=_sampler(stream, options.capture_floor),
            )
            opened.callback(_close_recorder, recorder)
        version = _first_version(options, store, fingerprint)
        watch = LiveWatch(version)
        target = _load_target(config)
        sharing = None
        if options.share_groups:
            texts = GroupTexts(
                opened.enter_context(connect(options.redis_url)),
                key,
                ttl_s=min(options.trace_ttl_s or DEFAULT_TTL_S, DEFAULT_TTL_S),
            )
            sharing = GroupSharing(texts, vocab_size=target.embed.shape[0], metrics=GroupTextMetrics(registry))
            opened.callback(sharing.close, timeout_s=5)
        pulse = None
        if options.pulse_dir is not None:
            pulse = Pulse(options.pulse_dir)
            opened.callback(pulse.close)
        engine = _build_engine(options, store, target, version, fingerprint, registry, recorder, watch, sharing, pulse)
        guard = TargetGuard(
            target.weights,
            on_change=partial(_target_changed, engine, recorder),
            on_renewal=partial(_target_renewed, engine, recorder),
        )
        engine.start()
        opened.callback(engine.stop)
        erasures = Erasures(opened.enter_context(connect(options.redis_url)), key)
        targets = TargetDesk(engine, TargetMetrics(registry), folder=settings.targets_dir, around=guard.move)
        rewards = RewardStream(opened.enter_context(connect(options.redis_url)), key) if recorder else None
        app = create_app(
            engine,
            settings=settings,
            registry=registry,
            drafts=DraftDesk(store, lambda: pointer, target_fingerprint=fingerprint),
            targets=targets,
            send_rewards=rewards.append if rewards else None,
        )
        privacy = _privacy(app.state.erase, engine, recorder, sharing, erasures, options)
        follower = DraftFollower(
            engine,
            pointer,
            engine_id=config.engine_id,
            on_swap=lambda report: guard.look(),
            status=lambda: {
                "target_ok": int(guard.look_at_times()),
                "target_version": engine.target_version,
                **({"capture_share": round(recorder.stats().share, 4)} if recorder else {}),
                **privacy.look(),
            },
            watch=watch,
            lifecycle=store.lifecycle,
            fleet=Fleet(client, key),
        )
        registry.register(VerdictCollector(lambda: follower.log))
        follower.start()
        opened.callback(follower.stop)
        server = GatewayServer(app, listener, max_connections=settings.max_connections)
        asyncio.run(serve_until_signal(server, model=config.model_name, draft_version=engine.draft_version))


def _privacy(
    erase_rollouts: Forget,
    engine: LocalEngine,
    recorder: TraceRecorder | None,
    sharing: GroupSharing | None,
    erasures: Erasures,
    options: ServeOptions,
) -> ErasureWatch:
    """What the process keeps of its traffic: rollouts, text for suffix drafts, and traces on their way."""
    ttl_s = options.trace_ttl_s
    return ErasureWatch(
        erasures.orders,
        # What still arrives would go into what the engine forgets.
        [
            erase_rollouts,
            *([sharing.forget] if sharing else []),
            engine.forget,
            *([recorder.forget] if recorder else []),
        ],
        expire=partial(engine.expire, ttl_s) if ttl_s else lambda: None,
    )


def _first_version(options: ServeOptions, store: DraftStore, fingerprint: str) -> int:
    newest = ensure_lineage(
        store,
        options.engine.model_dir,
        fingerprint,
        draft_vocab_size=options.draft_vocab_size,
        seed=options.seed,
        texts=options.vocab_texts,
    )
    return version_to_serve(store, newest)


def _load_target(config: LocalEngineConfig) -> Target:
    torch.set_num_threads(config.num_threads)
    return Target(
        config.model_dir,
        num_slots=config.num_slots,
        context_length=config.context_length,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, config.dtype),
        device=config.device,
    )


def _build_engine(
    options: ServeOptions,
    store: DraftStore,
    target: Target,
    version: int,
    fingerprint: str,
    registry: CollectorRegistry,
    recorder: TraceRecorder | None,
    watch: LiveWatch,
    sharing: GroupSharing | None,
    pulse: Pulse | None,
) -> LocalEngine:
    config = options.engine
    draft = load_draft(store, version, embed=target.embed, target_fingerprint=fingerprint).to(target.embed.dtype)
    meter = SpeedupMeter()
    engine = LocalEngine(
        config,
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
        metrics=EngineMetrics(registry),
        meter=meter,
        on_trace=recorder.submit if recorder else None,
        on_round=watch.observe,
        sharing=sharing,
        pulse=pulse,
    )
    estimate = engine.estimated_speedup.ratio
    registry.register(ServingCollector(meter, recorder.stats if recorder else None, estimate))
    return engine


def _sampler(stream: TraceStream, floor: float) -> CaptureSampler | None:
    return CaptureSampler(lambda: stream, floor=floor) if floor < 1 else None


def _target_changed(engine: LocalEngine, recorder: TraceRecorder | None) -> None:
    engine.metrics.target_unchanged.set(0)
    if recorder is not None:
        recorder.distrust()


def _target_renewed(engine: LocalEngine, recorder: TraceRecorder | None) -> None:
    engine.metrics.target_unchanged.set(1)
    if recorder is not None:
        recorder.trust()


def _close_recorder(recorder: TraceRecorder) -> None:
    recorder.close(timeout_s=10)
    log.info("recorder closed", **asdict(recorder.stats()))
