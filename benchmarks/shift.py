"""Does the draft keep what it knew while it learns what is new: traffic moves from A to B and comes back to A.

    python -m benchmarks.shift [--quick] [--json FILE] [--prompts FILE.jsonl] [--a DOMAIN] [--b DOMAIN] [--jobs N] …

    A ──▶ before ──▶ B ──▶ on return ──▶ A again (answers that were not shown) ──▶ after
          the static draft stays here

Both domains are answered once by the local engine and kept as recordings (benchmarks/workloads.py). A fifth of the
answers is held out; the others arrive evenly over the steps of their phase, and each step is the service's own: offer
what arrived to the replay, draw, learn. The policies differ in the replay's memory and in nothing else:

    replay        the trainer's own, with bytes for a share of all traffic, so that something has to be forgotten
    newest_only   the same bytes, all of them for the newest traces: no reservoirs
    no_replay     the last few traces

They learn from the same arrivals in as many steps. Acceptance is predicted on the held-out answers with chains that no
confidence ends (trainer/evaluate.py). Recorded proposals all count fully, whatever their age: the versions of one
recording say nothing about those of the other, and the default loss does not use them.

Targets, medians over seeds for `replay` at the largest depth: on return, before anything of A is seen again, acceptance
on A is at least 0.95 of what it was before the shift; and after B its length on B, which is the throughput as far as
acceptance limits it, is at least 1.25 times that of the static draft, `replay`'s own at the end of the first phase.
"""

from __future__ import annotations

import argparse
import multiprocessing  # noqa: TID251 - between our own processes
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor  # noqa: TID251
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.replay import HELD_OUT_SHARE
from slipstream.topics import built_in_prompts, read_prompts
from speculator.errors import ConfigError, TraceError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingReader
from trainer.batch import Example, cut, make_example, pack
from trainer.config import TrainerConfig, load_config
from trainer.domains import DomainNames
from trainer.drift import DriftMonitor
from trainer.evaluate import predict_acceptance
from trainer.priority import priority
from trainer.provenance import Stored, provenance_of
from trainer.replay import Admission, Replay
from trainer.step import Learner

REPLAY, NEWEST_ONLY, NO_REPLAY = "replay", "newest_only", "no_replay"
POLICIES = (REPLAY, NEWEST_ONLY, NO_REPLAY)
STATIC = "static"
# The phases, as the curve names them.
A, B, A_AGAIN = "a", "b", "a_again"
SHARE_BEFORE = 2 / 3
"""Of the learnt answers of A, those that come before the shift."""
PASSES = 3
"""Nominal: a batch holds whole traces, and so half more than `batch_tokens`. Each is learnt from four to five times."""
FEW = 4
"""Traces that the memory of `no_replay` holds, on average."""
USUAL = ("math", "code")
RETENTION, RECOVERY = 0.95, 1.25
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class ShiftOptions:
    """One run. `depths` are evaluated; `memory_share` is the replay's memory, as a share of all learnt traffic."""

    recording_a: Path
    recording_b: Path
    model_dir: Path
    policy: str
    seed: int
    depths: Sequence[int]
    memory_share: float
    passes: float = PASSES
    """`batch_tokens` of a phase's steps, as a multiple of the tokens that arrive in it."""
    points: int = 4
    """Points of the curve in each phase."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What arrives in each phase, in the order of the recordings, and what is held out of each domain (A and B)."""

    phases: dict[str, list[Stored]]
    held_out: dict[str, list[Example]]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each arriving trace."""
        return [stored.num_bytes for arriving in self.phases.values() for stored in arriving]


def read_stored(path: Path, draft_ids_V: Tensor, *, feature_width: int) -> list[Stored]:
    """The usable traces of a recording."""
    found = []
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            try:
                example = make_example(trace, draft_ids_V, feature_width=feature_width)
            except TraceError:
                continue
            found.append(Stored(example=example, provenance=provenance_of(trace)))
    return found


def split_traffic(of_a: Sequence[Stored], of_b: Sequence[Stored], *, seed: int) -> Traffic:
    """Raises ConfigError where a recording holds too little for its phases."""
    rng = random.Random(seed)
    learnt_a, held_out_a = _hold_out(of_a, rng)
    learnt_b, held_out_b = _hold_out(of_b, rng)
    num_before = round(SHARE_BEFORE * len(learnt_a))
    if not 0 < num_before < len(learnt_a) or not learnt_b:
        raise ConfigError("the recordings hold too few traces for a shift: raise --answers")
    phases = {A: learnt_a[:num_before], B: learnt_b, A_AGAIN: learnt_a[num_before:]}
    return Traffic(phases=phases, held_out={A: held_out_a, B: held_out_b})


def _hold_out(stored: Sequence[Stored], rng: random.Random) -> tuple[list[Stored], list[Example]]:
    count = max(round(HELD_OUT_SHARE * len(stored)), 1)
    chosen = set(rng.sample(range(len(stored)), min(count, len(stored))))
    learnt = [one for index, one in enumerate(stored) if index not in chosen]
    return learnt, [stored[index].example for index in sorted(chosen)]


def make_replay(
    policy: str, sizes: Sequence[int], config: TrainerConfig, rng: random.Random, *, share: float
) -> Replay:
    """The policy's replay for traffic of these sizes in bytes."""
    max_bytes = round(share * sum(sizes))
    if policy == NO_REPLAY:
        # A trace larger than the whole memory would never be learnt from.
        max_bytes = max(round(FEW * statistics.fmean(sizes)), *sizes)
    return Replay(
        max_bytes=max_bytes,
        max_waiting=config.max_waiting_traces,
        recent_share=config.replay_recent_share if policy == REPLAY else 1.0,
        max_tenant_share=config.max_tenant_share,
        max_draft_lag=config.max_draft_lag,
        rng=rng,
        seed=config.seed,
    )


