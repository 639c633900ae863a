"""Interactive requests beside rollouts on one engine: their latency with and without an objective for it.

    python -m benchmarks.rollout_interactive [--quick] [--json FILE] [--prompts FILE.jsonl] [--engine local|sglang]
                                             [--users 2] [--seconds 40] [--factors 1.1 2] [--repeats 5] [-- ARGUMENTS]

First the users alone, for the 99th percentiles of time to first token and of time between two chunks. Then one server
without objectives, and for each of `--factors` one whose objectives are so many times these percentiles. In each repeat
every server has its turn with rollouts beside the users, in random order, and the first has one without rollouts.
The first `--settle` seconds of a turn are reported apart: it takes a while until a server has found its share.

Target: with the first factor, both percentiles at most 1.1 times those without rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

import httpx

from benchmarks.common.report import Spread, Target, fill_in, finish, parser, percentile, pick_prompts
from benchmarks.common.served import add_serving_options, serving
from slipstream.client import AsyncRollouts, Group
from slipstream.demo.servers import Scrape

KINDS = ("ttft", "itl")
_PER_SAMPLE = 200
"""Tokens of a rollout's sample."""
_ALONE = "users alone"
_FREE = "rollouts beside them"
_WARM_UP_S = 10.0
_MANY = 4000
"""Prompts to choose from."""


@dataclass
class Latencies:
    """Seconds of all users in a turn, each with the time since its beginning."""

    ttft: list[tuple[float, float]] = field(default_factory=list)
    itl: list[tuple[float, float]] = field(default_factory=list)
    rollout_rate: float = 0.0
    """Tokens a second of rollouts."""

    def p99(self, kind: str, settle_s: float) -> float:
        return percentile(self.settled(kind, settle_s), 99)

    def settled(self, kind: str, settle_s: float) -> list[float]:
        return [seconds for at_s, seconds in getattr(self, kind) if at_s >= settle_s]

    def missed(self, kind: str, bound_s: float, until_s: float) -> float:
        """The part of what came before `until_s` that is above the bound."""
        early = [seconds for at_s, seconds in getattr(self, kind) if at_s < until_s]
        return sum(seconds > bound_s for seconds in early) / len(early) if early else 0.0


async def use(url: str, prompts: Iterator[str], options: argparse.Namespace, *, beside: bool) -> Latencies:
    """One turn: users that ask one prompt after another, with rollouts beside them or without."""
    found, began_s = Latencies(), time.perf_counter()

    async def user(http: httpx.AsyncClient) -> None:
        while time.perf_counter() - began_s < options.seconds:
            body = {
                "model": options.served,
                "prompt": next(prompts)[:600],
                "max_tokens": 48,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
            }
            last_s, kind = time.perf_counter(), found.ttft
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        now_s = time.perf_counter()
                        kind.append((now_s - began_s, now_s - last_s))
                        last_s, kind = now_s, found.itl

    async with AsyncExitStack() as opened:
        rolling = asyncio.create_task(_roll(url, prompts, options)) if beside else None
        http = await opened.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=600))
        before = await _rollout_tokens(http, url)
        await asyncio.gather(*(user(http) for _ in range(options.users)))
        found.rollout_rate = (await _rollout_tokens(http, url) - before) / (time.perf_counter() - began_s)
        if rolling is not None:
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)
    return found


async def _rollout_tokens(http: httpx.AsyncClient, url: str) -> float:
    return Scrape.parse(0, (await http.get(f"{url}/metrics")).text).total("slipstream_rollout_tokens_total")


async def _roll(url: str, prompts: Iterator[str], options: argparse.Namespace) -> None:
    """Rollouts without an end."""
    async with AsyncRollouts(url) as rollouts:
        while True:
            groups = [
                Group(prompt=next(prompts)[:600], n=4, max_tokens=_PER_SAMPLE, temperature=0.7, ignore_eos=True)
                for _ in range(options.slots)
            ]
            rollout = rollouts.start(groups, logprobs=False)
            try:
                async for _ in rollout:
                    pass
            except asyncio.CancelledError:
                await rollout.cancel()
                raise


