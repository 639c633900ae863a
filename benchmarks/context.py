"""Whether the draft still helps in long contexts: its accept length behind 4k tokens over that behind 1k.

    python -m benchmarks.context [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] [--domain rag]
                                 [--lengths 1024 4096] [--answers 88] [--steps 150] [--folds 3] …

Prompts come in pairs: the same question with its passage last, behind few other passages and behind many. The other
passages are the rest of the prompts, each used once. The local engine answers both, greedily and without a draft, and
keeps every position of the prompt.

Each arm says what a draft learns from: traces of both lengths that keep the default capture window of the prompt,
traces of both lengths that keep all of it, or traces of the short prompts alone. All arms of a fold begin with the same
weights and take as many steps. Each fold holds out another third of the pairs, so each pair is scored once an arm, by a
draft that has learnt from neither of its answers.

A held-out answer is scored at depth 4 behind its whole prompt, as in service. With a draft window of W each position
of the draft sees the W positions before it and itself, as with SGLang's `--speculative-draft-window-size W`.

Targets: with either capture window and the draft's whole context, the accept length behind the long prompts is at least
0.9 of that behind the short ones. The interval is of a bootstrap over pairs.

With `--runs` each draft's scores are a line of that file at once, and what the file holds already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.answers import add_recording_options, recording
from benchmarks.common.report import Target, fill_in, finish, parser
from serving.answer_text import LocalTokenizer
from serving.local.config import LocalEngineConfig
from slipstream.demo.topics import Prompt
from slipstream.models import resolve_model
from slipstream.replay import Feed
from speculator.draft.eagle3 import Eagle3Draft, autocast
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.host import read_json_lines
from speculator.recording import RecordingReader
from speculator.trace import Trace, encode_trace
from trainer.config import TrainerConfig, load_config
from trainer.learning.batch import Batch, Window, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner
from trainer.release.gate import accept_probabilities, expected_rounds
from trainer.statistics import Acceptance

DEPTH = 4
DRAFT_WINDOWS = (0, 256, 512, 1024)
"""0 is none: the draft sees its whole context."""
_DEFAULT_WINDOW = LocalEngineConfig.context_window
_ALL_CONTEXT = 1 << 31
_SMALLEST_PIECE = 8
"""Tokens of a passage."""
_FOLDS = 3
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a draft learns from. `window` of the prompt's positions are captured, and as many serve as context."""

    name: str
    window: int
    has_long: bool = True


@dataclass(frozen=True)
class Pair:
    """The traces of one question behind a short context and behind a long one."""

    short: Trace
    long: Trace


class PairScore(NamedTuple):
    """Of the two answers of a pair, behind the short and the long context: tokens committed in how many rounds."""

    short_committed: float
    short_rounds: float
    long_committed: float
    long_rounds: float


Scores = dict[tuple[str, int], list[PairScore]]
"""By arm and draft window: of every pair."""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    model_dir = resolve_model(arguments.model)
    most = max(arguments.lengths)
    path = arguments.traces or recording(
        arguments,
        model_dir,
        lambda prompts, count: paired_prompts(prompts, count // 2, arguments, LocalTokenizer(model_dir)),
        engine={"num_slots": 4, "context_length": most + 256 + arguments.max_tokens, "context_window": 2 * most},
    )
    pairs = read_pairs(path)
    arms = [
        Arm(name="default window", window=_DEFAULT_WINDOW),
        Arm(name="whole prompt", window=2 * most),
        Arm(name="short prompts only", window=_DEFAULT_WINDOW, has_long=False),
    ]
    scores = _all_scores(arms, pairs, path, model_dir, arguments)
    rows: list[tuple[str, object]] = [("arm, draft window", "accept length short → long, ratio (95%)")]
    rows += [(f"{name}, {window or 'none'}", _row(found)) for (name, window), found in scores.items()]
    sizes = trace_bytes(pairs, (_DEFAULT_WINDOW, 1024, 2048, most))
    rows += [(f"MB of a long trace, window {window}", f"{size / 1e6:.2f}") for window, size in sizes.items()]
    targets = [Target(f"{arm.name}: long over short", ratio(scores[arm.name, 0]), 0.9) for arm in arms if arm.has_long]
    finish(rows, targets, _document(scores, sizes, len(pairs), arguments), arguments.json)


def _all_scores(
    arms: Sequence[Arm], pairs: Sequence[Pair], path: Path, model_dir: Path, arguments: argparse.Namespace
) -> Scores:
    """Those of every draft that `--runs` does not hold yet, one after the other; the folds go outside."""
    log: Path | None = arguments.runs
    known: dict[str, list[list[Sequence[float]]]] = {}
    if log is not None and log.exists():
        lines = read_json_lines(log, dict[str, Any], example='{"key": "…", "run": []}')
        known = {line["key"]: line["run"] for _, line in lines}
    scores: Scores = {(arm.name, window): [] for arm in arms for window in DRAFT_WINDOWS}
    for fold, arm in itertools.product(range(arguments.folds), arms):
        key = f"{arm} fold {fold} of {_FOLDS}, {arguments.steps} steps, {path.name}"
        if key not in known:
            others = [pair for index, pair in enumerate(pairs) if index % _FOLDS != fold]
            draft = learnt(arm, others, model_dir, num_steps=arguments.steps, seed=fold)
            held_out = pairs[fold::_FOLDS]
            known[key] = [[_score(draft, pair, window) for pair in held_out] for window in DRAFT_WINDOWS]
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps({"key": key, "run": known[key]}) + "\n")
        for window, found in zip(DRAFT_WINDOWS, known[key], strict=True):
            scores[arm.name, window] += [PairScore(*numbers) for numbers in found]
        print(f"{arm.name}, {fold + 1} of {arguments.folds} folds: {_row(scores[arm.name, 0])}", flush=True)
    return scores


