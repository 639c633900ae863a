"""`"slipstream": {"tokens": true}`: events that say which of their text was proposed by whom."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.doubles import DoubleEngine, says
from tests.serving.gateway import passage
from tests.serving.gateway.client import chat, complete, error_of, events
from tests.serving.sglang.outside.fake_sglang import FakeSglang

TEXT = "über 日本 river stone"


def engine() -> DoubleEngine:
    return DoubleEngine(answer=says(TEXT))


def without_pieces(data: Any) -> Any:
    """An event as a client that did not ask sees it; its id and time are its own."""
    if data == "[DONE]":
        return data
    choices = [{key: value for key, value in choice.items() if key != "slipstream"} for choice in data["choices"]]
    return {**data, "id": "", "created": 0, "choices": choices}


@pytest.mark.parametrize("ask", [chat, complete])
def test_pieces_are_the_text_of_their_event(ask: Any) -> None:
    plain = events(ask(engine(), stream=True, stream_options={"include_usage": True}))
    asked = events(ask(engine(), stream=True, stream_options={"include_usage": True}, slipstream={"tokens": True}))
    assert "slipstream" not in str(plain)
    assert [without_pieces(each) for each in plain] == [without_pieces(each) for each in asked]
    shown, sources = "", []
    for data in asked[:-2]:
        [choice] = data["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        pieces = choice["slipstream"]["pieces"] if text else []
        assert ("slipstream" in choice) == bool(text)
        assert "".join(piece["text"] for piece in pieces) == text
        shown += text
        sources += [piece["source"] for piece in pieces]
    assert shown == TEXT
    # Four tokens a chunk, the last of them the target's: "ü" ends with the second, "本" with the twelfth.
    assert "".join(source[0] for source in sources[:7]) == "hhthhht"


@pytest.mark.parametrize("ask", [chat, complete])
def test_only_a_stream_has_them(ask: Any) -> None:
    refused = error_of(ask(engine(), slipstream={"tokens": True}))
    assert refused["param"] == "slipstream.tokens"
    assert "stream" in refused["message"]


def test_sglang_cannot_say_and_nobody_pretends() -> None:
    response = passage.chat(FakeSglang(), stream=True, slipstream={"tokens": True})
    assert response.status_code == 400
    assert error_of(response)["param"] == "slipstream.tokens"
