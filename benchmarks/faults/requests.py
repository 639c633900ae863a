"""Faults of clients: they leave, ask for too much, all come at once, or do not speak JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.loop import MODEL, Loop

LEAVERS = 50
BURST = 400
_JSON = {"content-type": "application/json"}
_GOOD: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 4}
_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}

MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"model": "toy", "prompt": NaN}',
    b'{"a":' * 50_000,
    b"[" * 100_000,
    *(
        json.dumps(body).encode()
        for body in (
            {},
            {"model": MODEL},
            {**_GOOD, "model": "another"},
            {**_GOOD, "temperature": False},
            {**_GOOD, "temperature": 1e400},
            {**_GOOD, "temperature": -1},
            {**_GOOD, "top_p": 0},
            {**_GOOD, "max_tokens": -2},
            {**_GOOD, "max_tokens": 2**70},
            {**_GOOD, "n": 0},
            {**_GOOD, "stop": [1]},
            {**_GOOD, "stop": ["x"] * 1000},
            {**_GOOD, "seed": "one"},
            {**_GOOD, "stream": "yes"},
            {**_GOOD, "prompt": [[-1]]},
            {**_GOOD, "prompt": [10**9]},
            {**_GOOD, "prompt": {"a": 1}},
            {**_GOOD, "slipstream": {"capture": "perhaps"}},
            {**_GOOD, "slipstream": []},
        )
    ),
)
GIANT: dict[str, dict[str, Any]] = {
    "a body of 5 MiB": {**_GOOD, "prompt": "a" * (5 << 20)},
    "3 × the context": {**_GOOD, "prompt": "a b c " * 512},
    "max_tokens of 10⁹": {**_GOOD, "max_tokens": 10**9},
    "10,000 prompts": {**_GOOD, "prompt": ["a"] * 10_000},
    "n of 10,000": {**_GOOD, "n": 10_000},
}


@fault(
    f"malformed bodies: {len(MALFORMED)} on two routes, twice",
    "status 4xx with an error body; others are served as before",
)
def malformed(loop: Loop) -> Observed:
    started_s = time.monotonic()
    answers = asyncio.run(_post(loop, [body for body in MALFORMED for _ in range(2)]))
    return _refusals(loop, answers, started_s)


@fault("giant requests: " + ", ".join(GIANT), "status 4xx; others are served as before")
def giant(loop: Loop) -> Observed:
    started_s = time.monotonic()
    answers = asyncio.run(_post(loop, [json.dumps(body).encode() for body in GIANT.values()]))
    return _refusals(loop, answers, started_s)


async def _post(loop: Loop, bodies: list[bytes]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=loop.url, timeout=60, trust_env=False) as client:
        answers = []
        for route in ("/v1/completions", "/v1/chat/completions"):
            answers += [await client.post(route, content=body, headers=_JSON) for body in bodies]
        return answers


def _refusals(loop: Loop, answers: list[httpx.Response], started_s: float) -> Observed:
    statuses = Counter(answer.status_code for answer in answers)
    loop.wait_for_answers()
    during = loop.load.since(started_s)
    told = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    return Observed(
        told=f"{told}; others: {during}",
        checks={
            "only 4xx": all(400 <= status < 500 for status in statuses),
            "each says why": all(answer.json().get("error", {}).get("message") for answer in answers),
            "no other request failed": during.num_failed == 0,
        },
        figures={f"status_{status}": count for status, count in statuses.items()},
    )


@fault(
    f"{LEAVERS} clients leave in the middle of a stream",
    "their generations end, their traces are discarded, nothing of them stays",
)
def leaving(loop: Loop) -> Observed:
    name = "slipstream_requests_aborted_total"
    before, started_s = loop.metrics().total(name), time.monotonic()
    asyncio.run(_leave(loop))
    gone_s = loop.wait(lambda: loop.metrics().total("slipstream_gateway_generations_in_flight") <= 4, "them to be gone")
    loop.wait_for_answers()
    during = loop.load.since(started_s)
    aborted = loop.metrics().total(name) - before
    return Observed(
        told=f"{aborted:.0f} generations ended early, none in flight {gone_s:.2f} s later; others: {during}",
        checks={"ended early": aborted > 0, "no other request failed": during.num_failed == 0},
        figures={"aborted": aborted, "gone_s": gone_s},
    )


async def _leave(loop: Loop) -> None:
    """A few at a time, so that none of them waits in the queue."""
    body = {**_CHAT, "max_tokens": 200, "stream": True}
    async with httpx.AsyncClient(base_url=loop.url, timeout=60, trust_env=False) as client:

        async def one(number: int) -> None:
            messages = [{"role": "user", "content": f"leaver {number}"}]
            async with client.stream("POST", "/v1/chat/completions", json={**body, "messages": messages}) as stream:
                async for _ in stream.aiter_bytes():
                    return

        for first in range(0, LEAVERS, 5):
            await asyncio.gather(*(one(number) for number in range(first, first + 5)))


@fault(
    f"{BURST} requests at once",
    "the queue is bounded: what is beyond it gets 429 with retry-after, the rest is answered",
    is_slow=True,
)
def burst(loop: Loop) -> Observed:
    started_s = time.monotonic()
    answers = asyncio.run(_all_at_once(loop))
    statuses = Counter(answer.status_code for answer in answers)
    refused = [answer for answer in answers if answer.status_code == 429]
    took_s = time.monotonic() - started_s
    after = loop.wait_for_answers()
    return Observed(
        told=f"{statuses[200]} answered within {took_s:.1f} s, {len(refused)} × 429; then {after}",
        checks={
            "answered or 429": set(statuses) <= {200, 429},
            "some of both": len(refused) > 0 and statuses[200] > 0,
            "each 429 says when": all("retry-after" in answer.headers for answer in refused),
            "served afterwards": after.num_failed <= 4,
        },
        figures={"answered": statuses[200], "refused": len(refused), "took_s": took_s},
    )


async def _all_at_once(loop: Loop) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=BURST)
    async with httpx.AsyncClient(base_url=loop.url, timeout=120, limits=limits, trust_env=False) as client:
        bodies = ({**_GOOD, "prompt": f"burst {number}", "max_tokens": 32} for number in range(BURST))
        return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))
