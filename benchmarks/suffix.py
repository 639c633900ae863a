"""Suffix drafts replayed over real answers: accepted tokens by source, calibration, time, memory, parameters.

    python -m benchmarks.suffix [--quick] [--json FILE] [--prompts FILE.jsonl] [--answers FILE.jsonl]

The local engine answers four workloads once: chat, editing (its own code comes back with a small change asked for),
structured output (JSON lists), and groups of 8 sampled answers to one prompt. `--answers` keeps them, since decoding is
slow and a replay takes a second. Verification emits the text whatever was proposed, so a replay that commits the
longest correct prefix and one token more counts exactly what an engine would. 8 requests run at the same time.

"Speed" is committed tokens over the cost of a round, if a proposal costs 3% or 10% of one: a cheap one and a dear one.
"Own text" is a request that shares nothing; its answer then counts as its tenant's text too, so some of what it accepts
appears there. With `arctic_inference` installed its suffix trees are replayed too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.report import Target, finish, parser, pick_prompts
from benchmarks.common.engines import local_engine
from serving.engine import GenerateRequest
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model
from speculator.json_lines import read_json_lines
from speculator.sampling import SamplingParams
from speculator.suffix import SuffixConfig, SuffixDrafter, SuffixRequest
from speculator.suffix_index import NEW_TEXT, SuffixIndex
from speculator.suffix_tree import Source
from speculator.tree import ROOT

CONCURRENCY = 8
MAX_PROPOSALS = 8
NOTHING = -1
"""What the target emits behind an answer."""
MAX_PROMPT = 700
PRICES = 0.03, 0.1
SAMPLES = 8
EDITS = ("Rename the first function to `run`", "Add a docstring to every function", "Add a comment above each line")
LIST_REQUEST = 'Answer with a JSON list of objects with the keys "title", "description" and "importance".'


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`group` is empty except for samples of one prompt; `limit` is the request's max_tokens."""

    workload: str
    prompt: list[int]
    tokens: list[int]
    limit: int
    group: str = ""


@dataclass
class Replay:
    """What the verifications of some answers committed."""

    rounds: int = 0
    committed: int = 0
    expected: float = 0.0
    """Tokens, by the proposals' own probabilities."""
    proposed: int = 0
    accepted: Counter[Source] = field(default_factory=Counter)
    verdicts: list[tuple[float, bool]] = field(default_factory=list)
    """(estimated probability, accepted) of every proposal that verification reached."""
    propose_us: list[float] = field(default_factory=list)
    commit_s: float = 0.0

    @property
    def accept_length(self) -> float:
        return self.committed / self.rounds

    @property
    def speeds(self) -> tuple[float, ...]:
        """By price."""
        return tuple(self.accept_length / (1 + price * self.proposed / self.rounds) for price in PRICES)

    def __str__(self) -> str:
        sources = "  ".join(f"{source.name.lower()} {self.accepted[source] / self.rounds:.2f}" for source in Source)
        rate = (self.committed - self.rounds) / max(self.proposed, 1)
        expected = f"   expected {self.expected / self.committed:.2f} ×" if self.expected else ""
        return (
            f"{self.accept_length:6.3f}   {self.proposed / self.rounds:5.2f} a round, {rate:4.0%} accepted"
            f"{expected}   speed {self.speeds[0]:.3f} {self.speeds[1]:.3f}   {sources}"
        )

    def to_dict(self) -> dict[str, float]:
        accepted = {f"accepted_{source.name.lower()}": self.accepted[source] / self.rounds for source in Source}
        speeds = {f"speed_at_{price:.0%}": speed for price, speed in zip(PRICES, self.speeds, strict=True)}
        figures = {
            "accept_length": self.accept_length,
            "proposed": self.proposed / self.rounds,
            "expected_over_committed": self.expected / self.committed,
        }
        return {name: round(value, 4) for name, value in {**figures, **speeds, **accepted}.items()}


