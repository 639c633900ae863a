"""What a rollout's parts cost on the local engine, for benchmarks/rollout_sim.py, which keeps the result beside it.

    python -m benchmarks.rollout_costs [--quick] [--json FILE] [--prompts FILE.jsonl] [--answers FILE.jsonl] …

* A round by requests and tokens each (the next token and the proposals), at a short and a long context: the target's
  step as `benchmarks/step.py` runs it, all sizes in turns; the least of the times, since interruptions only add.
* Reading a prompt, which a sample pays for again wherever it goes on.
* What suffixes propose, at most 8 tokens, and how much of it is accepted, by the number of finished answers to the same
  prompt that the index of the group holds (0: own text alone). Groups of 8 sampled answers of `benchmarks/suffix.py`;
  every answer is replayed after each number of its siblings. Rounds are told apart by how sure the index is: where it
  knows nothing, nothing is proposed, and drafting costs nothing.
* What a proposal from a suffix takes.

`--json benchmarks/rollout_costs.json` replaces the table that the simulator reads.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, parser
from benchmarks.suffix import Answer, count_accepted, load_answers
from serving.local.kernels.library import compute_with
from serving.local.target import Target as TargetModel
from slipstream.models import resolve_model
from speculator.suffix import SuffixConfig, SuffixDrafter

BATCHES = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 3, 5, 9)
"""Tokens of each request in a round: the next one and up to 8 proposals."""
CONTEXTS = (128, 1024)
PREFILL_TOKENS = 32
"""The local engine reads prompts in pieces of this size."""
SIBLINGS = (0, 1, 3, 7)
MAX_DEPTH = 8
BOUNDS = (0.0, 0.25, 0.5, 0.75)
"""Rounds are told apart by the probability of their first proposal: none, below 0.25, …, from 0.75 on."""


def main() -> None:
    options = parser("What a rollout's parts cost on the local engine")
    options.add_argument("--threads", type=int, default=1, help="the demo's engine has one")
    options.add_argument("--answers", type=Path, metavar="FILE.jsonl", help="as in benchmarks.suffix")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    compute_with(arguments.threads)
    groups = group_answers(load_answers(arguments))
    repeats = 4 if arguments.quick else 20
    model_dir = resolve_model(arguments.model)
    round_ms, prefill_ms = measure_rounds(model_dir, repeats)
    suffixes, propose_us = measure_acceptance(groups)
    rows: list[tuple[str, object]] = [
        (f"ms, {requests} requests, context {context}", "".join(f"{cell:8.1f}" for cell in cells))
        for context, table in round_ms.items()
        for requests, cells in table.items()
    ]
    rows += [(f"ms to read a token at context {context}", f"{value:.2f}") for context, value in prefill_ms.items()]
    for count, values in suffixes.items():
        rows.append((f"tokens a verification after {count} siblings", f"{values['committed']:.3f}"))
        rows += [("  share, length, acceptance", str(list(each.values()))) for each in values["classes"]]
    rows.append(("µs a proposal", f"{propose_us:.0f}"))
    document: dict[str, Any] = {
        "command": "python -m benchmarks.rollout_costs",
        "model": Path(arguments.model).name,
        "threads": arguments.threads,
        "repeats": repeats,
        "num_answers": sum(len(group) for group in groups),
        "widths": WIDTHS,
        "round_ms": round_ms,
        "prefill_ms_a_token": prefill_ms,
        "suffixes": suffixes,
        "propose_us": propose_us,
    }
    finish(rows, [], document, arguments.json)


def measure_rounds(model_dir: Path, repeats: int) -> tuple[dict[int, dict[int, list[float]]], dict[int, float]]:
    """Least ms of a round by context, requests and width (a list, as `WIDTHS`); ms a token of reading by context."""
    target = TargetModel(model_dir, num_slots=max(BATCHES), context_length=max(CONTEXTS) + 64, cache_margin=max(WIDTHS))
    sizes = [(requests, width) for requests in BATCHES for width in WIDTHS] + [(1, PREFILL_TOKENS)]
    cells = [(context, *size) for context in CONTEXTS for size in sizes]
    times_ms = defaultdict[tuple[int, int, int], list[float]](list)
    generator = torch.Generator().manual_seed(0)
    for turn in range(repeats + 1):
        for context, requests, width in cells:
            tokens = torch.randint(len(target.embed), (requests, width), generator=generator)
            started = time.perf_counter()
            _step(target, tokens, [context] * requests)
            if turn:  # the first turn warms up
                times_ms[context, requests, width].append(1000 * (time.perf_counter() - started))
    least = {cell: round(min(times), 3) for cell, times in times_ms.items()}
    rounds = {
        context: {requests: [least[context, requests, width] for width in WIDTHS] for requests in BATCHES}
        for context in CONTEXTS
    }
    return rounds, {context: round(least[context, 1, PREFILL_TOKENS] / PREFILL_TOKENS, 4) for context in CONTEXTS}


@torch.inference_mode()
def _step(target: TargetModel, tokens: torch.Tensor, starts: list[int]) -> None:
    hidden, _ = target.forward(tokens, first_slot=0, starts=starts)
    target.ranking.likeliest(target.logits(hidden).flatten(0, 1))


def group_answers(answers: Sequence[Answer]) -> list[list[Answer]]:
    groups = defaultdict[str, list[Answer]](list)
    for answer in answers:
        if answer.group and len(answer.tokens) > 1:
            groups[answer.group].append(answer)
    return list(groups.values())


@dataclass
class _Rounds:
    """Verifications whose first proposal was given about the same probability, or that had no proposal."""

    rounds: int = 0
    proposed: int = 0
    reached: int = 0
    accepted: int = 0

    def to_dict(self, num_rounds: int) -> dict[str, float]:
        """`share` of all rounds, mean `length` of the chain, `acceptance` of a proposal that is reached."""
        return {
            "share": round(self.rounds / num_rounds, 4),
            "length": round(self.proposed / max(self.rounds, 1), 2),
            "acceptance": round(self.accepted / max(self.reached, 1), 4),
        }


def measure_acceptance(groups: Sequence[Sequence[Answer]]) -> tuple[dict[int, dict[str, Any]], float]:
    """Suffix proposals by the number of finished siblings; µs a proposal."""
    found: dict[int, dict[str, Any]] = {}
    propose_us: list[float] = []
    for count in SIBLINGS:
        classes = [_Rounds() for _ in range(len(BOUNDS) + 1)]
        for group in groups:
            for row, answer in enumerate(group):
                siblings = [group[(row + other + 1) % len(group)] for other in range(min(count, len(group) - 1))]
                _replay(answer, siblings, classes, propose_us)
        num_rounds = sum(each.rounds for each in classes)
        found[count] = {
            "committed": round(1 + sum(each.accepted for each in classes) / num_rounds, 4),
            "classes": [each.to_dict(num_rounds) for each in classes],
        }
    return found, round(statistics.median(propose_us), 1)


def _replay(answer: Answer, siblings: Sequence[Answer], classes: Sequence[_Rounds], propose_us: list[float]) -> None:
    drafter = SuffixDrafter(SuffixConfig(width=1))  # what is counted by class are chains
    for sibling in siblings:
        drafter.start(sibling.prompt, tenant="t", group_id="g").commit(sibling.tokens)
    request = drafter.start(answer.prompt, tenant="t", group_id="g")
    request.commit(answer.tokens[:1])
    done = 1
    while done < len(answer.tokens):
        started = time.perf_counter()
        proposal = request.propose(MAX_DEPTH)
        propose_us.append(1e6 * (time.perf_counter() - started))
        accepted = count_accepted(proposal.tree.tokens, answer.tokens[done:])
        tokens = answer.tokens[done : done + accepted + 1]
        request.commit(tokens)
        done += len(tokens)
        first = proposal.tree.probabilities[0] if proposal.tree.probabilities else -1.0
        rounds = classes[bisect_right(BOUNDS, first)]
        rounds.rounds += 1
        rounds.proposed += len(proposal.tree.tokens)
        rounds.reached += min(accepted + 1, len(proposal.tree.tokens))
        rounds.accepted += accepted


if __name__ == "__main__":
    main()
