"""What an operator may do with the draft versions: look at them, compare them, choose which one is served.

Command line and gateway both work through the desk. Each change of which draft is served is on record before it is
begun, as the event `asked`, and again, with where it led, when it is done; a crash in between leaves the former. An
engine goes on watching what it was told to serve.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
from torch import Tensor

from speculator.checkpoint import config_from_json, expected_shapes
from speculator.difference import Difference, compare
from speculator.errors import LifecycleError, StoreError, UnknownDraftError
from speculator.events import Event
from speculator.folder import check_can_write, write_folder
from speculator.lifecycle import BARRED, SERVABLE, State
from speculator.lineage import admit
from speculator.overview import Details, Overview, overview
from speculator.pointer import DraftPointer
from speculator.store import DraftStore

log = structlog.get_logger(__name__)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where an operator's change has led."""

    version: int
    """The version that was promoted, rolled back, pinned or unpinned."""
    state: State | None
    desired: int | None
    """What engines run from now on."""
    num_unrecorded: int = 0
    """Events of this change that could not be written: a rollback does not wait for its record."""


class DraftDesk:
    """One store's versions, with the pointer of the engines that serve them.

    `pointer` is called for each use and may raise StreamError, or ConfigError where nobody said which one it is.
    """

    def __init__(
        self, store: DraftStore, pointer: Callable[[], DraftPointer], *, target_fingerprint: str | None = None
    ) -> None:
        self._store, self._pointer, self._fingerprint = store, pointer, target_fingerprint
        self._states = store.lifecycle

    def overview(self) -> Overview:
        """Every version; what Redis knows is left out where it cannot be asked. Raises StoreError."""
        return overview(self._store, self._pointer)

    def show(self, version: int) -> Details:
        """Raises StoreError, UnknownDraftError among them, or DraftFileError for a damaged manifest."""
        manifest = self._store.manifest(version)
        for row in self.overview().drafts:
            if row.version == version:
                return Details(draft=row, manifest=manifest, history=self._states.history(version))
        raise UnknownDraftError(f"draft version {version} has just been removed")

    def diff(self, a: int, b: int) -> Difference:
        """What changed from version `a` to version `b`. Raises StoreError or DraftError."""
        sides = [(self._store.manifest(each), self._store.config(each), self._store.load(each)) for each in (a, b)]
        return compare(*sides)

    def events(self, count: int) -> list[Event]:
        """The last events, oldest first. Raises StoreError."""
        return self._states.recent_events(count)

    def promote(self, version: int, *, actor: str) -> Outcome:
        """Have engines serve a version, one in quarantine too: it is read back and verified first.

        Raises StoreError, DraftError for a version that no engine can load, LifecycleError while another one is pinned,
        StreamError.
        """
        pointer = self._pointer()
        self._refuse_other_pin(pointer, version)
        self._verified(version)
        self._asked("promote", version, actor)
        self._release(version, actor)
        if self._states.state(version) is State.PROMOTED:
            self._states.move(version, State.PROMOTED, actor=actor, reason="promoted by operator")
        pointer.publish(version)
        return self._done("promote", version, pointer, actor)

    def rollback(self, *, actor: str, reason: str, version: int | None = None) -> Outcome:
        """Bar a version, by default the one that engines should run, and have the last good one served instead.

        What a crash cut short is brought to its end by asking again, and asking twice changes nothing more: without
        `version` it is refused where the one in service came there by a rollback. Raises StoreError, LifecycleError
        then or where no other version is good, DraftError where that one cannot be loaded, StreamError. An event log
        that cannot be written keeps nobody from getting rid of a draft: what is lost of it is logged and counted.
        """
        pointer = self._pointer()
        bad = version or self._in_service(pointer)
        good = self._states.last_good(other_than=bad)
        if good is None:
            raise LifecycleError(f"no other draft version than {bad} was ever good: `slipstream drafts promote` one")
        self._verified(good)
        if self._states.state(bad) is None:
            self._store.manifest(bad)
        is_asked = self._noted("asked", actor, action="rollback", version=bad, reason=reason)
        if self._states.state(bad) is None:
            self._states.move(bad, State.WRITTEN, actor=actor)
        self._states.bar(bad, actor=actor, reason=reason)
        if (pinned := pointer.pinned()) is not None and self._states.state(pinned) not in SERVABLE:
            pointer.unpin()
        published = pointer.published()
        if published is None:
            pointer.publish(good)
        elif self._states.state(published) not in SERVABLE:
            pointer.replace(published, good)
        desired = pointer.desired()
        is_done = self._noted("rollback", actor, version=bad, desired=desired, reason=reason)
        return Outcome(
            version=bad,
            state=self._states.state(bad),
            desired=desired,
            num_unrecorded=(not is_asked) + (not is_done),
        )

    def pin(self, version: int, *, actor: str) -> Outcome:
        """Have engines serve this version, whatever the trainer publishes, until `unpin`.

        Raises StoreError, DraftError, LifecycleError for a version that may not be served, StreamError.
        """
        pointer = self._pointer()
        self._verified(version)
        state = self._states.state(version)
        if state not in SERVABLE:
            known = "unknown" if state is None else state.value
            raise LifecycleError(f"draft version {version} is {known}: promote it first")
        self._asked("pin", version, actor)
        pointer.pin(version)
        return self._done("pin", version, pointer, actor)

    def unpin(self, *, actor: str) -> Outcome:
        """Have engines serve what is published.

        Raises LifecycleError where nothing is pinned, StreamError, StoreError.
        """
        pointer = self._pointer()
        pinned = pointer.pinned()
        if pinned is None:
            raise LifecycleError("no draft version is pinned")
        self._asked("unpin", pinned, actor)
        pointer.unpin()
        return self._done("unpin", pinned, pointer, actor)

    def export(self, version: int, folder: Path, *, actor: str) -> Path:
        """Write a version as a Hugging Face folder, as SGLang loads it, and return it.

        Raises StoreError, DraftError, ConfigError where the folder holds something or cannot be written.
        """
        check_can_write(folder)
        weights = self._verified(version)
        written = write_folder(folder, weights, self._store.config(version))
        self._states.events.append("export", actor=actor, version=version)
        return written

    def _verified(self, version: int) -> dict[str, Tensor]:
        shapes = expected_shapes(config_from_json(self._store.config(version)))
        return self._store.load(version, expected_fingerprint=self._fingerprint, expected_shapes=shapes)

    def _release(self, version: int, actor: str) -> None:
        """From wherever it stands to a state in which it may be served."""
        if self._states.state(version) in BARRED:
            self._states.move(version, State.QUARANTINED, actor=actor)
            self._states.move(version, State.SCORED, actor=actor, reason="released by operator")
        else:
            fingerprint = self._store.manifest(version).target_fingerprint
            admit(
                self._store,
                version,
                target_fingerprint=fingerprint,
                actor=actor,
                reason="promoted by operator, unscored",
            )

    def _refuse_other_pin(self, pointer: DraftPointer, version: int) -> None:
        pinned = pointer.pinned()
        if pinned not in (None, version):
            raise LifecycleError(f"draft version {pinned} is pinned: unpin it first")

    def _in_service(self, pointer: DraftPointer) -> int:
        """What engines should run, unless a rollback put it there: then the one that was meant may be gone already."""
        version = pointer.desired() or self._states.last_good()
        if version is None:
            raise LifecycleError("there is no draft version in service to roll back")
        histories = self._states.histories()
        own = histories.get(version, [])
        if own and own[-1].state in BARRED:
            return version  # a rollback that was cut short
        since = max((one.sequence for one in own), default=0)
        for other, history in histories.items():
            was_servable = any(one.state in SERVABLE for one in history)
            if was_servable and history[-1].state in BARRED and history[-1].sequence > since:
                raise LifecycleError(
                    f"draft version {other} was rolled back already, and engines should run {version}: "
                    f"to roll that one back, too, say that it is version {version}"
                )
        return version

    def _asked(self, action: str, version: int, actor: str) -> None:
        self._states.events.append("asked", actor=actor, action=action, version=version)

    def _noted(self, kind: str, actor: str, **fields: str | int | None) -> bool:
        """False where it could not be written."""
        try:
            self._states.events.append(kind, actor=actor, **fields)
        except StoreError as error:
            log.error("not on record", kind=kind, actor=actor, error=str(error), **fields)
            return False
        return True

    def _done(self, kind: str, version: int, pointer: DraftPointer, actor: str) -> Outcome:
        desired = pointer.desired()
        self._states.events.append(kind, actor=actor, version=version, desired=desired)
        return Outcome(version=version, state=self._states.state(version), desired=desired)
