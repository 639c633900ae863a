"""Gain of the learned gate on suffix proposals over calibration alone, and the upper bound of a perfect gate.

    python -m benchmarks.acceptance_gate [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] …

The local engine answers real prompts once, greedily; no prompt is asked twice. Verification emits the same text
whatever was proposed, so a replay that commits what is right of a tree, and one token more, counts what an engine
would. Each arm replays all answers, `--clients` of them at a time, with a suffix drafter and a planner of its own, both
those of the engines:

    calibration   `SuffixConfig(learns=False)`
    gate          the default: the gate begins untrained and learns from each verdict
    oracle        proposes exactly the right nodes of the same trees: the upper bound of any gate

`tree` is the local engine: a round takes `--step-ms`, and `--row-share` of that for each token in it, and the processor
time in which proposals were made and learned from. `chain` is SGLang: one length for all requests, whose rows all
count. The drafter in Python stands there for the compiled one, and its time does not count.

Gains are in tokens a second over calibration, on the answers behind the first quarter, with the paired bootstrapped 95%
interval over answers. The calibration error is that of ten bins over all proposals that were reached. Arms take turns
after each `--block` answers, so that a slow minute is everyone's.

Targets, for trees: a gain of 3% with an interval above 0, and a calibration error of 2%.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.answers import RECORDING_DEFAULTS, SHORTEST, add_recording_options, in_turn, recording
from benchmarks.common.report import Target, fill_in, finish, parser
from slipstream.models import resolve_model
from speculator.proposals.draft_tree import NO_PROPOSALS, ROOT, DraftTree
from speculator.proposals.length_planner import LengthPlanner
from speculator.proposals.planner import RoundPlanner
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter, SuffixRequest
from speculator.recording import RecordingReader

MOST = 16
"""Proposals of a request in a round: the local engine's default."""
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8)
"""Lengths of SGLang's chains."""
ARMS = "calibration", "gate", "oracle"
NOTHING = -1
"""Stands for the token after an answer's end."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Tokens of a prompt (or its tail) and of its greedy answer."""

    prompt: list[int]
    tokens: list[int]


@dataclass(eq=False)
class Totals:
    """Results of one arm."""

    tokens: np.ndarray
    """One element an answer; so is `seconds`."""
    seconds: np.ndarray
    rounds: int = 0
    proposed: int = 0
    drafting_s: float = 0.0
    verdicts: list[tuple[float, bool]] = field(default_factory=list)
    """(probability, accepted) of each proposal that was reached."""

    @property
    def calibration_error(self) -> float:
        predicted, accepted = (np.array(column, float) for column in zip(*self.verdicts, strict=True))
        tenth = np.minimum((10 * predicted).astype(int), 9)
        return float(sum(abs((predicted - accepted)[tenth == each].sum()) for each in range(10)) / len(tenth))


@dataclass(eq=False)
class _Running:
    number: int
    answer: Answer
    request: SuffixRequest
    done: int = 1


