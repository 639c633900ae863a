"""Compare slimmer heads: cost as a share of a target's step, and accept length after equal training.

    python -m benchmarks.slim_heads [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec]
                                    [--runs FILE.jsonl] [--arms 8192x1536 4096x512 …] [--steps 150] [--seeds 2] …

An arm is the size of the draft's vocabulary and the width of its MLP. `rank` behind it: the vocabulary is the first
ids, as without `--vocab-from`; of all others it is chosen by the tokens of the answers that the draft learns from.

**Cost**: the local engine's target takes a step of one token a request, and behind it the draft reads two pairs of each
and proposes one token, or three. The target has then been through the caches, as in a round. Arms and depths take
turns, step by step. The figures are medians of the draft's time over the median of the target's steps. With one thread
time is the CPU's, so that other processes hardly count; with `--cost-threads 2` it is the clock's, on a quiet machine.

**Accept length**: drafts of all arms learn from a recording of plain greedy answers in the same steps
(slipstream/replay.py) and are scored on the same held-out answers, seed by seed.

Both together are tokens a second of the head alone at a depth of three, over plain decoding: the accept length over a
step, the head's part and 3.7% of a step for every proposal that is verified. Targets: one request's first token takes
at most 0.05 of a step, a chain of three 0.09, both of the arm `--judged`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.answers import RECORDING_DEFAULTS, add_recording_options, in_turn, recording
from benchmarks.common.paired import Runs, all_runs
from benchmarks.common.report import Target, fill_in, finish, parser
from serving.local.draft import Pairs, PairSpan, ServingDraft
from serving.local.kernels.library import set_num_threads
from serving.local.request import DraftSource
from serving.local.target.model import Target as TargetModel
from slipstream.models import resolve_model
from slipstream.replay import ReplayOptions, read_split, replay
from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import ChainRule
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

ARMS = ("8192x1536rank", "8192x1536", "8192x512", "4096x1536", "4096x512", "2048x1536", "2048x512", "2048x256")
JUDGED = "2048x512"
DEPTHS = (1, 3)
BATCHES = (1, 4)
_CONTEXT = 300
"""Context length of a timed round, in pairs."""
_ROW = 0.037
"""Cost of a verified row as a share of a step (benchmarks/results/step.md)."""


class Arm(NamedTuple):
    draft_vocab_size: int
    intermediate_size: int
    is_by_rank: bool

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Parse SIZExWIDTH[rank]. Raises ValueError for another form."""
        size, width = name.removesuffix("rank").split("x")
        return cls(int(size), int(width), name.endswith("rank"))


Costs = dict[tuple[str, int, int], float]
"""Shares of a target's step by arm, batch size and depth."""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    model_dir = resolve_model(arguments.model)
    costs, step_ms = shares(arguments.arms, model_dir, num_rounds=arguments.rounds, threads=arguments.cost_threads)
    runs: Runs = {}
    if arguments.steps:
        path = arguments.traces or recording(arguments, model_dir, in_turn)
        runs = all_runs(
            arguments.runs,
            arguments.arms,
            arguments.seeds,
            about=f"{arguments.steps} steps, {path.name}",
            run=lambda arm, seed: learnt(arm, seed, path, model_dir, arguments.steps),
        )
    rows: list[tuple[str, object]] = [
        ("target's step, ms", "  ".join(f"{batch} requests {ms:.2f}" for batch, ms in step_ms.items())),
        ("arm", "cost by batch size and depth; accept length at depth 3 by seed; over plain decoding for one request"),
        *((arm, _row(arm, costs, runs, arguments.seeds)) for arm in arguments.arms),
    ]
    targets = [
        Target(f"{arguments.judged}: part of a step, depth {depth}", costs[arguments.judged, 1, depth], bound, False)
        for depth, bound in zip(DEPTHS, (0.05, 0.09), strict=True)
    ]
    document: dict[str, Any] = {
        "step_ms": step_ms,
        "cost": [
            {"arm": arm, "batch": batch, "depth": depth, "of_step": round(cost, 4)}
            for (arm, batch, depth), cost in costs.items()
        ],
        "runs": [{"arm": arm, **run} for (arm, _), run in runs.items()],
    }
    finish(rows, targets, document, arguments.json)


def learnt(name: str, seed: int, path: Path, model_dir: Path, num_steps: int) -> dict[str, Any]:
    """Replay with a fresh draft of this arm; returns the document."""
    arm = Arm.parse(name)
    split = read_split([path], model_dir, fresh_draft(model_dir, seed=seed), seed=seed)
    with tempfile.TemporaryDirectory() as root:
        ensure_lineage(
            DraftStore(Path(root)),
            model_dir,
            target_fingerprint(model_dir),
            draft_vocab_size=arm.draft_vocab_size,
            intermediate_size=arm.intermediate_size,
            seed=seed,
            texts=() if arm.is_by_rank else [example.token_ids.tolist() for example in split.learnt],
        )
        options = ReplayOptions(
            recordings=[path],
            model_dir=model_dir,
            depths=range(1, max(DEPTHS) + 1),
            num_steps=num_steps,
            seed=seed,
            store=Path(root),
        )
        return replay(options)


