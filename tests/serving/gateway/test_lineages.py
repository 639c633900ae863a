"""Several drafts behind one gateway: whose engines a request goes to, and what happens where these are away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from serving.gateway import pools
from serving.gateway.config import lineage_urls, load_settings
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.server import serve
from serving.gateway.verified import Verified, may_measure
from serving.marks import HEADER, OTHER_TARGET, Marks
from slipstream.front import check_settings
from speculator.errors import ConfigError, UnreachableError
from speculator.lineages import BASE
from tests.serving.gateway.client import CHAT, error_of
from tests.serving.gateway.keyfile import KeyFile
from tests.serving.gateway.passage import HELLO, passing
from tests.serving.sglang_client.fake_sglang import EVENTS, MODEL, WHOLE, FakeSglang, flat_error

Ask = Callable[..., Awaitable[httpx.Response]]
NOBODY = "http://127.0.0.1:9"


def count(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"slipstream_gateway_lineage_{name}_total", labels) or 0


@asynccontextmanager
async def lineages(
    base: FakeSglang, code: FakeSglang | None, registry: CollectorRegistry | None = None, **settings: Any
) -> AsyncIterator[Ask]:
    """A gateway in front of both; without `code`, nobody is at its address."""
    async with serve((code or FakeSglang()).app(), port=0, grace_s=0) as behind:
        urls = {"code": behind.url if code else NOBODY}
        async with (
            passing(base, lineages=urls, registry=registry, **settings) as server,
            httpx.AsyncClient(base_url=server.url) as client,
        ):

            async def ask(*, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
                return await client.post(CHAT, json={"model": MODEL, "messages": HELLO, **body}, headers=headers)

            yield ask


def test_a_request_names_its_lineage() -> None:
    async def run() -> None:
        base, code, registry = FakeSglang(), FakeSglang(), CollectorRegistry()
        async with lineages(base, code, registry) as ask:
            for body in ({}, {"slipstream": {"lineage": BASE}}, {"slipstream": {"lineage": None, "domain": "code"}}):
                assert (await ask(**body)).content == WHOLE
            assert (await ask(slipstream={"lineage": "code"})).content == WHOLE
            assert (await ask(slipstream={"lineage": "code"}, stream=True)).content == b"".join(EVENTS)
            assert (len(base.raw), len(code.raw)) == (3, 2)
            assert "lineage" not in json.dumps(code.bodies), "the name goes no further"
            unknown = await ask(slipstream={"lineage": "math"})
            error = error_of(unknown)
            assert (unknown.status_code, error["param"], error["code"]) == (
                400, "slipstream.lineage", "lineage_not_found",
            )  # fmt: skip
            assert "base, code" in str(error["message"])
            assert (len(base.raw), len(code.raw)) == (3, 2)
            assert count(registry, "requests", lineage="code", chosen_by="request") == 2
            assert count(registry, "requests", lineage=BASE, chosen_by="default") == 2

    asyncio.run(run())


def test_a_key_names_one_for_requests_that_do_not(tmp_path: Path) -> None:
    async def run() -> None:
        keys = KeyFile(tmp_path / "keys.json")
        coder = keys.add("coder", lineage="code")
        elsewhere = keys.add("elsewhere", lineage="math")
        base, code = FakeSglang(), FakeSglang()
        async with lineages(base, code, keys_file=keys.path) as ask:
            assert (await ask(headers=coder)).status_code == 200
            assert (len(base.raw), len(code.raw)) == (0, 1)
            assert (await ask(headers=coder, slipstream={"lineage": BASE})).status_code == 200
            assert (await ask(headers=elsewhere)).status_code == 200
            assert (len(base.raw), len(code.raw)) == (2, 1)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_the_base_answers_while_a_lineage_is_away(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        expected = b"".join(EVENTS) if stream else WHOLE
        base, registry = FakeSglang(), CollectorRegistry()
        async with lineages(base, None, registry) as ask:
            for _ in range(3):
                assert (await ask(slipstream={"lineage": "code"}, stream=stream)).content == expected
            assert count(registry, "fallbacks", lineage="code") == 3
        refusing = FakeSglang(refusal=flat_error(503, "No available workers"))
        async with lineages(base, refusing) as ask:
            assert (await ask(slipstream={"lineage": "code"}, stream=stream)).content == expected
            refusing.refusal = None
            assert (await ask(slipstream={"lineage": "code"}, stream=stream)).content == expected
            assert len(refusing.raw) == 1, "it is left alone for a moment"
            monkeypatch.setattr(pools.time, "monotonic", _later(pools.AWAY_S))
            assert (await ask(slipstream={"lineage": "code"}, stream=stream)).content == expected
            assert len(refusing.raw) == 2

    asyncio.run(run())


def test_one_request_alone_tries_a_lineage_that_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        tried, over = asyncio.Event(), asyncio.Event()

        class Hanging:
            @asynccontextmanager
            async def answer(self, *_: object) -> AsyncIterator[httpx.Response]:
                tried.set()
                await over.wait()
                raise UnreachableError("no route")
                yield

        class Answering:
            @asynccontextmanager
            async def answer(self, *_: object) -> AsyncIterator[httpx.Response]:
                yield httpx.Response(200)

        two: Any = {"base": Answering(), "code": Hanging()}
        behind = pools.Pools(two["base"], {"code": two["code"]}, GatewayMetrics(CollectorRegistry()))

        async def ask() -> str:
            async with behind.answer("code", CHAT, b"", {}) as (lineage, _):
                return lineage

        over.set()
        assert await ask() == BASE
        over.clear()
        tried.clear()
        monkeypatch.setattr(pools.time, "monotonic", _later(pools.AWAY_S))
        trying = asyncio.create_task(ask())
        await tried.wait()
        assert await asyncio.wait_for(ask(), 5) == BASE
        assert not trying.done()
        over.set()
        assert await trying == BASE

    asyncio.run(run())


def _later(seconds: float) -> Callable[[], float]:
    now = pools.time.monotonic
    return lambda: now() + seconds


def test_engines_of_another_target_do_not_answer() -> None:
    """One that comes later than the gateway: what it serves is another text."""

    async def run() -> None:
        base, other, registry = FakeSglang(), FakeSglang(refusal=flat_error(503, OTHER_TARGET)), CollectorRegistry()
        async with lineages(base, other, registry, target="5f") as ask:
            assert (await ask(slipstream={"lineage": "code"})).content == WHOLE
        meant = [Marks.of_header(headers[HEADER]).policy["target"] for headers in (*other.headers, *base.headers)]
        assert meant == ["5f", "5f"]
        assert count(registry, "fallbacks", lineage="code") == 1

    asyncio.run(run())


@pytest.mark.parametrize("status", [400, 429, 500])
def test_what_is_wrong_with_a_request_is_said_by_its_lineage(status: int) -> None:
    async def run() -> None:
        base = FakeSglang()
        async with lineages(base, FakeSglang(refusal=flat_error(status, "no"))) as ask:
            assert (await ask(slipstream={"lineage": "code"})).status_code == status
            assert base.raw == []

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_not_begun_again_elsewhere() -> None:
    async def run() -> None:
        base = FakeSglang()
        async with lineages(base, FakeSglang(events=EVENTS[:2], cut=True)) as ask:
            response = await ask(slipstream={"lineage": "code"}, stream=True)
            assert response.content.startswith(b"".join(EVENTS[:2]))
            assert b"engine_unavailable" in response.content
            assert base.raw == []

    asyncio.run(run())


# -- chosen by what was measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_requests_go_where_answers_were_accepted_most(stream: bool) -> None:
    async def run() -> None:
        base, code = FakeSglang(accept_length=1.2), FakeSglang(accept_length=2.4)
        registry = CollectorRegistry()
        async with lineages(base, code, registry, choose_lineages=True) as ask:
            for _ in range(12):
                response = await ask(stream=stream, slipstream={"domain": "code"})
                if stream:
                    assert response.content == b"".join(EVENTS)
                else:
                    assert response.json() == json.loads(WHOLE)
            assert len(code.raw) >= 8
            assert all(body["return_spec_tokens_details"] for body in code.bodies)
            assert all(Marks.of_header(headers[HEADER]).measure for headers in code.headers), "a router loses the field"
            assert count(registry, "requests", lineage="code", chosen_by="measured") == len(code.raw)

    asyncio.run(run())


def test_a_lineage_that_is_away_earns_nothing_for_what_the_base_has_done() -> None:
    async def run() -> None:
        base, registry = FakeSglang(accept_length=2.0), CollectorRegistry()
        async with lineages(base, None, registry, choose_lineages=True) as ask:
            for _ in range(10):
                assert (await ask(slipstream={"domain": "code"})).status_code == 200
        # Without a single answer of its own it is still unknown, and tried.
        assert count(registry, "requests", lineage="code", chosen_by="measured") == 9
        assert len(base.raw) == 10

    asyncio.run(run())


def test_a_client_that_wants_the_figures_itself_gets_them() -> None:
    async def run() -> None:
        base = FakeSglang(accept_length=1.5)
        async with lineages(base, FakeSglang(), choose_lineages=True) as ask:
            whole = await ask(return_spec_tokens_details=True)
            assert whole.json()["sglext"]["spec_tokens_details"]["spec_verify_ct"] == 10
            assert b'"sglext"' in (await ask(return_spec_tokens_details=True, stream=True)).content

    asyncio.run(run())


def test_nothing_is_asked_of_sglang_where_nothing_is_chosen() -> None:
    async def run() -> None:
        base = FakeSglang(accept_length=1.5)
        async with lineages(base, FakeSglang()) as ask:
            assert (await ask()).content == WHOLE
            assert "return_spec_tokens_details" not in base.bodies[0]
            assert not Marks.of_header(base.headers[0][HEADER]).measure

    asyncio.run(run())


def test_samples_add_up_and_text_that_looks_like_figures_is_text() -> None:
    verified = Verified()
    samples = [{"spec_accept_length": 2.0, "spec_verify_ct": 5}, {"spec_accept_length": 3.0, "spec_verify_ct": 10}]
    answer = {"id": "a", "n": 1.50, "sglext": {"spec_tokens_details": samples}}
    assert verified.take_from(json.dumps(answer).encode()) == b'{"id":"a","n":1.5}'
    assert (verified.num_tokens, verified.num_verifications) == (40, 15)
    text = b'data: {"choices":[{"delta":{"content":"sglext"}}]}\n\n'
    assert verified.take_from_events(text) == text
    whole = b'{"choices": [{"text": "sglext"}]}'
    assert verified.take_from(whole) == whole
    assert (verified.num_tokens, verified.num_verifications) == (40, 15)
    none = b'data: {"choices":[],"sglext":{"spec_tokens_details":null}}\n\n'
    assert verified.take_from_events(text + none + text) == text * 2
    assert not may_measure(b'{"return_cached_tokens_details": true}')


# -- settings ------------------------------------------------------------------------------------------------------


def test_addresses_of_lineages() -> None:
    assert lineage_urls("") == {}
    assert lineage_urls("code=http://a:1, math=https://b/x=y") == {"code": "http://a:1", "math": "https://b/x=y"}
    many = ",".join(f"l{number}=http://a" for number in range(17))
    for text in ("code", "code=ftp://a", "base=http://a", "Code=http://a", "a=http://a,a=http://b", "=http://a", many):
        with pytest.raises(ConfigError):
            lineage_urls(text)


def test_bad_settings_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_CHOOSE_LINEAGES", "1")
    with pytest.raises(ConfigError, match="set SLIPSTREAM_GATEWAY_LINEAGES"):
        check_settings(load_settings())
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_LINEAGES", "code")
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_GATEWAY_LINEAGES is not usable: .*'code' has no address"):
        load_settings()
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_LINEAGES", "code=http://127.0.0.1:1")
    check_settings(load_settings())
