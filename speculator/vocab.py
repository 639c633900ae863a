"""Which target tokens a draft can propose: chosen once for a lineage, then frozen.

A small vocabulary makes the draft's output layer cheap; every token outside it is a sure rejection. Byte-pair merges
are learnt in the order of their frequency, so a tokenizer's low ids are its frequent tokens (Zipf's law). That prior is
mixed half and half with the counts of texts from the service's own domain, where there are any: on real answers to
mathematics, code and questions 8,192 of SmolLM2's 49,152 tokens cover 91% by rank alone and 96% with the domain's
prompts counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from speculator.errors import ConfigError
from speculator.target_folder import reading

# Flattens Zipf's law over the special and byte tokens at the very start.
_RANK_OFFSET = 100
_PRIOR_SHARE = 0.5


def choose_draft_vocab(vocab_size: int, size: int, counts_V: Tensor | None = None) -> Tensor:
    """Offsets `d2t` [min(size, vocab_size)] int64 of the chosen tokens: target id = draft id + d2t[draft id].

    `counts_V` [V] are token counts of texts like those to be served.
    """
    prior_V = 1.0 / (torch.arange(vocab_size, dtype=torch.float64) + _RANK_OFFSET)
    score_V = prior_V / prior_V.sum()
    if counts_V is not None and bool(counts_V.any()):
        score_V = _PRIOR_SHARE * score_V + (1 - _PRIOR_SHARE) * counts_V.double() / counts_V.sum()
    chosen_D = score_V.topk(min(size, vocab_size)).indices.sort().values
    return chosen_D - torch.arange(len(chosen_D))


def count_tokens(model_dir: Path, texts: Iterable[str], vocab_size: int) -> Tensor:
    """[V] int64 counts of the target's tokens in `texts`. Raises ConfigError without a `tokenizer.json` that fits."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"the target in {model_dir} has no tokenizer.json")
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    with reading(model_dir):
        tokenizer = Tokenizer.from_file(str(path))
        check_vocabulary(model_dir, tokenizer, vocab_size)
        for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = torch.tensor(encoding.ids, dtype=torch.int64)
            # Added tokens may lie beyond: no request can have them.
            counts_V += torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
    return counts_V


def check_vocabulary(model_dir: Path, tokenizer: Any, vocab_size: int) -> None:
    """Raise ConfigError for a tokenizer of another model: with more tokens than the target's embedding has rows."""
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"{model_dir}: the tokenizer has token id {largest}, vocab_size is {vocab_size}: check --model"
        )
