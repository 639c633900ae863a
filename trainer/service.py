"""The trainer's parts put together, and the verbs that the loop is made of."""

from __future__ import annotations

import functools
import random
import time
from typing import NamedTuple

import msgspec
import structlog
import torch
from prometheus_client import CollectorRegistry

from speculator.checkpoint import read_target_tensor, target_fingerprint
from speculator.errors import ConfigError, DraftMismatchError
from speculator.labels import draft_ids_by_target_id
from speculator.lineage import ensure_lineage, load_draft
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import DraftPointer, TraceStream
from trainer.batch import cut, make_example, pack
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint
from trainer.config import ENV_PREFIX, TrainerConfig
from trainer.distributed import Ranks
from trainer.guard import Guard, all_finite
from trainer.intake import Intake
from trainer.metrics import TrainerMetrics
from trainer.pressure import LearningCurve, tokens_owed, training_pressure
from trainer.provenance import Stored
from trainer.publish import Publisher
from trainer.replay import Drawn, Replay
from trainer.shares import joined, share_of
from trainer.shelf import Shelf
from trainer.source import TraceSource, consumer_name
from trainer.staleness import without_stale
from trainer.step import Learner, StepReport

log = structlog.get_logger()

# What `lead` passes on where nothing was published; the store counts from 1.
_NO_VERSION = 0


class _Stock(NamedTuple):
    """What the replays of all ranks hold, and how many ranks see a drift alarm."""

    num_waiting: int
    num_tokens: int
    num_alarms: int