class Arm:
    """One way to judge proposals, in rounds of one engine."""

    def __init__(self, name: str, answers: Sequence[Answer], options: argparse.Namespace, *, is_chain: bool) -> None:
        self._is_oracle, self._is_chain, self._answers, self._options = name == "oracle", is_chain, answers, options
        self._drafter = SuffixDrafter(SuffixConfig(width=1 if is_chain else 3, learns=name == "gate"))
        self._rounds, self._lengths = RoundPlanner(max_depth=1), LengthPlanner(max_depth=1)
        self._next, self._running = 0, list[_Running]()
        self.totals = Totals(np.zeros(len(answers)), np.zeros(len(answers)))

    def serve(self, until: int) -> None:
        """Run rounds until all answers before number `until` have begun; for the last, until they have ended."""
        while self._next < until or (until == len(self._answers) and self._running):
            while len(self._running) < self._options.clients and self._next < until:
                answer = self._answers[self._next]
                request = self._drafter.start(answer.prompt, tenant="")
                request.commit(answer.tokens[:1])
                self._running.append(_Running(self._next, answer, request))
                self._next += 1
            self._round()
            self._running = [one for one in self._running if one.done < len(one.answer.tokens)]

    def _round(self) -> None:
        totals, running = self.totals, self._running
        started_s = time.thread_time()
        grown = [one.request.propose(MOST).tree for one in running]
        drafting_s = time.thread_time() - started_s
        paths = [_right_of(tree, one) for tree, one in zip(grown, running, strict=True)]
        for tree, path in zip(grown, paths, strict=True):
            reached = {ROOT, *path}
            totals.verdicts += [
                (probability, node in reached)
                for node, (parent, probability) in enumerate(zip(tree.parents, tree.probabilities, strict=True))
                if parent in reached
            ]
        if self._is_oracle:
            grown = [
                DraftTree.chain([tree.tokens[node] for node in path], [1.0] * len(path))
                for tree, path in zip(grown, paths, strict=True)
            ]
        trees, rows, seconds = self._in_chains(grown) if self._is_chain else self._in_trees(grown)
        for one, tree in zip(running, trees, strict=True):
            num_committed = min(len(_right_of(tree, one)) + 1, len(one.answer.tokens) - one.done)
            committed = one.answer.tokens[one.done : one.done + num_committed]
            started_s = time.thread_time()
            one.request.commit(committed)
            drafting_s += time.thread_time() - started_s
            one.done += num_committed
            totals.tokens[one.number] += num_committed
        shares = np.array(rows) / sum(rows)
        if not self._is_chain:
            seconds += drafting_s
        totals.seconds[[one.number for one in running]] += seconds * shares
        totals.rounds += len(running)
        totals.proposed += sum(rows) - len(running)
        totals.drafting_s += drafting_s

    def _in_trees(self, grown: Sequence[DraftTree]) -> tuple[list[DraftTree], list[int], float]:
        """(pruned trees that the planner verifies, rows of each request, seconds of the round)."""
        batch = len(grown)
        plan = self._rounds.plan(
            [""] * batch, batch, [tree.reaches for tree in grown], head_depth=0, unread=[0] * batch
        )
        trees = [tree.first(plan.num_proposals) for tree in grown]
        rows = [len(tree.tokens) + 1 for tree in trees]
        seconds = self._seconds(sum(rows))
        self._rounds.observe(plan, num_proposals=max(rows) - 1, num_steps=0, num_pairs=0, draft_s=0.0, verify_s=seconds)
        return trees, rows, seconds

    def _in_chains(self, grown: Sequence[DraftTree]) -> tuple[list[DraftTree], list[int], float]:
        """The same for chains of one length."""
        batch = len(grown)
        gains_BL = np.array([[sum(tree.reaches[:length]) for length in LENGTHS] for tree in grown])
        plan = self._lengths.plan(batch, LENGTHS, head_lengths=[0], text_gains_BL=gains_BL)
        from_text = plan.from_text or (False,) * batch
        trees = [
            tree.first(plan.num_proposals) if is_text else NO_PROPOSALS
            for tree, is_text in zip(grown, from_text, strict=True)
        ]
        rows = [plan.num_proposals + 1] * batch
        seconds = self._seconds(sum(rows))
        self._lengths.observe(batch, plan.num_proposals, seconds, uses_head=False)
        return trees, rows, seconds

    def _seconds(self, rows: int) -> float:
        return float(self._options.step_ms / 1000 * (1 + self._options.row_share * rows))


def _right_of(tree: DraftTree, one: _Running) -> list[int]:
    """The nodes of the tree that continue the recorded answer."""
    rest = one.answer.tokens[one.done :]
    return tree.walk(lambda _, depth: rest[depth] if depth < len(rest) else NOTHING)[1]


