"""The averaged draft as a candidate: when it is due, what the gate says, and how it is published.

training ──▶ due ──▶ gate (gate.py) ──▶ version in the store ──▶ checkpoint ──▶ pointer in Redis
    └──────────── start again ◀──────────── rolled back, barred (live_review.py)

The pointer comes last, after a checkpoint that knows the version: whenever the trainer is killed, no engine is told of
a version that the trainer would not find itself descended from. A candidate that the gate refuses leaves an event.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import SlipstreamError, StoreError, StreamError
from speculator.redis.control_plane import DraftPointer
from speculator.tracing import prefixed, span
from speculator.versions.lifecycle import SERVABLE
from speculator.versions.lineage import MANIFEST_KEY, TenantCounts, admit, joined_counts
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.gate import GateDecision, Outcome, Shadow
from trainer.release.live_review import Review, RollbackWatch
from trainer.replay.admission import Intake
from trainer.session import Training

log = structlog.get_logger()
# What `lead` passes on where there is no version; the store counts from 1.
_NO_VERSION = 0


class Patience:
    """How long the golden set has been vetoing; on rank 0."""

    def __init__(self, patience_s: float, since_s: float | None) -> None:
        """`since_s` is when the first veto came, in seconds since the epoch; None where there was none."""
        self._patience_s = patience_s
        self.since_s = since_s

    def is_over(self, decision: GateDecision, now_s: float) -> bool:
        """Whether this veto is one too many. What is held, or worse on held-out traces, was not its doing."""
        if decision.outcome is Outcome.PROMOTE:
            self.since_s = None
        if not decision.is_vetoed:
            return False
        if self.since_s is None:
            self.since_s = now_s
        return now_s - self.since_s >= self._patience_s


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
        vetoed_since_s: float | None = None,
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
        self.review = Review(
            store.lifecycle, pointer, config, metrics, ranks, load_draft=training.load_draft, clock=clock
        )
        self._events, self._clock = store.lifecycle.events, clock
        # What an operator chose does not wear out.
        self.patience = Patience(config.golden_patience_s if config.golden is None else math.inf, vetoed_since_s)
        self._is_unannounced = False
        """The version in training was stored, and Redis was away."""
        metrics.published_version.set(training.version)

    def heed_rollbacks(self) -> bool:
        """True where the training began again from another version's weights."""
        training = self._training
        good = self._ranks.lead(lambda: self._rollbacks.look(training.version) or _NO_VERSION)
        if good == _NO_VERSION:
            return False
        training.start_over(good)
        self._is_unannounced = False
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
        """Judge the averaged draft on traces that no draft has learnt from, and store it where it is fit; True where it
        was, and is to be announced after a checkpoint. One that could not be announced comes before a new one.
        """
        if self._is_unannounced:
            return True
        training, publisher = self._training, self._publisher
        info = self._info()
        training.curve.mark()
        averaged = training.learner.averaged
        try:
            incumbent = self._ranks.lead(lambda: publisher.incumbent(training.version))
            newest = self._intake.target_version
            has_moved = bool(self._ranks.lead(lambda: publisher.target_version_of(incumbent) < newest))
            with span("gate", incumbent=incumbent) as judging:
                decision = self._shadow.judge(averaged, incumbent=incumbent, has_moved=has_moved)
                if decision is not None:
                    judging.set_attributes(prefixed(outcome=decision.outcome.value))
        except StoreError as error:
            publisher.failed(error)
            return False

        def carry_out() -> int:
            assert decision is not None, "rank 0 has decided"
            tokens = training.learnt_tokens
            version = publisher.carry_out(
                decision,
                averaged,
                parent=training.version,
                learnt_tokens=tokens,
                target_version=self._intake.target_version,
                info=info,
            )
            return version or _NO_VERSION

        version = self._ranks.lead(carry_out)
        if self._ranks.any(decision is not None and self.patience.is_over(decision, self._clock())):
            self._renew_golden()
        if version == _NO_VERSION:
            return False
        training.version = version
        self._shadow.published(version)
        return True

    def announce(self) -> None:
        """Tell the engines of the version that was stored."""
        version, tokens = self._training.version, self._training.learnt_tokens
        self._is_unannounced = not self._ranks.lead(lambda: self._publisher.announce(version, learnt_tokens=tokens))
        if not self._is_unannounced:
            self._metrics.published_version.set(version)

    def _renew_golden(self) -> None:
        since_s, self.patience.since_s = self.patience.since_s, None
        num_traces = int(self._ranks.sum([self._intake.renew_golden()])[0])
        if since_s is None or not self._ranks.leads:
            return
        numbers = {"num_traces": num_traces, "vetoed_s": round(self._clock() - since_s)}
        log.warning("the golden set is given up: traffic has left it behind", **numbers)
        try:
            self._events.append("golden_renewed", actor="trainer", **numbers)
        except StoreError as error:
            log.warning("not on record", error=str(error))

    def _info(self) -> dict[str, Any]:
        """What a manifest says about the learning; whose traffic it was is known on rank 0."""
        intake = self._intake
        parts = self._ranks.gather(msgspec.json.encode(self._training.tenants))
        tenants = joined_counts(msgspec.json.decode(part, type=TenantCounts) for part in parts)
        seen = map(int, self._ranks.sum([intake.num_traces, intake.num_repeated, intake.new_tokens]))
        return {
            "num_steps": self._training.learner.num_steps,
            **dict(zip(("num_traces", "num_repeated", "new_tokens"), seen, strict=True)),
            "learnt_tokens": self._training.learnt_tokens,
            MANIFEST_KEY: msgspec.to_builtins(tenants),
        }


