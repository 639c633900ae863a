"""What became of each draft version: one state machine, one small file a version, every change with its reason.

    written ─▶ validated ─▶ scored ─▶ live ─▶ promoted
                                        │        │
                                        └────────┴──▶ rolled back ─▶ quarantined ─▶ scored (released by an operator)

From every state but the last two a version can also be quarantined at once: its file is damaged, or an engine refuses
it. The files lie beside the versions in the draft store, since a state must not be lost with Redis:

    states/000042.json     all transitions of version 42, oldest first; the last one is its state
    states/lock            held while a transition is made, and shared while all states are read
    events.jsonl           the same transitions, and what operators and the gate did, in the order they happened; one
                           line of JSON an event, appended by whoever holds events.lock

A transition is a file written under a temporary name, fsynced and renamed: after a crash it was made or it was not.
Its event is written after it. Where a crash comes between the two, whoever makes the next transition of any version
writes the missing event first, and until then `recent_events` tells it from the states.

A version without a file here is unknown, and unknown versions are not served: the store writes a version's files before
its state and removes them after it.

`events.jsonl` becomes `events.1.jsonl`, in place of the one before, when it is long. A line that a crash cut short is
passed over.
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
from speculator.host import exclusive, json_line, now_ms, shared, sync, write_synced

log = structlog.get_logger(__name__)

Number = float | int | str | bool | None


class VersionState(enum.Enum):
    """Where a version stands."""

    WRITTEN = "written"
    """Its files are complete on disk."""
    VALIDATED = "validated"
    """Read back and verified: hash, names, shapes, types, finite values, target and draft vocabulary."""
    SCORED = "scored"
    """The gate found it fit to serve."""
    LIVE = "live"
    """An engine has it in service and compares it with the version before."""
    PROMOTED = "promoted"
    """Live traffic confirmed it: what engines fall back to and start with."""
    ROLLED_BACK = "rolled_back"
    """Live traffic, or an operator, spoke against it."""
    QUARANTINED = "quarantined"
    """No engine takes it any more."""


SERVABLE = frozenset({VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED})
BARRED = frozenset({VersionState.ROLLED_BACK, VersionState.QUARANTINED})

ALLOWED: Mapping[VersionState | None, frozenset[VersionState]] = {
    None: frozenset({VersionState.WRITTEN}),
    VersionState.WRITTEN: frozenset({VersionState.VALIDATED, VersionState.QUARANTINED}),
    VersionState.VALIDATED: frozenset({VersionState.SCORED, VersionState.QUARANTINED}),
    VersionState.SCORED: frozenset({VersionState.LIVE, VersionState.QUARANTINED}),
    # A version may be promoted again: it is then the last one that was.
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
        """None for a version that nothing is known of. Raises StoreError."""
        history = self.history(version)
        return history[-1].state if history else None

    def states(self) -> dict[int, VersionState]:
        """The state of every known version, oldest first. Raises StoreError."""
        return {version: history[-1].state for version, history in self.histories().items()}

    def histories(self) -> dict[int, list[Transition]]:
        """The transitions of every known version as they are at one moment. Raises StoreError."""
        with store_errors(self.root), shared(self._lock):
            return self._histories()

    def history(self, version: int) -> list[Transition]:
        """Its transitions, oldest first. Raises StoreError."""
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
        """Make a transition durable; False where the version is in that state already.

        Raises LifecycleError where no way leads there from its state, StoreError when it cannot be written; it was
        made all the same where only its event could not.
        """
        with self._locked():
            made = self._make(version, state, actor, reason, dict(numbers or {}))
            if made:
                self._tell(made)
            return bool(made)

    def bar(self, version: int, *, actor: str, reason: str, numbers: Mapping[str, Number] | None = None) -> None:
        """Take a version into quarantine, by way of `rolled_back` where it is in service; done already is done.

        Events that cannot be written are left to the next transition. Raises LifecycleError for an unknown version,
        StoreError when its state cannot be written.
        """
        with self._locked():
            made: dict[int, list[Transition]] = {}
            if self.state(version) in (VersionState.LIVE, VersionState.PROMOTED):
                made = self._make(version, VersionState.ROLLED_BACK, actor, reason, dict(numbers or {}))
            made = self._make(version, VersionState.QUARANTINED, actor, reason, dict(numbers or {})) or made
            try:
                self._tell(made)
            except StoreError as error:
                log.warning("events are not written yet", version=version, error=str(error))

    def last_good(self, *, other_than: int | None = None) -> int | None:
        """The version that was promoted last, of those that still are; None where none is. Raises StoreError."""
        return _last_good(self.histories(), other_than)

    def newest_servable(self) -> int | None:
        """The highest version that may be served. Raises StoreError."""
        return max((version for version, state in self.states().items() if state in SERVABLE), default=None)

    def rollbacks_in_a_row(self) -> list[Transition]:
        """The rollbacks by engines and trainers since a version was last promoted, oldest first. Raises StoreError.

        Not among them: versions that were released again. A version that was rolled back later is no sign of better.
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
        """The last `count` events, oldest first, with those of transitions that a crash kept from being written.

        Raises StoreError.
        """
        with store_errors(self.root), shared(self._lock):
            untold = [_event(version, one) for version, one in self._untold(self._histories())]
            return [*self.events.tail(count), *untold][-count:] if count else []

    def forget(self, version: int) -> bool:
        """Drop what is known of a version whose files are to be removed; False for the last good one, and for one that
        went live after it. A version that went live before got no verdict, and nobody waits for one.

        Raises StoreError.
        """
        with self._locked():
            histories = self._histories()
            good = _last_good(histories)
            promoted_at = 0 if good is None else histories[good][-1].sequence
            came = [one.sequence for one in histories.get(version, [])[-1:] if one.state is VersionState.LIVE]
            if version == good or max(came, default=0) > promoted_at:
                return False
            # A full disk must not keep what fills it.
            with contextlib.suppress(StoreError):
                self._tell(histories)
            self._path(version).unlink(missing_ok=True)
            sync(self._states)
        return True

    def _histories(self) -> dict[int, list[Transition]]:
        """Under the lock."""
        versions = sorted(int(path.stem) for path in self._states.glob("*.json") if path.stem.isdigit())
        return {version: history for version in versions if (history := self.history(version))}

    def _make(
        self, version: int, state: VersionState, actor: str, reason: str, numbers: dict[str, Number]
    ) -> dict[int, list[Transition]]:
        """All histories with the new transition; none where the version is in that state already. Under the lock."""
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
        """Of those that were forgotten, too: a number that is given twice would not be told."""
        told = 0
        # A transition does not wait for the log: an engine must be able to bar a version without it.
        with contextlib.suppress(StoreError):
            told = self.events.last_sequence()
        return max([told, *(history[-1].sequence for history in histories.values())])

    def _tell(self, histories: Mapping[int, list[Transition]]) -> None:
        """Write the events that are missing. Under the lock."""
        for version, transition in self._untold(histories):
            self.events.add(_event(version, transition))

    def _untold(self, histories: Mapping[int, list[Transition]]) -> list[tuple[int, Transition]]:
        told = self.events.last_sequence()
        # A log without any number is new, or of before there were numbers, or other events have filled it since.
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
            with exclusive(self._lock):
                yield

    @property
    def _lock(self) -> Path:
        return self._states / "lock"

    def _path(self, version: int) -> Path:
        return self._states / f"{version:06d}.json"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` say what, in numbers where there are any; never a key or a user's text."""

    at_ms: int
    kind: str
    actor: str
    fields: dict[str, Any] = {}
    sequence: int = 0
    """Of a transition: its number; 0 for what is none."""


class EventLog:
    """Events of one store; any number of writers. Two files of about `max_bytes` are kept."""

    def __init__(self, root: Path, *, max_bytes: int = 8 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._path = root / "events.jsonl"
        self._before = root / "events.1.jsonl"
        self._lock = root / "events.lock"

    def append(self, kind: str, /, *, actor: str, **fields: Any) -> None:
        """Durable when it returns. Raises StoreError."""
        self.add(Event(at_ms=now_ms(), kind=kind, actor=actor, fields=fields))

    def add(self, event: Event) -> None:
        """The same for an event that happened before."""
        line = json_line(event)
        with store_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(self._lock):
                if self._path.exists() and self._path.stat().st_size > self._max_bytes:
                    self._path.replace(self._before)
                _append_line(self._path, line)

    def tail(self, count: int) -> list[Event]:
        """The last `count` events, oldest first. Raises StoreError."""
        return list(islice(self._newest_first(), count))[::-1]

    def last_sequence(self) -> int:
        """The number of the last transition that is on record; 0 where none is. Raises StoreError."""
        return next((event.sequence for event in self._newest_first() if event.sequence), 0)

    def _newest_first(self) -> Iterator[Event]:
        with store_errors(self._path), shared(self._lock):
            for path in (self._path, self._before):
                for line in _newest_lines(path):
                    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                        yield msgspec.json.decode(line, type=Event)


def _newest_lines(path: Path) -> Iterator[bytes]:
    """From the end, block by block: the live page asks for the last few every second, and the file has megabytes."""
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
                # A crash cut the last line short: end it, so that it takes no other with it.
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
