"""Compare the adaptive depth in SGLang with each fixed depth, as a batch of rollouts thins out.

.venv-sglang/bin/python -m benchmarks.sglang_concurrency [--quick] [--json FILE] [--prompts FILE.jsonl] [--minutes 5]
                                                         [--drafts FOLDER] [--turns 6] [--requests 64 16 4 1]
                                                         [--accept-length 2.5]

A server with the plugin stands beside SGLang without speculation (depth 0) and with one to three steps. All have the
same head, which learns from live traffic first, or comes from `--drafts` (see benchmarks/sglang_hybrid.py). With
`--accept-length` it is a random one, and SGLang simulates that a verification commits so many tokens on average, where
there are so many nodes (SGLANG_SIMULATE_ACC_LEN), which changes the text and not the work.

In a turn each server answers so many new prompts at a time, and what counts is the time in which all of them decode.
Nothing is captured, and no earlier text proposes. The first turn with each number of requests does not count: in it the
policy finds its depth. The threads that run the models have a core of their own.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.cores import core_for_schedulers, give_core
from benchmarks.common.decoding import decode
from benchmarks.common.report import Median, Spread, Target, fill_in, finish, in_order, parser, refusing
from benchmarks.sglang_scene.phases import add_head_options, learnt_version
from benchmarks.sglang_scene.servers import DEPTH, LEARNT_FROM, Scene, prepared
from serving.sglang.report import EngineReport
from tests.sglang.server import SglangServer, speculative_flags

_OURS = "adaptive"
_LONGEST_PROMPT = 160
"""In characters: prompts are read before any of them is decoded, and here reading 64 takes longer than decoding."""
_TURN_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 512, 32, 128
"""Of all answers of a turn together, and the bounds for each."""
_FLAGS = ("--stream-interval", "4", "--max-running-requests", "64")
_REPORTED_AFTER_S = 2.0
_BOUND = 0.98


@dataclass
class Cell:
    """Measurements with one number of requests, by server and turn."""

    requests: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    accept_lengths: dict[str, list[float]] = field(default_factory=dict)
    mean_depth: float = 0.0
    """Proposals of the adaptive server, a verification and request."""

    @property
    def best(self) -> str:
        """The fixed depth with the highest median rate."""
        return max((name for name in self.rates if name != _OURS), key=lambda name: statistics.median(self.rates[name]))

    def ratio(self, name: str) -> Median:
        """Rate of the adaptive server over that of another, turn by turn."""
        return Median.of([ours / other for ours, other in zip(self.rates[_OURS], self.rates[name], strict=True)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "over_best": self.ratio(self.best).to_dict(),
            "over": {name: self.ratio(name).to_dict() for name in self.rates if name != _OURS},
            "tokens_per_s": {name: Spread.of(rates).to_dict() for name, rates in self.rates.items()},
            "accept_length": {name: Spread.of(each).to_dict() for name, each in self.accept_lengths.items()},
            "mean_depth": round(self.mean_depth, 3),
        }


@refusing
def main() -> None:
    options = parser("The adaptive depth in SGLang against each fixed depth, by the number of requests")
    add_head_options(options)
    options.add_argument("--turns", type=int, help="with each number of requests")
    options.add_argument("--requests", type=int, nargs="+", default=[64, 16, 4, 1], help="at a time, in this order")
    options.add_argument("--accept-length", type=float, help="simulated; default: a real head")
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (1.0, 5.0), "turns": (1, 6)})
    env = {} if arguments.accept_length is None else {"SGLANG_SIMULATE_ACC_LEN": str(arguments.accept_length)}
    with core_for_schedulers() as core, prepared(arguments.model, arguments.prompts) as scene:
        if env:
            version = scene.add_random()
        else:
            version = learnt_version(scene, scene.prompts[LEARNT_FROM], arguments.drafts, arguments.minutes)
        prompts = scene.numbered(scene.prompts[: LEARNT_FROM.start], _LONGEST_PROMPT)
        with _servers(scene, version, env) as servers:
            for server in servers.values():
                give_core(server.pid, core)
            cells = [_measure(scene, servers, prompts, count, arguments.turns) for count in arguments.requests]
    rows: list[tuple[str, object]] = []
    for cell in cells:
        rows += [
            (f"{cell.requests} at a time, {name}: token/s; accept length", f"{Spread.of(rates)}; {length:.2f}")
            for name, rates in cell.rates.items()
            for length in [statistics.median(cell.accept_lengths[name])]
        ]
        rows.append((f"   adaptive / {cell.best}; mean depth", f"{cell.ratio(cell.best)}; {cell.mean_depth:.2f}"))
    targets = [
        Target(f"{cell.requests}: adaptive / the best fixed", cell.ratio(cell.best).value, _BOUND) for cell in cells
    ]
    finish(rows, targets, {f"requests_{cell.requests}": cell.to_dict() for cell in cells}, arguments.json)


@contextlib.contextmanager
def _servers(scene: Scene, version: int, env: Mapping[str, str]) -> Iterator[Mapping[str, SglangServer]]:
    draft_dir = scene.store.root / "versions" / f"{version:06d}"
    with contextlib.ExitStack() as stack:
        servers = {_OURS: scene.live_server(version, _FLAGS, {"SLIPSTREAM_CAPTURE": "0", **env})}
        for depth in range(DEPTH + 1):
            speculative = speculative_flags(draft_dir, num_steps=depth) if depth else []
            servers[f"depth {depth}"] = scene.plain_server(*_FLAGS, *speculative, env=env, name=f"depth_{depth}")
        yield {name: stack.enter_context(server) for name, server in servers.items()}


def _measure(
    scene: Scene, servers: Mapping[str, SglangServer], prompts: Iterator[list[int]], count: int, num_turns: int
) -> Cell:
    cell = Cell(count)
    num_tokens = min(max(_TURN_TOKENS // count, _LEAST_TOKENS), _MOST_TOKENS)
    for turn in range(1 + num_turns):
        if turn == 1:
            before = _proposed(scene)
        asked = [next(prompts) for _ in range(count)]
        for name in in_order(servers, turn):
            decoded = decode(servers[name], asked, max_new_tokens=num_tokens, ignore_eos=True)
            if turn:
                cell.rates.setdefault(name, []).append(decoded.rate)
                cell.accept_lengths.setdefault(name, []).append(decoded.accept_length)
    proposals, verifications = (now - then for now, then in zip(_proposed(scene), before, strict=True))
    cell.mean_depth = proposals / verifications
    print(f"{count}: {cell.to_dict()}", flush=True)
    return cell


def _proposed(scene: Scene) -> tuple[int, int]:
    """Proposals of the adaptive server since its start, and verifications, counted by request."""
    time.sleep(_REPORTED_AFTER_S)
    report = EngineReport.parse(scene.report())
    committed = sum(report.round_tokens.values())
    return sum(report.proposals.values()), committed - sum(report.accepted.values())


if __name__ == "__main__":
    main()
