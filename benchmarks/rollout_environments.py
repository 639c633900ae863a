"""Rollouts with slow environments: samples that go on independently, compared with batches in lockstep.

    python -m benchmarks.rollout_environments [--quick] [--json FILE] [--prompts FILE.jsonl] [--engine local|sglang]
                                              [--groups 12] [--samples 4] [--turns 4] [--repeats 3] [-- ARGUMENTS]

Each sample is a conversation of `--turns` turns with an environment whose steps take 0.1 to 5 seconds, with a heavy
tail (Pareto, α = 1.1); one step in twenty never answers and is given up after `--deadline-s`. All ways send the same
groups to the same server, with other numbers in front of the prompts:

* `batches`: as many samples as there are slots take each turn together, once all their environments have answered, and
  the next batch begins when the last one has ended;
* `lockstep`: the same with all samples as one batch, so slots are busy while there are turns to decode;
* `asynchronous`: each sample goes on when its own environment has answered (slipstream/rollout.py).

Targets: tokens a second at least twice those of batches; at most 2% of the slots idle while samples wait for one; every
sample is accounted for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import httpx

from benchmarks.common.report import Spread, Target, fill_in, finish, parser, pick_prompts
from benchmarks.common.served import add_serving_options, serving
from slipstream.client import AsyncRollouts, Group, SampleKey
from slipstream.demo.servers import Scrape
from slipstream.rollout import Conversations, Step

Way = Literal["batches", "lockstep", "asynchronous"]
WAYS: tuple[Way, ...] = ("batches", "lockstep", "asynchronous")
_LOOK_S = 0.05
_SHORTEST_S, _LONGEST_S, _ALPHA, _NEVER = 0.1, 5.0, 1.1, 0.05
_HOPELESS_S = 600.0


def latency_s(key: SampleKey, turn: int, seed: int) -> float | None:
    """Latency of an environment's step; None for one that never answers. The same in all ways."""
    rng = random.Random(f"{seed} {key.group_id} {key.sample} {turn}")
    return None if rng.random() < _NEVER else min(_SHORTEST_S * rng.paretovariate(_ALPHA), _LONGEST_S)


@dataclass
class Together:
    """A barrier: all participants that have not left wait for each other."""

    num_left: int
    _num_here: int = 0
    _all_here: asyncio.Event = field(default_factory=asyncio.Event)

    async def arrive(self) -> None:
        self._num_here += 1
        gate = self._all_here
        self._open()
        await gate.wait()

    def leave(self) -> None:
        self.num_left -= 1
        self._open()

    def _open(self) -> None:
        if self._num_here == self.num_left:
            self._num_here = 0
            self._all_here.set()
            self._all_here = asyncio.Event()


@dataclass
class Slow:
    """An environment that answers `turns` times, each after its latency."""

    key: SampleKey
    turns: int
    deadline_s: float
    seed: int
    together: Together | None
    _turn: int = 0

    async def reset(self, sample: SampleKey) -> None:
        assert sample == self.key

    async def step(self, _: str) -> Step:
        self._turn += 1
        latency = latency_s(self.key, self._turn, self.seed)
        await asyncio.sleep(self.deadline_s if latency is None else latency)
        is_last = latency is None or self._turn == self.turns
        if self.together is not None:
            if is_last:
                self.together.leave()
            else:
                await self.together.arrive()
        if latency is None:
            raise TimeoutError("the environment did not answer")
        return Step(reward=1.0, done=True) if is_last else Step(observation="\nGo on.\n")