class Training:
    """The service's intake and step (trainer/intake.py, trainer/service.py) on traces that are here already."""

    def __init__(self, learner: Learner, replay: Replay, config: TrainerConfig, rng: random.Random) -> None:
        self.replay = replay
        self._learner, self._config, self._rng = learner, config, rng
        self._domains, self._drift = DomainNames(config.max_domains), DriftMonitor()
        self.num_refused = 0
        """Arrivals that got no place in the replay."""
        self.trained_tokens = 0

    def take(self, stored: Stored) -> None:
        provenance = stored.provenance
        domain = self._domains.name(provenance.domain, provenance.tenant)
        weight = priority(provenance.acceptance, *self._drift.level(domain), bound=self._config.max_priority)
        if self.replay.add(stored, domain=domain, priority=weight) is not Admission.NEW:
            self.num_refused += 1
        elif provenance.acceptance is not None:
            self._drift.observe(domain, provenance.num_accepted, provenance.num_completion_tokens)

    def step(self) -> float:
        """Returns the loss."""
        batch = self.replay.draw(self._config.batch_tokens, published=0).batch
        windows = [cut(drawn.stored.example, max_bases=self._config.max_bases, rng=self._rng) for drawn in batch]
        report = self._learner.step(pack(windows, max_context=self._config.max_context))
        self.trained_tokens += sum(window.num_bases for window in windows) if report.applied else 0
        return report.loss