def paired_prompts(
    prompts: Sequence[Prompt], num_pairs: int, arguments: argparse.Namespace, tokenizer: LocalTokenizer
) -> list[Prompt]:
    """Of each question the short prompt, then the long one. Raises ConfigError where the prompts do not suffice."""
    short, long = arguments.lengths
    rng = random.Random(0)
    questions = [one for one in prompts if one.domain == arguments.domain] or list(prompts)
    questions = rng.sample(questions, min(num_pairs, len(questions)))
    asked = set(questions)
    others = [one.text for one in prompts if one not in asked]
    pool = deque(rng.sample(others, len(others)))
    chosen = []
    for question in questions:
        near = _behind(pool, question.text, short, tokenizer)
        chosen += [Prompt("short", near), Prompt("long", _behind(pool, near, long, tokenizer))]
    return chosen


def _behind(pool: deque[str], text: str, length: int, tokenizer: LocalTokenizer) -> str:
    """The text behind as many passages of the pool as make it `length` tokens long."""
    missing = length - len(tokenizer.encode(text))
    while missing > _SMALLEST_PIECE:
        if not pool:
            raise ConfigError("the prompts are too few: pass a larger --prompts, or fewer --answers")
        # What comes behind a passage of a retrieval prompt is its question, which nobody asks here.
        piece = pool.popleft().rpartition("\n")
        tokens = tokenizer.encode(piece[0] or piece[2])[:missing]
        text = f"{tokenizer.decode(tokens)}\n\n{text}"
        missing -= len(tokens)
    return text


def read_pairs(path: Path) -> list[Pair]:
    """Of every question both answers, where both have a length; the engine numbers its requests as the prompts came."""
    with RecordingReader(path) as reader:
        traces = {int(trace.header.request_id): trace for trace in reader.traces()}
    return [
        Pair(trace, traces[number + 1])
        for number, trace in sorted(traces.items())
        if not number % 2 and number + 1 in traces
    ]


def captured(trace: Trace, window: int) -> Trace:
    """The trace as an engine that keeps `window` positions of the prompt makes it."""
    header = trace.header
    cut = max(header.num_prompt_tokens - window - header.first_position, 0)
    return replace(
        trace,
        header=msgspec.structs.replace(header, first_position=header.first_position + cut),
        token_ids=trace.token_ids[cut:],
        aux_hidden=trace.aux_hidden[cut:],
        target_topk_ids=trace.target_topk_ids[cut:],
        target_topk_logprobs=trace.target_topk_logprobs[cut:],
        constrained=trace.constrained[cut:],
    )


def learnt(arm: Arm, pairs: Sequence[Pair], model_dir: Path, *, num_steps: int, seed: int) -> Eagle3Draft:
    """The draft of one arm behind its last step, as the trainer would publish it."""
    config = _config(model_dir, arm.window, seed)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=seed)
    to_example = _example_maker(draft)
    traces = [trace for pair in pairs for trace in ((pair.short, pair.long) if arm.has_long else (pair.short,))]
    examples = [to_example(captured(trace, arm.window)) for trace in traces]
    random.Random(seed).shuffle(examples)
    learner = Learner(draft, config)
    feed = Feed(examples, config, num_steps=num_steps, seed=seed)
    for step in range(num_steps):
        learner.step(pack(feed.draw(step), max_context=config.max_context))
    return learner.averaged


