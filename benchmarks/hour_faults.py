"""What goes wrong in the hour (benchmarks/hour.py): drafts that somebody publishes past the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.falls import RECENT, Best
from benchmarks.replayed import ReplayEngine
from benchmarks.rollback import Scene, noisy, subtly_worse
from speculator.lifecycle import BARRED, State

RANDOM, NAN = "random weights", "NaN weights"
FAULTS = (
    (0.15, RANDOM),
    (0.25, "accept length −30%"),
    (0.30, NAN),
    (0.42, "accept length −10%"),
    (0.75, RANDOM),
    (0.85, "accept length −10%"),
)
"""(share of the run, what is published)."""
QUICK_FAULTS = ((0.2, RANDOM), (0.45, NAN), (0.5, "accept length −30%"))
LOSSES = {"accept length −10%": 0.1, "accept length −30%": 0.3}


@dataclass
class Fault:
    name: str
    at_s: float
    version: int | None = None
    offline_loss: float | None = None
    state: str = "not published"
    reason: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in (State.QUARANTINED.value, State.PROMOTED.value)


class Faults:
    """Publishes them in turn, again where the trainer published something before an engine came to it."""

    def __init__(self, plan: Sequence[tuple[float, str]], scene: Scene, best: Best, *, end_s: float) -> None:
        self.all = [Fault(name, share * end_s) for share, name in plan]
        self._scene, self._best = scene, best

    def look(self, at_s: float) -> None:
        fault = next((one for one in self.all if not one.is_over), None)
        if fault is None or at_s < fault.at_s:
            return
        if fault.version is None:
            fault.version = self._make(fault)
        self._read(fault)
        if fault.state == State.SCORED.value and self._scene.pointer.published() != fault.version:
            self._scene.pointer.publish(fault.version)
        if fault.is_over:
            print(
                f"{at_s / 60:5.1f} min  {fault.name}, version {fault.version}: {fault.state}, {fault.reason}",
                flush=True,
            )

    def read_again(self) -> None:
        """A version that an engine promoted may have been rolled back since."""
        for fault in self.all:
            if fault.version is not None:
                self._read(fault)

    def _read(self, fault: Fault) -> None:
        # Of a version that was pruned meanwhile, what was read before stands.
        for last in self._scene.store.lifecycle.history(fault.version or 0)[-1:]:
            fault.state, fault.reason, fault.numbers = last.state.value, last.reason, dict(last.numbers)

    def _make(self, fault: Fault) -> int:
        draft, scene = self._best.served.draft, self._scene
        if fault.name == NAN:
            return scene.add_nan(scene.store.lifecycle.last_good() or 1)
        if fault.name == RANDOM:
            return scene.add(noisy(draft, float("inf")), draft)
        examples = [answer.example for answer in list(self._best.recent)[: RECENT // 2]]
        state, fault.offline_loss = subtly_worse(draft, examples, LOSSES[fault.name])
        return scene.add(state, draft)


def outcome(fault: Fault, engine: ReplayEngine) -> str:
    version = fault.version or 0
    loss = "" if fault.offline_loss is None else f" ({fault.offline_loss:.1%} offline)"
    served = f"{engine.rounds_of[version]} rounds, {engine.seconds_of[version]:.1f} s in service"
    return f"version {version}{loss}: {fault.state} ({fault.reason or 'no verdict'}), {served}"


def overrun(fault: Fault, engine: ReplayEngine) -> float:
    """Its time in service over the promised one; infinite where it stays, or never came to be tried."""
    version = fault.version or 0
    rounds, seconds = engine.rounds_of[version], engine.seconds_of[version]
    if fault.state not in {state.value for state in BARRED}:
        return float("inf")
    if fault.name == NAN:
        return float("inf") if rounds else 0.0
    return min(rounds / 50, seconds / 5) if fault.name == RANDOM else rounds / 2000
