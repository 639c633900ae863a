from __future__ import annotations

from typing import Any

from tests.fixtures.doubles import DoubleEngine, says, words_for
from tests.serving.gateway.client import chat, complete, error_of, events


def deltas(chunks: list[Any], index: int = 0) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]


def test_order_of_events() -> None:
    response = chat(DoubleEngine(answer=says("Hi there")), stream=True)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert "content-length" not in response.headers
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hi t"}, {"content": "here"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{response.headers['x-request-id']}"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_is_the_last_event_when_asked_for() -> None:
    response = chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 8,
        "total_tokens": 31,
        "completion_tokens_details": {"accepted_prediction_tokens": 6},
    }


def test_each_event_has_the_usage_so_far_when_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {23}
    options = {"continuous_usage_stats": True}
    *chunks, _ = events(chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options=options))
    assert all("usage" not in chunk for chunk in chunks)


def test_chunks_without_text_are_skipped() -> None:
    # Three-byte characters, one token a chunk: two of three chunks have nothing to show yet.
    *chunks, _ = events(chat(DoubleEngine(answer=says("日本"), tokens_per_chunk=1), stream=True))
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "日"}, {"content": "本"}, {}]


def test_stream_says_what_the_whole_answer_says() -> None:
    body = {"seed": 11, "max_tokens": 40, "n": 3}
    whole = [choice["message"]["content"] for choice in chat(DoubleEngine(), **body).json()["choices"]]
    engine = DoubleEngine()
    *chunks, _ = events(chat(engine, stream=True, **body))
    streamed = ["".join(delta.get("content", "") for delta in deltas(chunks, index)) for index in range(3)]
    assert streamed == whole
    assert whole[0] == words_for(engine.requests[0]).encode()[:40].decode(errors="ignore")
    for index in range(3):
        assert deltas(chunks, index)[0] == {"role": "assistant", "content": ""}
        assert deltas(chunks, index)[-1] == {}


def test_failure_mid_stream_ends_with_an_error_event() -> None:
    for ask in (chat, complete):
        engine = DoubleEngine(failure=RuntimeError("boom"), fail_at=2)
        response = ask(engine, stream=True)
        assert response.status_code == 200
        *chunks, last = events(response)
        assert len(chunks) >= 2
        assert set(last) == {"error"}
        assert last["error"]["code"] == "internal_error"
        assert "boom" not in response.text
        assert "[DONE]" not in response.text


def test_one_failing_sample_aborts_the_others() -> None:
    class OneFails(DoubleEngine):
        async def misbehave(self, index: int) -> None:
            await super().misbehave(index)
            if index == 3 and self.failure is None:
                self.failure, self.fail_at = RuntimeError("boom"), 3
                raise self.failure

    engine = OneFails()
    *_, last = events(chat(engine, n=3, stream=True, max_tokens=200))
    assert last["error"]["code"] == "internal_error"
    assert engine.finished == []
    assert len(engine.aborted) == 3


def test_engine_that_aborts_or_just_stops_is_an_error() -> None:
    for engine in (DoubleEngine(ends_with="abort"), DoubleEngine(is_cut=True)):
        *_, last = events(chat(engine, stream=True, max_tokens=40))
        assert last["error"]["code"] == "engine_unavailable"
        response = chat(engine, max_tokens=40)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"
