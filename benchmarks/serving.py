"""What a user gets: tokens a second by workload, with every source of proposals and without, beside Hugging Face.

    python -m benchmarks.serving [--quick] [--json FILE] [--prompts FILE.jsonl] [--answers FILE] [--store DIR]

Every prompt is answered by all of these in turn, in another order each time, with the same number of threads:

    plain        the local engine at depth 0
    head         planned rounds with the learned draft alone
    suffix       … with suffixes of earlier text alone
    hybrid       … with both, as it is served
    generate     Hugging Face `generate`; lookup, the same with `prompt_lookup_num_tokens`; both one request at a time

Workloads as in benchmarks/suffix.py: chat, editing (long copies of the prompt), structured output, and groups of eight
sampled answers to one prompt, which decode together. The learned draft is the last good one of `--store`, or trained
here on answers to the first half of the prompts; figures are of the second half. Ratios are by prompt, their medians
are over prompts. What the planner expected of its rounds is compared with what they took.

Assisted generation is not among them: there is no smaller model of this vocabulary to assist.

Then drafts that are of no use answer chat beside the plain engine, prompt by prompt: one with random weights, and the
learned one with its vocabulary moved by one, which is as sure of itself and always wrong. Over each `--window` seconds
of the plain engine's time the tokens a second of both are compared; no suffixes here.

Targets: hybrid at least as fast as either part (0.97, for noise), expected throughput within 10% of measured, no
workload and no window below 0.97 of plain.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import Spread, Target, finish, parser
from benchmarks.engines import engine_with
from benchmarks.live import good_draft
from benchmarks.suffix import Answer, load_answers
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model
from speculator.fresh import fresh_draft
from speculator.model import Eagle3Draft
from speculator.planner import Plan, RoundPlanner
from speculator.sampling import SamplingParams
from speculator.trace import Trace

LOOKUP = 10
KINDS = ("plain", "head", "suffix", "hybrid")


class WithoutHead(RoundPlanner):
    """Plans with suffixes alone."""

    def plan(
        self, domains: Sequence[str], num_keys: int, suffixes: Sequence[Sequence[float]], *, head_depth: int
    ) -> Plan:
        return super().plan(domains, num_keys, suffixes, head_depth=0)


@dataclass(frozen=True)
class Work:
    """What is asked for at the same time: one prompt, or the samples of one prompt."""

    workload: str
    prompt: tuple[int, ...]
    limit: int
    num_samples: int = 1


@dataclass
class Rates:
    """Tokens a second by (workload, kind), in the order of the prompts."""

    by_kind: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, work: Work, kind: str, num_tokens: int, seconds: float) -> None:
        self.by_kind.setdefault((work.workload, kind), []).append(num_tokens / seconds)

    def spread(self, workload: str, kind: str) -> Spread:
        return Spread.of(self.by_kind[workload, kind])

    def ratio(self, workload: str, kind: str, other: str) -> Spread:
        pairs = zip(self.by_kind[workload, kind], self.by_kind[workload, other], strict=True)
        return Spread.of([rate / base for rate, base in pairs])


def works(answers: Sequence[Answer]) -> list[Work]:
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    limits: dict[str, int] = {}
    for answer in answers:
        key = answer.workload, tuple(answer.prompt)
        found[key] = found.get(key, 0) + 1
        limits[answer.workload] = answer.limit
    return [Work(workload, prompt, limits[workload], count) for (workload, prompt), count in found.items()]


async def _answer(engine: LocalEngine, work: Work, name: str) -> int:
    """Tokens of all samples, which decode together."""

    async def one(sample: int) -> int:
        request = GenerateRequest(
            request_id=f"{name}-{sample}",
            prompt_token_ids=work.prompt,
            max_tokens=work.limit,
            sampling=SamplingParams(temperature=0.8 if work.num_samples > 1 else 0.0),
            seed=sample,
            policy=CapturePolicy(domain=work.workload, group_id=name if work.num_samples > 1 else ""),
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*(one(sample) for sample in range(work.num_samples))))


def _asked(engine: LocalEngine) -> Callable[[Work, str], int]:
    return lambda work, name: asyncio.run(_answer(engine, work, name))


@contextlib.contextmanager
def _engines(model_dir: Path, draft: Eagle3Draft, threads: int) -> Iterator[dict[str, LocalEngine]]:
    settings: dict[str, dict[str, Any]] = {
        "plain": {"depth": 0, "suffix_depth": 0},
        "head": {"suffix_depth": 0},
        "suffix": {},
        "hybrid": {},
    }
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(
                engine_with(
                    model_dir,
                    copy.deepcopy(draft),
                    threads,
                    settings={"control_share": 0.0, "capture": False, **changes},
                    planner=WithoutHead(max_depth=5) if kind == "suffix" else None,
                )
            )
            for kind, changes in settings.items()
        }


def _hugging_face(model_dir: Path) -> dict[str, Callable[[Work, str], int]]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    def generate(work: Work, **options: Any) -> int:
        prompt = torch.tensor([work.prompt])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=work.limit,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return out.shape[1] - prompt.shape[1]

    return {
        "generate": lambda work, _: generate(work),
        "lookup": lambda work, _: generate(work, prompt_lookup_num_tokens=LOOKUP),
    }


def _learnt(model_dir: Path, arguments: Any, taught: Sequence[Work]) -> Eagle3Draft:
    traces: list[Trace] = []
    settings = {"depth": 0, "suffix_depth": 0, "control_share": 0.0, "prefill_chunk": 256}
    first = fresh_draft(model_dir, seed=0)
    with engine_with(model_dir, first, arguments.threads, settings=settings, on_trace=traces.append) as engine:

        async def all_of_them() -> None:
            await asyncio.gather(*(_answer(engine, work, str(number)) for number, work in enumerate(taught)))

        asyncio.run(all_of_them())
    draft, _ = good_draft(arguments.store, model_dir, traces, arguments.train_steps)
    return draft


def useless(draft: Eagle3Draft, model_dir: Path) -> dict[str, Eagle3Draft]:
    """Drafts that accept next to nothing."""
    ids = draft.target_ids.roll(1)
    wrong = Eagle3Draft(draft.config, draft.embed, ids - torch.arange(len(ids)))
    wrong.load_state_dict(dict(draft.named_parameters()), strict=False)
    return {"random": fresh_draft(model_dir, seed=3), "sure and wrong": wrong}


def windows(runs: Sequence[tuple[int, float, int, float]], window_s: float) -> list[float]:
    """Rates of one engine over another's, over every stretch of runs in which the other took at least `window_s`.

    A run is (tokens, seconds) of the one and of the other.
    """
    ratios = []
    for first in range(len(runs)):
        tokens = seconds = others = other_s = 0.0
        for run in runs[first:]:
            tokens, seconds, others, other_s = tokens + run[0], seconds + run[1], others + run[2], other_s + run[3]
            if other_s >= window_s:
                ratios.append(tokens / seconds * other_s / others)
                break
    return ratios


def _beside_plain(
    model_dir: Path, draft: Eagle3Draft, traffic: Sequence[Work], arguments: Any, window_s: float
) -> list[float]:
    settings = {"control_share": 0.0, "capture": False, "suffix_depth": 0}
    runs: list[tuple[int, float, int, float]] = []
    plain_s = 0.0
    with (
        engine_with(model_dir, copy.deepcopy(draft), arguments.threads, settings=settings) as drafting,
        engine_with(model_dir, copy.deepcopy(draft), arguments.threads, settings={**settings, "depth": 0}) as plain,
    ):
        for number, work in enumerate(itertools.cycle(traffic)):
            took: dict[int, tuple[int, float]] = {}
            for turn in ((0, 1), (1, 0))[number % 2]:
                started_s = time.perf_counter()
                num_tokens = asyncio.run(_answer((drafting, plain)[turn], work, f"useless-{number}"))
                took[turn] = num_tokens, time.perf_counter() - started_s
            runs.append((*took[0], *took[1]))
            plain_s += took[1][1]
            if plain_s >= 2 * window_s:
                return windows(runs, window_s)
    return []


def _expected(engine: LocalEngine) -> dict[str, tuple[float, float]]:
    """By batch size: tokens a second as the planner expected them, and as they were, over all planned rounds."""
    metrics = engine.metrics
    found = {}
    for batch in (str(size) for size in range(1, 9)):
        expected_s = metrics.expected_seconds.labels(batch)._value.get()
        seconds = metrics.round_seconds.labels("speculative", batch)._value.get()
        if expected_s > 1.0:
            found[batch] = (
                metrics.expected_tokens.labels(batch)._value.get() / expected_s,
                metrics.round_tokens.labels("speculative", batch)._value.get() / seconds,
            )
    return found


def main() -> None:
    options = parser("Tokens a second by workload and source of proposals")
    options.add_argument("--answers", type=Path, metavar="FILE", help="prompts as benchmarks.suffix wrote them")
    options.add_argument("--store", type=Path, metavar="DIR", help="take its last good draft instead of training one")
    options.add_argument("--threads", type=int, default=1, help="of the engines and of Hugging Face")
    options.add_argument("--train-steps", type=int, help="default 300, quick 40")
    options.add_argument("--window", type=float, help="seconds, of useless drafts; default 30, quick 6")
    options.add_argument("--count", type=int, help="prompts of each workload that are timed; default 6, quick 1")
    arguments = options.parse_args()
    arguments.train_steps = arguments.train_steps or (40 if arguments.quick else 300)
    count = arguments.count or (1 if arguments.quick else 6)
    window_s = arguments.window or (6.0 if arguments.quick else 30.0)
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    by_workload: dict[str, list[Work]] = {}
    for work in works(load_answers(arguments)):
        by_workload.setdefault(work.workload, []).append(work)
    taught = [work for found in by_workload.values() for work in found[: len(found) // 2]]
    timed = {workload: found[len(found) // 2 :][:count] for workload, found in by_workload.items()}
    draft = _learnt(model_dir, arguments, taught)
    rates = Rates()
    with _engines(model_dir, draft, arguments.threads) as engines:
        ways = {**{kind: _asked(engine) for kind, engine in engines.items()}, **_hugging_face(model_dir)}
        for number, work in enumerate(itertools.chain(*timed.values())):
            names = list(ways) if work.num_samples == 1 else list(engines)
            for kind in names[number % len(names) :] + names[: number % len(names)]:
                started_s = time.perf_counter()
                num_tokens = ways[kind](work, f"{kind}-{number}")
                rates.add(work, kind, num_tokens, time.perf_counter() - started_s)
            print(f"{work.workload} {number + 1}", flush=True)
        expected = {kind: _expected(engines[kind]) for kind in KINDS if kind != "plain"}
    beside = {
        kind: Spread.of(_beside_plain(model_dir, one, by_workload["chat"], arguments, window_s))
        for kind, one in useless(draft, model_dir).items()
    }
    _finish(rates, list(timed), expected, beside, arguments)


def _finish(
    rates: Rates,
    workloads: Sequence[str],
    expected: dict[str, dict[str, tuple[float, float]]],
    beside: dict[str, Spread],
    arguments: Any,
) -> None:
    rows: list[tuple[str, object]] = [("", "median    (min … max)")]
    targets = []
    ratios: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        rows.append((f"{workload}: plain, token/s", rates.spread(workload, "plain")))
        ratios[workload] = {}
        for kind in ("head", "suffix", "hybrid", "generate", "lookup"):
            if (workload, kind) in rates.by_kind:
                ratio = rates.ratio(workload, kind, "plain")
                rows.append((f"{workload}: {kind} ÷ plain", ratio))
                ratios[workload][kind] = ratio.to_dict()
        best = max(rates.ratio(workload, kind, "plain").median for kind in ("head", "suffix"))
        hybrid = rates.ratio(workload, "hybrid", "plain").median
        targets += [
            Target(f"{workload}_hybrid_over_better_part", hybrid / best, 0.97),
            Target(f"{workload}_hybrid_over_plain", hybrid, 0.97),
        ]
    for kind, spread in beside.items():
        rows.append((f"{kind} draft ÷ plain, windows", spread))
        targets.append(Target(f"{kind.replace(' ', '_')}_lowest_window", spread.low, 0.97))
    for kind, found in expected.items():
        for batch, (forecast, measured) in found.items():
            rows.append((f"{kind}, {batch} together: expected ÷ measured token/s", f"{forecast / measured:8.2f}"))
    errors = [abs(forecast / measured - 1) for found in expected.values() for forecast, measured in found.values()]
    targets.append(Target("expected_throughput_error", max(errors, default=1.0), 0.1, at_least=False))
    document = {
        "threads": arguments.threads,
        "tokens_per_s": {
            workload: {kind: rates.spread(workload, kind).to_dict() for one, kind in rates.by_kind if one == workload}
            for workload in workloads
        },
        "ratios_over_plain": ratios,
        "useless_over_plain": {kind: spread.to_dict() for kind, spread in beside.items()},
        "expected_over_measured": {
            kind: {batch: round(forecast / measured, 4) for batch, (forecast, measured) in found.items()}
            for kind, found in expected.items()
        },
    }
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()
