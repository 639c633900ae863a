"""Which draft version has come into service last, and what it took the place of; the lifecycle beside the store says.

It does not matter who published it: this trainer, an operator, or whoever writes to the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from speculator.versions.lifecycle import BARRED, Lifecycle, State, Transition

_IN_SERVICE = frozenset({State.LIVE, State.PROMOTED})


class Newcomer(NamedTuple):
    version: int
    incumbent: int
    """The last good version but for it: what engines go back to."""
    sequence: int
    """Of the transition with which it came: a version that was barred and released comes anew."""


class Newcomers:
    """For one thread. A version is named until `settle` is told of it, it is barred, or a newer one comes."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._settled: int | None = None
        """The sequence up to which nothing is left to do."""
        self._current: Newcomer | None = None

    def look(self) -> Newcomer | None:
        """Raises StoreError."""
        histories = self._lifecycle.histories()
        came = {version: _came(history) for version, history in histories.items() if history[-1].state in _IN_SERVICE}
        if self._settled is None:
            # Versions that were promoted before this process began are as good as they ever will be.
            promoted = (came[one] for one in came if histories[one][-1].state is State.PROMOTED)
            self._settled = max(promoted, default=0)
        version = max(came, key=came.__getitem__, default=None)
        if version is None or came[version] <= self._settled:
            self._current = None
        elif self._current is None or self._current.sequence != came[version] or _is_gone(histories, self._current):
            incumbent = self._lifecycle.last_good(other_than=version)
            self._current = Newcomer(version, incumbent, came[version]) if incumbent is not None else None
        return self._current

    def settle(self, newcomer: Newcomer) -> None:
        self._settled, self._current = newcomer.sequence, None


def _is_gone(histories: Mapping[int, Sequence[Transition]], current: Newcomer) -> bool:
    """Nobody goes back to its incumbent: it was barred, or removed."""
    history = histories.get(current.incumbent)
    return history is None or history[-1].state in BARRED


def _came(history: Sequence[Transition]) -> int:
    return max((one.sequence for one in history if one.state is State.LIVE), default=0)
