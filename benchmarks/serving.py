"""Tokens a second by workload, with each source of proposals and without, compared with other projects.

    python -m benchmarks.serving [--quick] [--json FILE] [--prompts FILE.jsonl] [--answers FILE] [--store DIR]
                                 [--parts workloads hugging_face llama_cpp random wrong]

Every prompt is answered in all ways of benchmarks/common/ways.py in turn, in another order each time, and one request
at a time by others with the same number of threads: by Hugging Face's `generate` with `prompt_lookup_num_tokens`; and
by llama.cpp, where `make llama-cpp` has put it there, over the bundled model in bfloat16 and in its own 4 bits.

Workloads are those of benchmarks/common/workloads.py: chat, editing (long copies of the prompt), structured output, and
groups of eight sampled answers to one prompt, which decode together. The learned draft is the last good one of
`--store`, or trained here on answers to the first half of the prompts; figures are of the second half. Ratios are by
prompt, their medians are over prompts.

Two equal runs differ by more than the hybrid and its better part do, or groups and plain decoding, so the hybrid is
compared with both once more with equal rounds at equal cost (benchmarks/common/equal_cost.py), and planning as
measured; the targets are on that, and the measured ratios stand beside it.

Then drafts that are of no use answer chat, prompt by prompt in turn with plain decoding: one with random weights, and
the learned one with its vocabulary moved by one, which is as sure of itself and always wrong; without suffixes. Tokens
a second are compared over each `--window` seconds of plain decoding, and those of plain decoding done twice: what
chance alone does. The target is on equal rounds at equal cost, too, with planning as measured: over so short a time
clocks say mostly what else this machine did.

Targets: hybrid at least as fast as either part (0.97, for noise), no workload and no window below 0.97 of plain.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common.drafts import last_good, trained
from benchmarks.common.engines import engine_with
from benchmarks.common.equal_cost import at_equal_cost
from benchmarks.common.llama import Generate, is_installed, llama_ways
from benchmarks.common.report import Spread, Target, fill_in, finish, in_order, parser, refusing
from benchmarks.common.ways import WAYS, Run, Ways, all_ways, answer
from benchmarks.common.workloads import Work, load_works
from slipstream.models import resolve_model
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.trace import Trace

LOOKUP = 10
PARTS = ("workloads", "hugging_face", "llama_cpp", "random", "wrong")
OTHERS = ("lookup", "llama_cpp", "llama_cpp_4_bits")


@dataclass
class Rates:
    """Tokens a second by (workload, kind), in the order of the prompts."""

    by_kind: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)
    """Runs of our own ways."""

    def add(self, work: Work, kind: str, num_tokens: int, seconds: float) -> None:
        self.by_kind.setdefault((work.workload, kind), []).append(num_tokens / seconds)

    def spread(self, workload: str, kind: str) -> Spread:
        return Spread.of(self.by_kind[workload, kind])

    def ratio(self, workload: str, kind: str, other: str) -> Spread:
        pairs = zip(self.by_kind[workload, kind], self.by_kind[workload, other], strict=True)
        return Spread.of([rate / base for rate, base in pairs])

    def ratio_at_equal_cost(self, workload: str, kind: str, other: str) -> Spread:
        """The same with equal rounds at equal cost, and each way's own planning time."""
        ways = [way for one, way in self.runs if one == workload]
        runs = [run for way in ways for run in self.runs[workload, way]]
        seconds = iter(at_equal_cost([run.rounds for run in runs]))
        rates = {
            way: [run.num_tokens / (next(seconds) + run.planning_s) for run in self.runs[workload, way]] for way in ways
        }
        return Spread.of([rate / base for rate, base in zip(rates[kind], rates[other], strict=True)])


def _hugging_face(model_dir: Path) -> dict[str, Callable[[Work], int]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    def lookup(work: Work) -> int:
        prompt = torch.tensor([work.prompt])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=work.limit,
                do_sample=False,
                pad_token_id=0,
                prompt_lookup_num_tokens=LOOKUP,
            )
        return int(out.shape[1] - prompt.shape[1])

    return {"lookup": lookup}


def _llama_cpp(threads: int) -> dict[str, Callable[[Work], int]]:
    def asked(generate: Generate) -> Callable[[Work], int]:
        return lambda work: generate(work.prompt, work.limit)

    return {name: asked(generate) for name, generate in llama_ways(threads).items()}