class Trainer:
    """Owns the draft in training, the replay and the connection; used by one thread.

    Where several ranks train together each has a Trainer, and they go through the same public methods in the same
    order. The draft and what steers its training (the guard, the curve, the counts of tokens) are the same on all of
    them; the source and the replay are each rank's own.
    """

    def __init__(
        self,
        config: TrainerConfig,
        registry: CollectorRegistry,
        *,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Resumes the last checkpoint, or starts from the newest version of the store, or from a fresh draft.

        A store without a version gets the fresh draft as its first, so that engines can start. The draft is trained on
        `device`, by default the CPU.
        Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError.
        """
        self._config = config
        self.ranks = ranks or Ranks()
        self._rng = random.Random(config.seed + self.ranks.rank)
        self.metrics = TrainerMetrics(registry)
        self._fingerprint = target_fingerprint(config.model_dir)
        self._redis = connect(config.redis_url)
        self._store = DraftStore(config.store_dir)
        self._version = self.ranks.lead(self._ensure_lineage)
        # The draft goes where its embedding is.
        self._embed_Vd = read_target_tensor(config.model_dir, "model.embed_tokens.weight").to(device or "cpu")
        self.learner = self._new_learner()
        progress = self._resume()
        self._learnt_tokens = progress.learnt_tokens
        self._tokens_since_news = progress.tokens_since_news
        self._curve = LearningCurve(progress.curve)
        self._guard = Guard()
        self._suspects: list[Stored] = []

        draft = self.learner.draft
        self._shelf = Shelf(config.state_dir / "replay")
        self._source = TraceSource(
            TraceStream(
                self._redis,
                config.model_key,
                max_bytes=config.stream_max_bytes,
                consumer=consumer_name(self.ranks.rank),
            ),
            functools.partial(
                make_example,
                draft_ids_V=draft_ids_by_target_id(draft.d2t.cpu(), draft.config.vocab_size),
                feature_width=draft.fc.in_features,
            ),
            target_fingerprint=self._fingerprint,
            used_trace_ids=progress.used_trace_ids,
            shelf=self._shelf,
            metrics=self.metrics,
        )
        self.ranks.lead(lambda: self._tidy(progress))
        self._replay = Replay(
            max_bytes=config.replay_max_bytes,
            max_waiting=config.max_waiting_traces,
            recent_share=config.replay_recent_share,
            max_tenant_share=config.max_tenant_share,
            max_draft_lag=config.max_draft_lag,
            rng=self._rng,
            seed=config.seed,
        )
        self.intake = Intake(self._source, self._replay, config, self.metrics, progress, self.ranks)
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
        self._survey()

    def read(self, *, block_ms: int) -> None:
        """Take new traces into the replay, as many as it has room for."""
        arrivals = self.intake.read(block_ms)
        num_news, num_repeated_tokens = self.ranks.sum([arrivals.is_news, arrivals.num_repeated_tokens])
        repeated = int(self._config.max_passes * num_repeated_tokens)
        self._tokens_since_news = 0 if num_news else max(self._tokens_since_news - repeated, 0)
        self._survey()
        self.metrics.pressure.set(self.pressure if self.has_work else 0.0)

    @property
    def pressure(self) -> float:
        """From 0 to 1: how much more training is worth its compute (trainer/pressure.py)."""
        return training_pressure(alarm=self._stock.num_alarms > 0, gain=self._curve.gain)

    @property
    def has_work(self) -> bool:
        """A new trace waits, or the old ones were not yet learnt from as often as the pressure asks for."""
        owed = tokens_owed(
            pressure=self.pressure,
            max_passes=self._config.max_passes,
            replay_tokens=self._stock.num_tokens,
            tokens_since_news=self._tokens_since_news,
        )
        return self._stock.num_waiting > 0 or owed > 0

    def step(self) -> None:
        """One optimiser step on a batch from the replay of every rank."""
        start_s = time.perf_counter()
        draw = self._replay.draw(self._config.batch_tokens, published=self._version)
        report = self._learn(draw.batch)
        if not _harmless(report):
            self._find_culprits(draw.batch, report)
        self._source.mark_used([drawn.stored for drawn in draw.batch] + draw.passed_over)
        self._survey()
        self.metrics.admissions.labels("passed_over").inc(len(draw.passed_over))
        proposal_weight = sum(drawn.proposal_weight for drawn in draw.batch) / max(len(draw.batch), 1)
        self.metrics.proposal_weight.set(proposal_weight)
        self.metrics.observe_step(report, time.perf_counter() - start_s)
        self.metrics.observe_replay(self._replay)
        self.metrics.healthy.set(self._guard.healthy)

    @property
    def checkpoint_due(self) -> bool:
        waited_s = time.monotonic() - self._checkpoint_s
        changed = self.learner.num_steps != self._checkpointed_steps or self._source.has_used
        return self.ranks.any(changed and waited_s >= self._config.checkpoint_interval_s)

    def checkpoint(self) -> None:
        """Make the steps so far durable: rank 0 writes what all ranks know, and all wait until it is on disk.

        Raises StoreError: a trainer that cannot save must not go on acking.
        """
        start_s = time.monotonic()
        if self.ranks.any(not all_finite(self.learner.state())):
            self._restore_weights()
        members = self._replay.members
        progress = Progress(
            target_fingerprint=self._fingerprint,
            learnt_tokens=self._learnt_tokens,
            new_tokens=self.intake.new_tokens,
            num_traces=self.intake.num_traces,
            used_trace_ids=self._source.used_trace_ids,
            replay=members,
            domains=self.intake.domains.known,
            drift=self.intake.drift.states,
            curve=self._curve.points,
            tokens_since_news=self._tokens_since_news,
            num_repeated=self.intake.num_repeated,
        )
        parts = [msgspec.json.decode(part, type=Progress) for part in self.ranks.gather(msgspec.json.encode(progress))]
        self.ranks.lead(lambda: self._save(joined(parts)))
        self._shelf.keep(members.keys() | self._source.trace_ids_in_hand)
        self._checkpoint_s = time.monotonic()
        self._checkpointed_steps = self.learner.num_steps
        self.metrics.checkpoint_seconds.set(self._checkpoint_s - start_s)

    def ack(self) -> None:
        """Tell Redis about the traces that the last checkpoint lists."""
        self._source.ack_used()

    @property
    def publish_due(self) -> bool:
        return self._guard.healthy and self.ranks.any(self.ranks.leads and self._publisher.due(self._learnt_tokens))

    def publish(self) -> None:
        """Offer the averaged draft to the engines; rank 0 does."""
        intake = self.intake
        seen = map(int, self.ranks.sum([intake.num_traces, intake.num_repeated, intake.new_tokens]))
        info = {
            "num_steps": self.learner.num_steps,
            **dict(zip(("num_traces", "num_repeated", "new_tokens"), seen, strict=True)),
            "learnt_tokens": self._learnt_tokens,
        }
        averaged, learnt_tokens = self.learner.averaged, self._learnt_tokens
        version = self.ranks.lead(
            lambda: self._publisher.publish(averaged, learnt_tokens=learnt_tokens, info=info) or _NO_VERSION
        )
        if version != _NO_VERSION:
            self._version = version
            self.metrics.published_version.set(version)
            self._curve.mark()

    def close(self) -> None:
        self._redis.close()

    def _survey(self) -> None:
        """Look over all replays: what is in them decides whether all ranks go on."""
        counts = (self._replay.num_waiting, self._replay.num_tokens, self.intake.drift.alarm)
        self._stock = _Stock(*map(int, self.ranks.sum(counts)))

    def _tidy(self, progress: Progress) -> int:
        """Before any rank reads: what processes had that are gone for good is found again, or removed."""
        self._source.take_over()
        self._shelf.sweep(progress.replay or ())
        return 0

    def _save(self, progress: Progress) -> int:
        state = {**self.learner.state(), "d2t": self.learner.draft.d2t}
        save_checkpoint(self._config.state_dir, {name: tensor.cpu() for name, tensor in state.items()}, progress)
        return 0

    def _learn(self, batch: list[Drawn]) -> StepReport:
        """One step of all ranks; this one's batch may be empty."""
        max_lag, examples = self._config.max_draft_lag, [drawn.stored.example for drawn in batch]
        fresh = [without_stale(one, published=self._version, max_lag=max_lag, rng=self._rng) for one in examples]
        windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in fresh]
        report = self.learner.step(pack(windows, max_context=self._config.max_context) if windows else None)
        self._tokens_since_news += report.num_bases
        if report.num_labels:
            self._guard.observe(finite=report.applied)
        if report.applied:
            self._learnt_tokens += report.num_bases
            self._curve.observe(report.accept_length, report.loss)
            self._discard(self._suspects)
        return report

    def _find_culprits(self, batch: list[Drawn], report: StepReport) -> None:
        """A batch was not finite: learn from its traces one by one. Kept, one bad trace would spoil every batch that it
        is drawn into; discarded without a look, it would take the good ones along. Ranks whose batch was fine stand by.
        """
        accused = batch if report.is_culprit else []
        tried = accused if len(accused) > 1 else []
        culprits = [drawn.stored for drawn in accused if not tried]
        for turn in range(self.ranks.max(len(tried))):
            alone = tried[turn : turn + 1]
            if self._learn(alone).is_culprit:
                culprits += [drawn.stored for drawn in alone]
        if report.is_culprit:
            log.warning("step skipped, not finite", trace_ids=[stored.trace_id for stored in culprits])
        self._suspects += culprits
        num_culprits, num_drawn = self.ranks.sum([len(culprits), len(batch)])
        if self._guard.blames_traces or num_culprits < num_drawn:
            self._discard(self._suspects)
        elif self._guard.must_restore or self.ranks.any(not all_finite(self.learner.state())):
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
        return Learner(draft, self._config, self.ranks)

    def _ensure_lineage(self) -> int:
        return ensure_lineage(
            self._store,
            self._config.model_dir,
            self._fingerprint,
            draft_vocab_size=self._config.draft_vocab_size,
            seed=self._config.seed,
        )

    def _resume(self) -> Progress:
        """Take over the last checkpoint, where there is one: this rank's share of it."""
        saved = load_checkpoint(self._config.state_dir)
        num_steps = -1 if saved is None else int(saved[0]["num_steps"])
        if not self.ranks.agree(num_steps):
            raise ConfigError(
                f"the ranks found different checkpoints in {self._config.state_dir}: set {ENV_PREFIX}STATE_DIR or "
                "--state to a folder that all machines share"
            )
        if saved is None:
            return Progress(
                target_fingerprint=self._fingerprint, learnt_tokens=0, new_tokens=0, num_traces=0, used_trace_ids=[]
            )
        state, progress = saved
        same_d2t = torch.equal(state["d2t"], self.learner.draft.d2t.cpu())
        if progress.target_fingerprint != self._fingerprint or not same_d2t:
            raise DraftMismatchError(
                f"the checkpoint in {self._config.state_dir} belongs to another target or draft vocabulary than "
                f"{self._config.store_dir}: remove it, or set {ENV_PREFIX}STATE_DIR to another folder"
            )
        self.learner.load_state(state)
        log.info("trainer resumed", num_steps=self.learner.num_steps, num_traces=progress.num_traces)
        return share_of(progress, self.ranks.rank)


def _harmless(report: StepReport) -> bool:
    """A step without any label changes nothing, and nothing is wrong."""
    return report.applied or not report.num_labels
