"""Error rates of watch and review: their verdicts on drafts known to be good or bad, repeated on recorded answers.

    python -m benchmarks.repeats [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] …

A draft is trained on a quarter of the recorded answers; the others are served again and again with it by an engine that
decodes them anew (benchmarks/replayed.py: real drafts, real acceptance, a clock that the rounds wind). Follower, watch,
store, lifecycle and Redis are the real ones, and so is the trainer's review (trainer/release/live_review.py),
which takes a turn at each poll, or none with `--alone`. Versions are published past the gate, each with nothing waiting
behind it, so that nothing shortens its trial. A version is done with when it is rolled back, or when both have ended
well:

* `--repeats` copies of the good draft, which must never be rolled back;
* `--worse` drafts with noise that takes a tenth of the accept length: rolled back within 2,000 rounds, which takes the
  review;
* `--random` drafts of random weights: rolled back within 50 rounds or 5 s, whichever is later.

And a draft that accepts 35% more than the incumbent comes while the traffic changes, `--repeats` times each way: 80% of
the tokens are then proposed by earlier text and were not before, or the other way round, from the swap on or up to 20 s
later. The watch alone judges it, and it must stay.

A running engine that takes such drafts back under load, where requests may fail and texts may change, is in
benchmarks/chaos.py.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from benchmarks.answers import RECORDING_DEFAULTS, Traffic, add_recording_options, read_answers, recording
from benchmarks.common.drafts import add_first, add_version, as_examples, trained
from benchmarks.common.report import Spread, Target, fill_in, finish, parser
from benchmarks.replayed import DEPTH, Answer, Costs, ReplayEngine, Table
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from slipstream.models import resolve_model
from speculator.draft.checkpoint import apply_state, draft_state, target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.trace import Trace
from speculator.versions.lifecycle import Transition, VersionState
from speculator.versions.lineage import load_draft
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig, load_config
from trainer.learning.batch import Example, make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.gate import predict_acceptance
from trainer.release.live_review import ACTOR, Review
from trainer.replay.reservoirs import Stored, provenance_of

POLL_S = 0.5
"""Virtual seconds between two polls of the follower: its default."""
PER_MINUTE = 27.0
COSTS = Costs(plain_ms=(27.9, 31.8), round_ms=(34.1, 44.2), spread=0.15)
"""For one client and two, measured in the demo with two: 15.9 ms a token plainly, 1.23 times as fast with 1.71 tokens a
verification. The spread is that of rounds of one batch size, 0.11 to 0.16."""
LONGEST_TRIAL_S = 3600.0
"""Virtual."""
REVIEWED_ROUNDS = 3000
"""Rounds within which the review may still roll back a version that the watch has kept."""
LATEST_SHIFT_S = 20.0
"""After the swap; virtual, too."""
SHIFTS = {"more remembered": (0.0, 0.8), "less remembered": (0.8, 0.0)}
"""Share of the tokens that earlier text proposes (before, after) the shift."""
GAIN = 0.35


@dataclass(frozen=True)
class Tried:
    """Outcome of a version's trial, and how long it served until then."""

    last: Transition
    rounds: int
    seconds: float

    @property
    def is_kept(self) -> bool:
        return self.last.state is not VersionState.QUARANTINED


def noisy(draft: Eagle3Draft, share: float, seed: int = 1) -> dict[str, Tensor]:
    """The draft's tensors with noise of `share` times their spread; an infinite `share` gives noise alone."""
    generator = torch.Generator().manual_seed(seed)
    state = draft_state(draft)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            mixed = noise if share == float("inf") else tensor.float() + share * noise
            state[name] = mixed.to(tensor.dtype)
    return state


