"""The training loop: read → train → checkpoint → ack → gate, checkpoint and publish → rest.

`train_until` is the loop. `Trainer` has a method for each of these steps, and builds the objects that they use.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from prometheus_client import CollectorRegistry

from speculator.draft.checkpoint import target_fingerprint
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer, gpu_id
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover
from speculator.redis.trace_stream import RewardStream, TraceStream, cap_for
from speculator.tracing import prefixed, span
from speculator.versions.store import DraftStore
from trainer.checkpoint import Progress, joined, save_checkpoint, share_of
from trainer.config import TrainerConfig
from trainer.drift import tokens_owed, training_pressure
from trainer.learning.batch import make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.candidate import Candidates
from trainer.release.gate import CandidateGate, Decide, decide
from trainer.release.live_review import Review
from trainer.replay.admission import RetentionPolicy, TraceAdmission
from trainer.replay.buffer import ReplayBuffer, RewardWeights
from trainer.replay.eval_sets import HeldOut, golden_set
from trainer.replay.trace_source import TraceFiles, TraceSource, consumer_name, trace_folder
from trainer.session import Training
from trainer.throttle import Throttle

_LEAST_PRESSURE = 0.1
"""Below this pressure more training hardly changes the draft (trainer/drift.py)."""


class _ReplayTotals(NamedTuple):
    """What the replays of all ranks hold, and how many ranks see a drift alarm."""

    num_waiting: int
    num_tokens: int
    num_alarms: int


class Trainer:
    """Owns the draft in training, the replay and the Redis connection; used by one thread.

    Where several ranks train together each has a Trainer, and all call the same public methods in the same order. The
    draft and what steers its training (trainer/checkpoint.py) are the same on all of them. Each rank has a trace
    source, a replay, a held-out and a golden set of its own.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: CollectorRegistry,
        *,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.time,
        decide: Decide = decide,
    ) -> None:
        """Resumes the last checkpoint, or starts from the newest version of the store, or from a fresh draft.

        A store without a version gets the fresh draft as its first, so that engines can start. The draft is trained on
        `device`, by default the CPU. `clock` gives seconds since the epoch. `decide` is the gate's rule.
        Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError.
        """
        self.config, self.ranks = config, ranks or Ranks()
        self.metrics = TrainerMetrics(registry)
        self._fingerprint = target_fingerprint(config.model_dir)
        self._redis = connect(config.redis_url)
        self._rewards = RewardWeights(
            RewardStream(self._redis, config.model_key), bound=config.max_reward_weight, metrics=self.metrics
        )
        rng = random.Random(config.seed + self.ranks.rank)
        self.replay = ReplayBuffer(
            max_bytes=config.replay_max_bytes,
            max_waiting=config.max_waiting_traces,
            recent_share=config.replay_recent_share,
            max_tenant_share=config.max_tenant_share,
            max_target_lag=config.max_target_lag,
            rng=rng,
            seed=config.seed,
            reward_weight=self._rewards.weight,
        )
        store = DraftStore(config.store_dir)
        self.training = Training(
            config,
            self.ranks,
            store,
            self.replay,
            self.metrics,
            target_fingerprint=self._fingerprint,
            device=device or torch.device("cpu"),
            rng=rng,
        )
        progress = self.training.resume()
        self._forgetting = RetentionPolicy(
            ErasureOrders(self._redis, config.model_key),
            TraceRemover(self._redis, config.model_key),
            name=consumer_name(self.ranks.rank),
            ttl_s=self._ttl_s,
            metrics=self.metrics,
        )
        self._forgetting.poll()
        draft = self.learner.draft
        self._to_example = partial(
            make_example,
            draft_ids_V=draft_ids_by_target_id(draft.d2t.cpu(), draft.config.vocab_size),
            feature_width=draft.fc.in_features,
            window=draft.config.max_position_embeddings,
        )
        self._trace_files = TraceFiles(trace_folder(config.state_dir))
        self.source = self._open_source(progress)
        self.admission = self._open_admission(progress)
        pointer = DraftPointer(self._redis, config.model_key)
        self.review = Review(
            store.lifecycle,
            pointer,
            config,
            self.metrics,
            self.ranks,
            load_draft=self.training.load_draft,
            clock=clock,
        )
        held_out, golden = self.admission.held_out, self.admission.golden
        self.candidates = Candidates(
            self.training,
            self.admission,
            CandidateGate(held_out, golden, config, self.ranks, load_draft=self.training.load_draft, decide=decide),
            store,
            pointer,
            config,
            self.metrics,
            self.ranks,
            target_fingerprint=self._fingerprint,
            vetoed_since_s=progress.vetoed_since_s,
            clock=clock,
        )
        self.throttle = Throttle(
            pointer.engines,
            self.ranks,
            self.metrics,
            busy_share=config.busy_share,
            card_share=config.card_share,
            gpu="" if device is None else gpu_id(device),
            may_gain=lambda: self.pressure >= _LEAST_PRESSURE,
            set_trainer_resting=pointer.set_trainer_resting,
            forget=self._forget,
            is_refused=lambda: self._forgetting.is_refused,
        )
        self._saved_s, self._saved_steps = time.monotonic(), self.learner.num_steps
        self.metrics.healthy.set(self.training.guard.healthy)
        self.source.observe_lag()
        self._forgetting.report()
        self._sum_replays()
        self.restart_after_rollback()

    @property
    def learner(self) -> Learner:
        return self.training.learner

    def read(self, *, block_ms: int) -> None:
        """Remove erased and expired traces, then take new ones into the replay, as many as it has room for."""
        self._forget()
        self._rewards.poll()
        previous = self.admission.target_version
        arrivals = self.admission.read(block_ms)
        newest = self.admission.target_version
        if newest > previous:
            self.learner.after_target_update()
        self.review.arrived(one for one in arrivals.traces if one.provenance.target_version == newest)
        num_news, num_repeated_tokens = self.ranks.sum([arrivals.is_news, arrivals.num_repeated_tokens])
        repeated = int(self.config.max_passes * num_repeated_tokens)
        since_news = max(self.training.tokens_since_news - repeated, 0)
        self.training.tokens_since_news = 0 if num_news else since_news
        self._sum_replays()
        self.metrics.pressure.set(self.pressure if self.has_work else 0.0)

    @property
    def pressure(self) -> float:
        """From 0 to 1: how much more training is worth its compute (trainer/drift.py)."""
        return training_pressure(alarm=self._replay_totals.num_alarms > 0, gain=self.training.curve.gain)

    @property
    def has_work(self) -> bool:
        """A new trace waits, or the pressure asks for more passes over the old ones."""
        owed = tokens_owed(
            pressure=self.pressure,
            max_passes=self.config.max_passes,
            replay_tokens=self._replay_totals.num_tokens,
            tokens_since_news=self.training.tokens_since_news,
        )
        return self._replay_totals.num_waiting > 0 or owed > 0

    def step(self) -> None:
        """One optimiser step on a batch from the replay of every rank."""
        start_s = time.perf_counter()
        draw = self.replay.draw(self.config.batch_tokens)
        with span("train_step") as learning:
            report = self.training.step(draw.batch)
            learning.set_attributes(
                prefixed(
                    loss=report.loss,
                    tokens=report.num_bases,
                    traces=len(draw.batch),
                    applied=report.applied,
                    step=self.learner.num_steps,
                )
            )
        self.source.mark_used(draw.batch + draw.passed_over)
        if report.applied:
            for stored, counts in zip(draw.batch[: draw.num_new], report.first_steps, strict=False):
                self.admission.record_prediction(stored, *counts)
        self._sum_replays()
        self.metrics.admissions.labels("passed_over").inc(len(draw.passed_over))
        self.metrics.observe_step(
            applied=report.applied,
            num_tokens=report.num_bases,
            loss=report.loss,
            accept_length=report.accept_length,
            seconds=time.perf_counter() - start_s,
        )
        self.metrics.observe_replay(
            num_traces=len(self.replay),
            num_waiting=self.replay.num_waiting,
            num_evicted=self.replay.num_evicted,
            bytes_by_domain=self.replay.num_bytes_by_domain(),
        )
        self.metrics.healthy.set(self.training.guard.healthy)

    @property
    def checkpoint_due(self) -> bool:
        waited_s = time.monotonic() - self._saved_s
        changed = self.learner.num_steps != self._saved_steps or self.source.has_used
        return self.ranks.any(changed and waited_s >= self.config.checkpoint_interval_s)

    def checkpoint(self) -> None:
        """Make the steps so far durable: rank 0 writes what all ranks know, and all wait until it is on disk.

        Raises StoreError: a trainer that cannot save must not go on acking.
        """
        start_s = time.monotonic()
        self.training.ensure_finite()
        # `ensure_finite` may have replaced the learner by one with the last good weights.
        learner, progress = self.learner, self._progress()
        self._trace_files.sync(progress.trace_ids)
        parts = [msgspec.json.decode(part, type=Progress) for part in self.ranks.gather(msgspec.json.encode(progress))]

        def save() -> None:
            state = {name: tensor.cpu() for name, tensor in {**learner.state(), "d2t": learner.draft.d2t}.items()}
            save_checkpoint(self.config.state_dir, state, joined(parts))

        self.ranks.run_on_leader(save)
        self._trace_files.keep({*progress.trace_ids, *self.source.unused_trace_ids})
        self._saved_s, self._saved_steps = time.monotonic(), learner.num_steps
        self.metrics.checkpoint_seconds.set(self._saved_s - start_s)

    def ack(self) -> None:
        """Tell Redis about the traces that the last checkpoint lists."""
        self.source.ack_used()

    def restart_after_rollback(self) -> None:
        """Restart training from the last good version where the one in training was rolled back or barred."""
        if self.candidates.restart_after_rollback():
            # The checkpoint on disk still has the weights of the barred version.
            self.checkpoint()
            self.ack()

    def publish(self) -> None:
        """Judge the averaged draft, and offer it to the engines where it is fit."""
        with span("publish") as publishing:
            published = self.candidates.publish()
            if published:
                # Before the engines get it: a trainer killed in between would not know that its weights are a version.
                self.checkpoint()
                self.candidates.announce()
            publishing.set_attributes(prefixed(published=published, version=self.training.version))
        if published:
            self.ack()

    def close(self) -> None:
        self._forgetting.close()
        self._redis.close()

    @property
    def _ttl_s(self) -> float:
        return 3600 * self.config.trace_ttl_hours

    def _open_source(self, progress: Progress) -> TraceSource:
        config, consumer = self.config, consumer_name(self.ranks.rank)
        max_bytes = config.stream_max_bytes or cap_for(config.model_dir)
        stream = TraceStream(self._redis, config.model_key, max_bytes=max_bytes, consumer=consumer, ttl_s=self._ttl_s)
        source = TraceSource(
            stream,
            self._to_example,
            target_fingerprint=self._fingerprint,
            used_trace_ids=progress.used_trace_ids,
            trace_files=self._trace_files,
            metrics=self.metrics,
            max_known=config.max_known_traces,
            reason_to_forget=self._forgetting.reason,
            has_refused=self._forgetting.may_have_orders,
        )

        def tidy() -> None:
            """Before any rank reads: take over pending entries of processes that are gone, remove their files."""
            source.take_over()
            self._trace_files.sweep(progress.trace_ids)

        self.ranks.run_on_leader(tidy)
        return source

    def _open_admission(self, progress: Progress) -> TraceAdmission:
        config = self.config
        held_out = HeldOut(
            share=config.holdout_share,
            max_traces=config.holdout_traces,
            max_bytes=config.holdout_share * config.replay_max_bytes,
            max_tenant_share=config.max_tenant_share,
            seed=config.seed,
        )
        golden = golden_set(
            config,
            self._to_example,
            self.ranks,
            target_fingerprint=self._fingerprint,
            is_gone=self._forgetting.reason_in_recording,
        )
        share = share_of(progress, self.ranks.rank)
        return TraceAdmission(self.source, self.replay, held_out, golden, config, self.metrics, share, self.ranks)

    def _progress(self) -> Progress:
        """This rank's part of the checkpoint."""
        training, admission = self.training, self.admission
        num_traces, new_tokens = admission.progress_counts
        return Progress(
            target_fingerprint=self._fingerprint,
            draft=self.learner.draft.config,
            learnt_tokens=training.learnt_tokens,
            new_tokens=new_tokens,
            num_traces=num_traces,
            used_trace_ids=self.source.used_trace_ids,
            replay=self.replay.members,
            domains=admission.domains.known,
            drift=admission.drift.series,
            curve=training.curve.points,
            tokens_since_news=training.tokens_since_news,
            num_repeated=admission.num_repeated,
            version=training.version,
            held_out=admission.held_out_trace_ids,
            golden=admission.golden_trace_ids,
            tenants=training.tenants,
            vetoed_since_s=self.candidates.vetoed_since_s,
            target_version=admission.target_version,
        )

    def _forget(self) -> None:
        """Carry out erasure orders and the age limit, when the orders are due to be read; each rank by itself."""
        if not self._forgetting.poll():
            return
        if self.source.has_refused and self._forgetting.sweep():
            self.source.swept()
        # An operator's recording does not expire: the operator chose its age.
        is_recording = self.config.golden is not None
        is_golden_gone = self._forgetting.reason_in_recording if is_recording else self._forgetting.reason
        gone = self.admission.forget(self._forgetting.reason, is_golden_gone=is_golden_gone)
        self.review.forget(self._forgetting.reason)
        self._trace_files.remove(stored.trace_id for stored in gone)
        self._forgetting.removed(gone)
        self._forgetting.report()

    def _sum_replays(self) -> None:
        """Sum up the replays of all ranks: the sums decide whether all ranks take a step."""
        counts = (self.replay.num_waiting, self.replay.num_tokens, self.admission.drift.alarm)
        self._replay_totals = _ReplayTotals(*map(int, self.ranks.sum(counts)))


