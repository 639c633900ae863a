"""Do several drafts beat one: lineages that forked from a shared base and learnt their own domain, against the base.

    python -m benchmarks.lineages [--quick] [--json FILE] [--prompts FILE.jsonl] [--lineages a,b+c] [--seeds 0,1,2]

    all domains ──▶ base ──┬──▶ all domains ─────────────────────────▶ shared
                           ├──▶ domains of lineage 1 ──▶ equal total ──▶ equal each
                           └──▶ domains of lineage 2 ──▶ equal total ──▶ equal each

Recorded greedy answers (benchmarks/answers.py), as many of each lineage, a fifth of each held out. The base learns from
all of them in turn; at the fork the shared draft goes on with all, and each lineage with its own alone. `equal total`:
the lineages together have learnt as many tokens after the fork as the shared draft; `equal each`: each of them has, so
that learning costs as many times more as there are lineages. Acceptance is predicted on the held-out answers
(trainer/evaluate.py), every draft on the same ones.

Then, of the drafts with equal total, what choosing them costs. `by domain` knows each answer's lineage; `best for each
answer` knows what each draft will commit; `by prompt` takes the draft that foretells most tokens of the prompt's end;
`measured` is the gateway's own policy (serving/gateway/choice.py) on a stream of requests of random domains, which
knows nothing but the name of the domain and what earlier answers committed.

Target: lineages chosen by domain commit at least as many tokens a verification as the shared draft, equal total.
Seeds run one after the other, each some minutes; `--earlier FILE.json` adds those of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import RECORDING_DEFAULTS, add_recording_options, read_answers, recording
from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.replayed import Answer
from serving.gateway.choice import Choice
from slipstream.models import resolve_model
from slipstream.replay import HELD_OUT_SHARE
from speculator.acceptance import Acceptance
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.lineages import BASE
from speculator.model import Eagle3Draft
from trainer.batch import Example, cut, pack
from trainer.config import TrainerConfig, load_config
from trainer.evaluate import predict_acceptance
from trainer.step import Learner

SHARED = "shared"
USUAL = "math,qa+rag"
DEPTH = 4
MOST_HELD_OUT = 24
"""Answers of a lineage."""
PROMPT_TAIL = 64
"""Tokens of the prompt's end that `by prompt` looks at."""
REQUESTS = 400
"""Of the stream on which the gateway's policy is run."""
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Of one lineage."""

    learnt: list[Answer] = field(repr=False)
    held_out: list[Answer] = field(repr=False)


def split(answers: Sequence[Answer], lineages: Sequence[str], *, seed: int) -> dict[str, Answers]:
    """As many answers for each lineage ("a" or "a+b", domains). Raises ConfigError where one has too few."""
    rng = random.Random(seed)
    own = {name: [each for each in answers if each.trace.header.domain in name.split("+")] for name in lineages}
    count = min(map(len, own.values()))
    num_held_out = min(round(HELD_OUT_SHARE * count), MOST_HELD_OUT)
    if num_held_out < 2:
        raise ConfigError(
            f"one of {', '.join(lineages)} has {count} answers: check --lineages, --prompts and --answers"
        )
    found = {}
    for name, candidates in own.items():
        chosen = rng.sample(candidates, count)
        found[name] = Answers(learnt=chosen[num_held_out:], held_out=chosen[:num_held_out])
    return found


class Turns:
    """Batches of windows: answers of every lineage in shuffled passes, of whichever had fewest tokens so far."""

    def __init__(self, answers: Mapping[str, Answers], config: TrainerConfig, *, seed: int) -> None:
        self._config, self._rng = config, random.Random(seed)
        self._passes = {name: self._endless([one.example for one in each.learnt]) for name, each in answers.items()}
        self.tokens = dict.fromkeys(answers, 0)
        """Of each lineage, so far."""

    def _endless(self, examples: list[Example]) -> Iterator[Example]:
        while True:
            yield from self._rng.sample(examples, len(examples))

    def step(self, learner: Learner) -> int:
        """Learn from one batch; returns its tokens."""
        windows, num = [], 0
        while num < self._config.batch_tokens:
            name = min(self.tokens, key=self.tokens.__getitem__)
            window = cut(next(self._passes[name]), max_bases=self._config.max_bases, rng=self._rng)
            windows.append(window)
            self.tokens[name] += window.num_bases
            num += window.num_bases
        learner.step(pack(windows, max_context=self._config.max_context))
        return num


def learn(learner: Learner, turns: Turns, num_tokens: int) -> None:
    while num_tokens > 0:
        num_tokens -= turns.step(learner)


def fork(learner: Learner, config: TrainerConfig, draft: Eagle3Draft) -> Learner:
    """A learner that goes on from there, with its moments and running average."""
    copied = Learner(draft, config)
    copied.load_state({name: tensor.clone() for name, tensor in learner.state().items()})
    return copied


Table = dict[str, list[Acceptance]]
"""Of each draft, each held-out answer's acceptance, in the order of the lineages."""


