"""Let one engine at a time, the canary, try a draft version that nothing has confirmed yet.

    ready for a trial ─▶ takes the slot ─▶ trial ─▶ kept: promoted, and every other engine installs it
                              │              └────▶ rolled back: barred, and no engine installs it
                              └─▶ no verdict: the slot is free, and another engine tries the version

The slot is a key in Redis (`speculator/redis/control_plane.py`). It expires: the canary renews it every few seconds
while it runs the version, so the slot of an engine that has died is free after `SLOT_S`. An engine alone is its own
canary.

A process that takes the slot and ends soon afterwards may have ended because of the version. One such crash is
forgiven. After the second one the next engine that takes the slot bars the version instead of trying it. A process that
gives the slot back in order, or runs the version for `PROBATION_S`, is not counted.

While Redis is away the canary goes on, and its trial may end: states of versions are in the store.

The engine acts first and writes afterwards (`VersionRecord`): a rollback must not wait for a disk or for Redis. Writes
that fail are tried again at the next look. A crash may lose them, which is safe: a version that is live or scored is
tried again, and one whose rollback was written never returns.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from serving.hotswap.breaker import LiveWatch
from speculator.errors import LifecycleError, StoreError, StreamError
from speculator.redis.control_plane import CanaryHolder, CanarySlot
from speculator.versions.lifecycle import BARRED, SERVABLE, Lifecycle, Number, VersionState

log = structlog.get_logger(__name__)

SLOT_S = 30.0
"""How long after its last renewal the slot is free."""
INSTALL_S = 60.0
"""How long an engine may take to put the version into service once it has the slot."""
PROBATION_S = 60.0
"""A canary that ends within this time of service may have ended because of the version."""
MOST_CRASHES = 2
"""Crashes on probation after which the version is barred."""
PATIENCE_S = 120.0
"""A canary gives the slot back to a waiting engine when it learns too little: fewer than `ENOUGH` comparable
verifications in each such period. The period doubles each time the engine gave the slot back for the same version."""
ENOUGH = 300
YIELD_S = 60.0
"""An engine that gave the slot back without a verdict leaves it to others for this time."""
_MOST_DOUBLINGS = 5
_MOST_OWED = 100
"""Writes of an engine that its store or Redis could not take; the oldest go first."""


class Pointer(Protocol):
    """Where the desired version and the canary's slot stand, and engines report; see `DraftPointer` in
    speculator/redis/control_plane.py.
    """

    def desired(self) -> int | None: ...

    def pinned(self) -> int | None: ...

    def replace(self, old: int, new: int) -> bool: ...

    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None: ...

    def hold_canary(self, holder: CanaryHolder, *, ttl_s: float, on_probation: bool) -> CanarySlot: ...

    def release_canary(self, holder: CanaryHolder, *, forget_crashes: bool = False) -> None: ...


class Canary:
    """One engine's claim on the canary's slot. Used by the follower's thread.

    The engine asks for the slot, and renews it, every `poll_s` seconds. `clock` gives seconds, of any origin.
    """

    def __init__(
        self,
        pointer: Pointer,
        record: VersionRecord,
        watch: LiveWatch | None,
        in_service: Callable[[], int],
        *,
        engine_id: str,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pointer, self._record, self._watch, self._in_service = pointer, record, watch, in_service
        self._engine_id, self._poll_s, self._clock = engine_id, poll_s, clock
        self._process = secrets.token_hex(8)
        self._held: CanaryHolder | None = None
        self._to_release: tuple[CanaryHolder, bool] | None = None
        """The claim that Redis has yet to release, and whether to forget the crashes that were counted."""
        self._is_leaving = self._is_waiting = False
        self._asked_s = self._polled_s = self._yields_until_s = float("-inf")
        self._held_since_s = 0.0
        self._in_service_since_s: float | None = None
        self._num_yields: Counter[int] = Counter()
        """By version: how often this engine gave the slot back because it learned too little."""

    @property
    def role(self) -> str:
        """`canary`; `waiting` for another engine's trial to end; or `settled`."""
        if self._held is not None:
            return "canary"
        return "waiting" if self._is_waiting else "settled"

    def may_try(self, desired: int) -> bool:
        """Whether this engine may try the desired version now; asks for the slot where it has none.

        Bars the version where too many processes have crashed while they tried it. Raises StreamError or StoreError.
        """
        if self._held is not None and self._held.version == desired:
            return True
        self.release()
        now_s = self._clock()
        if now_s < self._yields_until_s or now_s - self._asked_s < self._poll_s:
            return False
        self._asked_s = now_s
        self._release_owed()
        holder = CanaryHolder(engine_id=self._engine_id, process=self._process, version=desired)
        # From here on Redis may have the claim. One that was not released would count as a crash.
        self._to_release = holder, False
        slot = self._pointer.hold_canary(holder, ttl_s=INSTALL_S, on_probation=True)
        self._is_waiting = not slot.is_held
        if not slot.is_held:
            self._to_release = None
            return False
        if slot.num_crashed >= MOST_CRASHES:
            self._bar(holder, slot.num_crashed)
            return False
        if not self._record.may_serve(desired) or self._record.is_promoted(desired):
            # The previous canary has judged it since this engine last looked.
            self._release_owed()
            return False
        self._to_release = None
        self._held, self._held_since_s, self._is_leaving = holder, now_s, False
        self._in_service_since_s, self._asked_s, self._polled_s = None, float("-inf"), float("-inf")
        return True

    def poll(self) -> int:
        """Renew the slot; returns the version that this engine has to leave, or 0. Raises StreamError or StoreError."""
        held, now_s = self._held, self._clock()
        is_installed = held is not None and self._in_service() == held.version
        if held is not None and not is_installed and now_s - self._held_since_s >= INSTALL_S:
            self._is_leaving = True
            self.release()
        self._release_owed()
        if held is None or not is_installed:
            return 0
        if self._is_leaving:
            # The slot is not renewed meanwhile: an engine whose idle ranks cannot swap serves no requests.
            return held.version
        if now_s - self._polled_s < self._poll_s:
            return 0
        if self._in_service_since_s is None:
            self._in_service_since_s = now_s
        on_probation = now_s - self._in_service_since_s < PROBATION_S
        slot = self._pointer.hold_canary(held, ttl_s=SLOT_S, on_probation=on_probation)
        self._polled_s = now_s
        if not slot.is_held:
            if self._record.is_promoted(held.version):
                self.release()
                return 0
            log.warning("draft version left: another engine has become its canary", version=held.version)
            self._is_leaving = True
        elif slot.is_awaited and self._learns_too_little(held.version, now_s):
            log.info("draft version left to another engine: too little traffic to judge it", version=held.version)
            self._num_yields[held.version] += 1
            self._is_leaving = True
        return held.version if self._is_leaving else 0

    def release(self) -> None:
        """Give the slot up; the next `poll` releases it in Redis."""
        if self._held is not None:
            if self._is_leaving:
                self._yields_until_s = self._clock() + YIELD_S
            self._to_release = self._held, False
            self._held = None

    def stop_waiting(self) -> None:
        """Note that there is no version to wait for."""
        self._is_waiting = False

    def close(self) -> None:
        """The engine stops: give the slot back now. Raises StreamError."""
        self.release()
        self._release_owed()

    def _release_owed(self) -> None:
        if self._to_release is not None:
            holder, forget_crashes = self._to_release
            self._pointer.release_canary(holder, forget_crashes=forget_crashes)
            self._to_release = None

    def _learns_too_little(self, version: int, now_s: float) -> bool:
        patience_s = PATIENCE_S * 2 ** min(self._num_yields[version], _MOST_DOUBLINGS)
        periods = (now_s - self._held_since_s) / patience_s
        num_compared = 0 if self._watch is None else self._watch.trial_compared
        return bool(periods >= 1 and num_compared < ENOUGH * periods)

    def _bar(self, holder: CanaryHolder, num_crashed: int) -> None:
        """Bar the version. The crashes are forgotten once the store has it, so that an operator may have it tried
        again.
        """
        log.error(
            "draft version barred: engines crashed while they tried it", version=holder.version, engines=num_crashed
        )
        numbers = {"engines_that_ended": num_crashed, "within_s": PROBATION_S}
        self._record.bar(holder.version, "engines ended as they tried it", numbers)
        self._to_release = holder, True
        self._release_owed()


