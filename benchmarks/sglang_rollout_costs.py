"""What a rollout's parts cost on SGLang, for benchmarks/rollout_sim.py, which keeps the result beside it.

.venv-sglang/bin/python -m benchmarks.sglang_rollout_costs [--quick] [--json FILE] [--prompts FILE.jsonl] [--repeats 3]

* A round by requests and tokens each (the next token and the proposals), at a short and a long context: requests whose
  answers the server has given before, so that earlier text proposes them and all proposals are accepted. Each number of
  tokens has a server, whose `SLIPSTREAM_SUFFIX_DEPTH` it is. The head has learnt nothing, and sleeps.
* Reading a token that no cache has, behind a short and a long context.

The least of the times counts, since interruptions only add. The thread that runs the model has a core of its own. What
text proposes, and how much of it is accepted, is the same on every engine and is taken over from the table as it is.

`--json benchmarks/rollout_costs.json` replaces the table that the simulator reads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks.common.cores import core_for_schedulers, give_core
from benchmarks.common.decoding import decode
from benchmarks.common.report import fill_in, finish, parser
from benchmarks.rollout_sim import TABLE
from benchmarks.sglang_scene.servers import LEARNT_FROM, Scene, prepared
from tests.sglang.server import SglangServer

BATCHES = (1, 2, 4, 8)
WIDTHS = (1, 2, 3, 4, 5, 9)
"""Tokens of each request in a round: the proposals that its server may take from text, and one."""
CONTEXTS = (128, 1024)
_ROUNDS = 6
_ANSWER_TOKENS = _ROUNDS * WIDTHS[-1] + 4
_READ_TOKENS = (16, 208)
"""A prompt is longer by so many tokens than what the cache has; what counts is the difference."""
_WORDS = (1000, 40_000)
"""Token ids that are no special ones."""
_FULL_ROUNDS = 0.2
"""Least share of rounds in which all proposals are accepted while all requests decode; others do not count."""
_TRIES = 8


@dataclass(frozen=True)
class Bench:
    server: SglangServer
    prompts: dict[int, list[list[int]]]
    """By context, as many as the largest batch has requests: their answers are known."""

    def round_ms(self, context: int, batch: int, width: int) -> float:
        """Median of some rounds of a server that is for this width."""
        for _ in range(_TRIES):
            with ThreadPoolExecutor(batch) as pool:
                streams = list(pool.map(functools.partial(self._events, width), self.prompts[context][:batch]))
            began_s, ended_s = (end(events[place][0] for events in streams) for end, place in ((max, 0), (min, -1)))
            rounds_s = [
                now_s - before_s
                for events in streams
                for (before_s, before), (now_s, now) in itertools.pairwise(events)
                if began_s <= before_s and now_s <= ended_s and now - before == width
            ]
            if len(rounds_s) >= _FULL_ROUNDS * batch * _ROUNDS:
                return 1000 * statistics.median(rounds_s)
        raise RuntimeError(f"{len(rounds_s)} rounds of {width} tokens for {batch} requests at context {context}")

    def _events(self, width: int, ids: list[int]) -> list[tuple[float, int]]:
        """(when, tokens so far), after each round."""
        stream = self.server.stream(ids, max_new_tokens=_ROUNDS * width + 2, **_sampling())
        return [(time.perf_counter(), int(event["meta_info"]["completion_tokens"])) for event in stream]

    def read_ms(self, context: int, tail: Sequence[int]) -> float:
        """Milliseconds a token; `tail` follows the context and is new."""
        took_s = []
        for number, length in enumerate(_READ_TOKENS):
            asked = self.prompts[context][0] + [tail[number], *tail[: length - 1]]
            began_s = time.perf_counter()
            self.server.generate(asked, max_new_tokens=1, **_sampling())
            took_s.append(time.perf_counter() - began_s)
        return 1000 * (took_s[1] - took_s[0]) / (_READ_TOKENS[1] - _READ_TOKENS[0])


def _sampling() -> dict[str, Any]:
    # Only text of requests that are captured is remembered for others.
    return {"ignore_eos": True, "custom_params": {"slipstream": {"capture": True, "tenant": "one", "group_id": "one"}}}


def main() -> None:
    options = parser("What a rollout's parts cost on SGLang")
    options.add_argument("--repeats", type=int, help="default 3, quick 1")
    arguments = options.parse_args()
    fill_in(arguments, {"repeats": (1, 3)})
    env = {"SLIPSTREAM_CONTROL_SHARE": "0", "SLIPSTREAM_PLAIN_SHARE": "0", "SLIPSTREAM_SHARE_GROUPS": "1"}
    with core_for_schedulers() as core, prepared(arguments.model, arguments.prompts) as scene:
        flags = ("--stream-interval", "1", "--max-running-requests", str(BATCHES[-1]))
        prompts = {context: _prompts(scene, context) for context in CONTEXTS}

        @contextlib.contextmanager
        def started(width: int) -> Iterator[Bench]:
            with scene.live_server(1, flags, env, name=f"costs{width}", suffix_depth=width - 1) as server:
                give_core(server.pid, core)
                yield Bench(server, prompts)

        rounds, reading = _measured(started, arguments.repeats)
    rows: list[tuple[str, object]] = [
        (f"ms a round, {batch} requests, context {context}", "".join(f"{cell:8.1f}" for cell in cells))
        for context, table in rounds.items()
        for batch, cells in table.items()
    ]
    rows += [(f"ms to read a token behind {context}", f"{value:.2f}") for context, value in reading.items()]
    known = json.loads(TABLE.read_text())
    document = {
        "command": "python -m benchmarks.sglang_rollout_costs",
        "model": arguments.model,
        "repeats": arguments.repeats,
        "widths": WIDTHS,
        "round_ms": rounds,
        "prefill_ms_a_token": reading,
        "num_answers": known["num_answers"],
        "suffixes": known["suffixes"],
        "propose_us": known["propose_us"],
    }
    finish(rows, [], document, arguments.json)


def _prompts(scene: Scene, context: int) -> list[list[int]]:
    texts = [prompt.text for prompt in scene.prompts[LEARNT_FROM]]
    per_prompt = len(texts) // BATCHES[-1]
    joined = (" ".join(texts[number * per_prompt :][:per_prompt]) for number in range(BATCHES[-1]))
    return [scene.ids(f"{context} {number} {text}")[-context:] for number, text in enumerate(joined)]


def _measured(
    started: Callable[[int], AbstractContextManager[Bench]], repeats: int
) -> tuple[dict[int, dict[int, list[float]]], dict[int, float]]:
    """Least ms of a round by context, requests and width (a list, as `WIDTHS`); ms a token of reading by context.
    `started` starts the server for a width.
    """
    found = defaultdict[tuple[int, int, int], list[float]](list)
    read = defaultdict[int, list[float]](list)
    rng = random.Random(0)
    for _ in range(repeats):
        for width in WIDTHS:
            with started(width) as bench:
                for context, prompts in bench.prompts.items():
                    # From now on their answers are known.
                    decode(bench.server, prompts, max_new_tokens=_ANSWER_TOKENS, **_sampling())
                    read[context].append(bench.read_ms(context, rng.choices(range(*_WORDS), k=_READ_TOKENS[1])))
                for context, batch in itertools.product(CONTEXTS, BATCHES):
                    found[context, batch, width].append(bench.round_ms(context, batch, width))
                    print(f"{context}/{batch}/{width}: {found[context, batch, width][-1]:.1f} ms", flush=True)
    rounds = {
        context: {batch: [round(min(found[context, batch, width]), 3) for width in WIDTHS] for batch in BATCHES}
        for context in CONTEXTS
    }
    return rounds, {context: round(min(each), 4) for context, each in read.items()}


if __name__ == "__main__":
    main()
