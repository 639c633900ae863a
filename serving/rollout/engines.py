"""Engines as the driver of rollouts sees them: slots, memory, and answers from token ids.

An adapter is all that another kind of engine needs. What it must keep: noise by (seed, position), or a sample that
moves is another sample than it would have been; and `GenerateRequest.num_answered`, or its text breaks where it moved.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from serving.engine import Chunk, Engine, GenerateRequest


class RolloutEngine(Protocol):
    """One of the engines that samples of a rollout run on."""

    @property
    def name(self) -> str:
        """Of its own among the engines of a driver."""

    @property
    def num_slots(self) -> int:
        """Samples that may run here now; it may change at any time (`Driver.wake`)."""

    @property
    def memory_tokens(self) -> int:
        """Tokens that all its samples together may hold."""

    @property
    def is_alive(self) -> bool:
        """Asked now and then of an engine that was lost: it may have come back."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `serving.engine.Engine.generate`."""

    def drop(self, tenant: str, group_id: str) -> None:
        """As `serving.engine.Engine.drop`."""


class InProcessEngine:
    """An engine of this process, shared with interactive requests, which go first.

    Samples hold at most `share` of its slots (at least one), and of those only what interactive requests leave: a slot
    that they need beyond the rest is given up at once, by a sample that goes on later with the tokens that it has.
    """

    def __init__(
        self, name: str, engine: Engine, *, share: float = 1.0, num_interactive: Callable[[], int] = lambda: 0
    ) -> None:
        self._name, self._engine, self._num_interactive = name, engine, num_interactive
        self._most = max(1, int(share * engine.info.num_slots))

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_slots(self) -> int:
        return max(0, min(self._most, self._engine.info.num_slots - self._num_interactive()))

    @property
    def memory_tokens(self) -> int:
        """Every slot has a whole context for itself."""
        info = self._engine.info
        return self._most * info.context_length

    @property
    def is_alive(self) -> bool:
        return self._engine.health().alive

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._engine.generate(request)

    def drop(self, tenant: str, group_id: str) -> None:
        self._engine.drop(tenant, group_id)
