"""The text of a growing sequence of tokens, delta by delta."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_NUM_KEPT = 8
"""Tokens that are decoded again with those that come after them."""
_MIN_CHARS = 4
"""Of the text of those; fewer could be less than three bytes, or the stripped beginning of a text."""
_SOME_BYTE = "<0x41>"


class Detokenizer:
    """Deltas of tokens that a model may produce; together they are what decoding all tokens in one go gives.

    A delta is what a token adds to the text of a window of the newest tokens. Ids without a token and special tokens
    have no text and never enter the window. The rest holds for the decoders of the tokenizers library. Two are left
    out: a Replace behind a Fuse sees further than the window, and a Strip of ends is refused by `load_tokenizer`.

    * A decoder that goes token by token (Metaspace, WordPiece, Strip, …) treats only the beginning of a text in
      another way. The window keeps tokens with text before the newest, so that is never the newest token.
    * ByteLevel joins all bytes, then decodes UTF-8. An unfinished character shows as one U+FFFD at the end, which is
      held back. How the decoder stands depends on the last three bytes at most; the window keeps more.
    * ByteFallback shows a run of byte tokens if all of them are valid UTF-8, else one U+FFFD for each. A run is held
      back until it ends, and the window never begins inside one.
    """

    def __init__(self, backend: Any, special_ids: Container[int]) -> None:
        """`backend`: a `tokenizers.Tokenizer`; the ids of its special tokens."""
        self._backend, self._special_ids = backend, special_ids
        decoder = backend.decoder
        self._has_byte_tokens = decoder is not None and decoder.decode([_SOME_BYTE]) == "A"
        self._window: list[int] = []
        self._num_shown = 0
        """Characters of the window's text that were given out."""

    @property
    def num_tokens(self) -> int:
        """How many `rest` decodes."""
        return len(self._window)

    def push(self, token_id: int) -> str:
        """The text that one more token makes certain."""
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = _certain(self._decode(self._window))
        delta, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        if len(self._window) > 2 * _NUM_KEPT:
            self._shorten()
        return delta

    def rest(self) -> str:
        """What is held back, as it shows if no token follows."""
        return self._decode(self._window)[self._num_shown :]

    def _shorten(self) -> None:
        start = len(self._window) - _NUM_KEPT
        while start > 0 and self._is_byte(self._window[start]):
            start -= 1
        text = self._decode(self._window[start:])
        if len(text) >= _MIN_CHARS:
            self._window, self._num_shown = self._window[start:], len(_certain(text))

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    def _is_byte(self, token_id: int) -> bool:
        if not self._has_byte_tokens:
            return False
        token: str = self._backend.id_to_token(token_id)
        return len(token) == len(_SOME_BYTE) and token.startswith("<0x") and token.endswith(">")


def _certain(text: str) -> str:
    return text.removesuffix(_UNFINISHED)
