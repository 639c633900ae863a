"""Texts of running prompt groups in Redis, by which any number of engines share them.

One string for each tenant and group. Engines append tokens in pieces when they commit them, and read on from where they
stopped. A text is removed when its group ends (`drop`), a fixed time after its first token even if it still grows, and
when it reaches `GROUP_BYTES`. When all texts exceed `max_bytes`, those that grew least recently are removed. A group
whose text was removed begins a new one with its next tokens. The head identifies the string: a reader that finds
another head knows that the text began anew.

    head    magic "SGT1", 8 random bytes
    piece   source u64, text u32, start u32, target version i64, time i64, number n u32, n tokens i32; little-endian
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import redis

from speculator.errors import GroupTextError
from speculator.host import now_ms
from speculator.redis.client import RedisKeys, redis_errors

HEAD_BYTES = 12
MAX_PIECE_TOKENS = 256
"""So that taking a piece into an index is never much work at once."""
_MAGIC = b"SGT1"
_PIECE = struct.Struct("<QIIqqI")
_TOKEN_BYTES = 4
MAX_PIECE_BYTES = _PIECE.size + MAX_PIECE_TOKENS * _TOKEN_BYTES


class GroupTextPiece(NamedTuple):
    """Tokens `start`, `start` + 1, … of one text."""

    source: int
    """A random number for the writer, which numbers its own texts."""
    text: int
    start: int
    target_version: int
    at_ms: int
    """When the first of the tokens was committed."""
    tokens: list[int]


def new_head() -> bytes:
    return _MAGIC + secrets.token_bytes(HEAD_BYTES - len(_MAGIC))


def encode_piece(piece: GroupTextPiece) -> bytes:
    """Encode a piece, of at most MAX_PIECE_TOKENS tokens."""
    assert 0 < len(piece.tokens) <= MAX_PIECE_TOKENS
    fields = (piece.source, piece.text, piece.start, piece.target_version, piece.at_ms, len(piece.tokens))
    return _PIECE.pack(*fields) + struct.pack(f"<{len(piece.tokens)}i", *piece.tokens)


def decode_pieces(data: bytes, *, vocab_size: int) -> Iterator[tuple[GroupTextPiece, int]]:
    """The whole pieces at the beginning of `data`, each with the number of bytes up to its end.

    Raises GroupTextError for what no engine of this model has written: a token that is not in 0…vocab_size − 1 too,
    since it would reach the target.
    """
    end = 0
    while end + _PIECE.size <= len(data):
        source, text, first, target_version, at_ms, num_tokens = _PIECE.unpack_from(data, end)
        if not 0 < num_tokens <= MAX_PIECE_TOKENS:
            raise GroupTextError(f"a piece of {num_tokens} tokens")
        start = end + _PIECE.size
        if start + num_tokens * _TOKEN_BYTES > len(data):
            return
        end = start + num_tokens * _TOKEN_BYTES
        tokens = list(struct.unpack_from(f"<{num_tokens}i", data, start))
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise GroupTextError("a token outside the model's vocabulary")
        yield GroupTextPiece(source, text, first, target_version, at_ms, tokens), end


def is_head(head: bytes) -> bool:
    return len(head) == HEAD_BYTES and head.startswith(_MAGIC)


GROUP_BYTES = 256 * 1024
"""Bound of one group's text: more than 60,000 tokens, where an engine's own window of a group has 8,192."""
_MOST_TTL_S = 3600.0
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
READ_BYTES = 64 * 1024
"""Most bytes of one group that one `fetch` reads: much more than a piece."""
assert READ_BYTES > MAX_PIECE_BYTES


class GroupKey(NamedTuple):
    tenant: str
    group_id: str

    @property
    def member(self) -> str:
        """A unique name, which begins with the tenant's."""
        return _beginning(self.tenant) + quote(self.group_id, safe="")


def _beginning(tenant: str) -> str:
    return quote(tenant, safe="") + ":"


class ReadPosition(NamedTuple):
    """A reader's position: `offset` bytes into the string with this head."""

    head: bytes = b""
    offset: int = HEAD_BYTES