@dataclass(frozen=True)
class Gain:
    """Relative gain in tokens a second of one arm over another, with its 95% interval."""

    value: float
    lower: float
    upper: float

    @classmethod
    def of(cls, arm: Totals, over: Totals, first: int) -> Gain:
        columns = [each[first:] for each in (arm.tokens, arm.seconds, over.tokens, over.seconds)]
        picked = np.random.default_rng(0).integers(0, len(columns[0]), (2000, len(columns[0])))
        resampled = [column[picked].sum(1) for column in columns]
        values = resampled[0] / resampled[1] * resampled[3] / resampled[2] - 1
        tokens, seconds, other_tokens, other_seconds = (column.sum() for column in columns)
        lower, upper = np.percentile(values, [2.5, 97.5]).tolist()
        return cls(float(tokens / seconds * other_seconds / other_tokens - 1), lower, upper)

    def __str__(self) -> str:
        return f"{self.value:+.2%} ({self.lower:+.2%} … {self.upper:+.2%})"


def main() -> None:
    arguments = _arguments()
    path = arguments.traces or recording(arguments, resolve_model(arguments.model), in_turn)
    answers = _read(path)
    first = len(answers) // 4
    rows: list[tuple[str, object]] = [("", "tokens a round  proposed  error of p  µs to draft  gain over calibration")]
    gains: dict[str, Gain] = {}
    document: dict[str, object] = {"answers": len(answers), "tokens": sum(len(one.tokens) for one in answers)}
    errors: dict[str, float] = {}
    for shape in ("tree", "chain"):
        arms = {name: Arm(name, answers, arguments, is_chain=shape == "chain") for name in ARMS}
        for until in [*range(arguments.block, len(answers), arguments.block), len(answers)]:
            for arm in arms.values():
                arm.serve(until)
        for name, arm in arms.items():
            label, totals = f"{shape} {name}", arm.totals
            gains[label] = Gain.of(totals, arms["calibration"].totals, first)
            errors[label] = totals.calibration_error
            figures = {
                "tokens_a_round": float(totals.tokens.sum() / totals.rounds),
                "proposed": totals.proposed / totals.rounds,
                "calibration_error": errors[label],
                "drafting_us": 1e6 * totals.drafting_s / totals.rounds,
            }
            gain = gains[label]
            document[label] = {**figures, "gain": gain.value, "lower": gain.lower, "upper": gain.upper}
            a_round, proposed, error, drafting_us = figures.values()
            rows.append((label, f"{a_round:14.3f}  {proposed:8.2f}  {error:10.2%}  {drafting_us:11.0f}  {gain}"))
    targets = [
        Target("gain of the gate, trees", gains["tree gate"].value, 0.03),
        Target("its lower end", gains["tree gate"].lower, 0.0),
        Target("its calibration error", errors["tree gate"], 0.02, at_least=False),
    ]
    finish(rows, targets, document, arguments.json)


def _read(path: Path) -> list[Answer]:
    """Each prompt's first greedy answer, in an order that mixes the domains."""
    found: dict[tuple[int, ...], Answer] = {}
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            start = trace.header.num_prompt_tokens - trace.header.first_position
            prompt, tokens = trace.token_ids[:start].tolist(), trace.token_ids[start:].tolist()
            if len(tokens) >= SHORTEST and trace.header.sampling.temperature == 0:
                found.setdefault(tuple(prompt), Answer(prompt, tokens))
    answers = list(found.values())
    random.Random(0).shuffle(answers)
    return answers


def _arguments() -> argparse.Namespace:
    options = parser("The learned gate on suffix proposals against calibration alone, replayed over real answers")
    add_recording_options(options)
    options.add_argument("--clients", type=int, default=4, help="requests that decode together")
    options.add_argument("--step-ms", type=float, default=9.0, help="of a decode step, without its rows")
    options.add_argument("--row-share", type=float, default=0.043, help="what a row adds to a step")
    options.add_argument("--block", type=int, default=8, help="answers before the next arm has its turn")
    arguments = options.parse_args()
    fill_in(arguments, RECORDING_DEFAULTS)
    return arguments


if __name__ == "__main__":
    main()
