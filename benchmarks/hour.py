"""An hour of traffic with faults in it: how far the served acceptance falls below the best version's, and for how long.

    python -m benchmarks.hour [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] [--keep DIR] …

Greedy answers are recorded once, or taken from a recording that `slipstream traces record` made of an engine at
temperature 0. They are then served again at the rate of the demo (docs/local-loop.md) by an engine that decodes them
with the draft in service (benchmarks/replayed.py), `--compress` virtual seconds in each second. Everything else is
real: Redis, store and lifecycle, follower and watch, whose clock is the virtual one, and the trainer in a process of
its own, with its gate. The trainer's intervals are divided by the compression and its arithmetic cannot be, so it
learns in an hour what it would in 60 / `--compress` minutes.

    0 ─────── A: half of the domains ─────── 1/3 ─────── B: the others ─────── 2/3 ─────── all ─────── 1

Meanwhile come random weights, weights with noise that takes a tenth and three tenths of the accept length, and NaN, all
of them past the gate, as by an operator's mistake (FAULTS); and one text over and over (benchmarks/answers.py).

What is claimed: over each `--window` consecutive verifications, let B be the verifications that the best version would
have needed for the same tokens of the same answers; B / `--window` is the served accept length over the best one's. The
best is the one of the promoted versions that was better than the one before on the last answers when it was promoted. A
fall is a stretch in which that ratio stays below 0.9 but for returns of fewer than ten windows, from the end of the
first window to the end of the last one. The targets are the windows that docs/versions.md promises: a fall with random
weights in it ends within 50 rounds or 5 s, whichever is later; any other within 2,000 rounds. Control rounds are no
part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import RECORDING_DEFAULTS, Traffic, add_recording_options, read_answers, recording
from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.falls import FLOOR, RECENT, Best, Fall, by_minute, falls, lengths, ratios
from benchmarks.live import trained
from benchmarks.replayed import Answer, Costs, ReplayEngine
from benchmarks.rollback import Scene, noisy, subtly_worse
from serving.hotswap import DraftFollower
from serving.watch import LiveWatch
from slipstream.layout import DEFAULT_STREAM_MAX_BYTES
from slipstream.models import resolve_model
from slipstream.processes import Child
from speculator.checkpoint import draft_state, model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import EngineError, StoreError, StreamError
from speculator.events import Event
from speculator.fresh import fresh_draft
from speculator.lifecycle import BARRED, State
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.store import DraftStore
from speculator.stream import DraftPointer, TraceStream, connect
from trainer.config import ENV_PREFIX, load_config

POLL_S = 0.5
"""Virtual seconds between two looks of the follower: its default."""
PER_MINUTE = 27.0
PLAIN_MS, ROUND_MS, SPREAD = (27.9, 31.8), (34.1, 44.2), 0.15
"""For one client and two. For two from the demo's eight minutes with gate and watch (docs/local-loop.md): 15.9 ms a
token plainly, 1.23 times as fast with 1.71 tokens a verification; for one in the proportion of benchmarks/rounds.py.
The spread is that of a batch size's rounds in benchmarks/speedup.py, 0.11 to 0.16."""
RANDOM, NAN = "random weights", "NaN weights"
FAULTS = (
    (0.15, RANDOM),
    (0.25, "accept length −30%"),
    (0.30, NAN),
    (0.42, "accept length −10%"),
    (0.75, RANDOM),
    (0.85, "accept length −10%"),
)
"""(share of the run, what is published)."""
QUICK_FAULTS = ((0.2, RANDOM), (0.45, NAN), (0.5, "accept length −30%"))
LOSSES = {"accept length −10%": 0.1, "accept length −30%": 0.3}
_ALL_EVENTS = 1_000_000


# -- what goes wrong -----------------------------------------------------------------------------------------


@dataclass
class Fault:
    name: str
    at_s: float
    version: int | None = None
    offline_loss: float | None = None
    state: str = "not published"
    reason: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state in (State.QUARANTINED.value, State.PROMOTED.value)


