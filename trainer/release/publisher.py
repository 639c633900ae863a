"""Hop 8: what becomes of a judged candidate. A version in the store and the pointer in Redis, or only an event.

The pointer comes last, after a checkpoint that knows the version: whenever the trainer is killed, no engine is told of
a version that the trainer would not find itself descended from.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog

from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import SlipstreamError, StoreError, StreamError
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import SERVABLE
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.release.gate import GateDecision, Outcome

log = structlog.get_logger()

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
        self._metrics.observe_gate(decision)
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