@torch.inference_mode()
def shares(arms: Sequence[str], model_dir: Path, *, num_rounds: int, threads: int) -> tuple[Costs, dict[int, float]]:
    """(time of each arm's proposals as a share of a target's step, milliseconds of the step by batch size)."""
    set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    most = max(BATCHES)
    target = TargetModel(model_dir, num_slots=most, context_length=_CONTEXT + 16, cache_margin=16)
    drafts = {}
    for name in arms:
        arm = Arm.parse(name)
        size, width = arm.draft_vocab_size, arm.intermediate_size
        draft = fresh_draft(model_dir, draft_vocab_size=size, intermediate_size=width, seed=0).to(torch.bfloat16)
        drafts[name] = ServingDraft(draft, 1, num_slots=most, length=_CONTEXT + 16)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(most, _CONTEXT + 16, draft.fc.in_features, generator=generator).bfloat16()
    tokens = torch.randint(draft.config.vocab_size, (_CONTEXT + 2,), generator=generator).tolist()
    for slot in range(most):
        target.forward([tokens[:_CONTEXT]], first_slot=slot, starts=[0])
        for serving in drafts.values():
            serving.read(Pairs(tokens[:_CONTEXT], [PairSpan(slot, 0, _CONTEXT)], features))
    steps: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    times: dict[tuple[str, int, int], list[float]] = {
        (name, batch, depth): [] for name in arms for batch in BATCHES for depth in DEPTHS
    }
    sources = [DraftSource(SamplingParams(temperature=0), 0)] * most
    for batch in BATCHES:
        pairs = Pairs(tokens[_CONTEXT:] * batch, [PairSpan(slot, _CONTEXT, 2) for slot in range(batch)], features)
        for _, name, depth in itertools.product(range(num_rounds), arms, DEPTHS):
            started_s = clock()
            hidden_Md, _ = target.forward([tokens[:1]] * batch, first_slot=0, starts=[_CONTEXT] * batch)
            target.ranking.likeliest(target.logits(hidden_Md))
            stepped_s = clock()
            drafts[name].propose(pairs, [1.0] * batch, sources[:batch], ChainRule([1.0] * depth, [-1.0] * depth))
            times[name, batch, depth].append(clock() - stepped_s)
            steps[batch].append(stepped_s - started_s)
    step_s = {batch: statistics.median(of_batch) for batch, of_batch in steps.items()}
    costs = {key: statistics.median(taken) / step_s[key[1]] for key, taken in times.items()}
    return costs, {batch: round(1000 * seconds, 3) for batch, seconds in step_s.items()}


def _row(arm: str, costs: Mapping[tuple[str, int, int], float], runs: Runs, num_seeds: int) -> str:
    parts = [f"{batch}×{depth} {costs[arm, batch, depth]:.3f}" for batch in BATCHES for depth in DEPTHS]
    if runs:
        lengths = [float(runs[arm, seed]["accept_length"]) for seed in range(num_seeds)]
        depth = max(DEPTHS)
        gain = statistics.fmean(lengths) / (1 + costs[arm, 1, depth] + depth * _ROW)
        parts += [*(f"{length:.4f}" for length in lengths), f"{gain:.3f} ×"]
    return "  ".join(parts)


def _arguments() -> argparse.Namespace:
    options = parser("Slimmer heads: their cost, and their accept length after equal training")
    add_recording_options(options)
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every run here, and go on from it")
    options.add_argument("--arms", nargs="+", default=ARMS, metavar="SIZExWIDTH[rank]")
    options.add_argument("--judged", default=JUDGED, help=f"whose cost has targets; default {JUDGED}")
    options.add_argument("--steps", type=int, help="optimiser steps of a run; default 150, quick 0: costs alone")
    options.add_argument("--seeds", type=int, help="seeds 0, 1, …; default 2, quick 1")
    options.add_argument("--cost-threads", type=int, default=1, help="of the target and the draft that are timed")
    options.add_argument("--rounds", type=int, help="timed rounds of each arm and depth; default 200, quick 30")
    arguments = options.parse_args()
    fill_in(arguments, {**RECORDING_DEFAULTS, "steps": (0, 150), "seeds": (1, 2), "rounds": (30, 200)})
    arguments.arms = list(dict.fromkeys([*arguments.arms, arguments.judged]))
    return arguments


if __name__ == "__main__":
    main()
