"""A fault, what is promised for it, and what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.faults.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Observed:
    """`told` says in words what `figures` say in numbers; `checks` are the parts of the promise by name."""

    told: str
    checks: dict[str, bool]
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        return [name for name, holds in self.checks.items() if not holds]


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    promise: str
    inject: Callable[[Loop], Observed]
    """Puts the fault in, takes it out again, and leaves the loop whole."""
    needs_small_disks: bool = False
    is_slow: bool = False
    """Left out with --quick."""
    needs_good_draft: bool = False
    """Shows itself only where the draft in service has learnt something, which on a toy target it has not."""


def fault(name: str, promise: str, **traits: bool) -> Callable[[Callable[[Loop], Observed]], Fault]:
    """Makes a Fault of the function below; `traits` are its fields of that name."""
    return lambda inject: Fault(name=name, promise=promise, inject=inject, **traits)
