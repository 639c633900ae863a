"""Events at fixed times: the same text, and nothing of the rounds in when and how it comes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from serving.engine import Chunk, Piece
from serving.gateway import cadence
from serving.gateway.app import create_passthrough_app
from serving.gateway.cadence import Cadence, merged, paced
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from serving.gateway.server import serve
from serving.gateway.upstream import Upstream
from speculator.errors import EngineError
from tests.doubles import DoubleEngine, says
from tests.serving.gateway import passage
from tests.serving.gateway.client import CHAT, COMPLETIONS, HELLO, chat, complete, events, post
from tests.serving.sglang_client.fake_sglang import EVENTS, MODEL, FakeSglang, flat_error

TEXT = "one two three four five six seven"


def paced_chat(engine: DoubleEngine, **body: Any) -> httpx.Response:
    return post(engine, CHAT, {"messages": HELLO, "stream": True, **body}, stream_interval_ms=20)


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def test_fewer_events_have_the_same_text_and_end() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"stream": True, "stream_options": options, "slipstream": {"tokens": True}}
    as_it_comes = events(chat(DoubleEngine(answer=says(TEXT), tokens_per_chunk=2), **asked))
    paced = events(paced_chat(DoubleEngine(answer=says(TEXT), tokens_per_chunk=2), **asked))
    assert paced[-1] == as_it_comes[-1] == "[DONE]"
    assert len(paced) < len(as_it_comes) // 2
    assert text_of(paced[:-1]) == text_of(as_it_comes[:-1]) == TEXT
    assert paced[-2]["usage"] == as_it_comes[-2]["usage"]
    choices = [choice for chunk in paced[:-1] for choice in chunk["choices"]]
    pieces = [piece for choice in choices for piece in choice.get("slipstream", {"pieces": ()})["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == TEXT
    assert choices[-1]["finish_reason"] == "stop"


def test_samples_stay_apart() -> None:
    asked = {"prompt": "hello", "n": 3, "seed": 1, "max_tokens": 12}
    plain = complete(DoubleEngine(tokens_per_chunk=1), **asked).json()
    body = {**asked, "stream": True}
    *chunks, _ = events(post(DoubleEngine(tokens_per_chunk=1), COMPLETIONS, body, stream_interval_ms=20))
    for index in range(3):
        parts = [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(parts) == plain["choices"][index]["text"]


def test_a_failure_comes_after_the_text_before_it() -> None:
    *chunks, error = events(
        paced_chat(DoubleEngine(answer=says(TEXT), tokens_per_chunk=2, failure=EngineError("it broke"), fail_at=3))
    )
    assert "error" in error
    assert text_of(chunks) == TEXT[:6]


def test_in_front_of_sglang_its_events_come_together() -> None:
    blocks = asyncio.run(_sent_in_front_of_sglang(stream_interval_ms=100))
    assert b"".join(block for _, block in blocks) == b"".join(EVENTS)
    times_s = [time_s for time_s, _ in blocks]
    assert times_s[0] >= 0.099, "nothing leaves before one interval"
    assert all(late - early >= 0.09 for early, late in itertools.pairwise(times_s))
    assert len(blocks) < len(EVENTS) / 2


async def _sent_in_front_of_sglang(**settings: Any) -> list[tuple[float, bytes]]:
    """What the gateway sends of a stream whose events are a millisecond apart: seconds after the request, and bytes."""
    sent: list[tuple[float, bytes]] = []
    clock = asyncio.get_running_loop().time
    async with serve(FakeSglang().app(), port=0, grace_s=0) as behind:
        upstream = Upstream(behind.url)
        registry = CollectorRegistry()
        app = create_passthrough_app(passage.host(), upstream, settings=GatewaySettings(**settings), registry=registry)

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            started_s = clock()

            async def note(message: Message) -> None:
                if message.get("body"):
                    sent.append((clock() - started_s, message["body"]))
                await send(message)

            await app(scope, receive, note)

        transport = httpx.ASGITransport(noting)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": MODEL, "messages": passage.HELLO, "stream": True}
            assert (await client.post(CHAT, json=body)).status_code == 200
        await upstream.close()
    return sent


def test_a_refusal_does_not_wait_for_the_time_of_events() -> None:
    body = {"model": MODEL, "messages": passage.HELLO, "stream": True}
    refusing = FakeSglang(refusal=flat_error(400, "temperature must be finite"))

    async def run() -> int:
        async with (
            asyncio.timeout(8),
            passage.passing(refusing, stream_interval_ms=10_000) as server,
            httpx.AsyncClient(base_url=server.url) as client,
        ):
            return (await client.post(CHAT, json=body)).status_code

    assert asyncio.run(run()) == 400


def test_in_front_of_sglang_the_text_before_the_deadline_is_sent() -> None:
    body = {"model": MODEL, "messages": passage.HELLO, "stream": True}
    fake, plain = FakeSglang(hold=True), FakeSglang()
    late = events(passage.post(fake, CHAT, body, max_request_s=1.0, stream_interval_ms=1500))
    assert late[-1]["error"]["code"] == "deadline_exceeded"
    assert late[:-1] == events(passage.post(plain, CHAT, body))[: len(late) - 1] != []


def test_merged_chunks_have_everything() -> None:
    first = Chunk(text="a", token_ids=(1,), num_accepted=1)
    second = Chunk(text="bc", token_ids=(2, 3), pieces=(Piece("b", "head"), Piece("c", "target")), finish_reason="stop")
    other = Chunk(text="z", token_ids=(9,))
    [(zero, whole), (one, alone)] = merged([(0, first), (1, other), (0, second)])
    assert (zero, one, alone) == (0, 1, other)
    assert (whole.text, whole.token_ids, whole.num_accepted, whole.finish_reason) == ("abc", (1, 2, 3), 1, "stop")
    assert whole.pieces == (Piece("a", "target"), Piece("b", "head"), Piece("c", "target"))


class Clock:
    """Times at which something was sent, in units of the interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._start_s = interval_s, asyncio.get_running_loop().time()
        self.sent: list[tuple[float, list[int]]] = []

    async def send(self, items: Sequence[int]) -> None:
        elapsed_s = asyncio.get_running_loop().time() - self._start_s
        self.sent.append((elapsed_s / self._interval_s, list(items)))


