"""How soon the drift alarm sounds after traffic has moved, and that it keeps silent while traffic stays as it is.

    python -m benchmarks.drift [--quick] [--json FILE] [--prompts FILE.jsonl] [--a DOMAIN] [--b DOMAIN] …

The answers are real, their order is drawn. Both domains are answered once by the local engine and kept as recordings
(benchmarks/workloads.py). While they were recorded the draft learnt, so the recorded rounds improve from answer to
answer and are no stationary traffic. Instead one draft learns from a share of the home domain's answers and then stays
as it is, and every other answer is decoded again with it (trainer/evaluate.py) at the engine's default depth and
confidence: accepted proposals of its completion tokens, the same measure as `trainer.provenance.Provenance.acceptance`.
For greedy answers, the default, that is a count; expected counts of sampled ones are rounded.

A request is one of these answers, drawn with replacement and counted as another text, as trainer/intake.py counts it:
the trainer's own `DriftMonitor` sees it under its domain's label, and so does the series of the whole traffic. Draws
are independent; real traffic may resemble itself from one request to the next, which the monitor's margin allows for
and tests/trainer/test_drift.py tries. The draft does not learn during a trial, as if the trainer had stopped: in
service it learns, which only makes the fall smaller once the first versions are out.

Each domain is the home once, with a draft of its own:

    stationary    LEAD requests of home and 2,000 more; also a steady mixture of both domains. Every alarm is false
    same label    after LEAD requests the traffic is the other domain's, and clients do not say so
    new label     the same, with a label that was never seen: only the series of all traffic can tell
    a share       only 50% or 25% of the requests move, told without a target

The alarm is about a fall by more than a margin of at least 0.02 of an answer's tokens. A shift towards text that the
draft accepts as well as before is no reason to train harder, so shifts by less than that margin are told without a
target too.

Targets: at most one false alarm in a hundred stretches of 2,000 stationary requests; in every trial of a whole shift
the alarm within 200 requests.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.replay import PASSES, Feed
from slipstream.topics import built_in_prompts, read_prompts
from speculator.errors import ConfigError, TraceError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.model import Eagle3Draft
from speculator.recording import RecordingReader
from trainer.batch import Example, make_example, pack
from trainer.config import TrainerConfig, load_config
from trainer.drift import MIN_MARGIN, DriftMonitor
from trainer.evaluate import predict_acceptance
from trainer.shadow import MIN_CONFIDENCE
from trainer.step import Learner

LEAD = 300
STATIONARY = 2000
FALSE_ALARMS = 0.01
WITHIN = 200
# A shift that was not noticed after so many requests counts as never noticed.
HORIZON = 1000
SHARES = (1.0, 0.5, 0.25)
LEARN_SHARE = 0.5
HOME, AWAY = "home", "away"

Answer = tuple[int, int]
"""(accepted proposals, completion tokens)."""


def acceptance(pool: Sequence[Answer]) -> float:
    """Mean over answers, as the monitor averages them."""
    return statistics.fmean(accepted / tokens for accepted, tokens in pool)


def mixture(rng: random.Random, home: Sequence[Answer], away: Sequence[Answer], share: float) -> Iterator[Answer]:
    """Requests without end, each from `away` with probability `share`."""
    while True:
        yield rng.choice(away if rng.random() < share else home)


def false_alarms(requests: Iterator[Answer], count: int, monitor: DriftMonitor | None = None) -> int:
    """Alarms of any series in `count` requests under the home label."""
    monitor = monitor or DriftMonitor()
    return sum(len(monitor.observe(HOME, *next(requests))) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What happens after LEAD requests of the home domain."""

    share: float
    """Of the requests, that move to the other domain."""
    new_label: bool

    def __str__(self) -> str:
        return f"{self.share:.0%} moves, {'new' if self.new_label else 'same'} label"


