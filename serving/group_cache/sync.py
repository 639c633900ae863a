"""Share the text of prompt groups between engines: what one has committed, the others may propose.

    drafter's thread ── publish ──▶ bounded queue ──▶ this thread ──▶ Redis (serving/group_cache/texts.py)
    drafter's thread ◀── take, a little each step ── bounded queue ◀── this thread ◀──┘

Seer (arXiv 2511.14617) has a server of its own for this; here a string in Redis does. The drafter's thread, which is
the one that decodes or one beside it, only queues and takes. While Redis is away each engine uses its own text only, as
without sharing; what does not fit into the queue meanwhile is dropped and counted. An engine reads only the text of
groups that it decodes, and only from where it stopped.

A group is one tenant's: its key has the tenant in it, and what is read goes into that tenant's window and no other.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from serving.group_cache.texts import (
    MAX_PIECE_TOKENS,
    GroupKey,
    GroupTextPiece,
    GroupTexts,
    ReadPosition,
    decode_pieces,
    encode_piece,
)
from serving.metrics import GroupTextMetrics
from speculator.errors import GroupTextError, StreamError, type_and_place
from speculator.host import now_ms
from speculator.proposals.suffix_index import NEW_TEXT

_MAX_TEXTS = 4096
"""Most texts of a group that are tracked. One that grows after so many others have goes on as a new text."""


class GroupWindow(Protocol):
    """A group's recent text, as an engine keeps it to propose from."""

    def append(self, text: int, tokens: Sequence[int], /) -> int:
        """Add tokens to the text with this handle (`NEW_TEXT` for the first ones); returns its handle from now on."""


@dataclass(eq=False)
class FollowedGroup:
    """One group, for as long as its window lives."""

    key: GroupKey
    window: weakref.ref[GroupWindow]
    source: int = field(default_factory=lambda: secrets.randbits(64))
    """Id of what this engine writes: its window has that already."""
    active_s: float = 0.0
    """When something was last committed here, on the clock of the engine's `GroupSharing`."""
    closed: bool = False
    """It has ended, or its tenant was erased: nothing more is published or taken."""
    place: ReadPosition = field(default_factory=ReadPosition)
    max_texts: int = _MAX_TEXTS
    texts: OrderedDict[tuple[int, int], tuple[int, int]] = field(default_factory=OrderedDict)
    """By source and text, the last grown at the end: the handle in the window and the number of tokens. For the
    drafter's thread."""

    def add_piece(self, piece: GroupTextPiece) -> int:
        """Put a piece into the window; returns the number of tokens that it did not have."""
        window = self.window()
        if self.closed or window is None:
            return 0
        handle, length = self.texts.get((piece.source, piece.text), (NEW_TEXT, 0))
        if piece.start > length:
            handle, length = NEW_TEXT, piece.start  # what is between was lost
        tokens = piece.tokens[length - piece.start :]  # after an error it may have been written twice
        if tokens:
            self.texts[piece.source, piece.text] = window.append(handle, tokens), length + len(tokens)
            self.texts.move_to_end((piece.source, piece.text))
            if len(self.texts) > self.max_texts:
                self.texts.popitem(last=False)
        return len(tokens)


@dataclass
class Queued:
    """Tokens `start`, `start` + 1, … of a text, to be published; the first of them was committed at `at_ms`."""

    group: FollowedGroup
    text: int
    start: int
    at_ms: int
    tokens: list[int] = field(default_factory=list)

    def encoded(self, target_version: int) -> bytes:
        return encode_piece(
            GroupTextPiece(self.group.source, self.text, self.start, target_version, self.at_ms, self.tokens),
        )


def num_tokens(queued: Iterable[Queued]) -> int:
    return sum(len(one.tokens) for one in queued)


Publish = Callable[[Sequence[int]], None]
"""Takes the next tokens of one text."""

_INTERVAL_S = 0.1
_LAST_RETRY_S = 5.0
_ACTIVE_S = 2.0
"""A group that has committed nothing here for so long is not read until it does again."""
_ENDED_LASTS_S = 60.0
"""How long an ended group stays ended: its last samples may still come or run a step. Later its id may be reused."""
_MAX_ENDED = 4096
_MAX_FOLLOWED = 1024
_MAX_QUEUED_TOKENS = 262_144
_MAX_ARRIVED_TOKENS = 65_536
_TOKENS_A_STEP = 256
"""Tokens that are taken into windows between two steps, at about two microseconds each."""

_BEYOND = 1 << 40
"""An offset behind which nothing ever comes."""

log = structlog.get_logger(__name__)