async def bursts() -> AsyncIterator[int]:
    for number in range(30):
        if number % 7 in (0, 3):
            await asyncio.sleep(0.013)
        yield number


def test_times_follow_the_interval_and_not_what_comes() -> None:
    async def run() -> Clock:
        clock = Clock(0.03)
        async with Cadence[int](0.03, clock.send) as pacing:
            async for number in bursts():
                await pacing.put(number)
        return clock

    clock = asyncio.run(run())
    assert [number for _, items in clock.sent for number in items] == list(range(30))
    assert 1 < len(clock.sent) < 10
    assert all(time >= 0.99 * number for number, (time, _) in enumerate(clock.sent, 1))


def test_without_an_interval_each_item_goes_at_once() -> None:
    async def run() -> list[list[int]]:
        sent: list[list[int]] = []

        async def send(items: Sequence[int]) -> None:
            sent.append(list(items))

        async with Cadence[int](0, send) as pacing:
            await pacing.put(1)
            await pacing.put(2)
        return sent

    assert asyncio.run(run()) == [[1], [2]]


def test_a_client_that_takes_nothing_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "_LAST_ITEMS_S", 0.05)
    settings = GatewaySettings(max_request_s=0.05, stream_interval_ms=10)

    async def run() -> None:
        async def send(items: Sequence[int]) -> None:
            await asyncio.Event().wait()

        async with asyncio.timeout(5), paced(settings, send) as items:
            await items.put(1)

    with pytest.raises(ApiError) as late:
        asyncio.run(run())
    assert (late.value.status, late.value.code) == (504, "deadline_exceeded")


def test_what_sending_raises_ends_the_stream() -> None:
    async def run() -> None:
        async def send(items: Sequence[int]) -> None:
            raise OSError("gone")

        async with Cadence[int](0.001, send) as pacing:
            for number in range(10_000):
                await pacing.put(number)
                await asyncio.sleep(0.001)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(asyncio.wait_for(run(), 5))


def test_what_a_slow_client_has_not_taken_is_not_piled_up() -> None:
    async def run() -> list[list[int]]:
        sent: list[list[int]] = []
        sending, reading = asyncio.Event(), asyncio.Event()

        async def send(items: Sequence[int]) -> None:
            sent.append(list(items))
            sending.set()
            await reading.wait()

        async with asyncio.timeout(10), Cadence[int](0.001, send) as cadence:
            await cadence.put(0)
            await sending.wait()
            putting = asyncio.create_task(cadence.put(1))
            await asyncio.wait((putting,), timeout=0.02)
            assert not putting.done(), "it waits for the client"
            reading.set()
            await putting
        return sent

    assert asyncio.run(run()) == [[0], [1]]