def _learnt(model_dir: Path, arguments: Any, taught: Sequence[Work]) -> Eagle3Draft:
    if arguments.store is not None:
        return last_good(arguments.store, model_dir)
    traces: list[Trace] = []
    settings = {"depth": 0, "suffix_depth": 0, "control_share": 0.0, "prefill_chunk": 256}
    first = fresh_draft(model_dir, seed=0)
    with engine_with(model_dir, first, arguments.threads, settings=settings, on_trace=traces.append) as engine:

        async def all_of_them() -> None:
            await asyncio.gather(*(answer(engine, work, str(number)) for number, work in enumerate(taught)))

        asyncio.run(all_of_them())
    return trained(model_dir, traces, arguments.train_steps)


def useless(kind: str, draft: Eagle3Draft, model_dir: Path) -> Eagle3Draft:
    """A draft of which almost nothing is accepted: random, or confident and wrong."""
    if kind == "random":
        return fresh_draft(model_dir, seed=3)
    ids = draft.target_ids.roll(1)
    wrong = Eagle3Draft(draft.config, draft.embed, ids - torch.arange(len(ids)))
    wrong.load_state_dict(dict(draft.named_parameters()), strict=False)
    return wrong


def windows(runs: Sequence[tuple[Run, Run]], window_s: float, seconds: Callable[[Run], float]) -> list[float]:
    """Ratios of two engines' rates over consecutive windows of runs in which the other took at least `window_s`."""
    ratios = []
    for first in range(len(runs)):
        tokens = took = others = other_s = 0.0
        for one, other in runs[first:]:
            tokens, took = tokens + one.num_tokens, took + seconds(one)
            others, other_s = others + other.num_tokens, other_s + seconds(other)
            if other_s >= window_s:
                ratios.append(tokens / took * other_s / others)
                break
    return ratios


@dataclass(frozen=True)
class Beside:
    """Rates by window, relative to a plain engine: of an engine, and of a second plain one (noise)."""

    equal_cost: Spread
    """With equal rounds at equal cost, and each engine's own planning time."""
    wall: Spread
    cpu: Spread
    plain_wall: Spread
    plain_cpu: Spread

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).to_dict() for field in fields(self)}


def _beside_plain(ways: Ways, traffic: Sequence[Work], window_s: float) -> Beside:
    turns = {"head": "head", "plain": "plain", "again": "plain"}
    runs: dict[str, list[Run]] = {turn: [] for turn in turns}
    for number, work in enumerate(itertools.cycle(traffic)):
        for turn in in_order(turns, number):
            runs[turn].append(ways.run(turns[turn], work, f"{turn}-{number}"))
        if sum(run.cpu_s for run in runs["plain"]) >= 2.5 * window_s:  # at equal cost prefill does not count
            break

    def ratios(turn: str, seconds: Callable[[Run], float]) -> Spread:
        return Spread.of(windows(list(zip(runs[turn], runs["plain"], strict=True)), window_s, seconds))

    everything = [run for turn in runs.values() for run in turn]
    charged_s = dict(zip(map(id, everything), at_equal_cost([run.rounds for run in everything]), strict=True))
    wall, cpu = (lambda run: run.wall_s), (lambda run: run.cpu_s)
    return Beside(
        ratios("head", lambda run: charged_s[id(run)] + run.planning_s),
        ratios("head", wall),
        ratios("head", cpu),
        ratios("again", wall),
        ratios("again", cpu),
    )