IDLE_BLOCK_MS = 1000


def train_until(stop: threading.Event, trainer: Trainer) -> None:
    """Learn until `stop` is set, then write a checkpoint, ack and close.

    Waits for: new traces, and only when no training on old ones is due (`Trainer.has_work`): a blocking Redis read of
    up to IDLE_BLOCK_MS at a time. After each turn it rests for busy engines (trainer/throttle.py).
    Unblocked by: the next trace, or `stop`.
    When behind: it reads no more than `ReplayBuffer.room` traces, so the backlog stays in Redis under the stream's byte
    cap, which drops and counts the oldest; batches are then made of new traces only.
    When Redis is away: reads come back empty, learning goes on from the replay, acks and the pointer wait.
    Shutdown: stop reading → finish the step → checkpoint → ack → close.
    All ranks take each turn together: where one has work, all take the step, and where one must stop, all stop.
    """
    while not trainer.ranks.any(stop.is_set()):
        trainer.read(block_ms=0 if trainer.has_work or trainer.review.has_work else IDLE_BLOCK_MS)
        began_s = time.monotonic()
        if trainer.has_work:
            trainer.step()
        if trainer.checkpoint_due:
            trainer.checkpoint()
            trainer.ack()
        trainer.review.take_turn()
        trainer.restart_after_rollback()
        if trainer.candidates.due:
            trainer.publish()
        trainer.throttle.rest(time.monotonic() - began_s, stop)
    trainer.checkpoint()
    trainer.ack()
    trainer.close()
