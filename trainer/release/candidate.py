"""Candidates: when the averaged draft is due for the gate, and how it is published.

training ──▶ due ──▶ gate (gate.py) ──▶ version in the store ──▶ checkpoint ──▶ pointer in Redis
    └──────────── start again ◀──────────── rolled back, barred (live_review.py)

The pointer comes last, after a checkpoint that names the version. So wherever the trainer is killed, engines never
serve a version that the restarted trainer's weights do not descend from. A refused candidate leaves an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import DraftError, SlipstreamError, StoreError, StreamError
from speculator.redis.control_plane import DraftPointer
from speculator.tracing import prefixed, span
from speculator.versions.lifecycle import SERVABLE
from speculator.versions.lineage import MANIFEST_KEY, TenantCounts, admit, joined_counts
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.gate import CandidateGate, GateDecision, GateOutcome
from trainer.release.live_review import RollbackWatch
from trainer.replay.admission import TraceAdmission
from trainer.session import Training

log = structlog.get_logger()

_ACTOR = "trainer"


class Candidates:
    """Judges and publishes the averaged draft. All ranks call the same methods in the same order: each scores drafts on
    its own traces, and rank 0 decides and publishes.
    """

    def __init__(
        self,
        training: Training,
        admission: TraceAdmission,
        gate: CandidateGate,
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
        """`vetoed_since_s`: when the golden set first vetoed since the last version, in seconds since the epoch."""
        self._training, self._admission, self._gate = training, admission, gate
        self._store, self._pointer, self._config = store, pointer, config
        self._metrics, self._ranks, self._clock = metrics, ranks, clock
        self._fingerprint = target_fingerprint
        self._rollbacks = RollbackWatch(
            store.lifecycle,
            metrics,
            published=pointer.published,
            first_pause_s=config.publish_pause_s,
            clock=clock,
        )
        self.vetoed_since_s = vetoed_since_s
        """On rank 0."""
        self._tried_s = time.monotonic()
        self._is_unannounced = False
        """The version in training is stored, but the pointer could not be set: Redis was away."""
        self._start_from(training.version)

    def restart_after_rollback(self) -> bool:
        """Restart training where its version was rolled back or barred; True where it did."""
        training = self._training
        good = self._ranks.run_on_leader(lambda: self._rollbacks.poll(training.version))
        if not good:
            return False
        training.restart_from(good)
        self._is_unannounced = False
        self._start_from(good)
        return True

    @property
    def due(self) -> bool:
        """Whether to judge a candidate: enough time and enough tokens since the last version, and a step since the last
        decision.
        """
        learnt_tokens, config = self._training.learnt_tokens, self._config
        is_due = (
            self._training.guard.healthy
            and not self._rollbacks.paused
            and time.monotonic() - self._tried_s >= config.publish_interval_s
            and learnt_tokens - self._begun_tokens >= config.publish_min_tokens
            and learnt_tokens != self._judged_tokens
        )
        return self._ranks.any(self._ranks.is_leader and is_due)

    def publish(self) -> bool:
        """Judge the averaged draft on traces that no draft has learnt from, and store it where the gate promotes it.

        True where a version is stored: write a checkpoint, then call `announce`. A version that could not be announced
        earlier comes before a new candidate.
        """
        if self._is_unannounced:
            return True
        training = self._training
        info = self._info()
        training.curve.mark()
        averaged = training.learner.averaged
        try:
            incumbent = self._ranks.run_on_leader(self._incumbent)
            newest = self._admission.target_version
            has_moved = bool(self._ranks.run_on_leader(lambda: self._store.manifest(incumbent).target_version < newest))
            with span("gate", incumbent=incumbent) as judging:
                decision = self._gate.judge(averaged, incumbent=incumbent, has_moved=has_moved)
                if decision is not None:
                    judging.set_attributes(prefixed(outcome=decision.outcome.value))
        except (StoreError, DraftError) as error:
            self._failed(error)
            return False

        def carry_out() -> int | None:
            assert decision is not None, "rank 0 has decided"
            return self._carry_out(decision, averaged, info)

        version = self._ranks.run_on_leader(carry_out)
        if self._ranks.any(decision is not None and self._is_patience_over(decision)):
            self._renew_golden()
        if version:
            training.version = version
            self._gate.published(version)
        return bool(version)

    def announce(self) -> None:
        """Point the engines to the stored version."""
        version = self._training.version
        self._is_unannounced = not self._ranks.run_on_leader(lambda: self._announce(version))
        if not self._is_unannounced:
            self._start_from(version)

    def _start_from(self, version: int) -> None:
        """Count the tokens towards the next candidate from here."""
        self._begun_tokens = self._judged_tokens = self._training.learnt_tokens
        self._metrics.published_version.set(version)

    def _incumbent(self) -> int:
        """The version that engines serve or will serve: the published one, else the last good one, else the one in
        training. Raises StoreError.
        """
        try:
            published = self._pointer.published()
        except StreamError:
            published = None
        states = self._store.lifecycle
        if published is not None and states.state(published) in SERVABLE:
            return published
        return states.last_good() or self._training.version

    def _carry_out(self, decision: GateDecision, draft: Eagle3Draft, info: dict[str, Any]) -> int | None:
        """Store the draft where the gate promotes it; returns its version. The decision is recorded in the manifest and
        in the store's events.
        """
        self._tried_s = time.monotonic()
        self._metrics.observe_gate(
            decision.outcome.value, decision.seconds, fresh=decision.fresh, golden=decision.golden
        )
        try:
            if decision.outcome is not GateOutcome.PROMOTE:
                self._judged_tokens = self._training.learnt_tokens
                self._note(decision)
                return None
            version = self._write(draft, {**info, "gate": msgspec.to_builtins(decision)}, decision)
            self._note(decision, version=version)
        except SlipstreamError as error:
            self._failed(error)
            return None
        return version

    def _write(self, draft: Eagle3Draft, info: dict[str, Any], decision: GateDecision) -> int:
        manifest = self._store.write(
            draft_state(draft),
            draft_config_json(draft.config),
            parent=self._training.version,
            target_fingerprint=self._fingerprint,
            target_version=self._admission.target_version,
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

    def _announce(self, version: int) -> bool:
        """False where Redis cannot be reached."""
        try:
            self._pointer.publish(version)
        except SlipstreamError as error:
            self._failed(error)
            return False
        log.info("draft published", version=version, learnt_tokens=self._training.learnt_tokens)
        try:
            self._store.prune(self._config.keep_versions, pinned=self._pointer.pinned())
        except (StoreError, StreamError) as error:
            log.warning("old versions were not removed", error=str(error))
        return True

    def _failed(self, error: SlipstreamError) -> None:
        """Log and count a failed attempt to judge or publish; the next one comes after the usual interval."""
        self._tried_s = time.monotonic()
        self._metrics.publish_errors.inc()
        log.error("draft not published", error=str(error))

    def _note(self, decision: GateDecision, **fields: Any) -> None:
        fields |= {"outcome": decision.outcome.value, "reason": decision.reason, **decision.numbers}
        log.info("candidate judged", **fields)
        self._store.lifecycle.events.append("gate", actor=_ACTOR, **fields)

    def _is_patience_over(self, decision: GateDecision) -> bool:
        """Whether the golden set has vetoed for longer than `golden_patience_s` without a new version. Only vetoes
        count, not other refusals. An operator's recording may veto for ever.
        """
        if decision.outcome is GateOutcome.PROMOTE:
            self.vetoed_since_s = None
        if not decision.is_vetoed:
            return False
        now_s = self._clock()
        # The clock may be set back meanwhile.
        self.vetoed_since_s = now_s if self.vetoed_since_s is None else min(self.vetoed_since_s, now_s)
        return self._config.golden is None and now_s - self.vetoed_since_s >= self._config.golden_patience_s

    def _renew_golden(self) -> None:
        since_s, self.vetoed_since_s = self.vetoed_since_s, None
        num_traces = int(self._ranks.sum([self._admission.renew_golden()])[0])
        if since_s is None or not self._ranks.is_leader:
            return
        numbers = {"num_traces": num_traces, "vetoed_s": round(self._clock() - since_s)}
        log.warning("the golden set is replaced by new traces: it vetoed every candidate for too long", **numbers)
        try:
            self._store.lifecycle.events.append("golden_renewed", actor=_ACTOR, **numbers)
        except StoreError as error:
            log.warning("the event golden_renewed was not recorded", error=str(error))

    def _info(self) -> dict[str, Any]:
        """What the manifest says about the training; complete on rank 0 alone."""
        admission = self._admission
        parts = self._ranks.gather(msgspec.json.encode(self._training.tenants))
        tenants = joined_counts(msgspec.json.decode(part, type=TenantCounts) for part in parts)
        seen = map(int, self._ranks.sum([admission.num_traces, admission.num_repeated, admission.new_tokens]))
        return {
            "num_steps": self._training.learner.num_steps,
            **dict(zip(("num_traces", "num_repeated", "new_tokens"), seen, strict=True)),
            "learnt_tokens": self._training.learnt_tokens,
            MANIFEST_KEY: msgspec.to_builtins(tenants),
        }
