"""Tokenizer of a local model directory, and the text of a growing answer."""

from __future__ import annotations

import inspect
import json
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from serving.engine import Message, Piece, Source, Tool
from serving.grammar import GrammarVocabulary
from serving.tool_calls import OPENING, in_plain_messages
from speculator.errors import ConfigError, RequestError
from speculator.target_folder import reading

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_NUM_KEPT = 8
"""Tokens of context that are decoded again together with each new token."""
_MIN_CHARS = 4
"""Least characters of that context: fewer could be under three bytes, or stripped as the beginning of a text."""
_SOME_BYTE = "<0x41>"


class Detokenizer:
    """Decodes tokens one by one; the pieces of text add up to what decoding all tokens at once gives.

    A piece is what a token adds to the text of a window of the newest tokens. Ids without a token and special tokens
    have no text and never enter the window. The rest holds for the decoders of the tokenizers library, but for two:
    a Replace behind a Fuse sees further than the window, and `load_tokenizer` refuses a Strip of ends.

    * A decoder that goes token by token (Metaspace, WordPiece, Strip, …) treats only the beginning of a text in
      another way. The window keeps tokens with text before the newest, so that is never the newest token.
    * ByteLevel joins all bytes, then decodes UTF-8. An unfinished character shows as one U+FFFD at the end, which is
      held back. How the decoder stands depends on the last three bytes at most; the window keeps more.
    * ByteFallback shows a run of byte tokens if all of them are valid UTF-8, else one U+FFFD for each. A run is held
      back until it ends, and the window never begins inside one.
    """

    def __init__(self, backend: Any, special_ids: Container[int]) -> None:
        """`backend`: a `tokenizers.Tokenizer`; `special_ids`: the ids of its special tokens."""
        self._backend, self._special_ids = backend, special_ids
        decoder = backend.decoder
        self._has_byte_tokens = decoder is not None and decoder.decode([_SOME_BYTE]) == "A"
        self._window: list[int] = []
        self._num_shown = 0
        """Characters of the window's text that `push` has returned."""

    @property
    def num_tokens(self) -> int:
        """How many tokens `rest` decodes."""
        return len(self._window)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that no further token can change."""
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = _without_incomplete(self._decode(self._window))
        delta, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        if len(self._window) > 2 * _NUM_KEPT:
            self._shorten()
        return delta

    def rest(self) -> str:
        """The text that is held back, as it reads if no token follows."""
        return self._decode(self._window)[self._num_shown :]

    def _shorten(self) -> None:
        start = len(self._window) - _NUM_KEPT
        while start > 0 and self._is_byte(self._window[start]):
            start -= 1
        text = self._decode(self._window[start:])
        if len(text) >= _MIN_CHARS:
            self._window, self._num_shown = self._window[start:], len(_without_incomplete(text))

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    def _is_byte(self, token_id: int) -> bool:
        if not self._has_byte_tokens:
            return False
        token: str = self._backend.id_to_token(token_id)
        return len(token) == len(_SOME_BYTE) and token.startswith("<0x") and token.endswith(">")


def _without_incomplete(text: str) -> str:
    return text.removesuffix(_UNFINISHED)


_MOST_LOOKED_AHEAD = 64
"""A stop string in held-back text is looked for at each token up to so many tokens; beyond, once that text is final."""


_ANSWER = "the-answer-itself"
"""A text that no chat template contains: marks where the answer stands."""
_OURS = ("messages", "self")
"""Names that `_chat` and every template take, beside those of the library's function."""