_ACTOR = "trainer"


class Publisher:
    """Decides when a candidate is due, and does with it what the gate decided: files first, then the pointer."""

    def __init__(
        self,
        store: DraftStore,
        pointer: DraftPointer,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        *,
        target_fingerprint: str,
        learnt_tokens: int,
    ) -> None:
        self._store, self._pointer, self._config, self._metrics = store, pointer, config, metrics
        self._fingerprint = target_fingerprint
        self._last_s = time.monotonic()
        self.begin(learnt_tokens)

    def begin(self, learnt_tokens: int) -> None:
        """From here on enough must be learnt for the next candidate."""
        self._begun_tokens = self._judged_tokens = learnt_tokens

    def due(self, learnt_tokens: int) -> bool:
        """Enough time has passed, enough was learnt since the last version, and something since the last decision."""
        waited_s = time.monotonic() - self._last_s
        learnt = learnt_tokens - self._begun_tokens
        enough = waited_s >= self._config.publish_interval_s and learnt >= self._config.publish_min_tokens
        return enough and learnt_tokens != self._judged_tokens

    def incumbent(self, version: int) -> int:
        """What engines have in service or will: the published version, else the last good one, else `version`.

        Raises StoreError.
        """
        try:
            published = self._pointer.published()
        except StreamError:
            published = None
        states = self._store.lifecycle
        if published is not None and states.state(published) in SERVABLE:
            return published
        return states.last_good() or version

    def target_version_of(self, version: int) -> int:
        """Which target a version was fitted to. Raises StoreError."""
        return self._store.manifest(version).target_version

    def carry_out(
        self,
        decision: GateDecision,
        draft: Eagle3Draft,
        *,
        parent: int,
        learnt_tokens: int,
        target_version: int,
        info: dict[str, Any],
    ) -> int | None:
        """Store the draft where the gate lets it, to be announced; returns its version. None where nothing was stored.

        The decision goes into the manifest and into the store's events.
        """
        self._last_s = time.monotonic()
        self._metrics.observe_gate(
            decision.outcome.value, decision.seconds, fresh=decision.fresh, golden=decision.golden
        )
        try:
            if decision.outcome is not Outcome.PROMOTE:
                self._judged_tokens = learnt_tokens
                self._note(decision)
                return None
            info = {**info, "gate": msgspec.to_builtins(decision)}
            version = self._write(draft, parent, target_version, info, decision)
            self._note(decision, version=version)
        except SlipstreamError as error:
            self.failed(error)
            return None
        return version

    def announce(self, version: int, *, learnt_tokens: int) -> bool:
        """Tell the engines; False where Redis cannot be reached."""
        try:
            self._pointer.publish(version)
        except SlipstreamError as error:
            self.failed(error)
            return False
        self.begin(learnt_tokens)
        log.info("draft published", version=version, learnt_tokens=learnt_tokens)
        self._prune()
        return True

    def failed(self, error: SlipstreamError) -> None:
        """A candidate could not be judged or published; the next attempt comes after the usual interval."""
        self._last_s = time.monotonic()
        self._metrics.publish_errors.inc()
        log.error("draft not published", error=str(error))

    def _write(
        self, draft: Eagle3Draft, parent: int, target_version: int, info: dict[str, Any], decision: GateDecision
    ) -> int:
        manifest = self._store.write(
            draft_state(draft),
            draft_config_json(draft.config),
            parent=parent,
            target_fingerprint=self._fingerprint,
            target_version=target_version,
            info=info,
        )
        admit(
            self._store,
            manifest.version,
            target_fingerprint=self._fingerprint,
            actor=_ACTOR,
            reason=decision.reason,
            numbers=decision.numbers,
        )
        return manifest.version

    def _prune(self) -> None:
        try:
            self._store.prune(self._config.keep_versions, pinned=self._pointer.pinned())
        except (StoreError, StreamError) as error:
            log.warning("old versions were not removed", error=str(error))

    def _note(self, decision: GateDecision, **fields: Any) -> None:
        fields |= {"outcome": decision.outcome.value, "reason": decision.reason, **decision.numbers}
        log.info("candidate judged", **fields)
        self._store.lifecycle.events.append("gate", actor=_ACTOR, **fields)
