"""Lifecycle of draft versions: a state machine, one small file a version, every transition with its reason.

    written ─▶ validated ─▶ scored ─▶ live ─▶ promoted
                                        │        │
                                        └────────┴──▶ rolled back ─▶ quarantined ─▶ scored (released by an operator)

From every state but the last two a version can also be quarantined directly: if its file is damaged, or an engine
refuses it. The files are in the draft store beside the versions, so that states survive a loss of Redis:

    states/000042.json     all transitions of version 42, oldest first; the last one is its state
    states/lock            held while a transition is made, and shared while all states are read
    events.jsonl           the same transitions, and what operators and the gate did, in the order they happened; one
                           line of JSON an event, appended by whoever holds events.lock

A transition is a file written under a temporary name, fsynced and renamed, so it is atomic. Its event is written after
it. If a crash comes between the two, the next transition of any version first writes the missing event, and until then
`recent_events` derives it from the states.

A version without a state file is unknown and not served: the store writes a version's files before its state, and
removes them after it.

A long `events.jsonl` is renamed to `events.1.jsonl`, which it replaces. A line that a crash cut short is skipped.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import structlog

from speculator.errors import LifecycleError, StoreError
from speculator.host import exclusive_lock, json_line, now_ms, shared_lock, sync, write_synced

log = structlog.get_logger(__name__)

Number = float | int | str | bool | None


class VersionState(enum.Enum):
    """State of a draft version."""

    WRITTEN = "written"
    """Its files are complete on disk."""
    VALIDATED = "validated"
    """Read back and verified: hash, names, shapes, types, finite values, target and draft vocabulary."""
    SCORED = "scored"
    """The gate accepted it for serving."""
    LIVE = "live"
    """On trial: an engine has it in service and compares it with the version before."""
    PROMOTED = "promoted"
    """Confirmed on live traffic: engines start with it and roll back to it."""
    ROLLED_BACK = "rolled_back"
    """Taken out of service, because of live traffic or by an operator."""
    QUARANTINED = "quarantined"
    """Barred: no engine loads it."""


SERVABLE = frozenset({VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED})
BARRED = frozenset({VersionState.ROLLED_BACK, VersionState.QUARANTINED})

ALLOWED: Mapping[VersionState | None, frozenset[VersionState]] = {
    None: frozenset({VersionState.WRITTEN}),
    VersionState.WRITTEN: frozenset({VersionState.VALIDATED, VersionState.QUARANTINED}),
    VersionState.VALIDATED: frozenset({VersionState.SCORED, VersionState.QUARANTINED}),
    VersionState.SCORED: frozenset({VersionState.LIVE, VersionState.QUARANTINED}),
    # A version may be promoted again: it is then the last good one.
    VersionState.LIVE: frozenset({VersionState.PROMOTED, VersionState.ROLLED_BACK, VersionState.QUARANTINED}),
    VersionState.PROMOTED: frozenset({VersionState.PROMOTED, VersionState.ROLLED_BACK, VersionState.QUARANTINED}),
    VersionState.ROLLED_BACK: frozenset({VersionState.QUARANTINED}),
    VersionState.QUARANTINED: frozenset({VersionState.SCORED}),
}


_MACHINES = ("engine:", "trainer:")
_BLOCK_BYTES = 64 * 1024


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one version's state."""

    state: VersionState
    sequence: int
    """Number among all transitions of the store, from 1."""
    at_ms: int
    actor: str
    """`trainer`, `trainer:review`, `engine:<id>`, or `operator:<who>`."""
    reason: str = ""
    numbers: dict[str, Number] = {}
    """Figures of the decision."""


