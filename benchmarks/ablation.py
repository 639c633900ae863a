"""Which loss learns fastest from the same traces: acceptance after equal trained tokens, and tokens to the baseline's.

    python -m benchmarks.ablation [--quick] [--json FILE] [--prompts FILE.jsonl] [--cache DIR] [--workloads a,b,a>b] …

Workloads are domains of the prompts, `a+b`: both mixed, and `a>b`: traffic that shifts from a to b. Each is answered
once by the local engine, whose draft learns from the answers as it would in service (so that recorded proposals come
from versions of a draft that improves), and kept as a recording in the cache. Every loss then learns from that
recording with the same seeds, the same data and the same steps (`slipstream/replay.py`), with as many training-time-
test steps as the deepest chain, and is evaluated on held-out answers at each depth. The baseline is forward KL on
committed text alone.

Target: the best loss needs at most 0.7 of the trained tokens that the baseline needs to reach the baseline's final
acceptance length, in the median over workloads, depths and seeds. The baseline's own tokens count up to where its curve
first reaches that length, not up to the end of the run: on a plateau that would flatter every loss, the baseline too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from benchmarks.common import Spread, Target, finish, parser
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target import Target as TargetModel
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from slipstream.models import cache_root, resolve_model
from slipstream.replay import ReplayOptions, replay
from slipstream.topics import Prompt, built_in_prompts, read_prompts
from speculator.checkpoint import draft_state, target_fingerprint
from speculator.codec import encode_trace
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingHeader, RecordingWriter
from speculator.sampling import SamplingParams
from speculator.trace import Trace
from trainer.batch import Example, cut, make_example, pack
from trainer.config import load_config
from trainer.step import Learner

BASELINE = "forward_kl"
LOSSES = (
    BASELINE,
    "reverse_kl",
    "acceptance",
    "log_acceptance",
    "forward_kl=0.7,cross_entropy=0.3",
    "forward_kl=1,log_acceptance=1",
    "forward_kl=1,discard=1",
    "forward_kl=1,discard=1,correction=topr",
    "forward_kl=1,discard=1,verdicts=fresh",
    "forward_kl=1,policy_gradient=0.1,correction=tis",
    "forward_kl=1,policy_gradient=0.1,correction=cispo",
    "forward_kl=1,policy_gradient=0.1,discard=0.5,correction=weighted_topr,negative=0.5",
)
QUICK_LOSSES = (BASELINE, "forward_kl=1,log_acceptance=1", "forward_kl=1,discard=1,correction=topr")
# Answers that are generated at the same time, between two updates of the draft.
GROUP = 8
Key = tuple[str, str, int]
"""Workload, loss, seed."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a workload is answered and recorded."""

    model_dir: Path
    max_tokens: int
    temperature: float
    num_threads: int
    seed: int = 0
    depth: int = 5
    passes: int = 3
    """Times that the draft learns from new answers' tokens before the next group is answered."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings of the engine besides, as `LocalEngineConfig` names them."""

    def key(self, prompts: Sequence[Prompt]) -> str:
        """Names everything that the recording depends on."""
        parts = (
            target_fingerprint(self.model_dir), self.max_tokens, self.temperature, self.seed, self.depth, self.passes,
            sorted(self.engine.items()), [(prompt.domain, prompt.text) for prompt in prompts],
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _LearningEngine:
    """A local engine that keeps its traces, and a learner that puts better drafts into it between groups of answers."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self.traces: list[Trace] = []
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        model_dir = options.model_dir
        unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
        self._config = load_config(model_dir=model_dir, seed=options.seed, **unused)
        draft = fresh_draft(model_dir, draft_vocab_size=self._config.draft_vocab_size, seed=options.seed)
        self._draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
        self._learner = Learner(draft, self._config)
        self._examples: list[Example] = []
        self._rng = random.Random(options.seed)
        self._engine = self._build()

    def _build(self) -> LocalEngine:
        options = self._options
        config = LocalEngineConfig(
            model_dir=options.model_dir,
            model_name=options.model_dir.name,
            depth=options.depth,
            control_share=0.0,
            num_slots=GROUP,
            num_threads=options.num_threads,
            **options.engine,
        )
        target = TargetModel(
            config.model_dir,
            num_slots=config.num_slots,
            context_length=config.context_length,
            cache_margin=config.max_depth + 1,
        )
        in_service = fresh_draft(
            config.model_dir, draft_vocab_size=self._config.draft_vocab_size, seed=options.seed
        ).to(target.embed.dtype)
        return LocalEngine(
            config,
            target=target,
            draft=in_service,
            draft_version=1,
            target_fingerprint=target_fingerprint(config.model_dir),
            load_draft=self._versions.__getitem__,
            metrics=EngineMetrics(CollectorRegistry()),
            meter=SpeedupMeter(),
            on_trace=self.traces.append,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            self._engine.stop()

    def answer(self, prompts: Sequence[Prompt], first_index: int) -> list[Trace]:
        """The traces of one group of answers, in the order of the prompts."""
        asyncio.run(self._ask(prompts, first_index))
        # The last chunk of an answer is delivered before its trace is handed over.
        while len(self.traces) < len(prompts) and self._engine.health().alive:
            time.sleep(0.01)
        found, self.traces[:] = list(self.traces), []
        return sorted(found, key=lambda trace: int(trace.header.request_id))

    async def _ask(self, prompts: Sequence[Prompt], first_index: int) -> None:
        async def one(index: int, prompt: Prompt) -> None:
            tokens = self._engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            longest = self._engine.info.context_length - self._options.max_tokens
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=tuple(tokens[-longest:]),
                max_tokens=self._options.max_tokens,
                sampling=SamplingParams(temperature=self._options.temperature),
                seed=index,
                policy=CapturePolicy(domain=prompt.domain),
            )
            async for _ in self._engine.generate(request):
                pass

        await asyncio.gather(*(one(first_index + row, prompt) for row, prompt in enumerate(prompts)))

    def learn(self, traces: Sequence[Trace]) -> None:
        """A few steps on the new traces and older ones, then the better draft into the engine."""
        width = self._learner.draft.fc.in_features
        new = [make_example(trace, self._draft_ids_V, feature_width=width) for trace in traces]
        self._examples += new
        batch_tokens = self._config.batch_tokens
        for _ in range(self._options.passes * sum(example.num_bases for example in new) // batch_tokens + 1):
            order = self._rng.sample(self._examples, len(self._examples))
            chosen: list[Example] = []
            while order and sum(example.num_bases for example in chosen) < batch_tokens:
                chosen.append(order.pop())
            windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in chosen]
            self._learner.step(pack(windows, max_context=self._config.max_context))
        version = self._engine.draft_version + 1
        self._versions[version] = draft_state(self._learner.averaged)
        self._engine.install_draft(version)
        del self._versions[version]


def record_workload(path: Path, prompts: Sequence[Prompt], options: RecordOptions, *, note: str) -> None:
    """Answer the prompts in their order and write the recording, whole or not at all."""
    engine = _LearningEngine(options)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    header = RecordingHeader(
        target_fingerprint=target_fingerprint(options.model_dir),
        model=options.model_dir.name,
        created_ms=time.time_ns() // 1_000_000,
        note=note,
    )
    with engine.running(), RecordingWriter(temporary, header) as writer:
        for first in range(0, len(prompts), GROUP):
            torch.set_num_threads(options.num_threads)
            traces = [trace for trace in engine.answer(prompts[first : first + GROUP], first) if trace.num_tokens > 8]
            for trace in traces:
                writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
            engine.learn([trace for trace in traces if trace.num_completion_tokens > 2])
    temporary.rename(path)


def workload_prompts(name: str, prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """At most `count` prompts, as many of each phase of a shift, in its order; none comes twice."""
    phases = name.split(">")
    chosen: list[Prompt] = []
    for phase in phases:
        domains = phase.split("+")
        for domain in domains:
            if all(prompt.domain != domain for prompt in prompts):
                raise ConfigError(f"no prompt has the domain {domain}: check --workloads and --prompts")
        of_phase = [prompt for prompt in prompts if prompt.domain in domains]
        share = min(count // len(phases), len(of_phase))
        chosen += random.Random(seed).sample(of_phase, share)
    return chosen


def tokens_to_reach(curve: Sequence[dict[str, Any]], length: float, depth: int) -> float:
    """Trained tokens at which the curve first reaches `length`, between two of its points linearly; inf if never."""
    points = [(point["trained_tokens"], point["accept_length_by_depth"][str(depth)]) for point in curve]
    if points[0][1] >= length:
        return 0.0
    for (tokens, before), (more_tokens, after) in itertools.pairwise(points):
        if after >= length:
            return float(tokens + (more_tokens - tokens) * (length - before) / (after - before))
    return float("inf")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One loss on one workload at one depth, over the seeds."""

    workload: str
    depth: int
    loss: str
    lengths: tuple[float, ...]
    """Acceptance lengths after all steps."""
    token_ratios: tuple[float, ...]
    """Trained tokens to the baseline's final acceptance length, as a share of those that the baseline needed."""

    def __str__(self) -> str:
        ratio = statistics.median(self.token_ratios)
        return f"{Spread.of(self.lengths)}   {'never' if ratio == float('inf') else f'{ratio:.2f} × tokens'}"

    def to_dict(self) -> dict[str, Any]:
        finite = [None if ratio == float("inf") else round(ratio, 4) for ratio in self.token_ratios]
        return {**vars(self), "lengths": [round(length, 4) for length in self.lengths], "token_ratios": finite}


def cells_of(runs: dict[Key, dict[str, Any]], depths: Sequence[int]) -> list[Cell]:
    """The table from runs by (workload, loss, seed)."""
    workloads = dict.fromkeys(workload for workload, _, _ in runs)
    losses = dict.fromkeys(loss for _, loss, _ in runs)
    seeds = dict.fromkeys(seed for _, _, seed in runs)
    cells = []
    for workload in workloads:
        for depth in depths:
            for loss in losses:
                lengths, ratios = [], []
                for seed in seeds:
                    run, baseline = runs[workload, loss, seed], runs[workload, BASELINE, seed]
                    goal = baseline["curve"][-1]["accept_length_by_depth"][str(depth)]
                    lengths.append(run["curve"][-1]["accept_length_by_depth"][str(depth)])
                    needed = max(tokens_to_reach(baseline["curve"], goal, depth), 1.0)
                    ratios.append(tokens_to_reach(run["curve"], goal, depth) / needed)
                cells.append(
                    Cell(workload=workload, depth=depth, loss=loss, lengths=tuple(lengths), token_ratios=tuple(ratios))
                )
    return cells


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    workloads = arguments.workloads or [*domains[: 1 if arguments.quick else 3], ">".join(domains[:2])]
    record = RecordOptions(
        model_dir=model_dir,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        num_threads=arguments.threads,
    )
    arguments.cache.mkdir(parents=True, exist_ok=True)
    recordings = {}
    for workload in workloads:
        chosen = workload_prompts(workload, prompts, arguments.answers, seed=0)
        path = recordings[workload] = arguments.cache / f"{record.key(chosen)}.rec"
        if not path.exists():
            print(f"recording {workload}: {len(chosen)} answers", flush=True)
            record_workload(path, chosen, record, note=f"workload {workload}")
    asked = {
        (workload, loss, seed): ReplayOptions(
            recordings=[path],
            model_dir=model_dir,
            depths=arguments.depths,
            loss=loss,
            num_steps=arguments.steps,
            seed=seed,
            num_points=arguments.points,
        )
        for workload, path in recordings.items()
        for seed in range(arguments.seeds)
        for loss in arguments.losses
    }
    runs = replay_all(asked, num_processes=arguments.jobs)
    _finish(cells_of(runs, arguments.depths), runs, arguments)


def replay_all(asked: dict[Key, ReplayOptions], *, num_processes: int) -> dict[Key, dict[str, Any]]:
    """Every run, some at a time, each on one thread; they do not depend on each other or on how many run."""
    with ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running = {pool.submit(replay, options): key for key, options in asked.items()}
        runs = {}
        for done in as_completed(running):
            workload, loss, seed = key = running[done]
            runs[key] = done.result()
            length, seconds = runs[key]["accept_length"], runs[key]["seconds"]
            print(f"{workload}, seed {seed}, {loss}: {length} in {seconds} s", flush=True)
    return {key: runs[key] for key in asked}


def _finish(cells: list[Cell], runs: dict[Key, dict[str, Any]], arguments: argparse.Namespace) -> None:
    overall = {
        loss: statistics.median(ratio for cell in cells if cell.loss == loss for ratio in cell.token_ratios)
        for loss in arguments.losses
    }
    winner = min(overall, key=lambda loss: overall[loss])
    rows = [(f"{cell.workload}, depth {cell.depth}, {cell.loss}", cell) for cell in cells]
    totals = [(f"tokens to the baseline, all workloads, {loss}", f"{ratio:8.2f} ×") for loss, ratio in overall.items()]
    finish(
        [("", "acceptance length, median (min … max) over seeds; trained tokens to the baseline's"), *rows, *totals],
        [Target(f"trained_tokens_to_baseline of {winner}", overall[winner], arguments.target, at_least=False)],
        {
            "baseline": BASELINE,
            "winner": winner,
            "median_token_ratio": {loss: None if ratio == float("inf") else ratio for loss, ratio in overall.items()},
            "cells": [cell.to_dict() for cell in cells],
            "runs": [{"workload": workload, "seed_index": seed, **run} for (workload, _, seed), run in runs.items()],
        },
        arguments.json,
    )


def _arguments() -> argparse.Namespace:
    options = parser("Losses on the same recorded traces")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument(
        "--workloads", type=lambda text: text.split(","), help="domains, mixtures and shifts: code,qa+rag,qa>code"
    )
    options.add_argument("--answers", type=int, help="answers to record a workload")
    options.add_argument("--max-tokens", type=int, help="completion tokens an answer")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default=[3, 5])
    options.add_argument("--seeds", type=int, help="seeds 0, 1, …")
    options.add_argument("--steps", type=int, help="default: every trace about four times")
    options.add_argument("--points", type=int, default=12, help="points of each curve")
    options.add_argument("--losses", nargs="+", help=f"the baseline {BASELINE} is always among them")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the recording engine")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    options.add_argument("--target", type=float, default=0.7)
    arguments = options.parse_args()
    quick = arguments.quick
    arguments.answers = arguments.answers or (24 if quick else 240)
    arguments.max_tokens = arguments.max_tokens or (48 if quick else 128)
    arguments.seeds = arguments.seeds or (1 if quick else 3)
    arguments.steps = arguments.steps or (24 if quick else None)
    losses = arguments.losses or (QUICK_LOSSES if quick else LOSSES)
    arguments.losses = list(dict.fromkeys([BASELINE, *losses]))
    arguments.depths.sort()
    return arguments


if __name__ == "__main__":
    main()
