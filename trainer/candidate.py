"""Hop 7 to 8: the averaged draft as a candidate. When it is due, what it is compared with, and what becomes of it.

training ──▶ due ──▶ gate (trainer/shadow.py, trainer/gate.py) ──▶ store and pointer (trainer/publish.py)
    └──────────── start again ◀──────────── rolled back, barred (trainer/rollback.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from speculator.errors import StoreError
from speculator.spans import span
from speculator.store import DraftStore
from speculator.stream import DraftPointer
from trainer.config import TrainerConfig
from trainer.distributed import Ranks
from trainer.intake import Intake
from trainer.metrics import TrainerMetrics
from trainer.publish import Publisher
from trainer.rollback import RollbackWatch
from trainer.shadow import Shadow
from trainer.training import Training

# What `lead` passes on where there is no version; the store counts from 1.
_NO_VERSION = 0


class Candidates:
    """All ranks call it in the same order: each scores drafts on its own traces, and rank 0 decides and publishes."""

    def __init__(
        self,
        training: Training,
        intake: Intake,
        store: DraftStore,
        pointer: DraftPointer,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        ranks: Ranks,
        *,
        target_fingerprint: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._training, self._intake, self._metrics, self._ranks = training, intake, metrics, ranks
        self._shadow = Shadow(intake.held_out, intake.golden, config, ranks, load_draft=training.load_draft)
        self._publisher = Publisher(
            store,
            pointer,
            config,
            metrics,
            target_fingerprint=target_fingerprint,
            learnt_tokens=training.learnt_tokens,
        )
        self._rollbacks = RollbackWatch(
            store.lifecycle,
            metrics,
            published=pointer.published,
            first_pause_s=config.publish_pause_s,
            clock=clock,
        )
        metrics.published_version.set(training.version)

    def heed_rollbacks(self) -> bool:
        """True where the training began again from another version's weights."""
        training = self._training
        good = self._ranks.lead(lambda: self._rollbacks.look(training.version) or _NO_VERSION)
        if good == _NO_VERSION:
            return False
        training.start_over(good)
        self._publisher.begin(training.learnt_tokens)
        self._metrics.published_version.set(good)
        return True

    @property
    def due(self) -> bool:
        if not self._training.guard.healthy:
            return False
        due = self._publisher.due(self._training.learnt_tokens) and not self._rollbacks.paused
        return self._ranks.any(self._ranks.leads and due)

    def publish(self) -> bool:
        """Judge the averaged draft on traces that no draft has learnt from, and publish it where it is fit; True where
        it was.
        """
        training, publisher = self._training, self._publisher
        info, averaged = self._info(), training.learner.averaged
        training.curve.mark()
        try:
            incumbent = self._ranks.lead(lambda: publisher.incumbent(training.version))
            with span("gate", incumbent=incumbent) as judging:
                decision = self._shadow.judge(averaged, incumbent=incumbent)
                if decision is not None:
                    judging.set(outcome=decision.outcome.value)
        except StoreError as error:
            publisher.failed(error)
            return False

        def carry_out() -> int:
            assert decision is not None, "rank 0 has decided"
            tokens = training.learnt_tokens
            version = publisher.carry_out(decision, averaged, parent=training.version, learnt_tokens=tokens, info=info)
            return version or _NO_VERSION

        version = self._ranks.lead(carry_out)
        if version == _NO_VERSION:
            return False
        training.version = version
        self._shadow.published(version)
        self._metrics.published_version.set(version)
        return True

    def _info(self) -> dict[str, int]:
        """What a manifest says about the learning."""
        intake = self._intake
        seen = map(int, self._ranks.sum([intake.num_traces, intake.num_repeated, intake.new_tokens]))
        return {
            "num_steps": self._training.learner.num_steps,
            **dict(zip(("num_traces", "num_repeated", "new_tokens"), seen, strict=True)),
            "learnt_tokens": self._training.learnt_tokens,
        }
