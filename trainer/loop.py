"""The training loop, one screen: read → train → checkpoint → ack → gate, checkpoint and publish → rest.

`train_until` is the loop, and `Trainer` has its verbs; what they act on is put together below them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import redis
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from speculator.draft.checkpoint import target_fingerprint
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_deletion import Erasures, Remover
from speculator.redis.trace_stream import RewardStream, TraceStream
from speculator.trace import Trace
from speculator.tracing import prefixed, span
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig
from trainer.learning.batch import Example, make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.candidate import Candidates
from trainer.replay.admission import Forgetting, Intake
from trainer.replay.buffer import Replay, RewardWeights
from trainer.replay.eval_sets import HeldOut, golden_set
from trainer.replay.memory import Provenance
from trainer.replay.trace_source import Shelf, TraceSource, consumer_name, shelf_folder
from trainer.schedule import Throttle, tokens_owed, training_pressure
from trainer.session import Progress, Training, joined, save_checkpoint, share_of


class _Stock(NamedTuple):
    """What the replays of all ranks hold, and how many ranks see a drift alarm."""

    num_waiting: int
    num_tokens: int
    num_alarms: int


class Trainer:
    """Owns the draft in training, the replay and the connection; used by one thread.

    Where several ranks train together each has a Trainer, and they go through the same public methods in the same
    order. The draft and what steers its training (trainer/session.py) are the same on all of them; the source, the
    replay and what is kept from learning are each rank's own.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: CollectorRegistry,
        *,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Resumes the last checkpoint, or starts from the newest version of the store, or from a fresh draft.

        A store without a version gets the fresh draft as its first, so that engines can start. The draft is trained on
        `device`, by default the CPU. `clock` gives seconds since the epoch.
        Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError.
        """
        self._config, self.ranks = config, ranks or Ranks()
        self.metrics = TrainerMetrics(registry)
        parts = assemble(config, self.ranks, self.metrics, device=device or torch.device("cpu"), clock=clock)
        self._redis, self._rewards, self._replay = parts.client, parts.rewards, parts.replay
        self._training, self._forgetting, self._shelf = parts.training, parts.forgetting, parts.shelf
        self._source, self.intake = parts.source, parts.intake
        self._candidates, self._saver, self.throttle = parts.candidates, parts.saver, parts.throttle
        self.metrics.healthy.set(self._training.guard.healthy)
        self._source.observe_lag()
        self._forgetting.report()
        self._survey()

    @property
    def learner(self) -> Learner:
        return self._training.learner

    def read(self, *, block_ms: int) -> None:
        """Take new traces into the replay, as many as it has room for, after forgetting what is to be forgotten."""
        self._forget()
        self._rewards.look()
        previous = self.intake.target_version
        arrivals = self.intake.read(block_ms)
        newest = self.intake.target_version
        if newest > previous:
            self.learner.target_moved()
        self._candidates.review.arrived(one for one in arrivals.traces if one.provenance.target_version == newest)
        num_news, num_repeated_tokens = self.ranks.sum([arrivals.is_news, arrivals.num_repeated_tokens])
        repeated = int(self._config.max_passes * num_repeated_tokens)
        since_news = max(self._training.tokens_since_news - repeated, 0)
        self._training.tokens_since_news = 0 if num_news else since_news
        self._survey()
        self.metrics.pressure.set(self.pressure if self.has_work else 0.0)

    @property
    def pressure(self) -> float:
        """From 0 to 1: how much more training is worth its compute (trainer/schedule.py)."""
        return training_pressure(alarm=self._stock.num_alarms > 0, gain=self._training.curve.gain)

    @property
    def has_work(self) -> bool:
        """A new trace waits, or the old ones were not yet learnt from as often as the pressure asks for."""
        owed = tokens_owed(
            pressure=self.pressure,
            max_passes=self._config.max_passes,
            replay_tokens=self._stock.num_tokens,
            tokens_since_news=self._training.tokens_since_news,
        )
        return self._stock.num_waiting > 0 or owed > 0

    def step(self) -> None:
        """One optimiser step on a batch from the replay of every rank."""
        start_s = time.perf_counter()
        draw = self._replay.draw(self._config.batch_tokens, published=self._training.version)
        with span("train_step") as learning:
            report = self._training.step(draw.batch)
            learning.set_attributes(
                prefixed(
                    loss=report.loss,
                    tokens=report.num_bases,
                    traces=len(draw.batch),
                    applied=report.applied,
                    step=self.learner.num_steps,
                )
            )
        self._source.mark_used([drawn.stored for drawn in draw.batch] + draw.passed_over)
        self._survey()
        self.metrics.admissions.labels("passed_over").inc(len(draw.passed_over))
        proposal_weight = sum(drawn.proposal_weight for drawn in draw.batch) / max(len(draw.batch), 1)
        self.metrics.proposal_weight.set(proposal_weight)
        self.metrics.observe_step(
            applied=report.applied,
            num_tokens=report.num_bases,
            loss=report.loss,
            accept_length=report.accept_length,
            seconds=time.perf_counter() - start_s,
        )
        self.metrics.observe_replay(
            num_traces=len(self._replay),
            num_waiting=self._replay.num_waiting,
            num_evicted=self._replay.num_evicted,
            bytes_by_domain=self._replay.num_bytes_by_domain(),
        )
        self.metrics.healthy.set(self._training.guard.healthy)

    @property
    def checkpoint_due(self) -> bool:
        return self._saver.is_due

    def checkpoint(self) -> None:
        """Make the steps so far durable. Raises StoreError: a trainer that cannot save must not go on acking."""
        self._saver.save()

    def ack(self) -> None:
        """Tell Redis about the traces that the last checkpoint lists."""
        self._source.ack_used()

    @property
    def is_reviewing(self) -> bool:
        """Traces wait here to be decoded by the versions that are compared on them."""
        return self._candidates.review.has_work

    def review(self) -> None:
        """Look once more at a version that came into service, on a few of the traces that arrived since."""
        self._candidates.review.take_turn()

    def heed_rollbacks(self) -> None:
        """Start again from the last good version where the one in training was rolled back or barred."""
        if self._candidates.heed_rollbacks():
            # The checkpoint on disk still has the weights that were given up.
            self.checkpoint()
            self.ack()

    @property
    def publish_due(self) -> bool:
        return self._candidates.due

    def publish(self) -> None:
        """Judge the averaged draft, and offer it to the engines where it is fit."""
        with span("publish") as publishing:
            published = self._candidates.publish()
            if published:
                # Before the engines hear of it: a trainer that is killed would not know what its weights became.
                self.checkpoint()
                self._candidates.announce()
            publishing.set_attributes(prefixed(published=published, version=self._training.version))
        if published:
            self.ack()

    def close(self) -> None:
        self._forgetting.close()
        self._redis.close()

    def _forget(self) -> None:
        if not self._forgetting.look():
            return
        if self._source.has_refused and self._forgetting.sweep():
            self._source.swept()
        is_golden_gone = reason_to_forget_golden(self._config, self._forgetting)
        gone = self.intake.forget(self._forgetting.reason, is_golden_gone=is_golden_gone)
        self._candidates.review.forget(self._forgetting.reason)
        self._shelf.remove(stored.trace_id for stored in gone)
        self._forgetting.removed(gone)
        self._forgetting.report()

    def _survey(self) -> None:
        """Look over all replays: what is in them decides whether all ranks go on."""
        counts = (self._replay.num_waiting, self._replay.num_tokens, self.intake.drift.alarm)
        self._stock = _Stock(*map(int, self.ranks.sum(counts)))


IDLE_BLOCK_MS = 1000


def train_until(stop: threading.Event, trainer: Trainer) -> None:
    """Learn until `stop` is set, then put everything in order.

    Waits for: new traces, and only when nothing is to be gained from the old ones (`Trainer.has_work`): then it sleeps
    in Redis, up to IDLE_BLOCK_MS at a time. After each turn it rests for busy engines (trainer/schedule.py).
    Unblocked by: the next trace, or `stop`.
    When behind: it reads no more than `Replay.room` traces, so the backlog stays in Redis under the stream's byte cap,
    which drops and counts the oldest; batches are then made of new traces only.
    When Redis is away: reads come back empty, learning goes on from the replay, acks and the pointer wait.
    Shutdown: stop reading → finish the step → checkpoint → ack → close.
    Under several ranks each turn is made by all of them: one that has work, or is told to stop, takes the others along.
    """
    while not trainer.ranks.any(stop.is_set()):
        trainer.read(block_ms=0 if trainer.has_work or trainer.is_reviewing else IDLE_BLOCK_MS)
        began_s = time.monotonic()
        if trainer.has_work:
            trainer.step()
        if trainer.checkpoint_due:
            trainer.checkpoint()
            trainer.ack()
        trainer.review()
        trainer.heed_rollbacks()
        if trainer.publish_due:
            trainer.publish()
        trainer.throttle.rest(time.monotonic() - began_s, stop)
    trainer.checkpoint()
    trainer.ack()
    trainer.close()


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


class Saver:
    """Every rank has one; they are asked at the same steps."""

    def __init__(
        self,
        training: Training,
        replay: Replay,
        intake: Intake,
        source: TraceSource,
        shelf: Shelf,
        candidates: Candidates,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        ranks: Ranks,
        *,
        target_fingerprint: str,
    ) -> None:
        self._training, self._replay, self._intake = training, replay, intake
        self._source, self._shelf, self._candidates = source, shelf, candidates
        self._config, self._metrics, self._ranks, self._fingerprint = config, metrics, ranks, target_fingerprint
        self._saved_s = time.monotonic()
        self._saved_steps = training.learner.num_steps

    @property
    def is_due(self) -> bool:
        waited_s = time.monotonic() - self._saved_s
        changed = self._training.learner.num_steps != self._saved_steps or self._source.has_used
        return self._ranks.any(changed and waited_s >= self._config.checkpoint_interval_s)

    def save(self) -> None:
        """Raises StoreError: a trainer that cannot save must not go on acking."""
        start_s = time.monotonic()
        self._training.ensure_finite()
        # Perhaps another one by now: with the last good weights.
        learner, progress = self._training.learner, self._progress()
        self._shelf.sync(progress.trace_ids)
        parts = [msgspec.json.decode(part, type=Progress) for part in self._ranks.gather(msgspec.json.encode(progress))]
        state = {**learner.state(), "d2t": learner.draft.d2t}
        self._ranks.lead(lambda: self._write(state, joined(parts)))
        self._shelf.keep({*progress.trace_ids, *self._source.trace_ids_in_hand})
        self._saved_s, self._saved_steps = time.monotonic(), learner.num_steps
        self._metrics.checkpoint_seconds.set(self._saved_s - start_s)

    def _progress(self) -> Progress:
        """What this rank knows."""
        training, intake = self._training, self._intake
        num_traces, new_tokens = intake.settled
        return Progress(
            target_fingerprint=self._fingerprint,
            learnt_tokens=training.learnt_tokens,
            new_tokens=new_tokens,
            num_traces=num_traces,
            used_trace_ids=self._source.used_trace_ids,
            replay=self._replay.members,
            domains=intake.domains.known,
            drift=intake.drift.states,
            curve=training.curve.points,
            tokens_since_news=training.tokens_since_news,
            num_repeated=intake.num_repeated,
            version=training.version,
            held_out=intake.held_out_trace_ids,
            golden=intake.golden_trace_ids,
            tenants=training.tenants,
            vetoed_since_s=self._candidates.patience.since_s,
            target_version=intake.target_version,
        )

    def _write(self, state: dict[str, Tensor], progress: Progress) -> int:
        save_checkpoint(self._config.state_dir, {name: tensor.cpu() for name, tensor in state.items()}, progress)
        return 0