def main() -> None:
    options = _options()
    prompts = iter(_distinct(options))
    turns: dict[str, list[Latencies]] = defaultdict(list)
    with ExitStack() as running:
        urls = {_FREE: running.enter_context(serving(options))}
        options.served = httpx.get(f"{urls[_FREE]}/v1/models", trust_env=False).json()["data"][0]["id"]
        first = asyncio.run(use(urls[_FREE], prompts, options, beside=False))
        for factor in options.factors:
            objectives = {
                f"SLIPSTREAM_GATEWAY_INTERACTIVE_{kind.upper()}_P99_S": str(factor * first.p99(kind, 0.0))
                for kind in KINDS
            }
            urls[f"… objective {factor:g} ×"] = running.enter_context(serving(options, **objectives))
        for url in urls.values():
            # What an engine does for the first time takes seconds.
            asyncio.run(use(url, prompts, argparse.Namespace(**{**vars(options), "seconds": _WARM_UP_S}), beside=True))
        for repeat in range(options.repeats):
            for way in random.Random(repeat).sample([_ALONE, *urls], len(urls) + 1):
                is_alone = way == _ALONE
                turn = asyncio.run(use(urls[_FREE if is_alone else way], prompts, options, beside=not is_alone))
                turns[way].append(turn)
                ttft_ms, itl_ms = (1000 * turn.p99(kind, options.settle) for kind in KINDS)
                print(
                    f"{way}: p99 {ttft_ms:.0f} and {itl_ms:.0f} ms, {turn.rollout_rate:.1f} rollout tokens/s",
                    flush=True,
                )
    _report(turns, options)


def _report(turns: dict[str, list[Latencies]], options: argparse.Namespace) -> None:
    alone = {kind: [turn.p99(kind, options.settle) for turn in turns[_ALONE]] for kind in KINDS}
    rows: list[tuple[str, object]] = []
    over: dict[str, dict[str, Spread]] = defaultdict(dict)
    for way, of_way in turns.items():
        for kind, base in alone.items():
            p99s = [turn.p99(kind, options.settle) for turn in of_way]
            over[way][kind] = Spread.of([one / other for one, other in zip(p99s, base, strict=True)])
            rows.append((f"{way}: p99 {kind}, ms", Spread.of([1000 * p99 for p99 in p99s])))
            if way != _ALONE:
                rows.append((f"{way}: p99 {kind} over alone", over[way][kind]))
        if way != _ALONE:
            rows.append((f"{way}: rollout tokens/s", Spread.of([turn.rollout_rate for turn in of_way])))
            bound = options.factors[0] * Spread.of(alone["itl"]).median
            early = Spread.of([100 * turn.missed("itl", bound, options.settle) for turn in of_way])
            rows.append((f"{way}: % of chunks too late while it settles", early))
    kept = over[f"… objective {options.factors[0]:g} ×"]
    targets = [Target(f"p99 {kind} over alone", kept[kind].median, 1.1, at_least=False) for kind in alone]
    document = {
        "over_alone": {way: {kind: spread.to_dict() for kind, spread in kinds.items()} for way, kinds in over.items()},
        "rollout_tokens_per_s": {
            way: [round(turn.rollout_rate, 2) for turn in of_way] for way, of_way in turns.items()
        },
        "p99_s": {
            way: {kind: [round(turn.p99(kind, options.settle), 5) for turn in of_way] for kind in alone}
            for way, of_way in turns.items()
        },
        "num_values": {
            way: {kind: [len(turn.settled(kind, options.settle)) for turn in of_way] for kind in alone}
            for way, of_way in turns.items()
        },
        **{name: getattr(options, name) for name in ("users", "seconds", "settle", "slots", "factors", "repeats")},
    }
    finish(rows, targets, document, options.json)


def _distinct(options: argparse.Namespace) -> Iterator[str]:
    """Prompts, each with a number in front from the second time on, so that none comes twice."""
    seen: dict[str, int] = defaultdict(int)
    for prompt in pick_prompts(options.prompts, _MANY):
        seen[prompt.text] += 1
        yield prompt.text if seen[prompt.text] == 1 else f"({seen[prompt.text]}) {prompt.text}"


def _options() -> argparse.Namespace:
    options = parser("Latency of interactive requests beside rollouts, with and without an objective")
    add_serving_options(options)
    options.add_argument("--users", type=int, default=2)
    options.add_argument("--seconds", type=float, help="of a turn; default 40, quick 12")
    options.add_argument("--settle", type=float, help="seconds that are reported apart; default 10, quick 4")
    options.add_argument("--factors", type=float, nargs="+", default=[1.1, 2.0], help="objectives over the users alone")
    options.add_argument("--repeats", type=int, help="default 5, quick 1")
    arguments = options.parse_args()
    fill_in(arguments, {"seconds": (12.0, 40.0), "settle": (4.0, 10.0), "repeats": (1, 5)})
    return arguments


if __name__ == "__main__":
    main()
