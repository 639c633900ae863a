"""Verdicts of the watch on drafts that are known to be good or bad, again and again, on recorded answers.

    python -m benchmarks.repeats [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] …

A draft is trained on a quarter of the recorded answers; the others are served again and again with it by an engine that
decodes them anew (benchmarks/replayed.py: real drafts, real acceptance, a clock that the rounds wind). Follower, watch,
store, lifecycle and Redis are the real ones. Versions are published past the gate, each with nothing waiting behind it,
so that nothing shortens its trial:

* `--repeats` copies of the good draft, which must never be rolled back;
* `--worse` drafts with noise that takes a tenth of the accept length: rolled back within 2,000 rounds;
* `--random` drafts of random weights: rolled back within 50 rounds or 5 s, whichever is later.

benchmarks/rollback.py tries one of each in a running engine, where requests may fail and texts may change.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.answers import RECORDING_DEFAULTS, Traffic, add_recording_options, read_answers, recording
from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.hour import PER_MINUTE, PLAIN_MS, POLL_S, ROUND_MS, SPREAD, begin
from benchmarks.live import as_examples, trained
from benchmarks.replayed import Costs, ReplayEngine
from benchmarks.rollback import SETTLED, Scene, noisy, subtly_worse
from serving.hotswap import DraftFollower
from serving.watch import LiveWatch
from slipstream.models import resolve_model
from speculator.checkpoint import draft_state, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.lifecycle import State, Transition
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.store import DraftStore
from speculator.stream import DraftPointer, connect

LONGEST_TRIAL_S = 3600.0
"""Virtual."""


@dataclass
class Trials:
    scene: Scene
    engine: ReplayEngine
    follower: DraftFollower
    good: Eagle3Draft

    def try_out(self, state: dict[str, Tensor], *, told: str) -> Transition:
        """What becomes of a version with these weights. Raises TimeoutError."""
        version = self.scene.add(state, self.good)
        self.scene.pointer.publish(version)
        end_s = self.engine.clock_s + LONGEST_TRIAL_S
        while self.engine.clock_s < end_s:
            self.engine.run_until(self.engine.clock_s + POLL_S)
            self.engine.steps.clear()
            self.follower.follow()
            last = self.scene.store.lifecycle.history(version)[-1]
            if last.state in SETTLED:
                print(f"{told}: {last.state.value}, {last.reason}, {last.numbers}", flush=True)
                self.scene.store.prune(4)
                return last
        raise TimeoutError(f"{told} is {last.state.value} after {LONGEST_TRIAL_S:.0f} virtual seconds")


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or recording(arguments, model_dir)
    torch.set_num_threads(1)
    answers = read_answers(path, fresh_draft(model_dir, seed=0))
    good, _ = trained(model_dir, [answer.trace for answer in answers[::4]], arguments.train_steps)
    served = [answer for answer in answers if answer.number % 4]
    examples = as_examples(good, [answer.trace for answer in served[::4]])
    worse = [subtly_worse(good, examples, 0.1, seed=number) for number in range(1, arguments.worse + 1)]
    fingerprint = target_fingerprint(model_dir)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder) / "redis") as redis,
        connect(redis.url) as client,
    ):
        store = DraftStore(Path(folder) / "drafts")
        pointer, watch = DraftPointer(client, "repeats"), LiveWatch(1, clock=lambda: engine.clock_s)
        scene = Scene(store, pointer, None, fingerprint)  # type: ignore[arg-type]  # it tries nothing out
        begin(store, good, scene)
        engine = ReplayEngine(
            partial(load_draft, store, embed=good.embed, target_fingerprint=fingerprint),
            1,
            Traffic(served, end_s=1.0, seed=0),  # of all domains, after its first second
            costs=Costs(plain_ms=PLAIN_MS, round_ms=ROUND_MS, spread=SPREAD),
            per_minute=PER_MINUTE,
            on_round=watch.observe,
            on_trace=lambda _: None,
        )
        follower = DraftFollower(engine, pointer, engine_id="repeats", watch=watch, lifecycle=store.lifecycle)
        trials = Trials(scene, engine, follower, good)
        found = {
            "good": _all(trials, arguments.repeats, "a copy of the good draft", lambda _: draft_state(good)),
            "worse": _all(trials, arguments.worse, "accept length −10%", lambda number: worse[number][0]),
            "random": _all(trials, arguments.random, "random weights", lambda n: noisy(good, float("inf"), seed=n)),
        }
    _finish(found, [loss for _, loss in worse], len(served), arguments)


def _all(trials: Trials, count: int, told: str, state: Callable[[int], dict[str, Tensor]]) -> list[Transition]:
    return [trials.try_out(state(number), told=f"{told}, {number + 1} of {count}") for number in range(count)]


def _finish(
    found: dict[str, list[Transition]], losses: Sequence[float], num_answers: int, arguments: argparse.Namespace
) -> None:
    def numbers(kind: str, name: str) -> list[float]:
        return [float(last.numbers.get(name) or 0) for last in found[kind]]

    def kept(kind: str) -> int:
        return sum(last.state is not State.QUARANTINED for last in found[kind])

    rows: list[tuple[str, object]] = [(f"{num_answers} answers, one or two clients", "median    (min … max)")]
    for kind, told in (("good", "a copy of the good draft"), ("worse", "accept length −10%"), ("random", "random")):
        rows += [
            (f"{told}: rolled back", f"{len(found[kind]) - kept(kind)} of {len(found[kind])}"),
            ("  rounds until decided", Spread.of(numbers(kind, "rounds"))),
            ("  virtual seconds", Spread.of(numbers(kind, "seconds"))),
        ]
    rows.append(("accept length −10%: really, offline", Spread.of([-100 * loss for loss in losses])))
    slowest = max(
        min(rounds / 50, seconds / 5)
        for rounds, seconds in zip(numbers("random", "rounds"), numbers("random", "seconds"), strict=True)
    )
    targets = [
        Target("good_rolled_back", len(found["good"]) - kept("good"), 0, at_least=False),
        Target("worse_kept", kept("worse"), 0, at_least=False),
        Target("worse_rounds", max(numbers("worse", "rounds")), 2000, at_least=False),
        Target("random_kept", kept("random"), 0, at_least=False),
        Target("random_rounds_over_50_or_seconds_over_5", slowest, 1.0, at_least=False),
    ]
    document = {
        "answers": num_answers,
        "offline_loss": [round(loss, 4) for loss in losses],
        **{kind: [{"state": last.state.value, **last.numbers} for last in each] for kind, each in found.items()},
    }
    finish(rows, targets, document, arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser("Verdicts of the watch on good and bad drafts, many times over")
    add_recording_options(options)
    options.add_argument("--train-steps", type=int, help="default 300, quick 60")
    options.add_argument("--repeats", type=int, help="copies of the good draft; default 20, quick 2")
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
    return arguments


if __name__ == "__main__":
    main()
