"""What a trainer is made of, put together in the order in which the parts need each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import redis
import torch

from speculator.draft.checkpoint import target_fingerprint
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_deletion import Erasures, Remover
from speculator.redis.trace_stream import RewardStream, TraceStream
from speculator.trace import Trace
from speculator.versions.store import DraftStore
from trainer.checkpoint import Progress, share_of
from trainer.config import TrainerConfig
from trainer.ingest.admission import Intake
from trainer.ingest.disk_cache import Shelf, shelf_folder
from trainer.ingest.retention import Forgetting
from trainer.ingest.reward_reader import RewardWeights
from trainer.ingest.trace_source import TraceSource, consumer_name
from trainer.learning.batch import Example, make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.candidate import Candidates
from trainer.replay.buffer import Replay
from trainer.replay.eval_sets import HeldOut, golden_set
from trainer.replay.provenance import Provenance
from trainer.saving import Saver
from trainer.session import Training
from trainer.throttle import Throttle


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of one process. Where several train together each has all of them, and its own share of the traces."""

    client: redis.Redis
    rewards: RewardWeights
    replay: Replay
    training: Training
    forgetting: Forgetting
    shelf: Shelf
    source: TraceSource
    intake: Intake
    candidates: Candidates
    saver: Saver
    throttle: Throttle


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What most of them need."""

    config: TrainerConfig
    ranks: Ranks
    metrics: TrainerMetrics
    client: redis.Redis
    fingerprint: str

    @property
    def key(self) -> str:
        return self.config.model_key

    @property
    def consumer(self) -> str:
        return consumer_name(self.ranks.rank)

    @property
    def ttl_s(self) -> float:
        return 3600 * self.config.trace_ttl_hours


def assemble(
    config: TrainerConfig, ranks: Ranks, metrics: TrainerMetrics, *, device: torch.device, clock: Callable[[], float]
) -> Parts:
    """Resume the last checkpoint; raises as `Trainer` does."""
    fingerprint = target_fingerprint(config.model_dir)
    client = connect(config.redis_url)
    ground = _Ground(config=config, ranks=ranks, metrics=metrics, client=client, fingerprint=fingerprint)
    store, rng = DraftStore(config.store_dir), random.Random(config.seed + ranks.rank)
    stream = RewardStream(client, config.model_key)
    rewards = RewardWeights(stream, bound=config.max_reward_weight, metrics=metrics)
    replay = _replay(config, rng, rewards)
    training = Training(config, ranks, store, replay, metrics, target_fingerprint=fingerprint, device=device, rng=rng)
    progress = training.resume()
    forgetting = _forgetting(ground, clock)
    forgetting.look()
    shelf = Shelf(shelf_folder(config.state_dir))
    to_example = _to_example(training)
    source = _source(ground, to_example, progress, shelf, forgetting)
    ranks.lead(partial(_tidy, source, shelf, progress))
    intake = _intake(ground, source, replay, to_example, progress, forgetting)
    pointer = DraftPointer(client, config.model_key)
    candidates = Candidates(
        training,
        intake,
        store,
        pointer,
        config,
        metrics,
        ranks,
        target_fingerprint=fingerprint,
        vetoed_since_s=progress.vetoed_since_s,
        clock=clock,
    )
    saver = Saver(
        training,
        replay,
        intake,
        source,
        shelf,
        candidates,
        config,
        metrics,
        ranks,
        target_fingerprint=fingerprint,
    )
    return Parts(
        client=client,
        rewards=rewards,
        replay=replay,
        training=training,
        forgetting=forgetting,
        shelf=shelf,
        source=source,
        intake=intake,
        candidates=candidates,
        saver=saver,
        throttle=Throttle(pointer.engines, ranks, metrics, busy_share=config.busy_share),
    )


def reason_to_forget_golden(config: TrainerConfig, forgetting: Forgetting) -> Callable[[Provenance], str | None]:
    return forgetting.reason if config.golden is None else forgetting.reason_in_recording


def _replay(config: TrainerConfig, rng: random.Random, rewards: RewardWeights) -> Replay:
    return Replay(
        max_bytes=config.replay_max_bytes,
        max_waiting=config.max_waiting_traces,
        recent_share=config.replay_recent_share,
        max_tenant_share=config.max_tenant_share,
        max_draft_lag=config.max_draft_lag,
        max_target_lag=config.max_target_lag,
        rng=rng,
        seed=config.seed,
        reward_weight=rewards.weight,
    )


def _forgetting(ground: _Ground, clock: Callable[[], float]) -> Forgetting:
    return Forgetting(
        Erasures(ground.client, ground.key),
        Remover(ground.client, ground.key),
        name=ground.consumer,
        ttl_s=ground.ttl_s,
        metrics=ground.metrics,
        clock=clock,
    )


def _to_example(training: Training) -> Callable[[Trace], Example]:
    draft = training.learner.draft
    return partial(
        make_example,
        draft_ids_V=draft_ids_by_target_id(draft.d2t.cpu(), draft.config.vocab_size),
        feature_width=draft.fc.in_features,
        window=draft.config.max_position_embeddings,
    )


def _source(
    ground: _Ground,
    to_example: Callable[[Trace], Example],
    progress: Progress,
    shelf: Shelf,
    forgetting: Forgetting,
) -> TraceSource:
    config, max_bytes = ground.config, ground.config.stream_max_bytes
    return TraceSource(
        TraceStream(ground.client, ground.key, max_bytes=max_bytes, consumer=ground.consumer, ttl_s=ground.ttl_s),
        to_example,
        target_fingerprint=ground.fingerprint,
        used_trace_ids=progress.used_trace_ids,
        shelf=shelf,
        metrics=ground.metrics,
        max_known=config.max_known_traces,
        reason_to_forget=forgetting.reason,
        has_refused=forgetting.may_have_orders,
    )


def _tidy(source: TraceSource, shelf: Shelf, progress: Progress) -> int:
    """Before any rank reads: what processes had that are gone for good is found again, or removed."""
    source.take_over()
    shelf.sweep(progress.trace_ids)
    return 0


def _intake(
    ground: _Ground,
    source: TraceSource,
    replay: Replay,
    to_example: Callable[[Trace], Example],
    progress: Progress,
    forgetting: Forgetting,
) -> Intake:
    config, ranks = ground.config, ground.ranks
    held_out = HeldOut(
        share=config.holdout_share,
        max_traces=config.holdout_traces,
        max_bytes=config.holdout_share * config.replay_max_bytes,
        max_tenant_share=config.max_tenant_share,
        seed=config.seed,
    )
    is_gone = reason_to_forget_golden(config, forgetting)
    golden = golden_set(config, to_example, ranks, target_fingerprint=ground.fingerprint, is_gone=is_gone)
    share = share_of(progress, ranks.rank)
    return Intake(source, replay, held_out, golden, config, ground.metrics, share, ranks)