class Running:
    """One answer in replay."""

    def __init__(self, answer: Answer, request: SuffixRequest) -> None:
        self.answer, self.request = answer, request
        self.done = 0
        self.commit(1)

    def commit(self, num_tokens: int) -> None:
        tokens = self.answer.tokens[self.done : self.done + num_tokens]
        self.request.commit(tokens)
        self.done += len(tokens)

    def round(self, replay: Replay) -> None:
        most = min(MAX_PROPOSALS, self.answer.limit - self.done - 1)
        started = time.perf_counter()
        proposal = self.request.propose(most)
        proposed = time.perf_counter()
        tree, rest = proposal.tree, self.answer.tokens[self.done :]
        _, path = tree.walk(lambda _, depth: rest[depth] if depth < len(rest) else NOTHING)
        verified, done = time.perf_counter(), self.done
        self.commit(len(path) + 1)
        replay.commit_s += time.perf_counter() - verified
        replay.propose_us.append(1e6 * (proposed - started))
        replay.rounds += 1
        replay.committed += self.done - done
        replay.expected += 1 + sum(tree.reaches)
        replay.proposed += len(tree.tokens)
        replay.accepted.update(proposal.sources[node] for node in path)
        reached = {ROOT, *path}
        replay.verdicts += [
            (probability, node in reached)
            for node, (parent, probability) in enumerate(zip(tree.parents, tree.probabilities, strict=True))
            if parent in reached
        ]


def count_accepted(proposed: Sequence[int], true: Sequence[int]) -> int:
    """Leading proposals that are what the answer goes on with."""
    pairs = zip(proposed, true, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def replay(
    answers: Sequence[Answer],
    config: SuffixConfig,
    *,
    grouped: bool = True,
    shared: bool = True,
    at_once: int = CONCURRENCY,
) -> dict[str, Replay]:
    """Every answer by one tenant in this order, `at_once` at the same time; figures by workload."""
    drafter, replays = SuffixDrafter(config), defaultdict[str, Replay](Replay)
    waiting, running = list(reversed(answers)), list[Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            answer = waiting.pop()
            group_id = answer.group if grouped else ""
            running.append(Running(answer, drafter.start(answer.prompt, tenant="t", group_id=group_id, shared=shared)))
        for one in running:
            if one.done < len(one.answer.tokens):
                one.round(replays[one.answer.workload])
        running = [one for one in running if one.done < len(one.answer.tokens)]
    return replays


# -- answers ----------------------------------------------------------------------------------------------------------


async def _ask(engine: LocalEngine, prompt: str, limit: int, sample: int | None) -> tuple[list[int], list[int]]:
    """Prompt and answer in tokens: greedy, or a sample at temperature 0.8 with this seed."""
    request = GenerateRequest(
        request_id="",
        prompt_token_ids=tuple(engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])),
        max_tokens=limit,
        sampling=SamplingParams(temperature=0.0 if sample is None else 0.8),
        seed=sample,
    )
    chunks = [chunk.token_ids async for chunk in engine.generate(request)]
    return list(request.prompt_token_ids), [token for tokens in chunks for token in tokens]


def _answers(
    engine: LocalEngine, workload: str, prompts: Sequence[str], *, limit: int, num_samples: int = 0
) -> list[Answer]:
    """Greedy answers, or `num_samples` samples of each prompt, which then form a group."""

    async def together() -> list[tuple[list[int], list[int]]]:
        samples = list(range(num_samples)) or [None]
        return await asyncio.gather(*(_ask(engine, prompt, limit, seed) for prompt in prompts for seed in samples))

    groups = [str(number) for number in range(len(prompts)) for _ in range(num_samples)] or [""] * len(prompts)
    return [
        Answer(workload=workload, prompt=prompt, tokens=tokens, limit=limit, group=group)
        for group, (prompt, tokens) in zip(groups, asyncio.run(together()), strict=True)
    ]


def asks_for(edit: str, program: str) -> str:
    """The prompt of one small change in a program."""
    return f"```python\n{program}\n```\n{edit} in this code and change nothing else. Answer with the whole code."