def subtly_worse(
    draft: Eagle3Draft, examples: Sequence[Example], loss: float, *, seed: int = 1
) -> tuple[dict[str, Tensor], float]:
    """(tensors with so much noise that the accept length on these answers falls by `loss`, its actual fall)."""

    def length(state: dict[str, Tensor]) -> float:
        copy = Eagle3Draft(draft.config, draft.embed, draft.d2t)
        apply_state(copy, state)
        return predict_acceptance(copy, examples, depths=[DEPTH])[DEPTH].length

    good = length(draft_state(draft))
    low, high = 0.0, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if length(noisy(draft, middle, seed)) > (1 - loss) * good else (low, middle)
    worse = noisy(draft, high, seed)
    return worse, 1 - length(worse) / good


class Shifts:
    """Trials of a better draft during which the traffic changes, each with an engine and a store of its own."""

    def __init__(
        self,
        weak: dict[str, Tensor],
        good: Eagle3Draft,
        answers: Sequence[Answer],
        fingerprint: str,
        client: redis.Redis,
        folder: Path,
    ) -> None:
        self._weak, self._good, self._answers = weak, good, answers
        self._fingerprint, self._client, self._folder = fingerprint, client, folder
        self._table = Table()

    def run_trial(self, told: str, before: float, after: float, *, seed: int) -> Tried:
        """Try the better draft until it is kept or rolled back. Raises TimeoutError."""
        store, good = DraftStore(self._folder / told), self._good
        first = Eagle3Draft(good.config, good.embed, good.d2t)
        apply_state(first, self._weak)
        incumbent = add_first(store, first, self._fingerprint)
        version = add_version(store, draft_state(good), good, self._fingerprint)
        pointer, watch = DraftPointer(self._client, told), LiveWatch(incumbent, clock=lambda: engine.clock_s)
        engine = ReplayEngine(
            partial(load_draft, store, embed=good.embed, target_fingerprint=self._fingerprint),
            incumbent,
            Traffic(self._answers, seed=seed),
            costs=COSTS,
            per_minute=PER_MINUTE,
            on_round=watch.observe,
            on_trace=lambda _: None,
            seed=seed,
            table=self._table,
        )
        engine.remembered = before
        follower = DraftFollower(engine, pointer, engine_id=told, watch=watch, lifecycle=store.lifecycle)
        pointer.publish(version)
        shift_s, late_s = math.inf, random.Random(seed).uniform(0, LATEST_SHIFT_S)
        while engine.clock_s < LONGEST_TRIAL_S:
            engine.run_until(engine.clock_s + POLL_S)
            follower.poll()
            if engine.draft_version == version:
                shift_s = min(shift_s, engine.clock_s + late_s)
            if engine.clock_s >= shift_s:
                engine.remembered = after
            last = store.lifecycle.history(version)[-1]
            if last.state in (VersionState.PROMOTED, VersionState.QUARANTINED):
                rounds, seconds = engine.rounds_of[version], engine.seconds_of[version]
                print(f"{told}: {last.state.value}, {rounds} rounds, {last.reason}, {last.numbers}", flush=True)
                return Tried(last, rounds, seconds)
        raise TimeoutError(f"{told} is {last.state.value} after {LONGEST_TRIAL_S:.0f} virtual seconds")


