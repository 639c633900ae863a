"""Rollouts on two SGLang servers: in chunks by `/v1/rollouts`, against plain requests in order of submission.

.venv-sglang/bin/python -m benchmarks.sglang_rollouts [--quick] [--json FILE] [--prompts FILE.jsonl] [--drafts FOLDER]
                                                      [--groups 12] [--samples 8] [--max-tokens 512] [--turns 3]
                                                      [--temperature 0.7] [--slots 8] [--minutes 5]

Two servers with the plugin, each on a core of its own, stand behind an sglang-router and a gateway; beside them two
without drafts, which rest while the others work. In a turn each way answers the same groups, with another number in
front of each prompt, so that no server has read it:

* `fifo plain`: all requests at once, groups dealt to the servers in turn, no drafts;
* `fifo`: the same on the servers with drafts: the learned head, and text of each request alone;
* `rollout`: `/v1/rollouts` of the gateway: one probe a group, the longest first, text of the whole group.

What counts is the time for a token, since sampled answers differ in length, and the tail: from the moment when nine
tenths of the samples have ended to the last. First a head learns from live traffic for `--minutes`; with `--drafts` it
is kept in that folder, and taken from there the next time.

Targets: rollout over fifo ≥ 1.3, over fifo plain ≥ 1.6, its tail at most half of fifo's, ≤ 5% of the tokens read again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.cores import pin
from benchmarks.common.report import Spread, Target, fill_in, finish, parser, prompts_of, refusing
from benchmarks.sglang_scene.phases import add_head_options, learnt_version
from benchmarks.sglang_scene.servers import SUFFIX_DEPTH, Scene, prepared
from serving.request_metadata import POLICY_KEY
from slipstream.client import AsyncRollouts, Group
from slipstream.demo.servers import Scrape
from speculator.errors import ConfigError
from speculator.host import free_port
from tests.sglang.pooled import find_router, router_command
from tests.sglang.server import SglangServer

DRAFTING, PLAIN = ("first", "second"), ("plain-first", "plain-second")
WAYS = PLAIN_FIFO, FIFO, ROLLOUT = ("fifo plain", "fifo", "rollout")
_HTTP = httpx.Timeout(None, connect=10.0)


@dataclass(frozen=True)
class Ended:
    """Result of one way in one turn: tokens, end of each sample, and tokens prefilled again."""

    tokens: int
    ends_s: list[float]
    read_again: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.ends_s[-1]

    @property
    def tail_s(self) -> float:
        return self.ends_s[-1] - self.ends_s[9 * len(self.ends_s) // 10 - 1]


@dataclass(frozen=True)
class Stage:
    servers: dict[str, SglangServer]
    gateway_url: str

    async def play(self, way: str, groups: Sequence[list[int]], arguments: argparse.Namespace) -> Ended:
        if way == ROLLOUT:
            return await self._rollout(groups, arguments)
        names = PLAIN if way == PLAIN_FIFO else DRAFTING
        return await self._fifo([self.servers[name].url for name in names], groups, arguments)

    async def _fifo(self, urls: Sequence[str], groups: Sequence[list[int]], arguments: argparse.Namespace) -> Ended:
        # Not captured: captured text would also be remembered for the group.
        marks = {POLICY_KEY: {"capture": False, "tenant": "fifo", "group_id": "", "domain": ""}}
        params = {"max_new_tokens": arguments.max_tokens, "temperature": arguments.temperature, "custom_params": marks}
        async with httpx.AsyncClient(timeout=_HTTP, limits=httpx.Limits(max_connections=None), trust_env=False) as http:
            began_s, ends_s = time.perf_counter(), list[float]()

            async def one(url: str, prompt: list[int]) -> int:
                body = {"input_ids": prompt, "sampling_params": params}
                answer = (await http.post(f"{url}/generate", json=body)).raise_for_status().json()
                ends_s.append(time.perf_counter() - began_s)
                return int(answer["meta_info"]["completion_tokens"])

            asked = [
                one(urls[number % len(urls)], prompt)
                for number, prompt in enumerate(groups)
                for _ in range(arguments.samples)
            ]
            return Ended(sum(await asyncio.gather(*asked)), ends_s)

    async def _rollout(self, groups: Sequence[list[int]], arguments: argparse.Namespace) -> Ended:
        same = {"n": arguments.samples, "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        before, ends_s, tokens = self._read_again(), list[float](), 0
        async with AsyncRollouts(self.gateway_url) as rollouts:
            began_s = time.perf_counter()
            async for sample in rollouts.start([Group(prompt=prompt, **same) for prompt in groups], logprobs=False):
                assert sample.state == "finished", sample
                ends_s.append(time.perf_counter() - began_s)
                tokens += len(sample.tokens)
        assert len(ends_s) == len(groups) * arguments.samples, "every sample has ended"
        return Ended(tokens, ends_s, self._read_again() - before)

    def _read_again(self) -> int:
        text = httpx.get(f"{self.gateway_url}/metrics", trust_env=False).raise_for_status().text
        return int(Scrape.parse(0, text).total("slipstream_rollout_read_again_tokens_total"))


@refusing
def main() -> None:
    arguments = _arguments()
    prompts = prompts_of(arguments.prompts)
    prompts = [prompt for prompt in prompts if prompt.domain == arguments.domain]
    learnt_from, asked = prompts[::2], prompts[1::2]
    if len(asked) < arguments.groups:
        raise ConfigError(
            f"{len(prompts)} prompts of the domain {arguments.domain} are too few: half of them are learnt from, and "
            f"{arguments.groups} others are asked in a turn"
        )
    rng, found = random.Random(0), defaultdict[str, list[Ended]](list)
    with prepared(arguments.model, arguments.prompts) as scene:
        version = learnt_version(scene, learnt_from, arguments.drafts, arguments.minutes)
        with _staged(scene, version, arguments.slots) as stage:
            for turn in range(arguments.turns):
                of_turn = rng.sample(asked, arguments.groups)
                for number, way in enumerate(rng.sample(WAYS, len(WAYS))):
                    groups = [scene.ids(f"({turn}.{number}) {prompt.text}") for prompt in of_turn]
                    ended = asyncio.run(stage.play(way, groups, arguments))
                    found[way].append(ended)
                    print(f"{way}: {ended.rate:.1f} tokens/s, {ended.ends_s[-1]:.1f} s, tail {ended.tail_s:.1f} s")
            reports = {name: scene.report(name) for name in DRAFTING}
    _report(found, reports, version, arguments)


def _report(
    found: dict[str, list[Ended]], reports: dict[str, dict[str, str]], version: int, arguments: argparse.Namespace
) -> None:
    def ratio(below: str) -> Spread:
        return Spread.of([one.rate / other.rate for one, other in zip(found[ROLLOUT], found[below], strict=True)])

    tail = Spread.of([one.tail_s / other.tail_s for one, other in zip(found[ROLLOUT], found[FIFO], strict=True)])
    read_again = sum(one.read_again for one in found[ROLLOUT]) / sum(one.tokens for one in found[ROLLOUT])
    over_fifo, over_plain = ratio(FIFO), ratio(PLAIN_FIFO)
    rows: list[tuple[str, object]] = [
        *((f"tokens/s, {way}", Spread.of([one.rate for one in of_way])) for way, of_way in found.items()),
        *((f"tail, s, {way}", Spread.of([one.tail_s for one in of_way])) for way, of_way in found.items()),
        ("rollout / fifo", over_fifo),
        ("rollout / fifo plain", over_plain),
        ("tail, rollout / fifo", tail),
        ("tokens read again / generated", f"{read_again:.1%}"),
    ]
    document: dict[str, Any] = {
        "over_fifo": over_fifo.to_dict(),
        "over_fifo_plain": over_plain.to_dict(),
        "tail": tail.to_dict(),
        "read_again": round(read_again, 4),
        "tokens_per_s": {way: Spread.of([one.rate for one in of_way]).to_dict() for way, of_way in found.items()},
        "tokens": {way: [one.tokens for one in of_way] for way, of_way in found.items()},
        "version": version,
        "reports": reports,
    }
    targets = [
        Target("rollout over fifo", over_fifo.median, 1.3),
        Target("rollout over fifo without drafts", over_plain.median, 1.6),
        Target("tail over fifo's", tail.median, 0.5, at_least=False),
        Target("share of tokens read again", read_again, 0.05, at_least=False),
    ]
    finish(rows, targets, document, arguments.json)


@contextlib.contextmanager
def _staged(scene: Scene, version: int, slots: int) -> Iterator[Stage]:
    flags = ("--stream-interval", "4", "--max-running-requests", str(slots))
    command = find_router()
    assert command is not None, "no sglang-router: make .venv-sglang/.installed"
    with contextlib.ExitStack() as opened:
        servers = {
            **{
                # No capture, whose cost would fall on some ways only.
                name: scene.live_server(
                    version, flags, {"SLIPSTREAM_CAPTURE": "0"}, name=name, suffix_depth=SUFFIX_DEPTH
                )
                for name in DRAFTING
            },
            **{name: scene.plain_server(*flags, name=name) for name in PLAIN},
        }
        cores = sorted(os.sched_getaffinity(0))
        for number, server in enumerate(servers.values()):
            pin(opened.enter_context(server).pid, cores[number % 2 % len(cores)])
        port = free_port()
        workers = [servers[name].url for name in DRAFTING]
        words = router_command(command, port=port, metrics_port=free_port(), workers=workers)
        opened.enter_context(_running(words, scene.folder / "router.log"))
        url = opened.enter_context(scene.gateway(f"http://127.0.0.1:{port}", "--pool"))
        yield Stage(servers, url)


@contextlib.contextmanager
def _running(words: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield
        finally:
            process.terminate()


def _arguments() -> argparse.Namespace:
    options = parser("Rollouts on two SGLang servers against requests in the order of submission")
    add_head_options(options)
    options.add_argument("--domain", default="math", help="of the prompts")
    options.add_argument("--groups", type=int, help="of a turn; default 12, quick 6")
    options.add_argument("--samples", type=int, default=8, help="of a group")
    options.add_argument("--max-tokens", type=int, help="of a sample; default 512, quick 320")
    options.add_argument("--turns", type=int, help="default 3, quick 1")
    options.add_argument("--temperature", type=float, default=0.7)
    options.add_argument("--slots", type=int, default=8, help="requests that a server decodes together")
    arguments = options.parse_args()
    # In fewer or shorter samples none would wait for a slot, and no tail would be left.
    fill_in(arguments, {"minutes": (0.5, 5.0), "groups": (6, 12), "max_tokens": (320, 512), "turns": (1, 3)})
    return arguments


if __name__ == "__main__":
    main()