def run_shift(options: ShiftOptions) -> dict[str, Any]:
    """The document of one run: the same for the same options and settings, `seconds` excepted. One thread."""
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=options.model_dir, seed=options.seed, **unused)
    draft = fresh_draft(options.model_dir, draft_vocab_size=config.draft_vocab_size, seed=options.seed)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    of_a, of_b = (
        read_stored(path, draft_ids_V, feature_width=draft.fc.in_features)
        for path in (options.recording_a, options.recording_b)
    )
    traffic = split_traffic(of_a, of_b, seed=options.seed)
    rng = random.Random(options.seed)
    learner = Learner(draft, config)
    replay = make_replay(options.policy, traffic.sizes, config, rng, share=options.memory_share)
    training = Training(learner, replay, config, rng)
    fresh: dict[str, Any] = {"phase": None, "step": 0, "trained_tokens": 0, "loss": None}
    curve = [fresh | _lengths(learner, traffic, options)]
    memory: dict[str, Any] = {}
    for phase, arriving in traffic.phases.items():
        num_tokens = sum(stored.num_bases for stored in arriving)
        num_steps = max(round(options.passes * num_tokens / config.batch_tokens), options.points)
        losses: list[float] = []
        for step in range(num_steps):
            for stored in arriving[-(-step * len(arriving) // num_steps) : -(-(step + 1) * len(arriving) // num_steps)]:
                training.take(stored)
            losses.append(training.step())
            if (step + 1) * options.points // num_steps > step * options.points // num_steps:
                point: dict[str, Any] = {
                    "phase": phase,
                    "step": learner.num_steps,
                    "trained_tokens": training.trained_tokens,
                    "loss": round(statistics.fmean(losses), _DIGITS),
                }
                curve.append(point | _lengths(learner, traffic, options))
                losses.clear()
        memory[phase] = {"traces": len(replay), "bytes_by_domain": replay.num_bytes_by_domain()}
    return {
        "policy": options.policy,
        "seed": options.seed,
        "steps": learner.num_steps,
        "trained_tokens": training.trained_tokens,
        "traces": {phase: len(arriving) for phase, arriving in traffic.phases.items()},
        "held_out_traces": {domain: len(examples) for domain, examples in traffic.held_out.items()},
        "refused_traces": training.num_refused,
        "memory_at_end_of": memory,
        "curve": curve,
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def _lengths(learner: Learner, traffic: Traffic, options: ShiftOptions) -> dict[str, dict[str, float]]:
    """Acceptance lengths now, by domain and depth."""
    return {
        f"accept_length_{domain}": {
            str(depth): round(found.length, _DIGITS)
            for depth, found in predict_acceptance(learner.averaged, examples, depths=options.depths).items()
        }
        for domain, examples in traffic.held_out.items()
    }


def figures(run: Mapping[str, Any], static: Mapping[str, Any], depth: int) -> dict[str, float]:
    """What one run shows; `static` is the run whose draft at the end of the first phase is the static one."""

    def length(of: Mapping[str, Any], domain: str, phase: str) -> float:
        at_end = [point for point in of["curve"] if point["phase"] == phase][-1]
        return float(at_end[f"accept_length_{domain}"][str(depth)])

    before, on_return, after = (length(run, A, phase) for phase in (A, B, A_AGAIN))
    b_static, b_after = length(static, B, A), length(run, B, B)
    return {
        "a_before": before,
        "a_on_return": on_return,
        "a_after": after,
        "b_static": b_static,
        "b_after": b_after,
        "retention_on_return": on_return / before,
        "retention_after": after / before,
        "recovery": b_after / b_static,
    }


def spreads(runs: Mapping[tuple[str, int], Mapping[str, Any]], depth: int) -> dict[str, dict[str, Spread]]:
    """Each policy's figures over the seeds, from runs by (policy, seed)."""
    found: dict[str, dict[str, Spread]] = {}
    for policy in dict.fromkeys(policy for policy, _ in runs):
        seeds = [seed for name, seed in runs if name == policy]
        each = [figures(runs[policy, seed], runs[REPLAY, seed], depth) for seed in seeds]
        found[policy] = {name: Spread.of([one[name] for one in each]) for name in each[0]}
    return found


def report(runs: Mapping[tuple[str, int], Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Table, targets, JSON and exit code."""
    by_depth = {depth: spreads(runs, depth) for depth in arguments.depths}
    rows: list[tuple[str, object]] = [("", f"A = {arguments.a}, B = {arguments.b}; median (min … max) over seeds")]
    for depth, by_policy in by_depth.items():
        kept = by_policy[REPLAY]
        rows.append((f"depth {depth}, {STATIC}", _path(kept, "a_before") + "     " + _path(kept, "b_static")))
        for policy, found in by_policy.items():
            name, moves = f"depth {depth}, {policy}", _path(found, "a_before", "a_on_return", "a_after")
            rows.append((name, moves + "     " + _path(found, "b_static", "b_after")))
            rows.append((f"{name}: A on return / before", found["retention_on_return"]))
            rows.append((f"{name}: A after / before", found["retention_after"]))
            rows.append((f"{name}: B after / static draft", found["recovery"]))
    promised = by_depth[max(arguments.depths)][REPLAY]
    finish(
        rows,
        [
            Target("retention_on_return of replay", promised["retention_on_return"].median, RETENTION),
            Target("recovery of replay", promised["recovery"].median, RECOVERY),
        ],
        {
            "a": arguments.a,
            "b": arguments.b,
            "memory_share": arguments.memory_share,
            "passes": arguments.passes,
            "depths": arguments.depths,
            "policies": {
                policy: {
                    f"depth_{depth}": {name: spread.to_dict() for name, spread in by_policy[policy].items()}
                    for depth, by_policy in by_depth.items()
                }
                for policy in dict.fromkeys(policy for policy, _ in runs)
            },
            "runs": list(runs.values()),
        },
        arguments.json,
    )


def _path(found: Mapping[str, Spread], *names: str) -> str:
    """Tokens a verification, one after the other: `A 1.62 → 1.55 → 1.64`."""
    return f"{names[0][0].upper()} " + " → ".join(f"{found[name].median:.2f}" for name in names)


def run_all(tasks: Sequence[ShiftOptions], jobs: int) -> Iterator[dict[str, Any]]:
    """The runs in the order of the tasks, `jobs` at a time in processes of their own."""
    if jobs == 1:
        yield from map(run_shift, tasks)
        return
    # A forked process would inherit torch's thread pools in whatever state they are.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run_shift, tasks)


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    usual = USUAL if set(USUAL) <= set(domains) else domains
    arguments.a, arguments.b = arguments.a or usual[0], arguments.b or usual[1]
    options = RecordOptions(
        model_dir=model_dir, max_tokens=arguments.max_tokens, temperature=0.0, num_threads=arguments.threads
    )
    recording_a, recording_b = (
        recorded(domain, prompts, arguments.answers, options, arguments.cache) for domain in (arguments.a, arguments.b)
    )
    tasks = [
        ShiftOptions(
            recording_a=recording_a,
            recording_b=recording_b,
            model_dir=model_dir,
            policy=policy,
            seed=seed,
            depths=arguments.depths,
            memory_share=arguments.memory_share,
            passes=arguments.passes,
            points=arguments.points,
        )
        for seed in range(arguments.seeds)
        for policy in POLICIES
    ]
    runs = {}
    for run in run_all(tasks, arguments.jobs):
        runs[run["policy"], run["seed"]] = run
        print(f"seed {run['seed']}, {run['policy']}: {run['steps']} steps in {run['seconds']} s", flush=True)
    report(runs, arguments)


def _arguments() -> argparse.Namespace:
    options = parser("Traffic that moves away and comes back: what the draft keeps, what it learns")
    options.add_argument("--a", help="domain of the prompts before and after; default: math, or else the first")
    options.add_argument("--b", help="domain of the prompts in between; default: code, or else the second")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--answers", type=int, help="answers to record a domain, at most")
    options.add_argument("--max-tokens", type=int, help="completion tokens an answer")
    options.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default=[3, 5])
    options.add_argument("--seeds", type=int, help="seeds 0, 1, …")
    options.add_argument("--memory-share", type=float, default=0.5, help="the replay's memory, of all traffic")
    options.add_argument("--passes", type=float, default=PASSES, help="batch_tokens of a phase over its tokens")
    options.add_argument("--points", type=int, help="points of the curve in each phase")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the recording engine")
    options.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (20, 110), "max_tokens": (48, 96), "seeds": (1, 3), "points": (1, 3)})
    arguments.depths.sort()
    return arguments


if __name__ == "__main__":
    main()
