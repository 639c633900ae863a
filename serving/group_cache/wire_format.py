"""What travels between engines that answer samples of one prompt group: committed tokens, in pieces, as they come.

A group's pieces lie one after another behind a head, in one string of bytes that only grows, so a reader goes on where
it stopped. The head names the string: where a reader finds another one, the string began anew.

    head    magic "SGT1", 8 random bytes
    piece   source u64, text u32, start u32, target version i64, time i64, number n u32, n tokens i32; little-endian
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from typing import NamedTuple

from speculator.errors import GroupTextError

HEAD_BYTES = 12
MAX_PIECE_TOKENS = 256
"""So that taking a piece into an index is never much work at once."""
_MAGIC = b"SGT1"
_PIECE = struct.Struct("<QIIqqI")
_TOKEN_BYTES = 4
MAX_PIECE_BYTES = _PIECE.size + MAX_PIECE_TOKENS * _TOKEN_BYTES


class Piece(NamedTuple):
    """Tokens `start`, `start` + 1, … of one text."""

    source: int
    """Who writes, by a random number; texts are numbered by their source."""
    text: int
    start: int
    target_version: int
    at_ms: int
    """When the first of the tokens was committed."""
    tokens: list[int]


def new_head() -> bytes:
    return _MAGIC + secrets.token_bytes(HEAD_BYTES - len(_MAGIC))


def encode_piece(piece: Piece) -> bytes:
    """At most MAX_PIECE_TOKENS tokens."""
    assert 0 < len(piece.tokens) <= MAX_PIECE_TOKENS
    fields = (piece.source, piece.text, piece.start, piece.target_version, piece.at_ms, len(piece.tokens))
    return _PIECE.pack(*fields) + struct.pack(f"<{len(piece.tokens)}i", *piece.tokens)


def decode_pieces(data: bytes, *, vocab_size: int) -> Iterator[tuple[Piece, int]]:
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
            raise GroupTextError("a token that the model does not have")
        yield Piece(source, text, first, target_version, at_ms, tokens), end


def is_head(head: bytes) -> bool:
    return len(head) == HEAD_BYTES and head.startswith(_MAGIC)
