"""What a trainer on the same machine costs serving, and how much of the idle CPU it uses: bursts of requests.

    python -m benchmarks.elasticity [--quick] [--rounds N] [--json FILE] [--prompts FILE.jsonl]

One local engine, on all cores unless told otherwise, answers bursts of requests with pauses between them, Poisson
arrivals within a burst, greedy and at depth 0. Each round has its own requests, from a fixed seed, and all its windows
answer the same ones. A request counts from the moment at which it was due. A round's windows, in this order:

- absent: no trainer;
- yielding: `slipstream train` with the engine's pulse (trainer/sharing.py);
- priority, not with --quick: `slipstream train` as it is without it: one thread, nice 19;
- absent again: what the machine's own drift adds counts half on either side.

Both trainers learn from traces of the same engine, and go on as long as they may. In the others' windows a trainer is
stopped (SIGSTOP). Percentiles are over all windows of a variant, each with the 95% interval over resampled rounds; the
two windows without a trainer, set against each other in the same way, say what this machine can tell apart.

CPU time says little about learning where two cores are the two halves of one, or a second thread only waits. So the
yielding trainer learns alone for a while, too, and what it learnt beside serving is set against its speed then times
the idle share of the machine: 1 is all that could be had from idle time.

It needs a quiet machine, and says nothing where other programs take more than they leave.

Targets: the 99th percentile of the gaps between two tokens, and of the requests' latency, at most 1.03 × those of
absent; the yielding trainer's CPU time at least 0.60 of what is idle without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import fill_in, finish, parser, pick_prompts
from benchmarks.elasticity_report import ABSENT, AGAIN, PRIORITY, YIELDING, Report, line
from benchmarks.elasticity_trainer import Trainer, running_trainer
from benchmarks.elasticity_window import Arrival, Measured, Scene, Window
from benchmarks.engines import answers_of, engine_with
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model
from speculator.fresh import fresh_draft
from speculator.pulse import Pulse, PulseBoard
from speculator.trace import Trace

SEEDED_TOKENS = 48


def main() -> None:
    options = parser("A trainer beside a local engine under bursts")
    options.add_argument("--rounds", type=int, help="windows of each variant; without a trainer twice")
    options.add_argument("--bursts", type=int, default=3, help="in a window")
    options.add_argument("--burst-s", type=float, default=3.0)
    options.add_argument("--pause-s", type=float, default=3.0, help="between the bursts' last arrivals and the next")
    options.add_argument("--rate", type=float, default=2.0, help="requests a second within a burst")
    options.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="that all of it may use")
    options.add_argument("--engine-threads", type=int, help="of the engine; default all cores")
    options.add_argument(
        "--known-s",
        type=float,
        default=0.0,
        help="of serving without a pause, beside the trainer, before it is measured",
    )
    options.add_argument(
        "--earlier", type=Path, nargs="*", default=[], metavar="FILE", help="--json of such runs, to count them too"
    )
    arguments = options.parse_args()
    fill_in(arguments, {"rounds": (2, 6)})
    # Told to end, too, it leaves no trainer behind that stands still or, worse, does not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(arguments.engine_threads or len(cores))
    model_dir = resolve_model(arguments.model)
    setting = {name: str(value) for name, value in vars(arguments).items() if name not in ("rounds", "json", "earlier")}
    earlier = [_earlier(path, setting) for path in arguments.earlier]
    first_round = sum(len(one.windows[ABSENT]) for one in earlier)
    with tempfile.TemporaryDirectory(prefix="slipstream-elasticity-", dir="/dev/shm") as scratch:
        measured = sum(earlier, _measure(model_dir, Path(scratch), arguments, cores, first_round))
    report = Report.of(measured, len(cores))
    document = report.document | {"setting": setting, "measured": asdict(measured)}
    finish(report.rows, report.targets, document, arguments.json)


def _earlier(path: Path, setting: dict[str, str]) -> Measured:
    document = json.loads(path.read_text())
    if document["setting"] != setting:
        raise SystemExit(f"{path} is of other options: {document['setting']}")
    return Measured.read(document["measured"])


def _measure(model_dir: Path, folder: Path, arguments: Any, cores: list[int], first_round: int) -> Measured:
    recorded: list[Trace] = []
    settings = {"depth": 0, "suffix_depth": 0, "control_share": 0.0}
    draft = fresh_draft(model_dir, seed=0)
    threads = arguments.engine_threads or len(cores)
    with (
        contextlib.closing(Pulse(folder / "pulse")) as pulse,
        contextlib.closing(PulseBoard(folder / "pulse")) as board,
        engine_with(model_dir, draft, threads, settings=settings, on_trace=recorded.append, pulse=pulse) as engine,
        contextlib.ExitStack() as running,
    ):
        scene = Scene(engine, board, cores)
        prompts = _prompts(engine, arguments.prompts, 64)
        asyncio.run(answers_of(engine, prompts[: 16 if arguments.quick else 32], SEEDED_TOKENS))
        traces = list(recorded)
        variants: dict[str, list[str]] = {YIELDING: ["--pulse-dir", str(folder / "pulse")]}
        if not arguments.quick:
            variants[PRIORITY] = []
        trainers: dict[str, Trainer] = {}
        for name, options in variants.items():
            trainers[name] = running.enter_context(running_trainer(name, model_dir, folder / name, traces, options))
        bursts = [arguments.burst_s] * arguments.bursts
        least_s = sum(bursts) + len(bursts) * arguments.pause_s
        # Warm.
        scene.window(_arrivals(prompts, 0, bursts, arguments), None, least_s)
        if arguments.known_s:
            scene.window(_arrivals(prompts, 0, [arguments.known_s], arguments), trainers[YIELDING], 0.0)
        alone_per_s = [trainers[YIELDING].speed()]
        found: dict[str, list[Window]] = {name: [] for name in (ABSENT, *trainers, AGAIN)}
        for number in range(first_round, first_round + arguments.rounds):
            trace = _arrivals(prompts, number, bursts, arguments)
            for name, windows in found.items():
                windows.append(scene.window(trace, trainers.get(name), least_s))
                print(f"round {number + 1} {name:<12} {line(windows[-1])}", flush=True)
        alone_per_s.append(trainers[YIELDING].speed())
    return Measured(found, alone_per_s)


def _prompts(engine: LocalEngine, path: Path | None, count: int) -> list[list[int]]:
    texts = [prompt.text for prompt in pick_prompts(path, count)]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}])[-128:] for text in texts]


def _arrivals(prompts: Sequence[Sequence[int]], seed: int, bursts_s: Sequence[float], arguments: Any) -> list[Arrival]:
    """Bursts of so many seconds; the same for the same options."""
    rng, arrivals, begin_s = random.Random(seed), [], 0.0
    for burst_s in bursts_s:
        due_s = begin_s
        while due_s < begin_s + burst_s:
            arrivals.append(Arrival(due_s, rng.choice(prompts), rng.randrange(12, 33)))
            due_s += rng.expovariate(arguments.rate)
        begin_s += burst_s + arguments.pause_s
    return arrivals


if __name__ == "__main__":
    main()
