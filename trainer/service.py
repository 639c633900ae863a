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
from speculator.lineage import ensure_lineage, load_draft
from speculator.loss import draft_ids_by_target_id
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import DraftPointer, TraceStream
from trainer.batch import cut, make_example, pack
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint
from trainer.config import ENV_PREFIX, TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.publish import Publisher
from trainer.replay import Replay
from trainer.source import TraceSource
from trainer.step import Learner

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
        store = DraftStore(config.store_dir)
        version = ensure_lineage(
            store, config.model_dir, self._fingerprint, draft_vocab_size=config.draft_vocab_size, seed=config.seed
        )
        embed_Vd = read_target_tensor(config.model_dir, "model.embed_tokens.weight")
        draft = load_draft(store, version, embed=embed_Vd, target_fingerprint=self._fingerprint)
        self.learner = Learner(draft, config)
        self._learnt_tokens = self._new_tokens = self._num_traces = 0
        used_trace_ids = self._resume()

        self._source = TraceSource(
            TraceStream(self._redis, config.model_key, max_bytes=config.stream_max_bytes),
            functools.partial(
                make_example,
                draft_ids_V=draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
                feature_width=draft.fc.in_features,
            ),
            target_fingerprint=self._fingerprint,
            used_trace_ids=used_trace_ids,
            metrics=self.metrics,
        )
        self._replay = Replay(max_bytes=config.replay_max_bytes, max_waiting=config.max_waiting_traces, rng=self._rng)
        for example in self._source.history(config.replay_max_bytes):
            self._replay.restore(example)
        self._publisher = Publisher(
            store,
            DraftPointer(self._redis, config.model_key),
            config,
            self.metrics,
            target_fingerprint=self._fingerprint,
            learnt_tokens=self._learnt_tokens,
        )
        if (latest := store.latest()) is None:
            self.publish()
        else:
            self.metrics.published_version.set(latest)
        self._tokens_since_news = 0
        self._checkpoint_s = time.monotonic()
        self._checkpointed_steps = self.learner.num_steps

    def read(self, *, block_ms: int) -> None:
        """Take new traces into the replay, as many as it has room for."""
        if not self._replay.room:
            return
        for example in self._source.read(self._replay.room, block_ms):
            self._replay.add(example)
            self._new_tokens += example.num_bases
            self._num_traces += 1
            self._tokens_since_news = 0

    @property
    def has_work(self) -> bool:
        """A new trace waits, or the old ones were not yet learnt from often enough."""
        return (
            self._replay.num_waiting > 0 or self._tokens_since_news < self._config.max_passes * self._replay.num_tokens
        )

    def step(self) -> None:
        """One optimiser step on a batch from the replay."""
        start_s = time.perf_counter()
        examples = self._replay.draw(self._config.batch_tokens)
        windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in examples]
        report = self.learner.step(pack(windows, max_context=self._config.max_context))
        num_tokens = sum(window.num_bases for window in windows)
        self._tokens_since_news += num_tokens
        if report.applied:
            self._learnt_tokens += num_tokens
        else:
            # Kept, they would spoil every batch that they are drawn into.
            self._replay.discard(examples)
            log.warning("step skipped, not finite", trace_ids=[example.trace_id for example in examples])
        self._source.mark_used(examples)
        self.metrics.observe_step(report, time.perf_counter() - start_s, num_tokens)
        self.metrics.observe_replay(self._replay.num_bytes, len(self._replay), self._replay.num_waiting)

    @property
    def checkpoint_due(self) -> bool:
        waited_s = time.monotonic() - self._checkpoint_s
        changed = self.learner.num_steps != self._checkpointed_steps or self._source.has_used
        return changed and waited_s >= self._config.checkpoint_interval_s

    def checkpoint(self) -> None:
        """Make the steps so far durable. Raises StoreError: a trainer that cannot save must not go on acking."""
        start_s = time.monotonic()
        progress = Progress(
            target_fingerprint=self._fingerprint,
            learnt_tokens=self._learnt_tokens,
            new_tokens=self._new_tokens,
            num_traces=self._num_traces,
            used_trace_ids=self._source.used_trace_ids,
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
        return self._publisher.due(self._learnt_tokens)

    def publish(self) -> None:
        """Offer the averaged draft to the engines."""
        info = {
            "num_steps": self.learner.num_steps,
            "num_traces": self._num_traces,
            "new_tokens": self._new_tokens,
            "learnt_tokens": self._learnt_tokens,
        }
        self._publisher.publish(self.learner.averaged, learnt_tokens=self._learnt_tokens, info=info)

    def close(self) -> None:
        self._redis.close()

    def _resume(self) -> list[str]:
        """Take over the last checkpoint; returns the trace ids that it has learnt from."""
        saved = load_checkpoint(self._config.state_dir)
        if saved is None:
            return []
        state, progress = saved
        if progress.target_fingerprint != self._fingerprint or not torch.equal(state["d2t"], self.learner.draft.d2t):
            raise DraftMismatchError(
                f"the checkpoint in {self._config.state_dir} belongs to another target or draft vocabulary than "
                f"{self._config.store_dir}: remove it, or set {ENV_PREFIX}STATE_DIR to another folder"
            )
        self.learner.load_state(state)
        self._learnt_tokens, self._new_tokens = progress.learnt_tokens, progress.new_tokens
        self._num_traces = progress.num_traces
        log.info("trainer resumed", num_steps=self.learner.num_steps, num_traces=self._num_traces)
        return progress.used_trace_ids
