"""A fault, what is promised for it, and what was observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.faults.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Observed:
    """An observation: `told` is text, `figures` are its numbers, `checks` are the parts of the promise by name."""

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
    """Injects the fault, removes it, and leaves the loop working."""
    needs_small_disks: bool = False
    is_slow: bool = False
    """Left out with --quick."""
    needs_good_draft: bool = False
    """Has an effect only if the draft in service has learnt something, which it has not on a toy target."""


def fault(name: str, promise: str, **traits: bool) -> Callable[[Callable[[Loop], Observed]], Fault]:
    """Decorator that makes a Fault of a function; `traits` are further fields of it."""
    return lambda inject: Fault(name=name, promise=promise, inject=inject, **traits)
