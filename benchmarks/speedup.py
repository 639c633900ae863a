"""The measured speedup against an offline A/B of the same traffic: is the live figure true?

    python -m benchmarks.speedup [--quick] [--json FILE] [--prompts FILE.jsonl] [--store DIR]

The same requests run twice, block by block in turn: with speculation and a share of control rounds, as in service, and
at depth 0. The live figure comes from the first kind alone (`serving.speedup`); the A/B puts the rounds of the second
kind in the place of the control rounds, batch size by batch size as well. What clients see, the
time between an answer's first and last token, is shown beside it: it holds the other requests' prompts, too.

The draft is trained here on the answers, or is the last good one of `--store`.

Target: the two agree within 5%.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Spread, Target, fill_in, finish, parser, pick_prompts
from benchmarks.engines import answers_of, engine_with, stream
from benchmarks.live import good_draft
from serving.evidence import WatchedRound
from serving.local.engine import LocalEngine
from serving.speedup import Sums, measure
from slipstream.models import resolve_model
from speculator.fresh import fresh_draft
from speculator.trace import Trace

DEPTH = 4
CONTROL_SHARE = 0.1
"""Five times as many as in service, so that a short run has as many control rounds as an hour."""


class Side:
    """The rounds, and the clients' times, of one kind of block."""

    def __init__(self) -> None:
        self.blocks: list[Sums] = []
        self.client_s, self.client_tokens = 0.0, 0


def offline(on: Sequence[Sums], off: Sequence[Sums]) -> float:
    """The speedup of the drafting rounds of one side over all rounds of the other."""
    both = Sums()
    for sums, is_on in [(sums, True) for sums in on] + [(sums, False) for sums in off]:
        for (batch, drafted), seconds in sums.seconds.items():
            if drafted or not is_on:
                both.add(batch, is_on, seconds, sums.tokens[batch, drafted])
    ratio = measure([both]).ratio
    assert ratio is not None, "both sides have seen the batch size of all clients"
    return ratio


async def _client(engine: LocalEngine, prompts: Sequence[list[int]], max_tokens: int, side: Side) -> None:
    for row, prompt in enumerate(prompts):
        first_s, tokens = 0.0, 0
        async for chunk in stream(engine, str(row), prompt, max_tokens):
            first_s = first_s or time.perf_counter()
            tokens += len(chunk)
            last_s = time.perf_counter()
        side.client_s += last_s - first_s
        side.client_tokens += tokens - 1


async def _block(
    engine: LocalEngine, prompts: Sequence[list[int]], clients: int, max_tokens: int, depth: int, side: Side
) -> None:
    engine.set_depth(depth)
    shares = [prompts[number::clients] for number in range(clients)]
    await asyncio.gather(*(_client(engine, share, max_tokens, side) for share in shares))


def main() -> None:
    options = parser("Measured speedup against an offline A/B")
    options.add_argument("--store", type=Path, metavar="DIR", help="take its last good draft instead of training one")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--clients", type=int, default=4)
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--questions", type=int, help="prompts of a block; default 12, quick 8")
    options.add_argument("--repeats", type=int, help="pairs of blocks; default 8, quick 3")
    options.add_argument("--train-steps", type=int, help="default 300, quick 60")
    arguments = options.parse_args()
    fill_in(arguments, {"questions": (8, 12), "train_steps": (60, 300), "repeats": (3, 8)})
    _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    model_dir, threads = resolve_model(arguments.model), arguments.threads
    torch.set_num_threads(os.cpu_count() or 1)
    traces: list[Trace] = []
    with engine_with(model_dir, fresh_draft(model_dir, seed=0), threads, on_trace=traces.append) as engine:
        prompts = [
            engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])[-512:]
            for prompt in pick_prompts(arguments.prompts, arguments.questions)
        ]
        asyncio.run(answers_of(engine, prompts, arguments.max_tokens))
    draft, _ = good_draft(arguments.store, model_dir, traces, arguments.train_steps)
    on, off = Side(), Side()
    current = [on]

    def observe(round_: WatchedRound) -> None:
        # As the engine's own meter: what the others took is not theirs alone.
        if not round_.read_prompt:
            current[0].blocks[-1].add(round_.batch, round_.drafted, round_.seconds, round_.committed)

    settings = {"dtype": "bfloat16", "depth": DEPTH, "control_share": CONTROL_SHARE}
    with engine_with(model_dir, draft, threads, settings=settings, on_round=observe) as engine:
        for repeat in range(arguments.repeats + 1):
            for depth, side in ((DEPTH, on), (0, off))[:: 1 if repeat % 2 else -1]:
                current[0] = side
                side.blocks.append(Sums())
                asyncio.run(_block(engine, prompts, arguments.clients, arguments.max_tokens, depth, side))
            if repeat == 0:  # warms up
                for side in (on, off):
                    side.blocks.clear()
                    side.client_s, side.client_tokens = 0.0, 0
    _finish(arguments, on, off)


def _finish(arguments: argparse.Namespace, on: Side, off: Side) -> None:
    live = measure(on.blocks)
    assert live.ratio is not None, "every block has control rounds"
    ab = offline(on.blocks, off.blocks)
    clients = (off.client_s / off.client_tokens) / (on.client_s / on.client_tokens)
    pairs = Spread.of([offline([one], [other]) for one, other in zip(on.blocks, off.blocks, strict=True)])
    difference = abs(live.ratio / ab - 1)
    interval = "" if live.lower is None or live.upper is None else f"  ({live.lower:.3f} … {live.upper:.3f})"
    finish(
        [
            (f"{arguments.clients} clients, {arguments.repeats} pairs of blocks", f"{on.client_tokens} tokens each"),
            ("measured live, 95% interval", f"{live.ratio:.3f}{interval}"),
            ("  control rounds", live.baseline_rounds),
            ("offline A/B of the same rounds", f"{ab:.3f}"),
            ("  by pairs of blocks", pairs),
            ("offline A/B as clients see it", f"{clients:.3f}"),
            ("live / offline − 1", f"{live.ratio / ab - 1:+.1%}"),
        ],
        [Target("difference", difference, 0.05, at_least=False)],
        {
            "clients": arguments.clients,
            "repeats": arguments.repeats,
            "live": {"ratio": live.ratio, "lower": live.lower, "upper": live.upper},
            "control_rounds": live.baseline_rounds,
            "offline": ab,
            "offline_by_pair": pairs.to_dict(),
            "offline_by_clients": clients,
            "difference": difference,
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