class Lifecycle:
    """The states of one store's versions; safe from several threads, processes and, where flock works, machines."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._states = self.root / "states"
        self.events = EventLog(self.root)

    def state(self, version: int) -> VersionState | None:
        """The state of a version; None for an unknown one. Raises StoreError."""
        history = self.history(version)
        return history[-1].state if history else None

    def states(self) -> dict[int, VersionState]:
        """The state of every known version, oldest first. Raises StoreError."""
        return {version: history[-1].state for version, history in self.histories().items()}

    def histories(self) -> dict[int, list[Transition]]:
        """A consistent snapshot of the transitions of every known version. Raises StoreError."""
        with store_errors(self.root), shared_lock(self._lock):
            return self._histories()

    def history(self, version: int) -> list[Transition]:
        """The transitions of a version, oldest first. Raises StoreError."""
        path = self._path(version)
        with store_errors(self.root):
            try:
                return msgspec.json.decode(path.read_bytes(), type=list[Transition])
            except FileNotFoundError:
                return []
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise StoreError(
                    f"{path} is damaged ({error}): remove it, and draft version {version} counts as unknown"
                ) from error

    def move(
        self,
        version: int,
        state: VersionState,
        *,
        actor: str,
        reason: str = "",
        numbers: Mapping[str, Number] | None = None,
    ) -> bool:
        """Make a transition, durably; returns False if the version is in that state already.

        Raises LifecycleError for a transition that is not allowed, StoreError when it cannot be written. If only its
        event cannot be written, it raises StoreError too, but the transition is made.
        """
        with self._locked():
            made = self._make(version, state, actor, reason, dict(numbers or {}))
            if made:
                self._write_missing_events(made)
            return bool(made)

    def bar(self, version: int, *, actor: str, reason: str, numbers: Mapping[str, Number] | None = None) -> None:
        """Quarantine a version, through `rolled_back` if it is in service; does nothing if it is quarantined already.

        Events that cannot be written now are written at the next transition. Raises LifecycleError for an unknown
        version, StoreError when its state cannot be written.
        """
        with self._locked():
            made: dict[int, list[Transition]] = {}
            if self.state(version) in (VersionState.LIVE, VersionState.PROMOTED):
                made = self._make(version, VersionState.ROLLED_BACK, actor, reason, dict(numbers or {}))
            made = self._make(version, VersionState.QUARANTINED, actor, reason, dict(numbers or {})) or made
            try:
                self._write_missing_events(made)
            except StoreError as error:
                log.warning("events are not written yet", version=version, error=str(error))

    def last_good(self, *, other_than: int | None = None) -> int | None:
        """The most recently promoted version that is still promoted; None without one. Raises StoreError."""
        return _last_good(self.histories(), other_than)

    def newest_servable(self) -> int | None:
        """The highest version that may be served. Raises StoreError."""
        return max((version for version, state in self.states().items() if state in SERVABLE), default=None)

    def rollbacks_in_a_row(self) -> list[Transition]:
        """Rollbacks by engines and trainers since the last promotion, oldest first. Raises StoreError.

        Leaves out versions that were released again, and ignores promotions of versions that were rolled back later.
        """
        rollbacks, promoted_at = [], 0
        for history in self.histories().values():
            barred = history[-1].state in BARRED
            for transition in history:
                if transition.state is VersionState.PROMOTED and not barred:
                    promoted_at = max(promoted_at, transition.sequence)
                elif transition.state is VersionState.ROLLED_BACK and barred and transition.actor.startswith(_MACHINES):
                    rollbacks.append(transition)
        rollbacks.sort(key=lambda transition: transition.sequence)
        return [transition for transition in rollbacks if transition.sequence > promoted_at]

    def recent_events(self, count: int) -> list[Event]:
        """The last `count` events, oldest first, including those that a crash kept from being written.

        Raises StoreError.
        """
        with store_errors(self.root), shared_lock(self._lock):
            untold = [_event(version, one) for version, one in self._missing_events(self._histories())]
            return [*self.events.tail(count), *untold][-count:] if count else []

    def forget(self, version: int) -> bool:
        """Delete the state of a version whose files are to be removed. Returns False, and keeps it, for the last good
        version, and for the two that went live last after it: the trial of one against the other may be running.

        Raises StoreError.
        """
        with self._locked():
            histories = self._histories()
            good = _last_good(histories)
            promoted_at = 0 if good is None else histories[good][-1].sequence
            came = {
                one: history[-1].sequence
                for one, history in histories.items()
                if history[-1].state is VersionState.LIVE and history[-1].sequence > promoted_at
            }
            # Not all of them: while a target moves, version after version stays without a verdict.
            if version == good or version in sorted(came, key=came.__getitem__)[-2:]:
                return False
            # Even if the disk is too full for events: pruning is what frees it.
            with contextlib.suppress(StoreError):
                self._write_missing_events(histories)
            self._path(version).unlink(missing_ok=True)
            sync(self._states)
        return True

    def _histories(self) -> dict[int, list[Transition]]:
        """Read all histories; the caller holds the lock."""
        versions = sorted(int(path.stem) for path in self._states.glob("*.json") if path.stem.isdigit())
        return {version: history for version in versions if (history := self.history(version))}

    def _make(
        self, version: int, state: VersionState, actor: str, reason: str, numbers: dict[str, Number]
    ) -> dict[int, list[Transition]]:
        """Make a transition; returns all histories, or {} if the version is in that state already. The caller holds the
        lock.
        """
        history = self.history(version)
        before = history[-1].state if history else None
        if state not in ALLOWED[before]:
            if state is before:
                return {}
            known = "unknown" if before is None else before.value
            raise LifecycleError(f"draft version {version} is {known} and cannot become {state.value}")
        histories = self._histories()
        transition = Transition(
            state=state,
            sequence=self._last_sequence(histories) + 1,
            at_ms=now_ms(),
            actor=actor,
            reason=reason,
            numbers=numbers,
        )
        self._replace(version, [*history, transition])
        return {**histories, version: [*history, transition]}

    def _last_sequence(self, histories: Mapping[int, list[Transition]]) -> int:
        """The last transition's number, forgotten versions included: the event of a reused number would be skipped."""
        told = 0
        # The log may be unreadable: an engine must be able to bar a version without it.
        with contextlib.suppress(StoreError):
            told = self.events.last_sequence()
        return max([told, *(history[-1].sequence for history in histories.values())])

    def _write_missing_events(self, histories: Mapping[int, list[Transition]]) -> None:
        """Write missing events; the caller holds the lock."""
        for version, transition in self._missing_events(histories):
            self.events.add(_event(version, transition))

    def _missing_events(self, histories: Mapping[int, list[Transition]]) -> list[tuple[int, Transition]]:
        told = self.events.last_sequence()
        # No number in the log: it is new, an old release wrote it, or other events have filled it since.
        last = [] if told else self.events.tail(1)
        since_ms = last[0].at_ms if last else 0
        made = (
            (version, one)
            for version, history in histories.items()
            for one in history
            if one.sequence > told and one.at_ms >= since_ms
        )
        return sorted(made, key=lambda pair: pair[1].sequence)

    def _replace(self, version: int, history: list[Transition]) -> None:
        path = self._path(version)
        temporary = path.with_suffix(".tmp")
        write_synced(temporary, msgspec.json.format(msgspec.json.encode(history)))
        temporary.rename(path)
        sync(self._states)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with store_errors(self.root):
            self._states.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(self._lock):
                yield

    @property
    def _lock(self) -> Path:
        return self._states / "lock"

    def _path(self, version: int) -> Path:
        return self._states / f"{version:06d}.json"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of events.jsonl. `fields` has details; never a key or a user's text."""

    at_ms: int
    kind: str
    actor: str
    fields: dict[str, Any] = {}
    sequence: int = 0
    """Number of the transition; 0 for other events."""


