"""How often the gate is wrong: candidates whose true change of acceptance length is known, judged on few traces each.

    python -m benchmarks.gate [--quick] [--json FILE] [--recording FILE.rec] [--prompts FILE.jsonl] …

A draft learns from a part of the recorded answers. Its states along the way, and its last state with graded noise on
the weights, are all asked what they would commit on the other answers, the population. Each ordered pair of them is a
candidate and an incumbent; over the whole population the change of acceptance length from one to the other is known
exactly. The gate sees only as many traces as the trainer holds out by default, drawn at random from the population with
replacement: without it, a sample of a small population would say more than a sample of endless traffic does.

    false promotion   promoted, though it is worse by ε (`gate_epsilon`) or more
    false refusal     not promoted, though it is better by the effect size or more; held candidates count as refused

Only pairs that differ by at most MAX_CHANGE count, the others being easy. The golden set is left out; it only refuses.

Target: at most 5% each.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Target, fill_in, finish, parser
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.replay import Feed, read_split
from slipstream.topics import built_in_prompts, read_prompts
from speculator.acceptance import Acceptance
from speculator.fresh import fresh_draft
from speculator.model import Eagle3Draft
from trainer.batch import Example, pack
from trainer.config import TrainerConfig, load_config
from trainer.evaluate import predict_acceptance
from trainer.gate import MIN_TRACES, Outcome, Pair, compare, decide
from trainer.shadow import MIN_CONFIDENCE
from trainer.step import Learner

MAX_CHANGE = 0.15
SMALL_RECORDING = Path(__file__).parents[1] / "tests" / "data" / "smollm2.rec"
NOISE_LEVELS = 2 * (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Deviation of the noise, as a share of that of each tensor's weights."""

Scores = list[Acceptance]
"""Of one draft, by trace of the population."""


@dataclass(frozen=True)
class Candidate:
    """One candidate against one incumbent: `change` is the truth."""

    change: float
    pairs: list[Pair]


def drafts(learner: Learner, examples: Sequence[Example], config: TrainerConfig, *, states: int) -> Iterator[str]:
    """Bring `learner.averaged` from state to state, by training and then by noise; yields what each is."""
    num_steps = 12 * states
    feed = Feed(examples, config, num_steps=num_steps, seed=config.seed)
    for step in range(num_steps):
        learner.step(pack(feed.draw(step), max_context=config.max_context))
        if step % 12 == 11 and step > num_steps // 3:
            yield f"{step + 1} steps"
    weights = {name: weight.clone() for name, weight in learner.averaged.named_parameters()}
    generator = torch.Generator().manual_seed(config.seed)
    for level in NOISE_LEVELS:
        with torch.no_grad():
            for name, weight in learner.averaged.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(weights[name] + level * weights[name].std(correction=0) * noise)
        yield f"noise {level}"


def scores_of(draft: Eagle3Draft, population: Iterable[Example], depth: int) -> Scores:
    return [
        predict_acceptance(draft, [example], depths=[depth], min_confidence=MIN_CONFIDENCE)[depth]
        for example in population
    ]


def candidates(scores: Sequence[Scores]) -> list[Candidate]:
    """Every ordered pair of drafts that is not easy to tell apart."""
    found = []
    for candidate, incumbent in permutations(scores, 2):
        pairs = [Pair(*both) for both in zip(candidate, incumbent, strict=True)]
        change = compare(pairs).change
        if abs(change) <= MAX_CHANGE:
            found.append(Candidate(change, pairs))
    return found


@dataclass(frozen=True)
class Rates:
    """How a gate that sees `num_traces` of each candidate decides, over all candidates and draws."""

    num_traces: int
    false_promotion: float
    false_refusal: float
    refused_though_no_worse: float
    """Plainly refused, not only held, though the candidate is no worse than the incumbent."""
    worst_false_promotion: float
    """Of any one candidate."""
    promoted: dict[str, float]
    """Share of promotions by true change."""

    def __str__(self) -> str:
        by_change = ", ".join(f"{name} {share:.2f}" for name, share in self.promoted.items())
        return (
            f"false promotions {self.false_promotion:.4f} (worst candidate {self.worst_false_promotion:.3f}), "
            f"false refusals {self.false_refusal:.4f}; promoted at a true change of {by_change}"
        )


def rates_of(
    known: Sequence[Candidate], config: TrainerConfig, *, num_traces: int, draws: int, effect_size: float
) -> Rates:
    rng = random.Random(config.seed)
    outcomes = [Counter(_draw(one, config, rng, num_traces) for _ in range(draws)) for one in known]

    def share(outcome: Outcome, of: Callable[[float], bool]) -> float:
        chosen = [counts[outcome] / draws for one, counts in zip(known, outcomes, strict=True) if of(one.change)]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    epsilon = config.gate_epsilon
    bins = [-0.10, -0.05, -0.02, 0.0, 0.02, 0.05, 0.10]
    return Rates(
        num_traces=num_traces,
        false_promotion=share(Outcome.PROMOTE, lambda change: change <= -epsilon),
        false_refusal=1 - share(Outcome.PROMOTE, lambda change: change >= effect_size),
        refused_though_no_worse=share(Outcome.REFUSE, lambda change: change >= 0),
        worst_false_promotion=max(
            (
                counts[Outcome.PROMOTE] / draws
                for one, counts in zip(known, outcomes, strict=True)
                if one.change <= -epsilon
            ),
            default=float("nan"),
        ),
        promoted={
            f"{low:+.0%} to {high:+.0%}": round(share(Outcome.PROMOTE, _between(low, high)), 4)
            for low, high in pairwise(bins)
        },
    )


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda change: low <= change < high


