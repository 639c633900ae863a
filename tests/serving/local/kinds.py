"""Small tokenizers of the kinds that models have, with the oddest tokens that such vocabularies hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from serving.answer_text import AnswerText, LocalTokenizer

END, SPECIAL, ADDED = "</s>", "<|im_end|>", "<think>"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _byte_level() -> Tokenizer:
    """GPT-2, Llama-3: a token is bytes, also a part of a character."""
    parts = [*pre_tokenizers.ByteLevel.alphabet(), "Ġhello", "wor", "ðŁĺ", "âĢ", "ĠðŁ", "âĢ¨", "ï¿½", ""]
    backend = Tokenizer(models.BPE({part: index for index, part in enumerate(parts)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_fallback(*more: object) -> Tokenizer:
    parts = ["<unk>", "▁", "▁hello", "wor", "a", "b", "c", "▁▁▁", "é", _REPLACEMENT, "", "\n"]
    parts += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {part: index for index, part in enumerate(parts)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _llama() -> Tokenizer:
    return _byte_fallback(decoders.Strip(" ", 1, 0))


def _unigram() -> Tokenizer:
    """T5, XLM: the first token of a text loses its space."""
    parts = ["<unk>", "▁", "▁hello", "wor", "▁▁", "a▁b", "é", _REPLACEMENT]
    backend = Tokenizer(models.Unigram([(part, -1.0) for part in parts], 0, False))
    backend.decoder = decoders.Metaspace()
    return backend


def _word_piece() -> Tokenizer:
    """BERT: a token that begins a word brings the space before it, the first one of a text does not."""
    parts = ["[UNK]", "hello", "##lo", ".", "##.", "n't", "do not", _REPLACEMENT, ","]
    backend = Tokenizer(models.WordPiece({part: index for index, part in enumerate(parts)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


KINDS = {
    "bytes": _byte_level,
    "llama": _llama,
    "gemma": _byte_fallback,
    "unigram": _unigram,
    "word pieces": _word_piece,
}


@dataclass(frozen=True)
class Pair:
    """A tokenizer as the engine uses it, and as Hugging Face does."""

    ours: LocalTokenizer
    reference: Any

    def ids(self, *tokens: str) -> list[int]:
        return self.reference.convert_tokens_to_ids(tokens)  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int]) -> str:
        return self.reference.decode(list(ids), skip_special_tokens=True)  # type: ignore[no-any-return]

    def shown(
        self, ids: Sequence[int], stop: tuple[str, ...] = (), begun: Sequence[int] = (), *, ends: bool = True
    ) -> tuple[str, int]:
        """All deltas of an answer to where it stops, and how many of its tokens that takes.

        Without `ends` it is to go on elsewhere, so nothing tells what is held back.
        """
        text, parts, count = AnswerText(self.ours, stop, begun), [], 0
        for token in ids:
            text.push(token, "target")
            parts += text.take()
            count += 1
            if text.stopped:
                break
        if ends:
            parts += text.finish()
        return "".join(part.text for part in parts), count


def pair_of(kind: str, folder: Path) -> Pair:
    backend = KINDS[kind]()
    backend.add_special_tokens([END, SPECIAL])
    backend.add_tokens([AddedToken(ADDED, special=False), AddedToken("\n\n", special=False), "é世"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
    return Pair(LocalTokenizer(folder), AutoTokenizer.from_pretrained(folder))
