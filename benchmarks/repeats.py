"""Error rates of watch and review: their verdicts on drafts known to be good or bad, repeated on recorded answers.

    python -m benchmarks.repeats [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] …

A draft is trained on a quarter of the recorded answers; the others are served again and again with it by an engine that
decodes them anew (benchmarks/common/replayed.py: real drafts, real acceptance, a clock that the rounds wind). Follower,
watch, store, lifecycle and Redis are the real ones, and so is the trainer's review (trainer/release/live_review.py),
which takes a turn at each poll. Versions are published past the gate, each with nothing waiting behind it, so that
nothing shortens its trial. A version is done with when it is rolled back, or when both have ended well:

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

from benchmarks.common.drafts import add_first, add_version, as_examples, trained
from benchmarks.common.recorded_answers import (
    RECORDING_DEFAULTS,
    Traffic,
    add_recording_options,
    read_answers,
    recording,
)
from benchmarks.common.replayed import DEPTH, Answer, Costs, ReplayEngine, Table
from benchmarks.common.report import Spread, Target, fill_in, finish, parser
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
from trainer.config import load_config
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


class Bench:
    """An engine that serves recorded answers, with a store, a pointer and a follower of its own."""

    def __init__(
        self,
        name: str,
        first: dict[str, Tensor],
        *,
        good: Eagle3Draft,
        fingerprint: str,
        client: redis.Redis,
        folder: Path,
        answers: Sequence[Answer],
        seed: int = 0,
        table: Table | None = None,
        on_trace: Callable[[Trace], object] = lambda _: None,
    ) -> None:
        """It begins with a version whose weights are `first`; `good` has the config of all versions."""
        self.name, self.good, self._fingerprint = name, good, fingerprint
        self.store, draft = DraftStore(folder / name), Eagle3Draft(good.config, good.embed, good.d2t)
        apply_state(draft, first)
        incumbent = add_first(self.store, draft, fingerprint)
        self.pointer, watch = DraftPointer(client, name), LiveWatch(incumbent, clock=lambda: self.engine.clock_s)
        self.load = partial(load_draft, self.store, embed=good.embed, target_fingerprint=fingerprint)
        self.engine = ReplayEngine(
            self.load,
            incumbent,
            Traffic(answers, seed=seed),
            costs=COSTS,
            per_minute=PER_MINUTE,
            on_round=watch.observe,
            on_trace=on_trace,
            seed=seed,
            table=table,
        )
        self._follower = DraftFollower(
            self.engine, self.pointer, engine_id=name, watch=watch, lifecycle=self.store.lifecycle
        )

    def run_trial(self, state: dict[str, Tensor], told: str, *, is_judged: Callable[[int], bool]) -> Tried:
        """Try a version with these weights until it is rolled back, or promoted and judged: `is_judged` is asked after
        each poll. Raises TimeoutError.
        """
        version = add_version(self.store, state, self.good, self._fingerprint)
        self.pointer.publish(version)
        end_s = self.engine.clock_s + LONGEST_TRIAL_S
        while self.engine.clock_s < end_s:
            self.engine.run_until(self.engine.clock_s + POLL_S)
            self._follower.poll()
            has_verdict, last = is_judged(version), self.store.lifecycle.history(version)[-1]
            is_gone = last.state is VersionState.QUARANTINED and self.engine.draft_version != version
            if is_gone or (last.state is VersionState.PROMOTED and has_verdict):
                rounds, seconds = self.engine.rounds_of[version], self.engine.seconds_of[version]
                outcome = f"{last.state.value} by {last.actor}, {rounds} rounds, {last.reason}, {last.numbers}"
                print(f"{told}: {outcome}", flush=True)
                self.store.prune(4)
                return Tried(last, rounds, seconds)
        raise TimeoutError(f"{told} is {last.state.value} after {LONGEST_TRIAL_S:.0f} virtual seconds")


def shift_trial(bench: Bench, before: float, after: float, *, seed: int) -> Tried:
    """Try the good draft while the traffic changes. Raises TimeoutError."""
    engine, shift_s = bench.engine, math.inf
    late_s, engine.remembered = random.Random(seed).uniform(0, LATEST_SHIFT_S), before

    def is_judged(version: int) -> bool:
        nonlocal shift_s
        if engine.draft_version == version:
            shift_s = min(shift_s, engine.clock_s + late_s)
        if engine.clock_s >= shift_s:
            engine.remembered = after
        return True

    return bench.run_trial(draft_state(bench.good), bench.name, is_judged=is_judged)


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
        bench = partial(Bench, good=good, fingerprint=fingerprint, client=client, folder=Path(folder), answers=served)
        all_in_turn = bench("repeats", draft_state(good), on_trace=on_trace)
        engine, store = all_in_turn.engine, all_in_turn.store
        unused: dict[str, Any] = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
        review = Review(
            store.lifecycle,
            all_in_turn.pointer,
            load_config(model_dir=model_dir, **unused),
            TrainerMetrics(CollectorRegistry()),
            Ranks(),
            load_draft=all_in_turn.load,
            clock=lambda: engine.clock_s,
        )

        def is_reviewed(version: int) -> bool:
            """Give the review its turn; whether that of this version has ended or timed out."""
            review.arrived(arrived)
            arrived.clear()
            review.take_turn()
            events = store.lifecycle.events.tail(20)
            told = (event.fields.get("version") for event in events if event.kind == "review")
            return version in told or engine.rounds_of[version] >= REVIEWED_ROUNDS

        weak, loss = subtly_worse(good, examples, 1 - 1 / (1 + GAIN))
        print(f"the incumbent of the shifts accepts {100 * loss:.0f}% less", flush=True)
        run, table = partial(all_in_turn.run_trial, is_judged=is_reviewed), Table()
        found = {
            "good": _all(run, arguments.repeats, "a copy of the good draft", lambda _: draft_state(good)),
            "worse": _all(run, arguments.worse, "accept length −10%", lambda number: worse[number][0]),
            "random": _all(run, arguments.random, "random weights", lambda n: noisy(good, float("inf"), seed=n)),
            **{
                told: [
                    shift_trial(bench(f"{told}, {n + 1}", weak, seed=n, table=table), *shares, seed=n)
                    for n in range(arguments.repeats)
                ]
                for told, shares in SHIFTS.items()
            },
        }
    _finish(found, [loss for _, loss in worse], len(served), arguments)


def _all(
    run: Callable[[dict[str, Tensor], str], Tried], count: int, told: str, state: Callable[[int], dict[str, Tensor]]
) -> list[Tried]:
    return [run(state(number), f"{told}, {number + 1} of {count}") for number in range(count)]


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
