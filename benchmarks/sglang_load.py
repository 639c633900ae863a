"""What the plugin costs SGLang by SGLang's own `bench_serving`: a draft that sleeps, capture, swaps.

.venv-sglang/bin/python -m benchmarks.sglang_load [--quick] [--json FILE] [--turns 5] [--accept-lengths 1 2 4]

In a turn a server without speculation and one with the plugin, whose fresh draft sleeps, answer new prompts in changing
order, the second one without capture and with it. Prompts are random tokens, and all of the same length. Then a server
with three proposals a step does so without capture and with it, for each accept length, which SGLang simulates
(SGLANG_SIMULATE_ACC_LEN); last, while its draft is swapped every two seconds. A request says itself whether it may be
captured: two servers that do the same work differ by more than capture costs. What is captured of simulated verdicts
contradicts itself, so it is dropped on its way to Redis. The threads that run the models have a core of their own.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.cores import core_for_schedulers, give_core
from benchmarks.common.report import Median, Spread, Target, fill_in, finish, in_order, parser
from benchmarks.sglang_scene.servers import FIXED_ID, LIVE_ID, Scene, prepared
from tests.sglang.server import SglangServer

_CLIENTS = 4
_NUM_TOKENS = (128, 64)
"""Of a prompt and of an answer."""
_SWAP_EVERY_S = 2.0

Kind = tuple[SglangServer, bool]
"""A server, and whether its answers are captured."""


def main() -> None:
    options = parser("The plugin under SGLang's bench_serving", has_prompts=False)
    options.add_argument("--turns", type=int)
    options.add_argument("--accept-lengths", type=float, nargs="*", default=[1, 2, 4], metavar="TOKENS")
    options.add_argument("--requests", type=int, help="of a turn, for each kind")
    arguments = options.parse_args()
    fill_in(arguments, {"turns": (2, 5), "requests": (8, 16)})
    found = Found()
    with core_for_schedulers() as core, prepared(arguments.model, None) as scene:
        load = Load(scene, arguments.requests)
        with scene.plain_server() as plain, scene.live_server() as live:
            for server in (plain, live):
                give_core(server.pid, core)
            kinds = {"plain": (plain, False), "asleep": (live, False), "captured": (live, True)}
            rates = load.in_turns(kinds, arguments.turns)
            report = scene.settled_report(LIVE_ID)
        found.add("asleep", rates, ("asleep", "plain"), 0.97)
        found.add("asleep", rates, ("captured", "asleep"), 0.98)
        found.add_traces(report, load.num_captured)
        for length in arguments.accept_lengths:
            name = f"accept_length_{length:g}"
            scene.pointer.publish(1)
            with scene.fixed_server(1, {"SGLANG_SIMULATE_ACC_LEN": str(length)}) as server:
                give_core(server.pid, core)
                kinds = {"silent": (server, False), "captured": (server, True)}
                rates = load.in_turns(kinds, arguments.turns)
                report = scene.report(FIXED_ID)
                swapped = load.swapping(server)
            found.add(name, rates, ("captured", "silent"), 0.98)
            found.add_swaps(name, swapped)
            found.document[name]["accept_length"] = float(report["accept_length"])
    finish(found.rows, found.targets, found.document, arguments.json)


@dataclass
class Load:
    """Runs of bench_serving, each with prompts of its own."""

    scene: Scene
    requests: int
    num_captured: int = 0
    num_runs: int = 0

    def in_turns(self, kinds: Mapping[str, Kind], turns: int) -> dict[str, list[float]]:
        """Tokens a second of each kind by turn, after one turn to warm up."""
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(turns + 1):
            for name in in_order(kinds, turn):
                rate = self.run(*kinds[name])["output_throughput"]
                if turn:
                    rates[name].append(rate)
            print({name: round(values[-1], 2) for name, values in rates.items() if values}, flush=True)
        return rates

    def run(self, server: SglangServer, is_captured: bool) -> dict[str, Any]:
        """What SGLang's `bench_serving`, unmodified, reports of a run."""
        self.num_runs += 1
        self.num_captured += self.requests * is_captured
        prompt, answer = _NUM_TOKENS
        marks = {"slipstream": {"capture": is_captured}}
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True, "custom_params": marks}
        found = self.scene.folder / f"load-{self.num_runs}.jsonl"
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url),
            *("--model", str(self.scene.model_dir), "--num-prompts", str(self.requests)),
            *("--max-concurrency", str(_CLIENTS), "--warmup-requests", "0", "--output-file", str(found)),
            *("--dataset-name", "random-ids", "--tokenize-prompt", "--seed", str(self.num_runs)),
            *("--random-input-len", str(prompt), "--random-output-len", str(answer), "--random-range-ratio", "1"),
            # In place of its own, which are the same without a policy.
            *("--extra-request-body", json.dumps({"sampling_params": sampling})),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
        served: dict[str, Any] = json.loads(found.read_text())
        assert served["completed"] == self.requests, served
        return served

    def swapping(self, server: SglangServer) -> dict[str, Any]:
        """One run with swaps between two versions of random weights."""
        versions = itertools.cycle((self.scene.add_random(), 1))
        before, stop = int(self.scene.report(FIXED_ID)["swaps"]), threading.Event()
        stalls_ms: list[float] = []

        def swap() -> None:
            while not stop.wait(_SWAP_EVERY_S):
                stalls_ms.append(self._swap_to(next(versions), stop))

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            served = self.run(server, is_captured=False)
        finally:
            stop.set()
            swapper.join()
        swaps = int(self.scene.report(FIXED_ID)["swaps"]) - before
        return {"swaps": swaps, "completed": served["completed"], "asked": self.requests, "stall_ms": max(stalls_ms)}

    def _swap_to(self, version: int, stop: threading.Event) -> float:
        """Milliseconds in which the scheduler stood still."""
        self.scene.pointer.publish(version)
        while self.scene.report(FIXED_ID)["version"] != str(version) and not stop.wait(0.1):
            pass
        return float(self.scene.report(FIXED_ID)["last_stall_ms"])


class Found:
    """The table, the targets, and the JSON document."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, object]] = []
        self.targets: list[Target] = []
        self.document: dict[str, Any] = {}

    def add(self, name: str, rates: Mapping[str, list[float]], kinds: tuple[str, str], bound: float) -> None:
        ratio = Median.of([one / two for one, two in zip(*(rates[kind] for kind in kinds), strict=True)])
        title = " / ".join(kinds)
        self.rows += [(f"{name}: {title}", ratio), *((f"   {kind}: token/s", Spread.of(rates[kind])) for kind in kinds)]
        self.targets.append(Target(f"{name}: {title}", ratio.value, bound))
        self.document.setdefault(name, {})["_over_".join(kinds)] = ratio.to_dict()

    def add_traces(self, report: Mapping[str, str], asked: int) -> None:
        self.rows.append(("   traces in Redis", f"{report['appended']} of {asked}"))
        self.targets.append(Target("traces", int(report["appended"]), asked))

    def add_swaps(self, name: str, swapped: Mapping[str, Any]) -> None:
        counts = f"{swapped['swaps']}, {swapped['asked'] - swapped['completed']}, {swapped['stall_ms']:.1f}"
        self.rows.append(("   swaps, failed requests, longest stall (ms)", counts))
        self.targets.append(Target(f"{name}: swaps", swapped["swaps"], 1))
        self.document[name]["swaps"] = dict(swapped)


if __name__ == "__main__":
    main()