class GroupSharing:
    """Exchanges group texts between one engine and the others. `join` and `index_received` are for the drafter's
    thread, the rest for any other.
    """

    def __init__(
        self,
        texts: GroupTexts,
        *,
        vocab_size: int,
        metrics: GroupTextMetrics,
        target_version: int = 0,
        keep_versions: int = 4,
        interval_s: float = _INTERVAL_S,
        max_followed: int = _MAX_FOLLOWED,
        max_queued_tokens: int = _MAX_QUEUED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`texts` is used on a thread of its own. Text of targets more than `keep_versions` before this engine's is not
        taken. At most `max_followed` groups are followed, and `max_queued_tokens` wait for Redis. `clock` gives
        seconds, of any origin.
        """
        self._texts, self._vocab_size, self.metrics = texts, vocab_size, metrics
        self._target_version, self._keep_versions = target_version, keep_versions
        self._interval_s, self._clock = interval_s, clock
        self._max_followed, self._max_queued_tokens = max_followed, max_queued_tokens
        self._exchanging = threading.Lock()
        # Shared, under `_changed`:
        self._changed = threading.Condition()
        self._followed: OrderedDict[GroupKey, FollowedGroup] = OrderedDict()
        self._queue: deque[Queued] = deque()
        self._unfinished: dict[tuple[int, int], Queued] = {}
        """By source and text, of what is queued: what follows on goes into the same piece."""
        self._num_queued = 0
        self._arrived: deque[tuple[FollowedGroup, GroupTextPiece]] = deque()
        self._num_arrived = 0
        self._ended: set[GroupKey] = set()
        self._ended_s: OrderedDict[GroupKey, float] = OrderedDict()
        self._erased_ms: dict[str, int] = {}
        self._closing = threading.Event()
        self._text_numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="group-text", daemon=True)
        self._thread.start()

    # -- the drafter's thread's --------------------------------------------------------------------------------------

    def join(self, key: GroupKey, window: GroupWindow, context: Sequence[int]) -> Publish:
        """Begin a sample of this group, after the tokens of `context`; call the result with what it commits.

        `window` is the group's. A window other than last time is filled from the beginning. A group that has just ended
        is not opened again.
        """
        with self._changed:
            if self._has_ended(key):
                return lambda _: None
            group = self._followed.get(key)
            if group is None or group.window() is not window:
                group = self._followed[key] = FollowedGroup(key, weakref.ref(window))
            self._followed.move_to_end(key)
            if len(self._followed) > self._max_followed:
                self._followed.popitem(last=False)
            text, start = next(self._text_numbers), 0

        def publish(tokens: Sequence[int]) -> None:
            nonlocal start
            self._publish(group, text, start, tokens)
            start += len(tokens)

        publish(context)
        return publish

    def index_received(self) -> None:
        """Put some of what has arrived into the windows."""
        took = 0
        while self._arrived and took < _TOKENS_A_STEP:
            with self._changed:
                if not self._arrived:
                    return
                group, piece = self._arrived.popleft()
                self._num_arrived -= len(piece.tokens)
            took += len(piece.tokens)
            if num_new := group.add_piece(piece):
                self.metrics.count("fetched", num_new)

    def _publish(self, group: FollowedGroup, text: int, start: int, tokens: Sequence[int]) -> None:
        with self._changed:
            group.active_s = self._clock()
            # A group that others pushed out of `_followed` is not marked closed when it ends.
            if group.closed or self._has_ended(group.key) or not tokens:
                return
            if self._closing.is_set() or self._num_queued + len(tokens) > self._max_queued_tokens:
                self.metrics.count("buffer_full", len(tokens))
                return
            at_ms = now_ms()
            for offset, token in enumerate(tokens, start):
                piece = self._unfinished.get((group.source, text))
                if piece is None or piece.start + len(piece.tokens) != offset or len(piece.tokens) == MAX_PIECE_TOKENS:
                    piece = self._unfinished[group.source, text] = Queued(group, text, offset, at_ms)
                    self._queue.append(piece)
                piece.tokens.append(token)
            self._num_queued += len(tokens)
            self._changed.notify()

    # -- any thread's -----------------------------------------------------------------------------------------------

    def set_target_version(self, version: int) -> None:
        """Set the target version of what is published from now on."""
        self._target_version = version

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a group that has ended, here and in Redis. Does not wait."""
        key = GroupKey(tenant, group_id)
        with self._changed:
            self._close([key])
            self._ended.add(key)
            self._ended_s[key] = self._clock()
            self._ended_s.move_to_end(key)
            if len(self._ended_s) > _MAX_ENDED:
                self._ended_s.popitem(last=False)
            self._changed.notify()

    def forget(self, tenants: Collection[str]) -> None:
        """Drop these tenants' text that is queued. After it has returned, none of their earlier text is written, nor
        used where it is still in Redis.
        """
        with self._changed:
            self._erased_ms |= dict.fromkeys(tenants, now_ms())
            self._close([key for key in self._followed if key.tenant in tenants])
        with self._exchanging:
            pass

    def close(self, timeout_s: float) -> None:
        """Write what is queued for up to `timeout_s`, and end."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self.metrics.count("closed", self._num_queued)
            self._queue.clear()
            self._num_queued = 0

    def _has_ended(self, key: GroupKey) -> bool:
        """Whether the group has ended within the last `_ENDED_LASTS_S`."""
        ended_s = self._ended_s.get(key)
        return ended_s is not None and self._clock() - ended_s < _ENDED_LASTS_S

    def _close(self, keys: Collection[GroupKey]) -> None:
        """Stop following these groups; call it under the lock."""
        for key in keys:
            if (group := self._followed.pop(key, None)) is not None:
                group.closed = True
        self._arrived = deque(one for one in self._arrived if not one[0].closed)
        self._num_arrived = sum(len(piece.tokens) for _, piece in self._arrived)

    # -- this thread's ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._interval_s
        while self._wait(pause_s):
            try:
                with self._exchanging:
                    self._write()
                    self._read()
                pause_s = self._interval_s
            except StreamError as error:
                log.warning(
                    "text of prompt groups is not shared for now", error=str(error), retry_in_s=round(pause_s, 1)
                )
                pause_s = min(2 * pause_s, _LAST_RETRY_S)
            except Exception as error:
                log.error("text of prompt groups could not be shared", error=type_and_place(error))
                pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _wait(self, pause_s: float) -> bool:
        """Wait for the next exchange; False when closed and nothing is left to write, or it cannot be written."""
        self._closing.wait(pause_s)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing.is_set() or self._queue or self._ended or self._active(),
            )
            is_last = self._closing.is_set()
            return not is_last or (bool(self._queue or self._ended) and pause_s == self._interval_s)

    def _active(self) -> list[FollowedGroup]:
        """Groups to read, while there is room for what they bring; under the lock."""
        if self._num_arrived >= _MAX_ARRIVED_TOKENS:
            return []
        since_s = self._clock() - _ACTIVE_S
        return [group for group in self._followed.values() if group.active_s >= since_s]

    def _write(self) -> None:
        with self._changed:
            ended, self._ended = self._ended, set()
            queued, self._queue, self._unfinished = list(self._queue), deque(), {}
        unwritten: list[Queued] = []
        try:
            if ended:
                self._texts.drop(sorted(ended))
                ended = set()
            queued = self._still_wanted(queued, self._texts.ttl_s)
            if queued:
                pieces: dict[GroupKey, bytes] = defaultdict(bytes)
                for one in queued:
                    pieces[one.group.key] += one.encoded(self._target_version)
                self.metrics.evicted += self._texts.append(pieces)
                self.metrics.count("published", num_tokens(queued))
        except StreamError:
            unwritten = queued
            raise
        except Exception:
            self.metrics.count("failed", num_tokens(queued))
            raise
        finally:
            with self._changed:
                self._ended |= ended
                self._queue.extendleft(reversed(unwritten))
                self._num_queued = num_tokens(self._queue)

    def _still_wanted(self, queued: Sequence[Queued], ttl_s: float) -> list[Queued]:
        """What is queued, without groups that have ended or were erased, and without what waited too long for Redis."""
        since_ms = now_ms() - int(1000 * ttl_s)
        found = []
        for one in queued:
            key = one.group.key
            if one.group.closed or self._has_ended(key) or one.at_ms <= self._erased_ms.get(key.tenant, -1):
                self.metrics.count("ended", len(one.tokens))
            elif one.at_ms < since_ms:
                self.metrics.count("expired", len(one.tokens))
            else:
                found.append(one)
        return found

    def _read(self) -> None:
        with self._changed:
            for key in [key for key, group in self._followed.items() if group.window() is None]:
                del self._followed[key]
            places = {group.key: (group, group.place) for group in self._active()}
        if places:
            found = self._texts.fetch({key: place for key, (_, place) in places.items()})
            for key, (place, data) in found.items():
                self._arrive(places[key][0], place, data)

    def _arrive(self, group: FollowedGroup, place: ReadPosition, data: bytes) -> None:
        group.place = place
        pieces: list[GroupTextPiece] = []
        try:
            for piece, end in decode_pieces(data, vocab_size=self._vocab_size):
                group.place = ReadPosition(place.head, place.offset + end)
                if self._is_wanted(group, piece):
                    pieces.append(piece)
        except GroupTextError as error:
            log.warning("a prompt group's text is unreadable, the rest of it is skipped", error=str(error))
            group.place = ReadPosition(place.head, _BEYOND)
            self.metrics.unreadable += 1
        with self._changed:
            if not group.closed:
                self._arrived += [(group, piece) for piece in pieces]
                self._num_arrived += sum(len(piece.tokens) for piece in pieces)

    def _is_wanted(self, group: FollowedGroup, piece: GroupTextPiece) -> bool:
        is_new = piece.at_ms > self._erased_ms.get(group.key.tenant, -1)
        is_young = piece.target_version + self._keep_versions >= self._target_version
        return piece.source != group.source and is_new and is_young