@dataclass(frozen=True)
class Played:
    tokens: int
    seconds: float
    ends: Counter[str]
    idle_share: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Idle:
    """Measures how many slots are free while samples wait."""

    def __init__(self, url: str, num_slots: int) -> None:
        self._url, self._num_slots = url, num_slots
        self._idle, self._looks = 0.0, 0

    @property
    def share(self) -> float:
        return self._idle / (self._looks * self._num_slots) if self._looks else 0.0

    async def watch(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                now = Scrape.parse(0, (await http.get(f"{self._url}/metrics")).text)
                waiting, paused, running = (
                    now.total("slipstream_rollout_samples", state=state) for state in ("waiting", "paused", "running")
                )
                if waiting + paused:
                    self._looks += 1
                    self._idle += max(self._num_slots - running, 0)
                await asyncio.sleep(_LOOK_S)


async def play(url: str, way: Way, groups: list[Group], seed: int, options: argparse.Namespace) -> Played:
    ends, tokens, idle = Counter[str](), 0, Idle(url, options.slots)
    size = max(options.slots // options.samples, 1) if way == "batches" else len(groups)
    began_s = time.perf_counter()
    watching = asyncio.create_task(idle.watch())
    async with AsyncRollouts(url) as rollouts:
        for batch in (groups[at : at + size] for at in range(0, len(groups), size)):
            together = None if way == "asynchronous" else Together(len(batch) * options.samples)

            def make(key: SampleKey, together: Together | None = together) -> Slow:
                return Slow(key, options.turns, options.deadline_s, seed, together)

            # The environments keep the deadline themselves: in lockstep a step waits for the others, too.
            async for sample in Conversations(rollouts, batch, make, step_timeout_s=_HOPELESS_S, logprobs=False):
                ends[sample.finish_reason] += 1
                tokens += sum(end - start for start, end in sample.turns or ())
    seconds = time.perf_counter() - began_s
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return Played(tokens, seconds, ends, idle.share)


def main() -> None:
    options = _options()
    prompts = pick_prompts(options.prompts, options.groups * options.repeats)
    found: dict[Way, list[Played]] = {way: [] for way in WAYS}
    # Rollouts may use all slots: there are no other requests.
    with serving(options, SLIPSTREAM_GATEWAY_ROLLOUT_SLOTS_SHARE="1") as url:
        for repeat in range(options.repeats):
            asked = prompts[repeat * options.groups : (repeat + 1) * options.groups]
            for way in random.Random(repeat).sample(WAYS, len(WAYS)):
                groups = [
                    Group(
                        id=str(number),
                        prompt=f"({repeat} {way}) {prompt.text[:400]}",
                        n=options.samples,
                        max_tokens=options.turns * (options.turn_tokens + 16),
                        turn_tokens=options.turn_tokens,
                        temperature=0.7,
                        ignore_eos=True,
                    )
                    for number, prompt in enumerate(asked)
                ]
                played = asyncio.run(play(url, way, groups, repeat, options))
                found[way].append(played)
                print(f"{way}: {played.rate:.1f} tokens/s, {played.seconds:.1f} s, {dict(played.ends)}", flush=True)
    _report(found, options)


def _report(found: dict[Way, list[Played]], options: argparse.Namespace) -> None:
    alone = found["asynchronous"]
    over = {
        way: Spread.of([one.rate / other.rate for one, other in zip(alone, found[way], strict=True)])
        for way in WAYS[:2]
    }
    idle = Spread.of([one.idle_share for one in alone])
    ends = {way: dict(sum((one.ends for one in of_way), Counter())) for way, of_way in found.items()}
    begun = options.groups * options.samples * options.repeats
    accounted = min(sum(of_way.values()) for of_way in ends.values()) / begun
    rows: list[tuple[str, object]] = [
        *((f"tokens/s, {way}", Spread.of([one.rate for one in of_way])) for way, of_way in found.items()),
        *((f"samples that ended, {way}", of_way) for way, of_way in ends.items()),
        *((f"asynchronous / {way}", ratio) for way, ratio in over.items()),
        ("slots idle while samples wait", f"{idle.median:.1%} ({idle.low:.1%} … {idle.high:.1%})"),
    ]
    targets = [
        Target("tokens a second over those of batches", over["batches"].median, 2.0),
        Target("share of slots idle while samples wait", idle.median, 0.02, at_least=False),
        Target("share of samples accounted for", accounted, 1.0),
    ]
    document = {
        **{f"over_{way}": ratio.to_dict() for way, ratio in over.items()},
        "idle": idle.to_dict(),
        "ended": ends,
        "begun": begun,
    }
    finish(rows, targets, document, options.json)


def _options() -> argparse.Namespace:
    options = parser("Samples that talk with slow environments, each on its own and in lockstep")
    add_serving_options(options)
    options.add_argument("--groups", type=int, help="of a rollout; default 12, quick 4")
    options.add_argument("--samples", type=int, default=4, help="of a group")
    options.add_argument("--turns", type=int, default=4, help="of a sample")
    options.add_argument("--turn-tokens", type=int, default=24)
    options.add_argument("--deadline-s", type=float, default=10.0, help="of a step that never answers")
    options.add_argument("--repeats", type=int, help="default 3, quick 1")
    arguments = options.parse_args()
    fill_in(arguments, {"groups": (4, 12), "repeats": (1, 3)})
    return arguments


if __name__ == "__main__":
    main()