class EventLog:
    """Events of one store; any number of writers. Two files of about `max_bytes` are kept."""

    def __init__(self, root: Path, *, max_bytes: int = 8 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._path = root / "events.jsonl"
        self._before = root / "events.1.jsonl"
        self._lock = root / "events.lock"

    def append(self, kind: str, /, *, actor: str, **fields: Any) -> None:
        """Append an event, durably. Raises StoreError."""
        self.add(Event(at_ms=now_ms(), kind=kind, actor=actor, fields=fields))

    def add(self, event: Event) -> None:
        """Append an event with its own time, durably. Raises StoreError."""
        line = json_line(event)
        with store_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(self._lock):
                if self._path.exists() and self._path.stat().st_size > self._max_bytes:
                    self._path.replace(self._before)
                _append_line(self._path, line)

    def tail(self, count: int) -> list[Event]:
        """The last `count` events, oldest first. Raises StoreError."""
        return list(islice(self._newest_first(), count))[::-1]

    def last_sequence(self) -> int:
        """The number of the last transition in the log; 0 without one. Raises StoreError."""
        return next((event.sequence for event in self._newest_first() if event.sequence), 0)

    def _newest_first(self) -> Iterator[Event]:
        with store_errors(self._path), shared_lock(self._lock):
            for path in (self._path, self._before):
                for line in _newest_lines(path):
                    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        yield msgspec.json.decode(line, type=Event)


def _newest_lines(path: Path) -> Iterator[bytes]:
    """Lines from the end, read by blocks: the live page needs the last few every second, and the file has megabytes."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        at, begun = file.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(at, _BLOCK_BYTES)
            at -= size
            file.seek(at)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from reversed(lines)
        yield begun


def _append_line(path: Path, line: bytes) -> None:
    with path.open("a+b") as file:
        length = file.seek(0, os.SEEK_END)
        if length > 0:
            file.seek(length - 1)
            if file.read(1) != b"\n":
                # A crash cut the last line short: end it, so that the new line does not join it.
                file.write(b"\n")
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if length == 0:
        sync(path.parent)


def _event(version: int, made: Transition) -> Event:
    fields = {"version": version, "reason": made.reason, "numbers": made.numbers}
    return Event(at_ms=made.at_ms, kind=made.state.value, actor=made.actor, fields=fields, sequence=made.sequence)


def _last_good(histories: Mapping[int, list[Transition]], other_than: int | None = None) -> int | None:
    promoted = {
        version: history[-1].sequence
        for version, history in histories.items()
        if history[-1].state is VersionState.PROMOTED and version != other_than
    }
    return max(promoted, key=promoted.__getitem__, default=None)


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Raise an error of the file system as a StoreError that names the fix."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot use the draft store at {path}: check its permissions and free space, or choose another one "
            f"({error})"
        ) from error
