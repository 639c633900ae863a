"""Account for every trace that Redis has acknowledged, from the notes of the services (witness.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.witness import digest
from speculator.redis.stream_accounting import StreamLag
from trainer.checkpoint import load_checkpoint


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """Counts of trace ids. An acknowledged one that is in no other account was lost silently."""

    acknowledged: int
    used: int
    """In a durable step of the trainer: learnt from, held out, or not needed."""
    dead_lettered: int
    waiting: int
    lost: int
    """Lost, as counted by the stream."""
    silently_lost: int
    used_in_all: int
    """Used ones, including those whose confirmation never reached the producer."""
    used_twice: int
    """Used by two durable steps."""
    undone: int
    """Uses lost in a kill, before a checkpoint had them."""

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} acknowledged = {self.used} used + {self.dead_lettered} set aside + {self.lost} "
            f"counted as lost + {self.waiting} waiting + {self.silently_lost} lost silently; "
            f"{self.used_twice} used twice; {self.undone} uses undone by kills before their checkpoint"
        )


def durable_uses(notes: Iterable[str], last_saved: str) -> tuple[Counter[str], int]:
    """How often each trace id was used by steps that a checkpoint has, and how many uses were undone.

    A process that resumes a checkpoint lacks the uses after it: `resumed` undoes them, back to the `saving` with the
    same digest. `last_saved` is the digest of the checkpoint on disk at the end; uses before the first checkpoint
    are undone, too.

    saving a | used 1 | saving b | used 2 | resumed b | used 2 | saving c   and c is on disk: 1 and 2, each once.
    """
    done: list[tuple[str, str]] = []
    num_undone = 0
    for kind, what in (*(_split(note) for note in notes), ("resumed", last_saved)):
        if kind in ("used", "saving"):
            done.append((kind, what))
        elif kind == "resumed":
            kept = next((at + 1 for at in reversed(range(len(done))) if done[at] == ("saving", what)), 0)
            num_undone += sum(kind == "used" for kind, _ in done[kept:])
            del done[kept:]
    return Counter(what for kind, what in done if kind == "used"), num_undone


def acknowledged_in(notes: Iterable[str]) -> set[str]:
    """The traces that Redis has acknowledged, from an engine's notes."""
    return _told(notes, "acknowledged")


def accounts_at_the_end(
    state_dir: Path, notes: Sequence[str], lag: StreamLag, *, acknowledged: set[str]
) -> tuple[Accounts, int]:
    """(accounts from the notes of a trainer that has ended, number of traces in its checkpoint in `state_dir`)."""
    saved = load_checkpoint(state_dir)
    assert saved is not None, "the trainer has saved nothing"
    progress, waiting = saved[1], lag.pending + lag.undelivered
    accounts = settle(
        acknowledged=acknowledged, notes=notes, last_saved=digest(progress), waiting=waiting, lost=lag.lost
    )
    return accounts, progress.num_traces + progress.num_repeated


def settle(*, acknowledged: set[str], notes: Sequence[str], last_saved: str, waiting: int, lost: int) -> Accounts:
    """Compute the accounts; `waiting` and `lost` are the stream's own counts."""
    uses, num_undone = durable_uses(notes, last_saved)
    dead = _told(notes, "dead")
    missing = len(acknowledged - uses.keys() - dead)
    return Accounts(
        acknowledged=len(acknowledged),
        used=len(acknowledged & uses.keys()),
        dead_lettered=len(acknowledged & dead - uses.keys()),
        waiting=min(waiting, missing),
        lost=min(lost, max(missing - waiting, 0)),
        silently_lost=max(missing - waiting - lost, 0),
        used_in_all=len(uses),
        used_twice=sum(count > 1 for count in uses.values()),
        undone=num_undone,
    )


def _told(notes: Iterable[str], kind: str) -> set[str]:
    return {what for other, what in map(_split, notes) if other == kind}


def _split(note: str) -> tuple[str, str]:
    kind, _, what = note.partition(" ")
    return kind, what
