"""Which text came from which token, when characters and stop strings are held back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serving.engine import Piece
from serving.local.text import AnswerText, LocalTokenizer
from tests.fixtures.toy import SPECIAL, make_toy_model, random_draft
from tests.serving.local.harness import toy_engine

SILENT = range(SPECIAL.index("\n"))
"""Special tokens, which have no text."""


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    """A token is a byte, so that one character can need several."""
    directory = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return LocalTokenizer(directory)


def test_a_character_belongs_to_the_token_that_completes_it(byte_tokenizer: LocalTokenizer) -> None:
    text = AnswerText(byte_tokenizer, ())
    first, second, last = byte_tokenizer.encode("é!")
    text.push(first, "head")
    assert text.take() == []
    text.push(second, "suffix")
    text.push(last, "target")
    assert text.take() == [Piece("é", "suffix"), Piece("!", "target")]
    text.push(first, "head")
    assert text.take() == []
    assert text.finish() == [Piece("\N{REPLACEMENT CHARACTER}", "head")]


def test_text_held_for_a_stop_string_keeps_its_source(byte_tokenizer: LocalTokenizer) -> None:
    text = AnswerText(byte_tokenizer, ("stop",))
    for token, source in zip(byte_tokenizer.encode("ast"), ("head", "suffix", "head"), strict=True):
        text.push(token, source)
    assert text.take() == [Piece("a", "head")]
    for token in byte_tokenizer.encode("asto"):
        text.push(token, "target")
    assert text.take() == [Piece("s", "suffix"), Piece("t", "head"), Piece("a", "target")]
    text.push(byte_tokenizer.encode("p")[0], "head")
    assert text.stopped
    assert text.finish() == []


def test_every_chunk_of_the_engine_is_its_pieces(tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "toy")
    with toy_engine(model, draft=random_draft(model, seed=9), dtype="float64") as engine:
        # The second answer is proposed from the first.
        for name in ("first", "second"):
            [answer] = engine.ask(engine.request("what is 2 and 2?", request_id=name, max_tokens=60))
    sources = []
    for chunk in answer.chunks:
        assert "".join(piece.text for piece in chunk.pieces) == chunk.text
        proposed = [index < chunk.num_accepted for index, token in enumerate(chunk.token_ids) if token not in SILENT]
        assert [piece.source != "target" for piece in chunk.pieces] == proposed
        sources += [piece.source for piece in chunk.pieces]
    assert {"suffix", "target"} <= set(sources)
