"""Compare the speedup that an SGLang server reports about itself with that measured over a server without drafts.

    .venv-sglang/bin/python -m benchmarks.reported_speedup [--quick] [--json FILE] [--prompts FILE.jsonl] [--blocks 6]
                                                           [--drafts random learnt poor good] [--clients 1 8]
                                                           [--minutes 6]

For each draft a server with the plugin, adaptive depth 0 … 3, stands beside one without speculation, and both are asked
in short turns. `random` is a fresh draft, which sleeps. `learnt` has learnt for `--minutes` from live traffic; the
turns have other prompts, and capture goes on. `poor` and `good` commit 1.2 and 2 tokens a verification by
SGLang's own simulation (SGLANG_SIMULATE_ACC_LEN), which changes the text and not the work; they capture nothing.

In a turn each client streams one answer. What counts is the time in which all of them decode. A block of turns lasts as
long as the window of the gauge, which is read at its end. The two are equal where the 90% interval of their ratio over
the blocks lies within ±5%: two one-sided tests (Schuirmann, J. Pharmacokinet. Biopharm. 15(6), 1987). The threads that
run the models have a core of their own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common.cores import core_for_schedulers, give_core
from benchmarks.common.decoding import decode
from benchmarks.common.paired import both_ends
from benchmarks.common.report import Median, Target, fill_in, finish, parser, refusing
from benchmarks.sglang_scene.phases import learnt_version
from benchmarks.sglang_scene.servers import LEARNT_FROM, LIVE_ID, Scene, prepared
from tests.sglang.server import SglangServer

LEARNT = "learnt"
ACCEPT_LENGTHS = {"random": None, LEARNT: None, "poor": 1.2, "good": 2.0}
"""Simulated accept lengths; None: a real draft."""
BLOCK_S = 125.0
_REPORTED_AFTER_S = 2.0
_TURN_TOKENS = 32
"""Few: from one quarter of a minute to the next this machine may be a fifth slower, for all servers alike."""
_LONGEST_PROMPT = 768
"""In characters."""
_WITHIN = math.log(1.05)


@dataclass(frozen=True)
class Block:
    """Ratios of the decoding rates of each turn, and the reported speedup at the end."""

    ratios: list[float]
    gauge: float
    accept_length: float

    @property
    def truth(self) -> float:
        return statistics.median(self.ratios)

    @property
    def error(self) -> float:
        """Logarithm of reported over measured speedup."""
        return math.log(self.gauge / self.truth)


@dataclass(frozen=True)
class Cell:
    draft: str
    clients: int
    blocks: list[Block]

    @property
    def name(self) -> str:
        return f"{self.draft}_{self.clients}"

    @property
    def truth(self) -> Median:
        return Median.of([ratio for block in self.blocks for ratio in block.ratios])

    def gauge_over_truth(self) -> tuple[float, float, float]:
        """The mean, and the ends of its 90% interval. Takes at least two blocks."""
        errors = [block.error for block in self.blocks]
        lower, upper = both_ends(errors)
        return math.exp(statistics.fmean(errors)), math.exp(lower), math.exp(upper)

    def targets(self) -> list[Target]:
        _, lower, upper = self.gauge_over_truth()
        pays = self.draft == "good"
        return [
            Target(f"{self.name}: gauge / truth, lower", lower, math.exp(-_WITHIN)),
            Target(f"{self.name}: gauge / truth, upper", upper, math.exp(_WITHIN), at_least=False),
            Target(f"{self.name}: adaptive / no speculation", self.truth.value, 1.1 if pays else 0.97),
            Target(f"{self.name}: its lower end", self.truth.lower, 1.1 if pays else 0.95),
        ]

    def to_dict(self) -> dict[str, Any]:
        mean, lower, upper = self.gauge_over_truth()
        return {
            "speedup": self.truth.to_dict(),
            "gauge": [round(block.gauge, 4) for block in self.blocks],
            "truth": [round(block.truth, 4) for block in self.blocks],
            "gauge_over_truth": {"mean": round(mean, 4), "lower": round(lower, 4), "upper": round(upper, 4)},
            "accept_length": self.blocks[-1].accept_length,
            "turns": sum(len(block.ratios) for block in self.blocks),
        }


@refusing
def main() -> None:
    options = parser("The measured speedup of an SGLang server against one without speculation")
    options.add_argument("--blocks", type=int, help="of two minutes, for each draft and number of clients")
    options.add_argument("--drafts", nargs="+", choices=ACCEPT_LENGTHS, default=list(ACCEPT_LENGTHS))
    options.add_argument("--clients", nargs="+", type=int, default=[1, 8])
    options.add_argument("--minutes", type=float, help="that `learnt` has learnt; default 6, quick 0.5")
    arguments = options.parse_args()
    fill_in(arguments, {"blocks": (2, 6), "minutes": (0.5, 6.0)})
    if arguments.blocks < 2:
        options.error("--blocks: an interval takes at least two")
    cells = []
    with (
        core_for_schedulers() as core,
        prepared(arguments.model, arguments.prompts) as scene,
        scene.plain_server(*_FLAGS) as plain,
    ):
        give_core(plain.pid, core)
        prompts = scene.numbered(scene.prompts[: LEARNT_FROM.start], _LONGEST_PROMPT)
        for draft in arguments.drafts:
            with _server(scene, draft, arguments.minutes) as live:
                give_core(live.pid, core)
                for clients in arguments.clients:
                    cells.append(_measure(scene, draft, plain, live, clients, arguments.blocks, prompts))
                    print(f"{cells[-1].name}: {cells[-1].to_dict()}", flush=True)
    rows: list[tuple[str, object]] = []
    for cell in cells:
        mean, lower, upper = cell.gauge_over_truth()
        gauge = statistics.fmean(block.gauge for block in cell.blocks)
        rows += [
            (f"{cell.draft} draft, {cell.clients} clients: adaptive / no speculation", cell.truth),
            ("   the gauge; gauge / truth", f"{gauge:8.3f}; {mean:.3f}  ({lower:.3f} … {upper:.3f})"),
        ]
    document = {cell.name: cell.to_dict() for cell in cells}
    finish(rows, [target for cell in cells for target in cell.targets()], document, arguments.json)


_FLAGS = ("--stream-interval", "4")
"""Server and clients share two cores: fewer stream events leave more time to the server."""


def _server(scene: Scene, draft: str, minutes: float) -> SglangServer:
    accept_length = ACCEPT_LENGTHS[draft]
    if accept_length is None:
        is_learnt = draft == LEARNT
        version = learnt_version(scene, scene.prompts[LEARNT_FROM], None, minutes) if is_learnt else 1
        return scene.live_server(version, _FLAGS)
    simulated = {
        "SGLANG_SIMULATE_ACC_LEN": str(accept_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        # Simulated verdicts are not the target's, so nothing may be captured.
        "SLIPSTREAM_CAPTURE": "0",
    }
    return scene.live_server(scene.add_random(), _FLAGS, simulated)


def _measure(
    scene: Scene,
    draft: str,
    plain: SglangServer,
    live: SglangServer,
    clients: int,
    num_blocks: int,
    prompts: Iterator[list[int]],
) -> Cell:
    """Measure blocks of turns. The first is a warm-up, in which the policy finds its depth."""
    blocks = []
    for number in range(1 + num_blocks):
        ratios: list[float] = []
        deadline_s = time.monotonic() + BLOCK_S
        while time.monotonic() < deadline_s:
            asked = [next(prompts) for _ in range(clients)]
            order = (plain, live) if len(ratios) % 2 else (live, plain)
            rates = {
                server.port: decode(server, asked, max_new_tokens=_TURN_TOKENS, ignore_eos=True).rate
                for server in order
            }
            ratios.append(rates[live.port] / rates[plain.port])
        time.sleep(_REPORTED_AFTER_S)
        report = scene.report(LIVE_ID)
        # With a draft that sleeps throughout the server measures no speedup: count it as 1.
        gauge = 1.0 if report["asleep"] == "1" else float(report["speedup"])
        if number:
            blocks.append(Block(ratios, gauge, float(report.get("accept_length", 1.0))))
    return Cell(draft, clients, blocks)


if __name__ == "__main__":
    main()
