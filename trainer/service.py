"""The trainer's parts put together, and the verbs that the loop is made of."""

from __future__ import annotations

import functools
import random
import time

import structlog
import torch
from prometheus_client import CollectorRegistry

from speculator.checkpoint import read_target_tensor, target_fingerprint
from speculator.errors import DraftMismatchError
from speculator.labels import draft_ids_by_target_id
from speculator.lineage import ensure_lineage, load_draft
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import DraftPointer, TraceStream
from trainer.batch import cut, make_example, pack
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint
from trainer.config import ENV_PREFIX, TrainerConfig
from trainer.guard import Guard, all_finite
from trainer.intake import Intake
from trainer.metrics import TrainerMetrics
from trainer.pressure import LearningCurve, tokens_owed, training_pressure
from trainer.provenance import Stored
from trainer.publish import Publisher
from trainer.replay import Drawn, Replay
from trainer.source import TraceSource
from trainer.staleness import without_stale
from trainer.step import Learner, StepReport

log = structlog.get_logger()


class Trainer:
    """Owns the draft in training, the replay and the connection; used by one thread."""

    def __init__(self, config: TrainerConfig, registry: CollectorRegistry) -> None:
        """Resumes the last checkpoint, or starts from the newest version of the store, or from a fresh draft.

        A store without a version gets the fresh draft as its first, so that engines can start.
        Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError.
        """
        self._config = config
        self._rng = random.Random(config.seed)
        self.metrics = TrainerMetrics(registry)
        self._fingerprint = target_fingerprint(config.model_dir)
        self._redis = connect(config.redis_url)
        self._store = DraftStore(config.store_dir)
        self._version = ensure_lineage(
            self._store, config.model_dir, self._fingerprint, draft_vocab_size=config.draft_vocab_size, seed=config.seed
        )
        self._embed_Vd = read_target_tensor(config.model_dir, "model.embed_tokens.weight")
        self.learner = self._new_learner()
        progress = self._resume()
        self._learnt_tokens = progress.learnt_tokens
        self._tokens_since_news = progress.tokens_since_news
        self._curve = LearningCurve(progress.curve)
        self._guard = Guard()
        self._suspects: list[Stored] = []

        draft = self.learner.draft
        self._source = TraceSource(
            TraceStream(self._redis, config.model_key, max_bytes=config.stream_max_bytes),
            functools.partial(
                make_example,
                draft_ids_V=draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
                feature_width=draft.fc.in_features,
            ),
            target_fingerprint=self._fingerprint,
            used_trace_ids=progress.used_trace_ids,
            metrics=self.metrics,
        )
        self._replay = Replay(
            max_bytes=config.replay_max_bytes,
            max_waiting=config.max_waiting_traces,
            recent_share=config.replay_recent_share,
            max_tenant_share=config.max_tenant_share,
            max_draft_lag=config.max_draft_lag,
            rng=self._rng,
            seed=config.seed,
        )
        self.intake = Intake(self._source, self._replay, config, self.metrics, progress)
        self._publisher = Publisher(
            self._store,
            DraftPointer(self._redis, config.model_key),
            config,
            self.metrics,
            target_fingerprint=self._fingerprint,
            learnt_tokens=self._learnt_tokens,
        )
        self.metrics.published_version.set(self._version)
        self.metrics.healthy.set(self._guard.healthy)
        self._checkpoint_s = time.monotonic()
        self._checkpointed_steps = self.learner.num_steps

    def read(self, *, block_ms: int) -> None:
        """Take new traces into the replay, as many as it has room for."""
        arrivals = self.intake.read(block_ms)
        repeated = int(self._config.max_passes * arrivals.num_repeated_tokens)
        self._tokens_since_news = 0 if arrivals.is_news else max(self._tokens_since_news - repeated, 0)
        self.metrics.pressure.set(self.pressure if self.has_work else 0.0)

    @property
    def pressure(self) -> float:
        """From 0 to 1: how much more training is worth its compute (trainer/pressure.py)."""
        return training_pressure(alarm=self.intake.drift.alarm, gain=self._curve.gain)

    @property
    def has_work(self) -> bool:
        """A new trace waits, or the old ones were not yet learnt from as often as the pressure asks for."""
        owed = tokens_owed(
            pressure=self.pressure,
            max_passes=self._config.max_passes,
            replay_tokens=self._replay.num_tokens,
            tokens_since_news=self._tokens_since_news,
        )
        return self._replay.num_waiting > 0 or owed > 0

    def step(self) -> None:
        """One optimiser step on a batch from the replay."""
        start_s = time.perf_counter()
        draw = self._replay.draw(self._config.batch_tokens, published=self._version)
        report, num_tokens = self._learn(draw.batch)
        if not _harmless(report):
            self._find_culprits(draw.batch)
        self._source.mark_used([drawn.stored for drawn in draw.batch] + draw.passed_over)
        self.metrics.admissions.labels("passed_over").inc(len(draw.passed_over))
        self.metrics.proposal_weight.set(sum(drawn.proposal_weight for drawn in draw.batch) / len(draw.batch))
        self.metrics.observe_step(report, time.perf_counter() - start_s, num_tokens)
        self.metrics.observe_replay(self._replay)
        self.metrics.healthy.set(self._guard.healthy)

    @property
    def checkpoint_due(self) -> bool:
        waited_s = time.monotonic() - self._checkpoint_s
        changed = self.learner.num_steps != self._checkpointed_steps or self._source.has_used
        return changed and waited_s >= self._config.checkpoint_interval_s

    def checkpoint(self) -> None:
        """Make the steps so far durable. Raises StoreError: a trainer that cannot save must not go on acking."""
        start_s = time.monotonic()
        if not all_finite(self.learner.state()):
            self._restore_weights()
        progress = Progress(
            target_fingerprint=self._fingerprint,
            learnt_tokens=self._learnt_tokens,
            new_tokens=self.intake.new_tokens,
            num_traces=self.intake.num_traces,
            used_trace_ids=self._source.used_trace_ids,
            replay=self._replay.members,
            domains=self.intake.domains.known,
            drift=self.intake.drift.states,
            curve=self._curve.points,
            tokens_since_news=self._tokens_since_news,
            num_repeated=self.intake.num_repeated,
        )
        state = {**self.learner.state(), "d2t": self.learner.draft.d2t}
        save_checkpoint(self._config.state_dir, state, progress)
        self._checkpoint_s = time.monotonic()
        self._checkpointed_steps = self.learner.num_steps
        self.metrics.checkpoint_seconds.set(self._checkpoint_s - start_s)

    def ack(self) -> None:
        """Tell Redis about the traces that the last checkpoint lists."""
        self._source.ack_used()

    @property
    def publish_due(self) -> bool:
        return self._guard.healthy and self._publisher.due(self._learnt_tokens)

    def publish(self) -> None:
        """Offer the averaged draft to the engines."""
        info = {
            "num_steps": self.learner.num_steps,
            "num_traces": self.intake.num_traces,
            "num_repeated": self.intake.num_repeated,
            "new_tokens": self.intake.new_tokens,
            "learnt_tokens": self._learnt_tokens,
        }
        version = self._publisher.publish(self.learner.averaged, learnt_tokens=self._learnt_tokens, info=info)
        if version is not None:
            self._version = version
            self._curve.mark()

    def close(self) -> None:
        self._redis.close()

    def _learn(self, batch: list[Drawn]) -> tuple[StepReport, int]:
        """One step; (what it did, its tokens)."""
        max_lag, examples = self._config.max_draft_lag, [drawn.stored.example for drawn in batch]
        fresh = [without_stale(one, published=self._version, max_lag=max_lag, rng=self._rng) for one in examples]
        windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in fresh]
        report = self.learner.step(pack(windows, max_context=self._config.max_context))
        num_tokens = sum(window.num_bases for window in windows)
        self._tokens_since_news += num_tokens
        if report.num_labels:
            self._guard.observe(finite=report.applied)
        if report.applied:
            self._learnt_tokens += num_tokens
            self._curve.observe(report.accept_length, report.loss)
            self._discard(self._suspects)
        return report, num_tokens

    def _find_culprits(self, batch: list[Drawn]) -> None:
        """A batch was not finite: learn from its traces one by one. Kept, one bad trace would spoil every batch that it
        is drawn into; discarded without a look, it would take the good ones along.
        """
        culprits = [drawn.stored for drawn in batch if len(batch) == 1 or not _harmless(self._learn([drawn])[0])]
        log.warning("step skipped, not finite", trace_ids=[stored.trace_id for stored in culprits])
        self._suspects += culprits
        if self._guard.blames_traces or len(culprits) < len(batch):
            self._discard(self._suspects)
        elif self._guard.must_restore or not all_finite(self.learner.state()):
            self._restore_weights()

    def _discard(self, suspects: list[Stored]) -> None:
        self._replay.discard(suspects)
        suspects.clear()

    def _restore_weights(self) -> None:
        """Back to the last checkpoint, or to the newest version where there is none."""
        self.learner = self._new_learner()
        saved = load_checkpoint(self._config.state_dir)
        if saved is not None:
            self.learner.load_state(saved[0])
        self._guard.restored()
        self._suspects.clear()
        self.metrics.restored.inc()
        log.error("the last good weights were taken back", num_steps=self.learner.num_steps)

    def _new_learner(self) -> Learner:
        draft = load_draft(self._store, self._version, embed=self._embed_Vd, target_fingerprint=self._fingerprint)
        return Learner(draft, self._config)

    def _resume(self) -> Progress:
        """Take over the last checkpoint, where there is one."""
        saved = load_checkpoint(self._config.state_dir)
        if saved is None:
            return Progress(
                target_fingerprint=self._fingerprint, learnt_tokens=0, new_tokens=0, num_traces=0, used_trace_ids=[]
            )
        state, progress = saved
        if progress.target_fingerprint != self._fingerprint or not torch.equal(state["d2t"], self.learner.draft.d2t):
            raise DraftMismatchError(
                f"the checkpoint in {self._config.state_dir} belongs to another target or draft vocabulary than "
                f"{self._config.store_dir}: remove it, or set {ENV_PREFIX}STATE_DIR to another folder"
            )
        self.learner.load_state(state)
        log.info("trainer resumed", num_steps=self.learner.num_steps, num_traces=progress.num_traces)
        return progress


def _harmless(report: StepReport) -> bool:
    """A step without any label changes nothing, and nothing is wrong."""
    return report.applied or not report.num_labels