@dataclass
class Trials:
    """Versions that are tried one after the other by one engine."""

    store: DraftStore
    pointer: DraftPointer
    fingerprint: str
    engine: ReplayEngine
    follower: DraftFollower
    good: Eagle3Draft
    review: Review
    arrived: list[Stored]
    is_alone: bool

    def run_trial(self, state: dict[str, Tensor], *, told: str) -> Tried:
        """Try a version with these weights until it is kept or rolled back. Raises TimeoutError."""
        version = add_version(self.store, state, self.good, self.fingerprint)
        self.pointer.publish(version)
        end_s = self.engine.clock_s + LONGEST_TRIAL_S
        while self.engine.clock_s < end_s:
            self.engine.run_until(self.engine.clock_s + POLL_S)
            self.follower.poll()
            self.review.arrived(self.arrived)
            self.arrived.clear()
            self.review.take_turn()
            last = self.store.lifecycle.history(version)[-1]
            is_gone = last.state is VersionState.QUARANTINED and self.engine.draft_version != version
            if is_gone or (last.state is VersionState.PROMOTED and self._is_reviewed(version)):
                rounds, seconds = self.engine.rounds_of[version], self.engine.seconds_of[version]
                print(
                    f"{told}: {last.state.value} by {last.actor}, {rounds} rounds, {last.reason}, {last.numbers}",
                    flush=True,
                )
                self.store.prune(4)
                return Tried(last, rounds, seconds)
        raise TimeoutError(f"{told} is {last.state.value} after {LONGEST_TRIAL_S:.0f} virtual seconds")

    def _is_reviewed(self, version: int) -> bool:
        """Whether the review of this version has ended or timed out; always true with `--alone`."""
        events = self.store.lifecycle.events.tail(20)
        told = (event.fields.get("version") for event in events if event.kind == "review")
        return self.is_alone or version in told or self.engine.rounds_of[version] >= REVIEWED_ROUNDS


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or recording(arguments, model_dir)
    torch.set_num_threads(1)
    answers = read_answers(path, fresh_draft(model_dir, seed=0))
    good = trained(model_dir, [answer.trace for answer in answers[::4]], arguments.train_steps)
    served = [answer for answer in answers if answer.number % 4]
    examples = as_examples(good, [answer.trace for answer in served[::4]])
    worse = [subtly_worse(good, examples, 0.1, seed=number) for number in range(1, arguments.worse + 1)]
    fingerprint, arrived = target_fingerprint(model_dir), list[Stored]()
    draft_ids_V = draft_ids_by_target_id(good.d2t, good.config.vocab_size)

    def on_trace(trace: Trace) -> None:
        example = make_example(trace, draft_ids_V, feature_width=good.fc.in_features)
        arrived.append(Stored(example=example, provenance=provenance_of(trace)))

    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder) / "redis") as redis,
        connect(redis.url) as client,
    ):
        store = DraftStore(Path(folder) / "drafts")
        pointer, watch = DraftPointer(client, "repeats"), LiveWatch(1, clock=lambda: engine.clock_s)
        add_first(store, good, fingerprint)
        load = partial(load_draft, store, embed=good.embed, target_fingerprint=fingerprint)
        engine = ReplayEngine(
            load,
            1,
            Traffic(served, seed=0),
            costs=COSTS,
            per_minute=PER_MINUTE,
            on_round=watch.observe,
            on_trace=on_trace,
        )
        follower = DraftFollower(engine, pointer, engine_id="repeats", watch=watch, lifecycle=store.lifecycle)
        review = Review(
            store.lifecycle,
            pointer,
            _config(model_dir, alone=arguments.alone),
            TrainerMetrics(CollectorRegistry()),
            Ranks(),
            load_draft=load,
            clock=lambda: engine.clock_s,
        )
        trials = Trials(store, pointer, fingerprint, engine, follower, good, review, arrived, arguments.alone)
        weak, loss = subtly_worse(good, examples, 1 - 1 / (1 + GAIN))
        print(f"the incumbent of the shifts accepts {100 * loss:.0f}% less", flush=True)
        shifts = Shifts(weak, good, served, fingerprint, client, Path(folder))
        found = {
            "good": _all(trials, arguments.repeats, "a copy of the good draft", lambda _: draft_state(good)),
            "worse": _all(trials, arguments.worse, "accept length −10%", lambda number: worse[number][0]),
            "random": _all(trials, arguments.random, "random weights", lambda n: noisy(good, float("inf"), seed=n)),
            **{
                told: [shifts.run_trial(f"{told}, {n + 1}", *shares, seed=n) for n in range(arguments.repeats)]
                for told, shares in SHIFTS.items()
            },
        }
    _finish(found, [loss for _, loss in worse], len(served), arguments)