class VersionRecord:
    """Reads the states of versions, and writes what one engine decided; used by one thread.

    `lifecycle` is None where there is no store to write to.
    """

    def __init__(self, lifecycle: Lifecycle | None, pointer: Pointer, *, engine_id: str) -> None:
        self._lifecycle, self._pointer, self._actor = lifecycle, pointer, f"engine:{engine_id}"
        self._owed: deque[Callable[[], object]] = deque(maxlen=_MOST_OWED)

    def may_serve(self, version: int) -> bool:
        """Whether the version's state allows to serve it. Raises StoreError, as its installation would."""
        return self._lifecycle is None or self._lifecycle.state(version) in SERVABLE

    def may_return_to(self, version: int) -> bool:
        """Whether the version may serve again: it may have been removed since. True also where the store cannot be
        read, since a rollback must not wait for it.
        """
        try:
            return self.may_serve(version)
        except StoreError as error:
            log.warning("state of a draft version not read, it may serve", version=version, error=str(error))
            return True

    def is_promoted(self, version: int) -> bool:
        """Whether the version is promoted. Raises StoreError."""
        return self._lifecycle is not None and self._lifecycle.state(version) is VersionState.PROMOTED

    def is_barred(self, version: int) -> bool:
        """Whether the version is barred; False also where the store cannot be read, so what is in service stays."""
        try:
            return self._lifecycle is not None and self._lifecycle.state(version) in BARRED
        except StoreError as error:
            log.warning("state of a draft version not read, it stays", version=version, error=str(error))
            return False

    def last_good(self, *, other_than: int) -> int | None:
        """The last good version; None also where the store cannot be read."""
        try:
            return self._lifecycle.last_good(other_than=other_than) if self._lifecycle is not None else None
        except StoreError as error:
            log.warning("last good draft version not read", error=str(error))
            return None

    def promoted_since(self, version: int, *, other_than: int) -> int | None:
        """The last good version where it was promoted after `version` went live, or was promoted itself.

        None also for a `version` that never went live, as one that an operator pinned. Raises StoreError.
        """
        good = self.last_good(other_than=other_than)
        if self._lifecycle is None or good is None:
            return None
        histories = self._lifecycle.histories()
        in_service = (VersionState.LIVE, VersionState.PROMOTED)
        came = [one.sequence for one in histories.get(version, [])[-1:] if one.state in in_service]
        is_later = came and any(one.sequence > came[0] for one in histories.get(good, []))
        return good if is_later else None

    def mark_live(self, version: int) -> None:
        if (states := self._lifecycle) is not None:
            self._owe(lambda: states.move(version, VersionState.LIVE, actor=self._actor, reason="in service"))

    def mark_promoted(self, version: int, reason: str, numbers: Mapping[str, Number]) -> None:
        if (states := self._lifecycle) is None:
            return

        def write() -> None:
            # An earlier write may have failed, as on a full disk.
            if states.state(version) is VersionState.SCORED:
                states.move(version, VersionState.LIVE, actor=self._actor, reason="in service")
            # Another engine may have promoted it, and another version after it.
            if states.state(version) is VersionState.LIVE:
                states.move(version, VersionState.PROMOTED, actor=self._actor, reason=reason, numbers=numbers)

        self._owe(write)

    def bar_and_replace(
        self, version: int, good: int, reason: str, numbers: Mapping[str, Number] | None = None
    ) -> None:
        """Bar the version everywhere and publish the good one in its place; may be repeated."""
        self._owe(lambda: self.bar(version, reason, numbers))
        was_barred = self.is_barred(version)

        def move_pointer() -> None:
            # An operator may release the version, and publish it again, while this engine cannot reach Redis.
            if not was_barred or not self.may_serve(version):
                self._pointer.replace(version, good)

        self._owe(move_pointer)

    def bar(self, version: int, reason: str, numbers: Mapping[str, Number] | None) -> None:
        """Bar the version everywhere, but leave the pointer. Raises StoreError, and does not try again."""
        if self._lifecycle is not None:
            self._lifecycle.bar(version, actor=self._actor, reason=reason, numbers=numbers)

    def flush(self) -> None:
        """Try failed writes again, in their order."""
        owed, self._owed = self._owed, deque(maxlen=_MOST_OWED)
        self._owed.extend(write for write in owed if not self._try(write))

    def _owe(self, write: Callable[[], object]) -> None:
        self._owed.append(write)
        self.flush()

    def _try(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except LifecycleError as error:
            log.warning("state of a draft version not written", error=str(error))
        except (StoreError, StreamError) as error:
            log.warning("state of a draft version not written yet", error=str(error))
            return False
        return True