class LocalTokenizer:
    """The model's own tokenizer; implements `serving.engine.Tokenizer`."""

    def __init__(self, model_dir: Path) -> None:
        with reading(model_dir):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_dir, local_files_only=True, trust_remote_code=False
            )
        if not self._tokenizer.is_fast:
            raise ConfigError(f"{model_dir} has no tokenizer.json, which streaming needs: check --model")
        self.backend: Any = self._tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder()
        self.special_tokens = {number: str(token.content) for number, token in added.items() if token.special}
        """Special tokens by id; decoded text leaves them out."""
        eos_token_id = self._tokenizer.eos_token_id
        own = () if eos_token_id is None else (eos_token_id,)
        self.end_token_ids = frozenset((*own, *_end_token_ids(model_dir)))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)  # type: ignore[no-any-return]

    def encode_more(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def encode_chat(
        self, messages: list[Message], tools: Sequence[Tool] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if taken := sorted({*own, *_OURS} & (template_kwargs or {}).keys()):
            raise RequestError(
                f"no chat template can be given {taken[0]!r}: leave it out", param="chat_template_kwargs"
            )
        return self._chat(  # type: ignore[no-any-return]
            messages, tools, tokenize=True, add_generation_prompt=True, return_dict=False, **(template_kwargs or {})
        )

    def encode_next(self, messages: list[Message], *, last: int) -> list[int]:
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        ended: str = self._chat(before, tokenize=False)
        whole: str = self._chat([*before, *messages], tokenize=False, add_generation_prompt=True)
        _, answer, rest = ended.rpartition(_ANSWER)
        if not (answer and whole.startswith(ended)):
            message = "the model's chat template rewrites earlier messages when new ones follow: send a text"
            raise RequestError(message, param="messages")
        if last in self.end_token_ids:
            rest = rest.removeprefix(self.special_tokens.get(last, ""))
        return self.encode_more(rest + whole[len(ended) :])

    @property
    def _writes_tool_calls(self) -> bool:
        """Whether the model's template writes tool calls in the format that `serving.tool_calls` parses."""
        return OPENING in str(self._tokenizer.chat_template)

    def _chat(self, messages: list[Message], tools: Sequence[Tool] = (), **how: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        try:
            if self._writes_tool_calls:
                how["tools"] = list(tools) or None
            else:
                messages = in_plain_messages(messages, tools)
            return self._tokenizer.apply_chat_template(messages, **how)
        except Exception as error:  # templates can raise any jinja2 error
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from None

    def has_token(self, text: str) -> bool:
        ids = self.encode_more(text)
        return len(ids) == 1 and self.decode(ids) == text

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(
            self.backend, end_token_ids=self.end_token_ids, hidden_token_ids=self.special_tokens.keys()
        )

    def decode(self, token_ids: list[int]) -> str:
        """The text of the tokens: without special tokens, and with all spaces as they are."""
        return self.backend.decode(token_ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.backend, self.special_tokens)


class _EndTokens(msgspec.Struct):
    """The part of a model's configuration that names its end tokens."""

    eos_token_id: int | list[int] | None = None
    text_config: _EndTokens | None = None

    def ids(self) -> list[int]:
        own = self.eos_token_id
        own = [] if own is None else [own] if isinstance(own, int) else own
        return own if self.text_config is None else own + self.text_config.ids()


def _end_token_ids(model_dir: Path) -> Iterator[int]:
    """End tokens of config.json and generation_config.json; each may lack some."""
    for path in (model_dir / "config.json", model_dir / "generation_config.json"):
        if path.is_file():
            try:
                yield from msgspec.convert(json.loads(path.read_bytes()), type=_EndTokens).ids()
            except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
                message = f"{path} cannot be used ({error}): eos_token_id must be a token's id or a list of ids"
                raise ConfigError(message) from None


class AnswerText:
    """Turns committed tokens into text that is safe to send, and finds stop strings.

    Held back: text that a further token may change, and a tail that may still become a stop string. Of an answer that
    another engine has `begun`, the safe text of those tokens was sent there; what was held back is sent here.

    A special token has no text, but a stop string may name it: then it is searched, and never sent.
    """

    def __init__(self, tokenizer: LocalTokenizer, stop: tuple[str, ...], begun: Sequence[int] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        special = tokenizer.special_tokens.items() if stop else ()
        self._named = {number: token for number, token in special if any(token in one for one in stop)}
        self._text = ""  # of all tokens so far, sent or held back
        self._num_shown = 0
        self._held: deque[tuple[int, Source | None]] = deque()
        """For each token not wholly sent: where its text ends, and its source (None for a special token)."""
        self._last_source: Source = "target"
        self.stopped = False
        for token_id in begun:
            self.push(token_id, "target")
        self.take()

    def push(self, token_id: int, source: Source) -> None:
        """Add one token; sets `stopped` when the text now contains a stop string, and cuts the text before it."""
        if (special := self._named.get(token_id)) is not None:
            self._look_ahead(special)
            if not self.stopped:
                self._extend(special, None)
            return
        self._last_source = source
        text = self._detokenizer.push(token_id)
        self._extend(text, source)
        if not text and self._stop and self._detokenizer.num_tokens <= _MOST_LOOKED_AHEAD:
            self._look_ahead("")

    def _look_ahead(self, special: str) -> None:
        """Take held-back text as final if it holds a stop string, because the answer then ends here."""
        rest = self._detokenizer.rest()
        if self._find_stop(rest + special) is not None:
            self._extend(rest, self._last_source)

    def take(self) -> list[Piece]:
        """The text that became safe to send since the last call, a piece for each token."""
        held = 0 if self.stopped else self._stop_prefix_length()
        return self._show(len(self._text) - held)

    def finish(self) -> list[Piece]:
        """The held-back text at the end of the answer, without an incomplete character; may set `stopped`."""
        if not self.stopped:
            # The bytes of a character that no further token will complete.
            self._extend(self._detokenizer.rest().rstrip(_UNFINISHED), self._last_source)
        return self._show(len(self._text))

    def _extend(self, text: str, source: Source | None) -> None:
        end = self._find_stop(text)
        self._text, self.stopped = (self._text + text)[:end], end is not None
        self._held.append((len(self._text), source))

    def _find_stop(self, text: str) -> int | None:
        """Where the first stop string begins if `text` is appended; only stop strings that end in `text` are new."""
        start = max(0, len(self._text) - self._longest_stop)
        tail = self._text[start:] + text
        found = [at for at in map(tail.find, self._stop) if at >= 0]
        return start + min(found) if found else None

    def _stop_prefix_length(self) -> int:
        """How many characters at the end of the text may begin a stop string."""
        begun = (length for stop in self._stop for length in range(1, len(stop)) if self._text.endswith(stop[:length]))
        return max(begun, default=0)

    def _show(self, end: int) -> list[Piece]:
        """The text up to `end`, a piece for each token that has text."""
        pieces = []
        while self._num_shown < end:
            token_end, source = self._held[0]
            upto = min(token_end, end)
            if upto > self._num_shown:
                if source is not None:
                    pieces.append(Piece(self._text[self._num_shown : upto], source))
                self._num_shown = upto
            if token_end <= end:
                self._held.popleft()
        return pieces