class GroupTexts:
    """The group texts of one model. Raises StreamError where Redis fails."""

    def __init__(
        self,
        client: redis.Redis,
        model_key: str,
        *,
        ttl_s: float = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        """Needs no connection yet. A text lives for an hour, or for `ttl_s` where that is less and not 0. The bounds
        may be exceeded by what engines append at the same moment.
        """
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)
        self.ttl_s = min(ttl_s or _MOST_TTL_S, _MOST_TTL_S)
        self._ttl_ms, self._group_bytes = int(1000 * self.ttl_s), group_bytes
        self._max_groups = max(1, max_bytes // group_bytes)

    @redis_errors
    def append(self, pieces: Mapping[GroupKey, bytes]) -> int:
        """Append encoded pieces to their groups' texts; returns how many texts were removed because of a bound.

        After an error the pieces may or may not be there. To append them again is safe: readers skip what they have.
        """
        at_ms = now_ms()
        index = self._keys.group_texts
        with self._redis.pipeline(transaction=True) as transaction:
            # Twice as long as a text lives: clocks differ, and what is not in the index could not be erased.
            transaction.zremrangebyscore(index, "-inf", at_ms - 2 * self._ttl_ms)
            for group, data in pieces.items():
                key = self._keys.group_text(group.member)
                # The first token sets the time to live, and appending leaves it as it is.
                transaction.set(key, new_head(), nx=True, px=self._ttl_ms)
                transaction.append(key, data)
                transaction.zadd(index, {group.member: at_ms})
            transaction.pexpire(index, 2 * self._ttl_ms)
            transaction.zcount(index, "-inf", "+inf")
            results = transaction.execute()
        lengths = results[2:-2:3]
        full = [group.member for group, length in zip(pieces, lengths, strict=True) if length >= self._group_bytes]
        excess = results[-1] - self._max_groups
        oldest = self._redis.zrange(index, 0, excess - 1) if excess > 0 else []
        gone = [*full, *(member.decode() for member in oldest)]
        self._remove(gone)
        return len(gone)

    @redis_errors
    def fetch(self, places: Mapping[GroupKey, ReadPosition]) -> dict[GroupKey, tuple[ReadPosition, bytes]]:
        """New bytes after each place; of a text that began anew, its beginning."""
        groups = list(places)
        found = self._read(groups, [places[group] for group in groups])
        anew = [group for group in groups if found[group][0].head != places[group].head and found[group][0].head]
        return {**found, **self._read(anew, [ReadPosition(found[group][0].head) for group in anew])}

    @redis_errors
    def drop(self, groups: Sequence[GroupKey]) -> None:
        """Remove the texts of groups that have ended."""
        self._remove([group.member for group in groups])

    @redis_errors
    def erase(self, tenant: str, *, dry_run: bool = False) -> int:
        """Remove the texts of a tenant; returns how many there are."""
        members = [member.decode() for member in self._redis.zrange(self._keys.group_texts, 0, -1)]
        theirs = [member for member in members if member.startswith(_beginning(tenant))]
        if not dry_run:
            self._remove(theirs)
        return len(theirs)

    def _read(
        self, groups: Sequence[GroupKey], places: Sequence[ReadPosition]
    ) -> dict[GroupKey, tuple[ReadPosition, bytes]]:
        if not groups:
            return {}
        with self._redis.pipeline(transaction=True) as transaction:
            for group, place in zip(groups, places, strict=True):
                key = self._keys.group_text(group.member)
                transaction.getrange(key, 0, HEAD_BYTES - 1)
                transaction.getrange(key, place.offset, place.offset + READ_BYTES - 1)
            results = transaction.execute()
        found = {}
        for group, place, head, data in zip(groups, places, results[::2], results[1::2], strict=True):
            is_same = head == place.head
            found[group] = (place, data) if is_same else (ReadPosition(head if is_head(head) else b""), b"")
        return found

    def _remove(self, members: Sequence[str]) -> None:
        if members:
            with self._redis.pipeline(transaction=True) as transaction:
                transaction.delete(*map(self._keys.group_text, members))
                transaction.zrem(self._keys.group_texts, *members)
                transaction.execute()
