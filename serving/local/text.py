"""Tokenizer of a local model directory, and the text of a growing answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from serving.engine import Piece, Source
from speculator.errors import ConfigError, RequestError


class LocalTokenizer:
    """The model's own tokenizer; implements `serving.engine.Tokenizer`."""

    def __init__(self, model_dir: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot load a tokenizer from {model_dir} ({reason}): check --model") from error
        if not self._tokenizer.is_fast:
            raise ConfigError(f"{model_dir} has no tokenizer.json, which streaming needs: check --model")
        self.backend: Any = self._tokenizer.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)  # type: ignore[no-any-return]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise jinja2 errors of their own making
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from None

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)  # type: ignore[no-any-return]


class AnswerText:
    """Turns committed tokens into text that is safe to show, and finds stop strings.

    Held back: bytes of an unfinished character, and a tail that may still become a stop string. An answer that was
    `begun` elsewhere has shown what could be shown of those tokens; what was held back then is shown here.
    """

    def __init__(self, tokenizer: LocalTokenizer, stop: tuple[str, ...], begun: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._token_ids: list[int] = []
        self._seen = ""  # all text of the tokens so far, shown or held
        self._num_shown = 0
        self._held: deque[tuple[int, Source]] = deque()  # where each token's text ends; those shown are gone
        self._last_source: Source = "target"
        self.stopped = False
        for token_id in begun:
            self.push(token_id, "target")
        self.take()

    def push(self, token_id: int, source: Source) -> None:
        """Add one token; sets `stopped` when the text now contains a stop string, and cuts the text before it."""
        self._token_ids.append(token_id)
        self._last_source = source
        piece = self._stream.step(self._tokenizer.backend, token_id)
        self._extend(piece or "")

    def _extend(self, piece: str) -> None:
        # A match must end in the new piece, but may begin before it.
        start = max(0, len(self._seen) - max(map(len, self._stop), default=0))
        self._seen += piece
        found = [at for at in (self._seen.find(stop, start) for stop in self._stop) if at >= 0]
        if found:
            self._seen, self.stopped = self._seen[: min(found)], True
        self._held.append((len(self._seen), self._last_source))

    def take(self) -> list[Piece]:
        """The text that became safe to show since the last call, by the tokens that it came from."""
        held = 0 if self.stopped else self._stop_prefix_length()
        return self._show(len(self._seen) - held)

    def finish(self) -> list[Piece]:
        """Everything still held back, at the end of the answer."""
        if not self.stopped:
            # An unfinished character shows as the replacement character, as decoding in one go would show it.
            whole = self._tokenizer.decode(self._token_ids)
            if whole.startswith(self._seen):
                self._extend(whole[len(self._seen) :])
        return self._show(len(self._seen))

    def _stop_prefix_length(self) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._seen)), 0, -1):
            if any(stop.startswith(self._seen[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, end: int) -> list[Piece]:
        """The text up to `end`, cut where tokens end; a token without text of its own has no piece."""
        pieces = []
        while self._num_shown < end:
            token_end, source = self._held[0]
            upto = min(token_end, end)
            if upto > self._num_shown:
                pieces.append(Piece(self._seen[self._num_shown : upto], source))
                self._num_shown = upto
            if token_end <= end:
                self._held.popleft()
        return pieces