def _config(model_dir: Path, window: int, seed: int) -> TrainerConfig:
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    return load_config(model_dir=model_dir, seed=seed, ttt_steps=DEPTH, max_context=window, **unused)


def _example_maker(draft: Eagle3Draft) -> partial[Any]:
    return partial(
        make_example,
        draft_ids_V=draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
        feature_width=draft.fc.in_features,
        window=draft.config.max_position_embeddings,
    )


def _score(draft: Eagle3Draft, pair: Pair, window: int) -> PairScore:
    short, long = (accepted(draft, trace, window) for trace in (pair.short, pair.long))
    return PairScore(short.num_committed, short.num_rounds, long.num_committed, long.num_rounds)


def accepted(draft: Eagle3Draft, trace: Trace, window: int) -> Acceptance:
    """What the draft would commit of an answer behind its whole prompt, with a draft window (0: none)."""
    example = _example_maker(draft)(trace)
    num_bases = example.num_bases - example.answer_base
    batch = pack([Window(example=example, start=example.answer_base, num_bases=num_bases)], max_context=_ALL_CONTEXT)
    # As the gate does it: autocast converts each weight once where it might have a gradient.
    draft.requires_grad_(True)
    with autocast(draft.embed.device, is_wanted=True):
        found = accept_probabilities(draft, windowed(batch, window), depth=DEPTH, verification="target_only")
    return expected_rounds(*found, DEPTH)


def windowed(batch: Batch, window: int) -> Batch:
    """The batch with bases that see `window` positions before them and themselves; 0 sets no bound."""
    if not window:
        return batch
    keys_M = torch.cat([batch.context.positions, batch.positions])
    return replace(batch, mask=batch.mask & (keys_M >= batch.positions[:, None] - window))


def lengths(found: Sequence[PairScore]) -> tuple[float, float]:
    """Accept length behind the short contexts and behind the long ones."""
    short_committed, short_rounds, long_committed, long_rounds = map(sum, zip(*found, strict=True))
    return short_committed / short_rounds, long_committed / long_rounds


def ratio(found: Sequence[PairScore]) -> float:
    short, long = lengths(found)
    return long / short


def interval(found: Sequence[PairScore]) -> tuple[float, float]:
    """95% of the ratios of pairs that are drawn again."""
    dice = random.Random(0)
    ratios = sorted(ratio(dice.choices(found, k=len(found))) for _ in range(_RESAMPLES))
    return ratios[_RESAMPLES // 40], ratios[-1 - _RESAMPLES // 40]


def _row(found: Sequence[PairScore]) -> str:
    short, long = lengths(found)
    low, high = interval(found)
    return f"{short:.3f} → {long:.3f}  {long / short:.3f} ({low:.3f} … {high:.3f})"


def trace_bytes(pairs: Sequence[Pair], windows: Sequence[int]) -> dict[int, float]:
    """Median bytes of the long prompts' encoded traces, by capture window."""
    return {
        window: statistics.median(len(encode_trace(captured(pair.long, window))) for pair in pairs)
        for window in sorted(set(windows))
    }


def _document(
    scores: Scores, sizes: Mapping[int, float], num_pairs: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    def row(found: Sequence[PairScore]) -> dict[str, Any]:
        return {
            "lengths": [round(length, 4) for length in lengths(found)],
            "ratio": round(ratio(found), 4),
            "interval": [round(end, 4) for end in interval(found)],
        }

    return {
        "pairs": num_pairs,
        "lengths": arguments.lengths,
        "steps": arguments.steps,
        "arms": [{"arm": arm, "draft_window": window, **row(found)} for (arm, window), found in scores.items()],
        "trace_bytes": {str(window): size for window, size in sizes.items()},
    }


def _arguments() -> argparse.Namespace:
    options = parser("The draft's accept length by the length of its context")
    add_recording_options(options)
    options.add_argument("--domain", default="rag", help="whose prompts are asked; the others are passages")
    options.add_argument("--lengths", nargs=2, type=int, metavar="TOKENS", help="default 1024 4096, quick 128 512")
    options.add_argument("--steps", type=int, help="optimiser steps of a draft; default 150, quick 8")
    options.add_argument(
        "--folds", type=int, choices=range(1, _FOLDS + 1), help="thirds of the pairs that are scored; quick 1"
    )
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every draft's scores here, and go on")
    arguments = options.parse_args()
    fill_in(
        arguments,
        {
            "max_tokens": (32, 96),
            "lengths": ([128, 512], [1024, 4096]),
            "answers": (18, 88),
            "steps": (8, 150),
            "folds": (1, _FOLDS),
        },
    )
    return arguments


if __name__ == "__main__":
    main()
