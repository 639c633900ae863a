"""How many samples of interactive requests are under way: rollouts take what these leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interactive:
    """Everything happens on the event loop."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.on_change: Callable[[], None] = _nobody_listens

    @contextmanager
    def sample(self) -> Iterator[None]:
        """One sample, from before its engine hears of it to its end."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.num_samples += change
        self.on_change()


def _nobody_listens() -> None:
    """No rollouts run here."""