def evaluate(learner: Learner, answers: Mapping[str, Answers], *, depth: int) -> list[Acceptance]:
    return [
        predict_acceptance(learner.averaged, [answer.example], depths=[depth])[depth]
        for each in answers.values()
        for answer in each.held_out
    ]


@torch.no_grad()
def foretold(draft: Eagle3Draft, answer: Answer, *, tail: int) -> float:
    """Share of the prompt's last `tail` tokens that the draft would have proposed, given all before each of them."""
    trace = answer.trace
    num = trace.header.num_prompt_tokens - trace.header.first_position
    tokens = torch.from_numpy(trace.token_ids[:num]).long()
    if num < 3:
        return 0.0
    positions = torch.arange(num - 1) + trace.header.first_position
    feature = draft.fuse(trace.aux_hidden[: num - 1][None])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    out = draft(tokens[None, 1:], feature, positions[None], attend)
    # Position t reads token t + 1 and predicts token t + 2; the last one predicts the answer's first.
    proposed = draft.target_ids[draft.logits(out[0, :-1][-tail:]).argmax(-1)]
    return float((proposed == tokens[2:][-tail:]).float().mean())


def run_seed(answers: Sequence[Answer], arguments: argparse.Namespace, model_dir: Path, seed: int) -> dict[str, Any]:
    """The document of one seed: of the draft, the split and the order."""
    started_s = time.perf_counter()
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, seed=seed, ttt_steps=DEPTH, **unused)

    def fresh() -> Eagle3Draft:
        return fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=seed)

    by_lineage = split(answers, arguments.lineages, seed=seed)
    base = Learner(fresh(), config)
    mixed = Turns(by_lineage, config, seed=seed)
    before, after = round(arguments.fork * arguments.tokens), round((1 - arguments.fork) * arguments.tokens)
    learn(base, mixed, before)
    table: Table = {"base": evaluate(base, by_lineage, depth=DEPTH)}
    forks = {name: fork(base, config, fresh()) for name in by_lineage}
    learn(base, mixed, after)
    table[SHARED] = evaluate(base, by_lineage, depth=DEPTH)
    scores: dict[str, list[float]] = {}
    for name, learner in forks.items():
        own = Turns({name: by_lineage[name]}, config, seed=seed)
        share = after // len(forks)
        learn(learner, own, share)
        table[name] = evaluate(learner, by_lineage, depth=DEPTH)
        held_out = [answer for each in by_lineage.values() for answer in each.held_out]
        scores[name] = [foretold(learner.averaged, answer, tail=PROMPT_TAIL) for answer in held_out]
        learn(learner, own, after - share)
        table[f"{name}, equal each"] = evaluate(learner, by_lineage, depth=DEPTH)
    lineage_of = [name for name, each in by_lineage.items() for _ in each.held_out]
    return {
        "seed": seed,
        "learnt_answers_each": len(next(iter(by_lineage.values())).learnt),
        "held_out_answers_each": len(next(iter(by_lineage.values())).held_out),
        "tokens": {"base": before, "after_fork": after},
        **figures(table, scores, lineage_of, seed=seed),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def figures(
    table: Table, scores: Mapping[str, Sequence[float]], lineage_of: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Acceptance lengths by draft and domain, and of every way to choose; `lineage_of` each held-out answer."""
    lineages = list(scores)
    rows = range(len(lineage_of))
    by_prompt = [max(lineages, key=lambda name: scores[name][row]) for row in rows]
    best = [max(lineages, key=lambda name: table[name][row].length) for row in rows]
    ways = {
        "base": ["base"] * len(rows),
        SHARED: [SHARED] * len(rows),
        "by domain": list(lineage_of),
        "by domain, equal each": [f"{name}, equal each" for name in lineage_of],
        "best for each answer": best,
        "by prompt": by_prompt,
    }
    measured, right = run_choice(table, lineages, lineage_of, seed=seed)
    return {
        "accept_length": {
            draft: {name: _length(found[row] for row in rows if lineage_of[row] == name) for name in lineages}
            for draft, found in table.items()
        },
        "accept_length_by_choice": {
            **{way: _length(table[draft][row] for row, draft in enumerate(chosen)) for way, chosen in ways.items()},
            "measured": measured,
        },
        "right_by_prompt": _share(one == other for one, other in zip(by_prompt, lineage_of, strict=True)),
        "domain_is_best_for_answer": _share(one == other for one, other in zip(best, lineage_of, strict=True)),
        "right_measured": right,
    }


def run_choice(table: Table, lineages: Sequence[str], lineage_of: Sequence[str], *, seed: int) -> tuple[float, float]:
    """(acceptance length, share of requests to their own lineage) of the gateway's policy; the base is one to choose,
    and is the shared draft.
    """
    rng = random.Random(seed)
    choice = Choice(lineages, rng=rng)
    total, num_right = [], 0
    for _ in range(REQUESTS):
        row = rng.randrange(len(lineage_of))
        domain = lineage_of[row]
        name = choice.pick("tenant", domain)
        found = table[SHARED if name == BASE else name][row]
        choice.learn("tenant", domain, name, num_tokens=found.num_committed, num_verifications=found.num_rounds)
        total.append(found)
        num_right += name == domain
    return _length(total), round(num_right / REQUESTS, _DIGITS)


def _length(found: Any) -> float:
    return round(sum(found, Acceptance()).length, _DIGITS)


def _share(values: Any) -> float:
    values = list(values)
    return round(sum(values) / len(values), _DIGITS)


def report(runs: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Table, target, JSON and exit code."""
    rows: list[tuple[str, object]] = [("", "tokens a verification, median (min … max) over seeds")]
    for draft in runs[0]["accept_length"]:
        for name in runs[0]["accept_length"][draft]:
            rows.append((f"draft {draft}, on {name}", Spread.of([run["accept_length"][draft][name] for run in runs])))
    margins: dict[str, Spread] = {}
    for way in runs[0]["accept_length_by_choice"]:
        lengths = [run["accept_length_by_choice"] for run in runs]
        margins[way] = Spread.of([each[way] / each[SHARED] for each in lengths])
        rows.append((f"chosen: {way}", f"{Spread.of([each[way] for each in lengths])}   ÷ shared {margins[way]}"))
    for name in ("right_by_prompt", "domain_is_best_for_answer", "right_measured"):
        rows.append((name, Spread.of([run[name] for run in runs])))
    finish(
        rows,
        [Target("lineages_over_shared, equal total tokens", margins["by domain"].median, 1.0)],
        {
            "lineages": arguments.lineages,
            "depth": DEPTH,
            "over_shared": {way: spread.to_dict() for way, spread in margins.items()},
            "runs": list(runs),
        },
        arguments.json,
    )


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    torch.set_num_threads(1)
    answers = read_answers(arguments.traces or recording(arguments, model_dir), fresh_draft(model_dir, seed=0))
    domains = list(dict.fromkeys(answer.trace.header.domain for answer in answers))
    usual = USUAL if set(USUAL.replace("+", ",").split(",")) <= set(domains) else ",".join(domains[:2])
    arguments.lineages = (arguments.lineages or usual).split(",")
    runs = [run for path in arguments.earlier for run in json.loads(path.read_text())["runs"]]
    for seed in arguments.seeds:
        runs.append(run_seed(answers, arguments, model_dir, seed))
        if arguments.json:  # whoever ends it early keeps what is done, for --earlier
            arguments.json.write_text(json.dumps({"runs": runs}))
        print(f"seed {seed}: {runs[-1]['accept_length_by_choice']} in {runs[-1]['seconds']} s", flush=True)
    report(runs, arguments)


def _arguments() -> argparse.Namespace:
    options = parser("Lineages that forked from a shared base against one shared draft")
    add_recording_options(options)
    options.add_argument("--lineages", help=f"domains of each; default {USUAL}, or else the first two")
    options.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")])
    options.add_argument("--tokens", type=int, help="that the shared draft learns in all")
    options.add_argument("--fork", type=float, default=0.4, help="share of them that the base learns")
    options.add_argument("--earlier", type=Path, nargs="*", default=[], metavar="FILE.json", help="runs to add")
    arguments = options.parse_args()
    fill_in(arguments, {**RECORDING_DEFAULTS, "seeds": ([0], [0, 1, 2]), "tokens": (8_000, 24_000)})
    return arguments


if __name__ == "__main__":
    main()
