"""The training loop, one screen: read → train → checkpoint → ack → gate, checkpoint and publish → rest.

`Trainer` has the verbs of the loop; trainer/wiring.py puts together what they act on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry

from speculator.tracing import prefixed, span
from trainer.config import TrainerConfig
from trainer.learning.optimizer_step import Learner
from trainer.learning.schedule import tokens_owed, training_pressure
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.wiring import assemble, reason_to_forget_golden


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
        """From 0 to 1: how much more training is worth its compute (trainer/learning/schedule.py)."""
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
    in Redis, up to IDLE_BLOCK_MS at a time. After each turn it rests for busy engines (trainer/throttle.py).
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
