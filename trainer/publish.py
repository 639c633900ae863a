"""Hop 8: a candidate becomes a version in the store, and the pointer in Redis tells the engines about it."""

from __future__ import annotations

import time
from typing import Any

import structlog

from speculator.checkpoint import draft_config_json, draft_state
from speculator.errors import DraftError, StoreError, StreamError
from speculator.lineage import admit
from speculator.model import Eagle3Draft
from speculator.store import DraftStore
from speculator.stream import DraftPointer
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics

log = structlog.get_logger()


class Publisher:
    """Decides when a version is due, and writes it: files first, then the pointer."""

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
        self._published_tokens = learnt_tokens

    def due(self, learnt_tokens: int) -> bool:
        """Enough time has passed and enough was learnt since the last version."""
        waited_s = time.monotonic() - self._last_s
        learnt = learnt_tokens - self._published_tokens
        return waited_s >= self._config.publish_interval_s and learnt >= self._config.publish_min_tokens

    def publish(self, draft: Eagle3Draft, *, learnt_tokens: int, info: dict[str, Any]) -> int | None:
        """Write a version and point the engines to it; None, counted and logged, where that failed.

        A draft that is not finite never reaches the store (`DraftStore.write` refuses it). The next attempt comes after
        the usual interval.
        """
        self._last_s = time.monotonic()
        try:
            manifest = self._store.write(
                draft_state(draft),
                draft_config_json(draft.config),
                parent=self._store.lifecycle.newest_servable(),
                target_fingerprint=self._fingerprint,
                info=info,
            )
            admit(
                self._store,
                manifest.version,
                target_fingerprint=self._fingerprint,
                actor="trainer",
                reason="finite and fitting",
            )
            self._pointer.publish(manifest.version)
            self._store.prune(self._config.keep_versions)
        except (DraftError, StoreError, StreamError) as error:
            self._metrics.publish_errors.inc()
            log.error("draft not published", error=str(error))
            return None
        self._published_tokens = learnt_tokens
        log.info("draft published", version=manifest.version, **info)
        return manifest.version