def _draw(one: Candidate, config: TrainerConfig, rng: random.Random, num_traces: int) -> Outcome:
    sample = compare(rng.choices(one.pairs, k=num_traces))
    epsilon, golden_epsilon = config.gate_epsilon, config.golden_epsilon
    return decide(sample, None, incumbent=1, epsilon=epsilon, golden_epsilon=golden_epsilon).outcome


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    model_dir = resolve_model(arguments.model)
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, seed=arguments.seed, **unused)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=arguments.seed)
    recording = arguments.recording or _recording(arguments, model_dir)
    examples = read_split([recording], model_dir, draft, seed=0, learn=False).held_out
    random.Random(arguments.seed).shuffle(examples)
    learnt, population = examples[: len(examples) // 3], examples[len(examples) // 3 :]
    learner, scores, seconds = Learner(draft, config), list[Scores](), list[float]()
    for name in drafts(learner, learnt, config, states=arguments.states):
        start_s = time.perf_counter()
        scores.append(scores_of(learner.averaged, population, config.gate_depth))
        seconds.append(time.perf_counter() - start_s)
        print(f"{name}: {sum(scores[-1], Acceptance()).length:.3f} tokens a verification", flush=True)
    known = candidates(scores)
    found = {
        count: rates_of(known, config, num_traces=count, draws=arguments.draws, effect_size=arguments.effect_size)
        for count in (MIN_TRACES, 8, config.holdout_traces)
    }
    _finish(found, known, population, sum(seconds) / len(seconds) / len(population), config, arguments)


def _finish(
    found: dict[int, Rates],
    known: Sequence[Candidate],
    population: Sequence[Example],
    trace_s: float,
    config: TrainerConfig,
    arguments: argparse.Namespace,
) -> None:
    usual, effect_size = found[config.holdout_traces], arguments.effect_size
    num_worse = sum(one.change <= -config.gate_epsilon for one in known)
    num_better = sum(one.change >= effect_size for one in known)
    tokens = sum(example.num_bases for example in population) / len(population)
    rows = [
        ("population", f"{len(population)} answers of {tokens:.0f} tokens, not learnt from"),
        ("candidates", f"{len(known)}: {num_worse} worse by ε or more, {num_better} better by the effect size or more"),
        ("draws of each candidate", arguments.draws),
        ("ε, effect size", f"{config.gate_epsilon}, {effect_size}"),
        *((f"{count} traces", rates) for count, rates in found.items()),
        ("seconds a draft and trace", f"{trace_s:.3f}"),
    ]
    document: dict[str, Any] = {
        "false_promotion_rate": round(usual.false_promotion, 5),
        "false_refusal_rate": round(usual.false_refusal, 5),
        "effect_size": effect_size,
        "epsilon": config.gate_epsilon,
        "num_candidates": len(known),
        "num_worse": num_worse,
        "num_better": num_better,
        "draws": arguments.draws,
        "population_traces": len(population),
        "tokens_a_trace": round(tokens, 1),
        "seconds_a_draft_and_trace": round(trace_s, 4),
        "by_num_traces": {str(count): vars(rates) for count, rates in found.items()},
    }
    targets = [
        Target("candidates", len(known), 200),
        Target("false promotions", usual.false_promotion, 0.05, at_least=False),
        Target("false refusals", usual.false_refusal, 0.05, at_least=False),
    ]
    finish(rows, targets, document, arguments.json)


def _recording(arguments: argparse.Namespace, model_dir: Path) -> Path:
    if arguments.quick:
        return SMALL_RECORDING
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    options = RecordOptions(
        model_dir=model_dir, max_tokens=arguments.max_tokens, temperature=arguments.temperature, num_threads=1
    )
    workload = "+".join(dict.fromkeys(prompt.domain for prompt in prompts))
    return recorded(workload, prompts, arguments.answers, options, arguments.cache)


def _arguments() -> argparse.Namespace:
    options = parser("How often the gate promotes what is worse, and does not promote what is better")
    options.add_argument("--recording", type=Path, metavar="FILE.rec", help="default: answers recorded now, once")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--answers", type=int, default=120, help="answers to record")
    options.add_argument("--max-tokens", type=int, default=96, help="completion tokens an answer")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--states", type=int, default=15, help="states of the draft in training; a third is left out")
    options.add_argument("--draws", type=int, help="sets of traces that each candidate is judged by")
    options.add_argument("--effect-size", type=float, default=0.02, help="a better candidate is better by this or more")
    arguments = options.parse_args()
    fill_in(arguments, {"draws": (20, 100)})
    return arguments


if __name__ == "__main__":
    main()