def _decode(options: argparse.Namespace, count: int, limit: int) -> Iterator[list[Answer]]:
    """The answers of one workload after the other, `count` of each but the groups, of about `limit` tokens."""
    with local_engine(resolve_model(options.model), depth=0, num_threads=options.threads) as engine:
        texts = pick_prompts(options.prompts, 50 * count)
        texts = [text for text in texts if len(engine.tokenizer.encode(text.text)) < MAX_PROMPT]
        others = [text.text for text in texts if text.domain != "code"]
        programs = [text.text for text in texts if text.domain == "code"][:count]
        written = _answers(engine, "", programs, limit=limit)
        asked = [
            asks_for(edit, engine.tokenizer.decode(program.tokens))
            for program, edit in zip(written, itertools.cycle(EDITS), strict=False)
        ]
        yield _answers(engine, "editing", asked, limit=limit + 60)
        yield _answers(engine, "group", others[: count // 4], limit=limit, num_samples=SAMPLES)
        lists = [f"{text}\n{LIST_REQUEST}" for text in others[count : 2 * count]]
        yield _answers(engine, "structured", lists, limit=limit)
        yield _answers(engine, "chat", others[2 * count : 3 * count], limit=limit)


def read_answers(path: Path) -> list[Answer]:
    example = '{"workload": "chat", "prompt": [1], "tokens": [2], "limit": 8}'
    return [answer for _, answer in read_json_lines(path, Answer, example=example)]


def load_answers(options: argparse.Namespace, *, quick: tuple[int, int] = (8, 120)) -> list[Answer]:
    """From the file of `--answers` where it exists; decoded, and then written there, where it does not.

    `quick` are answers of a workload and tokens of an answer with `--quick`.
    """
    path: Path | None = options.answers
    if path is not None and path.exists():
        return read_answers(path)
    answers = [answer for workload in _decode(options, *(quick if options.quick else (24, 200))) for answer in workload]
    if path is not None:
        path.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    return answers


# -- figures ----------------------------------------------------------------------------------------------------------

SWEEP: dict[str, tuple[float, ...]] = {
    "alpha": (1.0, 2.0, 4.0, 8.0),
    "min_reach": (0.0, 0.05, 0.1, 0.2),
    "width": (1, 2, 3, 16),
    "max_match": (8, 16, 32, 64),
    "max_places": (4, 8, 16, 32, 64),
}


def arctic(answers: Sequence[Answer]) -> Replay:
    """The same replay over the suffix trees of arctic-inference, with their defaults."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache, result = SuffixDecodingCache(), Replay()
    waiting, running = list(reversed(list(enumerate(answers)))), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < CONCURRENCY:
            name, answer = waiting.pop()
            cache.start_request(name, answer.prompt)
            cache.add_active_response(name, answer.tokens[:1])
            running[name] = 1
        for name, done in list(running.items()):
            rest, started = answers[name].tokens[done:], time.perf_counter()
            context = (answers[name].prompt + answers[name].tokens[:done])[-cache.max_tree_depth :]
            proposed = cache.speculate(name, context, max_spec_tokens=MAX_PROPOSALS).token_ids
            result.propose_us.append(1e6 * (time.perf_counter() - started))
            accepted = count_accepted(proposed, rest)
            committed, started = rest[: accepted + 1], time.perf_counter()
            cache.add_active_response(name, committed)
            result.commit_s += time.perf_counter() - started
            result.rounds += 1
            result.committed += len(committed)
            result.proposed += len(proposed)
            running[name] += len(committed)
            if running[name] >= len(answers[name].tokens):
                cache.stop_request(name)
                del running[name]
    return result


def total(replays: Iterable[Replay]) -> Replay:
    """All workloads together."""
    result = Replay()
    for one in replays:
        result.rounds += one.rounds
        result.committed += one.committed
        result.expected += one.expected
        result.proposed += one.proposed
        result.accepted += one.accepted
        result.verdicts += one.verdicts
        result.propose_us += one.propose_us
        result.commit_s += one.commit_s
    return result


def mean_speeds(replays: Iterable[Replay]) -> list[float]:
    """Geometric mean over workloads, by price."""
    return [statistics.geometric_mean(speeds) for speeds in zip(*(one.speeds for one in replays), strict=True)]


def reliability(verdicts: Sequence[tuple[float, bool]]) -> list[tuple[int, float, float]]:
    """(number, mean estimate, share accepted) of the proposals in each tenth of estimated probability."""
    tenths = defaultdict[int, list[tuple[float, bool]]](list)
    for probability, accepted in verdicts:
        tenths[int(10 * probability)].append((probability, accepted))
    return [
        (len(part), statistics.mean(p for p, _ in part), statistics.mean(accepted for _, accepted in part))
        for _, part in sorted(tenths.items())
    ]


def bytes_per_token(tokens: Sequence[int]) -> float:
    """What a full index of these tokens takes."""
    tracemalloc.start()
    index = SuffixIndex(len(tokens))
    index.append(NEW_TEXT, tokens)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / len(index)


def main() -> None:
    options = parser("Suffix drafts over real answers")
    options.add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="read answers here, or decode and keep them"
    )
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = options.parse_args()
    answers, config = load_answers(arguments), SuffixConfig()
    rows: list[tuple[str, object]] = [(f"{len(answers)} answers, {sum(len(a.tokens) for a in answers)} tokens", "")]
    runs = {
        "own text": replay(answers, config, shared=False),
        "and tenant": replay(answers, config, grouped=False),
        "and group": (best := replay(answers, config)),
        "one at a time": replay(answers, config, at_once=1),
        "chains": replay(answers, replace(config, width=1)),
    }
    for workload in best:
        rows += [(f"{workload}: {name}", replays[workload]) for name, replays in runs.items()]
    overall = total(best.values())
    rows.append(("all workloads", overall))
    if find_spec("arctic_inference"):
        theirs = arctic(answers)
        rows.append(("all workloads, arctic-inference", theirs))
        rows += _times("arctic-inference", theirs)
    rows += _times("ours", overall)
    words = [token for answer in answers for token in answer.prompt + answer.tokens]
    memory = bytes_per_token(words), bytes_per_token(random.Random(0).choices(range(1 << 17), k=32_768))
    rows.append(("bytes a token: this text, random text", f"{memory[0]:.0f}, {memory[1]:.0f}"))
    tenths = reliability(overall.verdicts)
    rows += [(f"estimated {mean:.2f}", f"accepted {share:.2f} of {count}") for count, mean, share in tenths]
    error = sum(count * abs(mean - share) for count, mean, share in tenths) / len(overall.verdicts)
    sweep = {
        f"{name} {value:g}": mean_speeds(replay(answers, replace(config, **{name: value})).values())
        for name, values in SWEEP.items()
        for value in values
    }
    rows += [(f"speed with {name}", "  ".join(f"{speed:.3f}" for speed in speeds)) for name, speeds in sweep.items()]
    finish(
        rows,
        [
            Target("propose_us", statistics.median(overall.propose_us), 50.0, at_least=False),
            Target("commit_us_a_token", 1e6 * overall.commit_s / overall.committed, 10.0, at_least=False),
            Target("calibration_error", error, 0.05, at_least=False),
        ],
        {
            "workloads": {
                workload: {name: replays[workload].to_dict() for name, replays in runs.items()} for workload in best
            },
            "calibration": tenths,
            "bytes_a_token": {"text": memory[0], "random": memory[1]},
            "sweep": sweep,
        },
        arguments.json,
    )


def _times(whose: str, result: Replay) -> list[tuple[str, object]]:
    ordered = sorted(result.propose_us)
    return [
        (f"µs a proposal, {whose}", f"{statistics.median(ordered):.1f}, p99 {ordered[int(0.99 * len(ordered))]:.1f}"),
        (f"µs to commit a token, {whose}", f"{1e6 * result.commit_s / result.committed:.1f}"),
    ]


if __name__ == "__main__":
    main()
