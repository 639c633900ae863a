"""The text of an answer, whatever tokens a model produces, and the strings that end it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.answer_text import AnswerText, LocalTokenizer
from serving.engine import Piece
from serving.gateway.openai.schema import MessageToolCall
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.errors import ConfigError, RequestError
from tests.fixtures import toy
from tests.serving.local.harness import toy_engine
from tests.serving.local.kinds import ADDED, END, KINDS, SPECIAL, Pair, pair_of

BEYOND = 5
"""Rows of an embedding that is padded past the vocabulary."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: pair_of(kind, tmp_path_factory.mktemp("tokenizer")) for kind in KINDS}


def some_ids(data: st.DataObject, pair: Pair) -> list[int]:
    """Any of the vocabulary and beyond; half of the time of a few tokens only, which then meet again and again."""
    ids = st.integers(0, len(pair.reference) + BEYOND)
    few = data.draw(st.lists(ids, max_size=3))
    return data.draw(st.lists(st.sampled_from(few) if few else ids, max_size=50))


def _ended(text: str) -> str:
    """Without bytes at the end that are no character."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_deltas_are_what_decoding_in_one_go_gives(pairs: dict[str, Pair], kind: str, data: st.DataObject) -> None:
    """But for half a character at the end. Also where the answer goes on elsewhere in the middle, and while a stop
    string that does not come is awaited.
    """
    pair = pairs[kind]
    ids = some_ids(data, pair)
    at = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.sampled_from([(), ("zz",), (" a a a a never",)]))
    whole = pair.decode(ids)
    assume(not any(one in whole for one in stop))
    assert pair.ours.decode(ids) == whole
    text, count = pair.shown(ids, stop)
    assert (_ended(text), count) == (_ended(whole), len(ids))
    before, _ = pair.shown(ids[:at], stop, ends=False)
    after, _ = pair.shown(ids[at:], stop, begun=ids[:at])
    assert _ended(before + after) == _ended(whole)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_answer_stops_at_the_first_token_with_which_its_text_has_the_stop_string(
    pairs: dict[str, Pair], kind: str, data: st.DataObject
) -> None:
    pair = pairs[kind]
    ids = some_ids(data, pair)
    whole = pair.decode(ids)
    # Bytes that may yet become a character are no match.
    certain = [run for run in whole.split("\N{REPLACEMENT CHARACTER}") if run]
    assume(certain)
    run = data.draw(st.sampled_from(certain))
    start = data.draw(st.integers(0, len(run) - 1))
    stop = run[start : start + data.draw(st.integers(1, 5))]
    text, count = pair.shown(ids, (stop,))
    ending = pair.decode(ids[:count])
    assert stop in ending
    assert text == ending[: ending.index(stop)]
    assert not any(stop in pair.decode(ids[:fewer]) for fewer in range(count))


def test_a_byte_that_is_none_of_a_character_ends_no_answer(pairs: dict[str, Pair]) -> None:
    """A valid byte, an invalid one, then a letter."""
    for kind in ("llama", "gemma"):
        ids = pairs[kind].ids("<0x41>", "<0xFF>", "b")
        assert pairs[kind].shown(ids) == ("\N{REPLACEMENT CHARACTER}" * 2 + "b", 3)


def test_a_line_that_bytes_spell_stops_at_its_end(pairs: dict[str, Pair]) -> None:
    llama = pairs["llama"]
    assert llama.shown(llama.ids("▁hello", "<0x0A>", "a"), ("\n",)) == ("hello", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_stops_where_it_is_asked_for(pairs: dict[str, Pair], kind: str) -> None:
    pair = pairs[kind]
    hello, lo, special, end, added = pair.ids(*_WORDS[kind], SPECIAL, END, ADDED)
    text = pair.decode([hello, lo])
    ids = [hello, lo, special, lo]
    assert pair.shown(ids) == (pair.decode(ids), 4)
    for stop in ((SPECIAL,), ("zz", SPECIAL), (END, SPECIAL)):
        assert pair.shown(ids, stop) == (text, 3)
    assert pair.shown(ids, (END,)) == (pair.decode(ids), 4)
    assert pair.shown([hello, end], (END,))[1] == 2
    assert pair.shown([hello, added, lo], (ADDED,)) == (pair.decode([hello]) + _SPACE.get(kind, ""), 2)
    # One that is awaited shows no sign of itself.
    assert pair.shown([hello, special, lo, hello], (f"{SPECIAL}zz",)) == (pair.decode([hello, special, lo, hello]), 4)
    # It may stand among others.
    tail = pair.decode([hello, lo]).removeprefix(pair.decode([hello]))
    assert pair.shown(ids, (f"{SPECIAL}{tail}",)) == (text, 4)
    assert pair.shown(ids, (f"{tail}{SPECIAL}",)) == (pair.decode([hello]), 3)


_WORDS = {
    "bytes": ("Ġhello", "wor"),
    "llama": ("▁hello", "wor"),
    "gemma": ("▁hello", "wor"),
    "unigram": ("▁hello", "wor"),
    "word pieces": ("hello", "##lo"),
}
_SPACE = {"word pieces": " "}


def test_a_special_token_stops_behind_what_is_held_back(pairs: dict[str, Pair]) -> None:
    llama = pairs["llama"]
    ids = llama.ids("▁hello", "<0x0A>", "<0xF0>", SPECIAL, "a")
    assert llama.shown(ids, (SPECIAL,)) == (llama.decode(ids[:3]), 4)


def test_a_token_costs_as_much_in_a_long_answer_as_in_a_short_one(pairs: dict[str, Pair]) -> None:
    """Of tokens that hold text back, or have none."""
    for kind, token in (("bytes", "ÿ"), ("bytes", SPECIAL), ("llama", "<0xFF>"), ("llama", "▁"), ("unigram", "▁")):
        pair = pairs[kind]
        seconds = []
        for count in (1_000, 8_000):
            ids = pair.ids(token) * count
            started_s = time.process_time()
            text = pair.ours.detokenizer()
            for one in ids:
                text.push(one)
            text.rest()
            seconds.append(time.process_time() - started_s)
        assert seconds[1] < 32 * seconds[0], (kind, token)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, {2}),
        ({"eos_token_id": 0}, None, {0, 2}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 0}, {0, 2, 5, 6}),
        ({"eos_token_id": None}, {"eos_token_id": [7]}, {2, 7}),
        ({"text_config": {"eos_token_id": 8}}, {"eos_token_id": None}, {2, 8}),
        ({"eos_token_id": 3, "text_config": {"eos_token_id": [0, 8]}}, {}, {0, 2, 3, 8}),
    ],
)
def test_what_any_file_of_a_folder_names_ends_an_answer(
    toy_folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, ends: set[int]
) -> None:
    _say(toy_folder, config, generation)
    assert LocalTokenizer(toy_folder).end_token_ids == ends


@pytest.mark.parametrize("said", ["2", [True], 2.5, {"id": 2}, [[2]]])
def test_an_end_that_is_no_token_is_refused_by_file_and_field(toy_folder: Path, said: object) -> None:
    _say(toy_folder, {}, {"eos_token_id": said})
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id") as refusal:
        LocalTokenizer(toy_folder)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    """A tokenizer whose `</s>` has the id 2."""
    toy.toy_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _say(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def test_a_character_belongs_to_the_token_that_completes_it(pairs: dict[str, Pair]) -> None:
    byte_tokenizer = pairs["bytes"].ours
    text = AnswerText(byte_tokenizer, ())
    first, second, last = byte_tokenizer.encode("é!")
    text.push(first, "head")
    assert text.take() == []
    text.push(second, "suffix")
    text.push(last, "target")
    assert text.take() == [Piece("é", "suffix"), Piece("!", "target")]
    text.push(first, "head")
    assert text.take() == []
    assert text.finish() == [], "half a character is never shown"


def test_text_held_for_a_stop_string_keeps_its_source(pairs: dict[str, Pair]) -> None:
    byte_tokenizer = pairs["bytes"].ours
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
    model = toy.make_toy_model(tmp_path / "toy")
    with toy_engine(model, draft=toy.random_draft(model, seed=9), dtype="float64") as engine:
        # The second answer is proposed from the first.
        for name in ("first", "second"):
            [answer] = engine.ask(engine.request("what is 2 and 2?", request_id=name, max_tokens=60))
    sources = []
    for chunk in answer.chunks:
        assert "".join(piece.text for piece in chunk.pieces) == chunk.text
        proposed = [
            index < chunk.num_accepted
            for index, token in enumerate(chunk.token_ids)
            if token not in range(toy.SPECIAL.index("\n"))
        ]
        assert [piece.source != "target" for piece in chunk.pieces] == proposed
        sources += [piece.source for piece in chunk.pieces]
    assert {"suffix", "target"} <= set(sources)


def test_messages_go_on_behind_an_answer_whether_it_ended_or_was_cut() -> None:
    """As the template would write the whole conversation."""
    tokenizer = LocalTokenizer(resolve_model(BUNDLED_MODEL))
    asked, answer = [{"role": "user", "content": "Name a river."}], "The Rhine."
    more = [{"role": "user", "content": "Another?"}]
    whole = tokenizer.encode_chat([*asked, {"role": "assistant", "content": answer}, *more])
    begun = [*tokenizer.encode_chat(asked), *tokenizer.encode_more(answer)]
    (end,) = tokenizer.encode_more("<|im_end|>")
    assert begun + tokenizer.encode_next(more, last=begun[-1]) == whole
    assert [*begun, end, *tokenizer.encode_next(more, last=end)] == whole


CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
TALK: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "c"},
]
WRITES_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}{{ mood }}"
)


def _with_template(directory: Path, template: str) -> LocalTokenizer:
    tokenizer = toy.byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return LocalTokenizer(directory)


def test_a_template_that_writes_tools_is_given_them(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, WRITES_TOOLS)
    ids = tokenizer.encode_chat(TALK, [TOOL], {"mood": "calm"})
    assert tokenizer.decode(ids) == "[now]user=hi;assistant=<tool_call>{}</tool_call>;tool=noon;calm"


def test_another_template_is_given_tools_as_text(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    text = tokenizer.decode(tokenizer.encode_chat(TALK, [TOOL]))
    assert text.startswith("system=You can call functions.")
    assert '"description": "The time."' in text
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert text.endswith(f";user=hi;assistant={call};user=<tool_response>\nnoon\n</tool_response>;")
    # Results of several calls are one message: many templates want user and assistant in turn.
    more = [*TALK, {**TALK[-1], "content": "night"}]
    text = tokenizer.decode(tokenizer.encode_chat(more, [TOOL]))
    assert text.endswith(
        f";assistant={call};user=<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>;"
    )
    system = [{"role": "system", "content": "Be kind."}]
    assert tokenizer.decode(tokenizer.encode_chat([*system, *TALK], [TOOL])).startswith("system=Be kind.\n\nYou can")


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "messages", "self"])
def test_a_client_gives_a_template_values_and_not_another_template(tmp_path: Path, name: str) -> None:
    tokenizer = _with_template(tmp_path, WRITES_TOOLS)
    with pytest.raises(RequestError, match=name) as refused:
        tokenizer.encode_chat(TALK, (), {name: "{{ 7 * 7 }}"})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("template", [WRITES_TOOLS, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_arguments_too_deep_to_be_written_are_refused(tmp_path: Path, template: str) -> None:
    tokenizer, deep = _with_template(tmp_path, template), json.loads("[" * 800 + "]" * 800)
    for _ in range(400):
        deep = [deep]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    with pytest.raises(RequestError, match="refuses these messages"):
        tokenizer.encode_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    sent = MessageToolCall.model_validate({"function": {"name": "f", "arguments": "[" * 5000}})
    assert sent.for_template()["function"]["arguments"] == "[" * 5000


def test_a_token_is_a_text_where_it_shows(tmp_path: Path) -> None:
    tokenizer = _with_template(tmp_path, WRITES_TOOLS)
    assert tokenizer.has_token("true") is False  # its letters are tokens: no merge makes it
    assert tokenizer.has_token("a") is True
    assert tokenizer.has_token("<|im_end|>") is False