def _config(model_dir: Path, *, alone: bool) -> TrainerConfig:
    """The trainer's settings from the environment, of which only the review's are used."""
    values: dict[str, Any] = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    return load_config(model_dir=model_dir, **values, **({"review_traces": 0} if alone else {}))


def _all(trials: Trials, count: int, told: str, state: Callable[[int], dict[str, Tensor]]) -> list[Tried]:
    return [trials.run_trial(state(number), told=f"{told}, {number + 1} of {count}") for number in range(count)]


def _finish(
    found: dict[str, list[Tried]], losses: Sequence[float], num_answers: int, arguments: argparse.Namespace
) -> None:
    def kept(kind: str) -> int:
        return sum(one.is_kept for one in found[kind])

    def by_trainer(kind: str) -> int:
        return sum(one.last.actor == ACTOR for one in found[kind])

    rows: list[tuple[str, object]] = [(f"{num_answers} answers, one or two clients", "median    (min … max)")]
    kinds = {"good": "a copy of the good draft", "worse": "accept length −10%", "random": "random"}
    for kind, told in (kinds | {shift: f"35% better, {shift} text" for shift in SHIFTS}).items():
        rows += [
            (
                f"{told}: rolled back",
                f"{len(found[kind]) - kept(kind)} of {len(found[kind])}, {by_trainer(kind)} by the trainer",
            ),
            ("  rounds in service until decided", Spread.of([one.rounds for one in found[kind]])),
            ("  virtual seconds", Spread.of([one.seconds for one in found[kind]])),
        ]
    rows.append(("accept length −10%: really, offline", Spread.of([-100 * loss for loss in losses])))
    slowest = max(min(one.rounds / 50, one.seconds / 5) for one in found["random"])
    targets = [
        Target("good_rolled_back", len(found["good"]) - kept("good"), 0, at_least=False),
        Target("worse_kept", kept("worse"), 0, at_least=False),
        Target("worse_rounds", max(one.rounds for one in found["worse"]), 2000, at_least=False),
        Target("random_kept", kept("random"), 0, at_least=False),
        *(
            Target(f"{shift.replace(' ', '_')}_rolled_back", len(found[shift]) - kept(shift), 0, at_least=False)
            for shift in SHIFTS
        ),
        Target("random_rounds_over_50_or_seconds_over_5", slowest, 1.0, at_least=False),
    ]
    document = {
        "answers": num_answers,
        "offline_loss": [round(loss, 4) for loss in losses],
        **{kind: [_document(one) for one in each] for kind, each in found.items()},
    }
    finish(rows, targets, document, arguments.json)


def _document(one: Tried) -> dict[str, Any]:
    served = {"served_rounds": one.rounds, "served_seconds": round(one.seconds, 2)}
    return {"state": one.last.state.value, "actor": one.last.actor, **served, **one.last.numbers}


def _arguments() -> argparse.Namespace:
    options = parser("Verdicts of the watch on good and bad drafts, many times over")
    add_recording_options(options)
    options.add_argument("--train-steps", type=int, help="default 300, quick 60")
    options.add_argument(
        "--repeats", type=int, help="copies of the good draft, and shifts each way; default 20, quick 2"
    )
    options.add_argument("--worse", type=int, help="drafts that are 10%% worse; default 5, quick 1")
    options.add_argument("--alone", action="store_true", help="without the trainer's review")
    options.add_argument("--random", type=int, help="drafts of random weights; default 10, quick 2")
    arguments = options.parse_args()
    defaults = {
        **RECORDING_DEFAULTS,
        "train_steps": (60, 300),
        "repeats": (2, 20),
        "worse": (1, 5),
        "random": (2, 10),
    }
    fill_in(arguments, defaults)
    if min(arguments.repeats, arguments.worse, arguments.random) < 1:
        options.error("--repeats, --worse and --random: there is a target for each, so at least one")
    return arguments


if __name__ == "__main__":
    main()