class Faults:
    """Publishes them in turn, again where the trainer published something before an engine came to it."""

    def __init__(self, plan: Sequence[tuple[float, str]], scene: Scene, best: Best, *, end_s: float) -> None:
        self.all = [Fault(name, share * end_s) for share, name in plan]
        self._scene, self._best = scene, best

    def look(self, at_s: float) -> None:
        fault = next((one for one in self.all if not one.is_over), None)
        if fault is None or at_s < fault.at_s:
            return
        if fault.version is None:
            fault.version = self._make(fault)
        last = self._scene.store.lifecycle.history(fault.version)[-1]
        fault.state, fault.reason, fault.numbers = last.state.value, last.reason, dict(last.numbers)
        if last.state is State.SCORED and self._scene.pointer.published() != fault.version:
            self._scene.pointer.publish(fault.version)
        if fault.is_over:
            print(
                f"{at_s / 60:5.1f} min  {fault.name}, version {fault.version}: {fault.state}, {fault.reason}",
                flush=True,
            )

    def _make(self, fault: Fault) -> int:
        draft, scene = self._best.served.draft, self._scene
        if fault.name == NAN:
            return scene.add_nan(scene.store.lifecycle.last_good() or 1)
        if fault.name == RANDOM:
            return scene.add(noisy(draft, float("inf")), draft)
        examples = [answer.example for answer in list(self._best.recent)[: RECENT // 2]]
        state, fault.offline_loss = subtly_worse(draft, examples, LOSSES[fault.name])
        return scene.add(state, draft)


# -- the run -------------------------------------------------------------------------------------------------


class Pace:
    """Keeps virtual time from running faster than `compress`; what was late by more than a second is not caught up."""

    def __init__(self, compress: float) -> None:
        self._compress, self._virtual_s, self._due_s = compress, 0.0, time.monotonic()

    def wait(self, clock_s: float) -> None:
        due_s = self._due_s + (clock_s - self._virtual_s) / self._compress
        self._virtual_s, self._due_s = clock_s, max(due_s, time.monotonic() - 1)
        time.sleep(max(self._due_s - time.monotonic(), 0))


def trainer_settings(compress: float) -> dict[str, str]:
    """The trainer's intervals, as its environment has them, in the seconds of this machine."""
    unused = {"model_dir": Path(), "redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(**unused)
    names = ("publish_interval_s", "publish_pause_s", "checkpoint_interval_s")
    return {ENV_PREFIX + name.upper(): str(getattr(config, name) / compress) for name in names}


@dataclass
class Hour:
    """What a run leaves behind."""

    engine: ReplayEngine
    traffic: Traffic
    follower: DraftFollower
    best: Best
    faults: Faults
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    failed_looks: int = 0


def begin(store: DraftStore, draft: Eagle3Draft, scene: Scene) -> None:
    """The first version, in service."""
    scene.add(draft_state(draft), draft)
    for state in (State.LIVE, State.PROMOTED):
        store.lifecycle.move(1, state, actor="benchmark")


def run(
    arguments: argparse.Namespace, model_dir: Path, first: Eagle3Draft, answers: Sequence[Answer], folder: Path
) -> Hour:
    store, fingerprint, end_s = DraftStore(folder / "drafts"), target_fingerprint(model_dir), 60 * arguments.minutes
    key = model_key(model_dir, fingerprint)
    with EmbeddedRedis(folder / "redis") as redis, connect(redis.url) as client:
        pointer, stream = DraftPointer(client, key), TraceStream(client, key, max_bytes=DEFAULT_STREAM_MAX_BYTES)
        watch = LiveWatch(1, clock=lambda: engine.clock_s)
        scene = Scene(store, pointer, None, fingerprint)  # type: ignore[arg-type]  # it tries nothing out
        begin(store, first, scene)
        traffic = Traffic(answers, end_s=end_s, seed=arguments.seed)
        engine = ReplayEngine(
            partial(load_draft, store, embed=first.embed, target_fingerprint=fingerprint),
            1,
            traffic,
            costs=Costs(plain_ms=arguments.plain_ms, round_ms=arguments.round_ms, spread=SPREAD),
            per_minute=arguments.per_minute,
            on_round=watch.observe,
            on_trace=lambda trace: stream.append(encode_trace(trace), trace_id=trace.header.trace_id),
            seed=arguments.seed,
        )
        follower = DraftFollower(engine, pointer, engine_id="replay", watch=watch, lifecycle=store.lifecycle)
        best = Best(engine.served, engine.table)
        faults = Faults(QUICK_FAULTS if arguments.quick else FAULTS, scene, best, end_s=end_s)
        hour = Hour(engine, traffic, follower, best, faults)
        os.environ.update(trainer_settings(arguments.compress))
        options = ["--model", str(model_dir), "--redis-url", redis.url, "--store", str(store.root)]
        trainer = Child(
            "train", ["train", *options, "--state", str(folder / "state")], log_path=folder / "train.log", num_threads=1
        )
        try:
            _drive(hour, trainer, end_s, arguments.compress)
        finally:
            trainer.stop()
        hour.events = store.lifecycle.events.tail(_ALL_EVENTS)
    return hour


def _drive(hour: Hour, trainer: Child, end_s: float, compress: float) -> None:
    engine, follower, best = hour.engine, hour.follower, hour.best
    pace, started_s, num_promoted, minute = Pace(compress), time.monotonic(), 0, 0
    while engine.clock_s < end_s:
        engine.run_until(engine.clock_s + POLL_S)
        in_service = engine.served
        try:
            follower.follow()
        except (StreamError, StoreError, EngineError) as error:
            hour.failed_looks += 1
            print(f"a look came to nothing: {error}", flush=True)
        best.take(engine.steps)
        if follower.log.verdicts["promoted"] > num_promoted:
            num_promoted += 1
            # The next one may be on trial already.
            best.meet(in_service)
        hour.faults.look(engine.clock_s)
        trainer.check()
        if engine.clock_s >= 60 * (minute + 1):
            minute += 1
            served, of_best = lengths([one for one in best.seen if one.at_s >= 60 * (minute - 1)])
            print(
                f"{minute:5d} min  accept length {served:.2f} (version {engine.draft_version}), "
                f"of the best {of_best:.2f} (version {best.served.version})",
                flush=True,
            )
        pace.wait(engine.clock_s)
    hour.seconds = time.monotonic() - started_s


# -- the report ----------------------------------------------------------------------------------------------


def gate_figures(events: Sequence[Event]) -> dict[str, Any]:
    """What the gate decided, and on how much."""
    judged = [event.fields for event in events if event.kind == "gate"]
    compared = [one for one in judged if one.get("lower") is not None]
    return {
        "outcomes": dict(Counter(one["outcome"] for one in judged)),
        "reasons": dict(Counter(one["reason"] for one in judged)),
        "held_out_traces_median": statistics.median(one["num_traces"] for one in compared) if compared else 0,
        "decisions": [
            {
                name: one.get(name)
                for name in ("outcome", "incumbent", "num_traces", "change", "lower", "upper", "seconds")
            }
            for one in judged
        ],
    }


def trial_figures(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What engines decided, in their order, with the numbers that it rests on."""
    return [
        {"version": event.fields["version"], "outcome": event.kind, "reason": event.fields["reason"]}
        | event.fields["numbers"]
        for event in events
        if event.actor.startswith("engine:") and event.kind in ("promoted", "rolled_back")
    ]


def report(hour: Hour, arguments: argparse.Namespace, num_answers: int) -> None:
    engine, seen, events = hour.engine, hour.best.seen, hour.events
    window, faults = arguments.window, hour.faults.all
    randoms = frozenset(one.version for one in faults if one.name == RANDOM and one.version is not None)
    found = falls(seen, window)
    with_random = [one for one in found if one.versions & randoms]
    others = [one for one in found if not one.versions & randoms]
    gate, by_window = gate_figures(events), ratios(seen, window)
    trials = trial_figures(events)
    outcomes, seconds = Counter(one["outcome"] for one in trials), [one.get("seconds", 0.0) for one in trials] or [0.0]
    tenth = 60 * arguments.minutes / 10
    at_start, at_end = (
        lengths([one for one in seen if low <= one.at_s < low + tenth]) for low in (0.0, 60 * arguments.minutes - tenth)
    )
    end_s = engine.clock_s
    rows: list[tuple[str, object]] = [
        ("virtual minutes, in minutes", f"{end_s / 60:.1f} in {hour.seconds / 60:.1f} ({end_s / hour.seconds:.1f}×)"),
        (
            "requests",
            f"{engine.num_requests}, {num_answers} different; each up to {max(hour.traffic.asked.values())} times",
        ),
        ("verifications, rounds", f"{len(seen)}, {engine.num_rounds}"),
        ("the gate", ", ".join(f"{count} {name}" for name, count in gate["outcomes"].items()) or "asked nothing"),
        ("  its held-out traces, median", gate["held_out_traces_median"]),
        ("engine: promoted, rolled back", f"{outcomes['promoted']}, {outcomes['rolled_back']}"),
        ("  seconds of a trial", Spread.of(seconds)),
        ("publishing paused", sum(event.kind == "publishing_paused" for event in events)),
        *((f"{one.at_s / 60:.1f} min: {one.name}", _outcome(one, engine)) for one in faults),
        ("accept length, first tenth → last", f"{at_start[0]:.2f} → {at_end[0]:.2f}; best {at_end[1]:.2f}"),
        (f"served / best, {window} verifications: lowest", f"{by_window.min():.3f}" if len(by_window) else "–"),
        ("  share of windows below 0.9", f"{(by_window < FLOOR).mean():.2%}" if len(by_window) else "–"),
        ("longest fall with random weights", _longest(with_random)),
        ("longest other fall", _longest(others)),
    ]
    finish(
        rows,
        [
            Target(
                "longest_fall_over_promised",
                max((one.overrun(randoms) for one in found), default=0.0),
                1.0,
                at_least=False,
            ),
            Target(
                "worst_fault_over_promised", max(_fault_overrun(one, engine) for one in faults), 1.0, at_least=False
            ),
            Target("windows", len(by_window), 1),
        ],
        {
            "virtual_minutes": round(end_s / 60, 2),
            "seconds": round(hour.seconds, 1),
            "compress": arguments.compress,
            "requests": engine.num_requests,
            "different_answers": num_answers,
            "verifications": len(seen),
            "rounds": engine.num_rounds,
            "window": window,
            "failed_looks": hour.failed_looks,
            "gate": gate,
            "trials": trials,
            "faults": [
                vars(one)
                | {"rounds": engine.rounds_of[one.version or 0], "seconds": engine.seconds_of[one.version or 0]}
                for one in faults
            ],
            "falls": [vars(one) | {"versions": sorted(one.versions)} for one in found],
            "lowest_ratio": float(by_window.min()) if len(by_window) else None,
            "by_minute": by_minute(seen),
        },
        arguments.json,
    )


def _outcome(fault: Fault, engine: ReplayEngine) -> str:
    version = fault.version or 0
    loss = "" if fault.offline_loss is None else f" ({fault.offline_loss:.1%} offline)"
    served = f"{engine.rounds_of[version]} rounds, {engine.seconds_of[version]:.1f} s in service"
    return f"version {version}{loss}: {fault.state} ({fault.reason or 'no verdict'}), {served}"


def _fault_overrun(fault: Fault, engine: ReplayEngine) -> float:
    """Its time in service over the promised one; infinite where it stays, or never came to be tried."""
    version = fault.version or 0
    rounds, seconds = engine.rounds_of[version], engine.seconds_of[version]
    if fault.state not in {state.value for state in BARRED}:
        return float("inf")
    if fault.name == NAN:
        return float("inf") if rounds else 0.0
    return min(rounds / 50, seconds / 5) if fault.name == RANDOM else rounds / 2000


def _longest(found: Sequence[Fall]) -> str:
    if not found:
        return "none"
    longest = max(found, key=lambda one: one.rounds)
    return (
        f"{longest.rounds} rounds, {longest.seconds:.1f} s, lowest {longest.lowest:.2f}, "
        f"at {longest.at_s / 60:.1f} min ({len(found)} falls)"
    )


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or recording(arguments, model_dir)
    torch.set_num_threads(1)
    first = fresh_draft(model_dir, seed=arguments.seed)
    answers = read_answers(path, first)
    if arguments.head_start:
        # From answers that are then not served: the gate's held-out traces stay fresh.
        traces = [answer.trace for answer in answers[::4]]
        answers = [answer for answer in answers if answer.number % 4]
        first, _ = trained(model_dir, traces, arguments.head_start)
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=not arguments.keep)
        hour = run(arguments, model_dir, first, answers, folder)
    report(hour, arguments, len(hour.traffic.asked))


def _arguments() -> argparse.Namespace:
    options = parser("How far and how long the served acceptance falls below the best version's")
    add_recording_options(options)
    options.add_argument("--minutes", type=float, help="virtual; default 60, quick 10")
    options.add_argument("--compress", type=float, help="virtual seconds in each; default 5, quick 8")
    options.add_argument("--per-minute", type=float, default=PER_MINUTE, help="most requests a virtual minute")
    options.add_argument("--plain-ms", type=float, nargs="+", default=PLAIN_MS, help="of a round, by clients")
    options.add_argument("--round-ms", type=float, nargs="+", default=ROUND_MS, help="the same with drafting")
    options.add_argument("--window", type=int, default=100, help="verifications over which a ratio is taken")
    options.add_argument("--head-start", type=int, help="steps before the first version; default 0, quick 60")
    options.add_argument("--keep", type=Path, metavar="DIR", help="where store, events and the trainer's log are left")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    defaults = {
        **RECORDING_DEFAULTS,
        "minutes": (10, 60),
        "compress": (8, 5),
        "head_start": (60, 0),
    }
    fill_in(arguments, defaults)
    return arguments


if __name__ == "__main__":
    main()
