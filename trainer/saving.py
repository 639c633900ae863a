"""Makes the steps of all ranks durable: rank 0 writes what all ranks know, and all wait until it is on disk."""

from __future__ import annotations

import time

import msgspec
from torch import Tensor

from trainer.checkpoint import Progress, joined, save_checkpoint
from trainer.config import TrainerConfig
from trainer.ingest.admission import Intake
from trainer.ingest.disk_cache import Shelf
from trainer.ingest.trace_source import TraceSource
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.candidate import Candidates
from trainer.replay.buffer import Replay
from trainer.session import Training


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
