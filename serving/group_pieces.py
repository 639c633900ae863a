"""One engine's view of the prompt groups that it shares: what it has taken of each, and what it has to publish.

serving/group_text.py moves it.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from speculator.group_store import GroupKey, Place
from speculator.group_text import MAX_PIECE_TOKENS, Piece, encode_piece
from speculator.host import now_ms
from speculator.proposals.suffix_index import NEW_TEXT, SuffixIndex

_MAX_TEXTS = 4096
"""Of a group that never ends. One that grows again after so many others goes on as a new text."""


@dataclass(eq=False)
class FollowedGroup:
    """One group, for as long as its index lives."""

    key: GroupKey
    index: weakref.ref[SuffixIndex]
    source: int = field(default_factory=lambda: secrets.randbits(64))
    """What is written from here: the index has it already."""
    since_ms: int = field(default_factory=now_ms)
    active_s: float = field(default_factory=time.monotonic)
    """When something was last committed here."""
    closed: bool = False
    """It has ended, or its tenant was erased: nothing more is published or taken."""
    place: Place = field(default_factory=Place)
    texts: OrderedDict[tuple[int, int], tuple[int, int]] = field(default_factory=OrderedDict)
    """By source and text, of those that grew last: its handle in the index and the tokens that it has. The decode
    thread's."""

    def take(self, piece: Piece) -> int:
        """Put a piece into the index; the number of tokens that it did not have."""
        index = self.index()
        if self.closed or index is None:
            return 0
        handle, length = self.texts.get((piece.source, piece.text), (NEW_TEXT, 0))
        if piece.start > length:
            handle, length = NEW_TEXT, piece.start  # what is between was lost
        tokens = piece.tokens[length - piece.start :]  # after an error it may have been written twice
        if tokens:
            self.texts[piece.source, piece.text] = index.append(handle, tokens), length + len(tokens)
            self.texts.move_to_end((piece.source, piece.text))
            if len(self.texts) > _MAX_TEXTS:
                self.texts.popitem(last=False)
        return len(tokens)


@dataclass(frozen=True)
class Queued:
    """Tokens `start`, `start` + 1, … of a text, to be published."""

    group: FollowedGroup
    text: int
    start: int
    tokens: tuple[int, ...]
    at_ms: int


def encoded(queued: Iterable[Queued], target_version: int) -> dict[GroupKey, bytes]:
    """The pieces of each group; what follows on in a text is one piece."""
    texts: dict[tuple[FollowedGroup, int], list[Queued]] = defaultdict(list)
    for one in queued:
        texts[one.group, one.text].append(one)
    found: dict[GroupKey, bytes] = defaultdict(bytes)
    for (group, text), parts in texts.items():
        for run in _runs(parts):
            tokens = [token for part in run for token in part.tokens]
            for offset in range(0, len(tokens), MAX_PIECE_TOKENS):
                piece = Piece(
                    source=group.source,
                    text=text,
                    start=run[0].start + offset,
                    target_version=target_version,
                    at_ms=run[0].at_ms,
                    tokens=tokens[offset : offset + MAX_PIECE_TOKENS],
                )
                found[group.key] += encode_piece(piece)
    return found


def _runs(parts: Sequence[Queued]) -> list[list[Queued]]:
    """Parts of one text that follow on one another; between two of them something was dropped."""
    found: list[list[Queued]] = []
    for part in parts:
        if found and found[-1][-1].start + len(found[-1][-1].tokens) == part.start:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def num_tokens(queued: Iterable[Queued]) -> int:
    return sum(len(one.tokens) for one in queued)