@refusing
def main() -> None:
    options = parser("Tokens a second by workload and source of proposals")
    options.add_argument("--answers", type=Path, metavar="FILE", help="take the works from here, or make and keep them")
    usual = [part for part in PARTS if part != "llama_cpp" or is_installed()]
    options.add_argument("--parts", nargs="+", choices=PARTS, default=usual, help="what to run; default all there is")
    options.add_argument("--store", type=Path, metavar="DIR", help="take its last good draft instead of training one")
    options.add_argument("--threads", type=int, default=1, help="of the engines and of the others")
    options.add_argument("--train-steps", type=int, help="default 300, quick 40")
    options.add_argument("--window", type=float, help="seconds, of useless drafts; default 30, quick 2")
    options.add_argument("--count", type=int, help="prompts of each workload that are timed; default 6, quick 1")
    arguments = options.parse_args()
    if not {"hugging_face", "llama_cpp"}.isdisjoint(arguments.parts) and "workloads" not in arguments.parts:
        options.error("hugging_face and llama_cpp are timed beside workloads")
    if "llama_cpp" in arguments.parts and not is_installed():
        options.error("llama_cpp is not installed: make llama-cpp")
    fill_in(arguments, {"train_steps": (40, 300), "count": (1, 6), "window": (2.0, 30.0)})
    count, window_s = arguments.count, arguments.window
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    by_workload: dict[str, list[Work]] = {}
    for work in load_works(arguments):
        by_workload.setdefault(work.workload, []).append(work)
    taught = [work for found in by_workload.values() for work in found[: len(found) // 2]]
    timed = {workload: found[len(found) // 2 :][:count] for workload, found in by_workload.items()}
    draft = _learnt(model_dir, arguments, taught)
    rates = Rates()
    beside = {}
    if "workloads" in arguments.parts:
        others = _hugging_face(model_dir) if "hugging_face" in arguments.parts else {}
        if "llama_cpp" in arguments.parts:
            others |= _llama_cpp(arguments.threads)
        with all_ways(model_dir, draft, arguments.threads) as ways:
            _time(ways, others, timed, rates)
    for kind in ("random", "wrong"):
        if kind in arguments.parts:
            one = useless(kind, draft, model_dir)
            with all_ways(model_dir, one, arguments.threads, suffixes=False) as ways:
                beside[kind] = _beside_plain(ways, by_workload["chat"], window_s)
    _finish(rates, list(timed) if rates.runs else [], beside, arguments)


def _time(
    ways: Ways, others: Mapping[str, Callable[[Work], int]], timed: Mapping[str, Sequence[Work]], rates: Rates
) -> None:
    # Workloads take turns, so that the cost of a cold engine is spread over all.
    in_turn = [work for row in itertools.zip_longest(*timed.values()) for work in row if work is not None]
    for number, work in enumerate(in_turn):
        for kind in in_order([*WAYS, *others] if work.num_samples == 1 else WAYS, number):
            if kind in others:
                started_s = time.perf_counter()
                rates.add(work, kind, others[kind](work), time.perf_counter() - started_s)
            else:
                run = ways.run(kind, work, str(number))
                rates.add(work, kind, run.num_tokens, run.wall_s)
                rates.runs.setdefault((work.workload, kind), []).append(run)
        print(f"{work.workload} {number + 1}", flush=True)


def _finish(rates: Rates, workloads: Sequence[str], beside: dict[str, Beside], arguments: Any) -> None:
    rows: list[tuple[str, object]] = [("", "median    (min … max)")]
    targets = []
    ratios: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        rows.append((f"{workload}: plain, token/s", rates.spread(workload, "plain")))
        ratios[workload] = {}
        for kind in ("head", "suffix", "hybrid", *OTHERS):
            if (workload, kind) in rates.by_kind:
                ratio = rates.ratio(workload, kind, "plain")
                rows.append((f"{workload}: {kind} ÷ plain", ratio))
                ratios[workload][kind] = ratio.to_dict()
        part = max(("head", "suffix"), key=lambda kind: rates.ratio_at_equal_cost(workload, kind, "plain").median)
        measured = rates.ratio(workload, "hybrid", part)
        equal, over_plain = (rates.ratio_at_equal_cost(workload, "hybrid", other) for other in (part, "plain"))
        rows += [
            (f"{workload}: hybrid ÷ {part}, measured", measured),
            ("  with equal rounds at equal cost", equal),
            (f"{workload}: hybrid ÷ plain, with equal rounds at equal cost", over_plain),
        ]
        ratios[workload] |= {
            "better_part": part,
            "hybrid_over_better_part": measured.to_dict(),
            "hybrid_over_better_part_at_equal_cost": equal.to_dict(),
            "hybrid_over_plain_at_equal_cost": over_plain.to_dict(),
        }
        targets += [
            Target(f"{workload}_hybrid_over_better_part", equal.median, 0.97),
            Target(f"{workload}_hybrid_over_plain", over_plain.median, 0.97),
        ]
    for kind, one in beside.items():
        rows += [
            (f"{kind} ÷ plain, windows, equal rounds at equal cost", one.equal_cost),
            (f"{kind} ÷ plain, windows, CPU time", one.cpu),
            ("  plain ÷ plain, beside it", one.plain_cpu),
            (f"{kind} ÷ plain, windows, wall clock", one.wall),
            ("  plain ÷ plain, beside it", one.plain_wall),
        ]
        targets.append(Target(f"{kind}_lowest_window", one.equal_cost.low, 0.97))
    document = {
        "threads": arguments.threads,
        "tokens_per_s": {
            workload: {kind: rates.spread(workload, kind).to_dict() for one, kind in rates.by_kind if one == workload}
            for workload in workloads
        },
        "ratios_over_plain": ratios,
        "windows_over_plain": {kind: one.to_dict() for kind, one in beside.items()},
    }
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()