def shift_trial(rng: random.Random, home: Sequence[Answer], away: Sequence[Answer], shift: Shift) -> tuple[int, float]:
    """(false alarms before the shift, requests from the shift up to the alarm: inf where none came)."""
    monitor = DriftMonitor()
    early = false_alarms(mixture(rng, home, away, 0.0), LEAD, monitor)
    for number in range(1, HORIZON + 1):
        moved = rng.random() < shift.share
        label = AWAY if moved and shift.new_label else HOME
        if monitor.observe(label, *rng.choice(away if moved else home)):
            return early, number
    return early, math.inf


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Requests up to the alarm in all trials of one shift; `fall` is what there was to notice, in shares of tokens."""

    home: str
    away: str
    shift: Shift
    fall: float
    requests: tuple[float, ...]
    early_alarms: int

    @property
    def has_target(self) -> bool:
        return self.shift.share == 1 and self.fall > MIN_MARGIN

    @property
    def share_within(self) -> float:
        return sum(number <= WITHIN for number in self.requests) / len(self.requests)

    def __str__(self) -> str:
        return f"{Spread.of(self.requests)}   {self.share_within:4.0%} within {WITHIN}   fall {self.fall:.3f}"

    def to_dict(self) -> dict[str, Any]:
        finite = [number for number in self.requests if number < math.inf]
        median, longest = (None if value == math.inf else value for value in self._extremes())
        return {
            "home": self.home,
            "away": self.away,
            "share": self.shift.share,
            "new_label": self.shift.new_label,
            "fall": round(self.fall, 4),
            "trials": len(self.requests),
            "never": len(self.requests) - len(finite),
            "median": median,
            "max": longest,
            "share_within": round(self.share_within, 4),
            "early_alarms": self.early_alarms,
        }

    def _extremes(self) -> tuple[float, float]:
        return statistics.median(self.requests), max(self.requests)


def fixed_draft(examples: Sequence[Example], draft: Eagle3Draft, config: TrainerConfig, num_steps: int) -> Eagle3Draft:
    """The draft after learning from these answers, about PASSES times each where `num_steps` is 0."""
    learner = Learner(draft, config)
    total = sum(example.num_bases for example in examples)
    num_steps = num_steps or max(PASSES * total // config.batch_tokens, 1)
    feed = Feed(examples, config, num_steps=num_steps, seed=config.seed)
    for step in range(num_steps):
        learner.step(pack(feed.draw(step), max_context=config.max_context))
    return learner.averaged


def answers_of(draft: Eagle3Draft, examples: Sequence[Example], *, depth: int, min_confidence: float) -> list[Answer]:
    """Each answer as this draft would have served it."""
    pool = []
    for example in examples:
        found = predict_acceptance(draft, [example], depths=[depth], min_confidence=min_confidence)[depth]
        # The chain of `answer_base` starts from the prompt's last token; what follows is the answer.
        num_tokens = len(example.token_ids) - example.first_base - example.answer_base - 1
        # A round that accepts k proposals is among those that reach 1, 2, … k.
        pool.append((round(sum(found.num_reaching)), num_tokens))
    return pool


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, **unused)
    by_domain = {name: _examples(path, config) for name, path in _recordings(arguments, model_dir).items()}
    rng = random.Random(0)
    rows: list[tuple[str, object]] = [("", "requests up to the alarm, median (min … max)")]
    delays: list[Delays] = []
    num_false: dict[str, int] = {}
    for home, away in (tuple(by_domain), tuple(by_domain)[::-1]):
        shuffled = random.Random(0).sample(by_domain[home], len(by_domain[home]))
        num_learnt = round(LEARN_SHARE * len(shuffled))
        fresh = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=config.seed)
        draft = fixed_draft(shuffled[:num_learnt], fresh, config, arguments.steps)
        at_home, elsewhere = (
            answers_of(draft, examples, depth=arguments.depth, min_confidence=arguments.min_confidence)
            for examples in (shuffled[num_learnt:], by_domain[away])
        )
        rows.append((f"a draft of {home}: acceptance on {home}, {away}", _told((at_home, elsewhere))))
        for share, name in ((0.0, f"{home} alone"), (0.5, f"{home} and {away} by halves, draft of {home}")):
            print(f"stationary: {name}", flush=True)
            num_false[name] = sum(
                false_alarms(mixture(rng, at_home, elsewhere, share), LEAD + STATIONARY)
                for _ in range(arguments.trials)
            )
        for shift in (Shift(share=share, new_label=new) for share in SHARES for new in (False, True)):
            print(f"{home} → {away}, {shift}", flush=True)
            trials = [shift_trial(rng, at_home, elsewhere, shift) for _ in range(arguments.trials)]
            delays.append(
                Delays(
                    home=home,
                    away=away,
                    shift=shift,
                    fall=shift.share * (acceptance(at_home) - acceptance(elsewhere)),
                    requests=tuple(requests for _, requests in trials),
                    early_alarms=sum(early for early, _ in trials),
                )
            )
    _finish(rows, delays, num_false, arguments)


def _told(pools: Sequence[Sequence[Answer]]) -> str:
    def one(pool: Sequence[Answer]) -> str:
        deviation = statistics.pstdev(accepted / tokens for accepted, tokens in pool)
        return f"{acceptance(pool):.3f} ± {deviation:.3f} ({len(pool)} answers)"

    return ", ".join(one(pool) for pool in pools)


def _finish(
    rows: list[tuple[str, object]], delays: list[Delays], num_false: dict[str, int], arguments: argparse.Namespace
) -> None:
    rows += [(f"{one.home} → {one.away}, {one.shift}", one) for one in delays]
    num_requests = arguments.trials * (LEAD + STATIONARY)
    rows += [(f"stationary, {name}", f"{count} alarms in {num_requests} requests") for name, count in num_false.items()]
    early = sum(one.early_alarms for one in delays)
    rows.append(("before all shifts", f"{early} alarms in {len(delays) * arguments.trials * LEAD} requests"))
    with_target = [one for one in delays if one.has_target]
    num_stretches = len(num_false) * num_requests / STATIONARY
    targets = [
        Target(
            f"false_alarms_per_{STATIONARY}_requests",
            sum(num_false.values()) / num_stretches,
            FALSE_ALARMS,
            at_least=False,
        )
    ]
    # Without a domain whose text is harder for the other's draft there is nothing to notice, and that is no success.
    slowest = max((max(one.requests) for one in with_target), default=math.inf)
    targets.append(Target("slowest_alarm_requests", slowest, WITHIN, at_least=False))
    document = {
        "trials": arguments.trials,
        "depth": arguments.depth,
        "min_confidence": arguments.min_confidence,
        "lead_requests": LEAD,
        "stationary_requests": STATIONARY,
        "false_alarms": {**num_false, "before_shifts": early},
        "shifts": [one.to_dict() for one in delays],
    }
    finish(rows, targets, document, arguments.json)


def _recordings(arguments: argparse.Namespace, model_dir: Path) -> dict[str, Path]:
    """The recording of each of the two domains, made now where the cache has none."""
    if arguments.recordings:
        return {path.stem: path for path in arguments.recordings}
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    options = RecordOptions(
        model_dir=model_dir, max_tokens=arguments.max_tokens, temperature=0.0, num_threads=arguments.threads
    )
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    return {
        domain: recorded(domain, prompts, arguments.answers, options, arguments.cache)
        for domain in (arguments.a or domains[0], arguments.b or domains[1])
    }


def _examples(path: Path, config: TrainerConfig) -> list[Example]:
    """The recording's answers that can be learnt from. Raises ConfigError where these are too few."""
    draft = fresh_draft(config.model_dir, draft_vocab_size=config.draft_vocab_size, seed=config.seed)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    examples = []
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            try:
                examples.append(make_example(trace, draft_ids_V, feature_width=draft.fc.in_features))
            except TraceError:
                continue
    if len(examples) < 4:
        raise ConfigError(f"{path} has {len(examples)} answers to learn from: record more, --answers")
    return examples


def _arguments() -> argparse.Namespace:
    options = parser("How soon the drift alarm sounds, and that it keeps silent otherwise")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--a", metavar="DOMAIN", help="default: the first of the prompts")
    options.add_argument("--b", metavar="DOMAIN", help="default: the second of the prompts")
    options.add_argument(
        "--recordings", type=Path, nargs=2, metavar="FILE", help="of two domains, instead of answering"
    )
    options.add_argument("--answers", type=int, help="answers to record a domain")
    options.add_argument("--max-tokens", type=int, help="completion tokens an answer")
    options.add_argument("--steps", type=int, default=0, help=f"of the draft; default: every answer {PASSES} times")
    options.add_argument("--trials", type=int, help="of every kind")
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--min-confidence", type=float, default=MIN_CONFIDENCE)
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (24, 240), "max_tokens": (48, 128), "trials": (20, 100)})
    return arguments


if __name__ == "__main__":
    main()
