"""An hour of traffic with faults in it: how far the served acceptance falls below the best version's, and for how long.

    python -m benchmarks.hour [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] [--keep DIR] …

Greedy answers are recorded once, or taken from a recording that `slipstream traces record` made of an engine at
temperature 0. They are then served again at the rate of the demo (docs/local-loop.md) by an engine that decodes them
with the draft in service (benchmarks/replayed.py), `--compress` virtual seconds in each second. Everything else is
real: Redis, store and lifecycle, follower and watch, whose clock is the virtual one, and the trainer in a process of
its own, with its gate and its second look at what came into service. The trainer's intervals are divided by the
compression and its arithmetic cannot be, so it learns in an hour what it would in 60 / `--compress` minutes.

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
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.answers import RECORDING_DEFAULTS, Traffic, add_recording_options, read_answers, recording
from benchmarks.common import fill_in, parser
from benchmarks.falls import Best, lengths
from benchmarks.hour_faults import FAULTS, QUICK_FAULTS, Faults
from benchmarks.hour_report import Hour, report
from benchmarks.live import trained
from benchmarks.replayed import Answer, Costs, ReplayEngine
from benchmarks.rollback import Scene
from benchmarks.versions import add_first
from serving.hotswap import DraftFollower
from serving.watch import LiveWatch
from slipstream.layout import DEFAULT_STREAM_MAX_BYTES
from slipstream.models import resolve_model
from slipstream.processes import Child, running_child
from speculator.checkpoint import model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import EngineError, StoreError, StreamError
from speculator.fresh import fresh_draft
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream
from trainer.config import ENV_PREFIX, load_config

POLL_S = 0.5
"""Virtual seconds between two looks of the follower: its default."""
PER_MINUTE = 27.0
PLAIN_MS, ROUND_MS, SPREAD = (27.9, 31.8), (34.1, 44.2), 0.15
"""For one client and two. For two from the demo's eight minutes with gate and watch (docs/local-loop.md): 15.9 ms a
token plainly, 1.23 times as fast with 1.71 tokens a verification; for one in the proportion of benchmarks/rounds.py.
The spread is that of a batch size's rounds in benchmarks/speedup.py, 0.11 to 0.16."""
_ALL_EVENTS = 1_000_000


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


def run(
    arguments: argparse.Namespace, model_dir: Path, first: Eagle3Draft, answers: Sequence[Answer], folder: Path
) -> Hour:
    store, fingerprint, end_s = DraftStore(folder / "drafts"), target_fingerprint(model_dir), 60 * arguments.minutes
    key = model_key(model_dir, fingerprint)
    with EmbeddedRedis(folder / "redis") as redis, connect(redis.url) as client:
        pointer, stream = DraftPointer(client, key), TraceStream(client, key, max_bytes=DEFAULT_STREAM_MAX_BYTES)
        watch = LiveWatch(1, clock=lambda: engine.clock_s)
        scene = Scene(store, pointer, None, fingerprint)  # type: ignore[arg-type]  # it tries nothing out
        add_first(store, first, fingerprint)
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
        with running_child("train", [*options, "--state", str(folder / "state")], folder) as trainer:
            _drive(hour, trainer, end_s, arguments.compress)
        faults.read_again()
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
