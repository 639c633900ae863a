"""What a trainer on the same machine costs serving, and how much of the idle CPU it uses: bursts of requests.

    python -m benchmarks.elasticity [--quick] [--json FILE] [--prompts FILE.jsonl]

One local engine on all cores answers the same requests again and again: bursts with pauses between them, Poisson
arrivals within a burst, from a fixed seed, greedy and at depth 0, so that every window has the same work. A request
counts from the moment at which it was due. Beside the engine, window by window in turn:

- absent: no trainer;
- yielding: `slipstream train` with the engine's pulse (trainer/sharing.py);
- priority: `slipstream train` as it is without it: one thread, nice 19.

Both trainers learn from traces of the same engine, and go on as long as they may. In the others' windows a trainer is
stopped (SIGSTOP). Each window is set against the absent one of its round; medians over the rounds, and the extremes.

It needs a quiet machine, and says nothing where other programs take more than they leave.

Targets: the 99th percentile of the gaps between two tokens, and of the requests' latency, at most 1.03 × those of
absent; the yielding trainer's CPU time at least 0.60 of what is idle without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from benchmarks.common import Spread, Target, fill_in, finish, parser, pick_prompts
from benchmarks.engines import answers_of, engine_with, stream
from benchmarks.panels import free_port
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model
from slipstream.processes import Child
from slipstream.scrape import Sample
from speculator.checkpoint import model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.pulse import Pulse
from speculator.redis_client import connect
from speculator.stream import TraceStream
from speculator.trace import Trace
from trainer.config import ENV_PREFIX

ABSENT, YIELDING, PRIORITY = "absent", "yielding", "priority"
P99_BOUND, IDLE_BOUND = 1.03, 0.60
SEEDED_TOKENS = 48
READY_S = 120.0
ALWAYS_AT_WORK = {"MAX_PASSES": "1000000"}


@dataclass(frozen=True)
class Arrival:
    due_s: float
    prompt: Sequence[int]
    num_tokens: int


@dataclass(frozen=True)
class Window:
    """What was measured while one variant ran."""

    gaps_ms: list[float]
    latencies_ms: list[float]
    idle_s: float
    trainer_s: float
    """CPU time of the trainer."""
    others_s: float
    """CPU time of what belongs to none of us."""
    learnt_tokens: float
    waited_s: float
    """That the trainer waited for the engine."""

    @property
    def gap_p99(self) -> float:
        return float(np.percentile(self.gaps_ms, 99))

    @property
    def latency_p99(self) -> float:
        return float(np.percentile(self.latencies_ms, 99))


def main() -> None:
    options = parser("A trainer beside a local engine under bursts")
    options.add_argument("--rounds", type=int, help="windows of each variant")
    options.add_argument("--bursts", type=int, default=3, help="in a window")
    options.add_argument("--burst-s", type=float, default=3.0)
    options.add_argument("--pause-s", type=float, default=3.0, help="between the bursts' last arrivals and the next")
    options.add_argument("--rate", type=float, default=2.0, help="requests a second within a burst")
    options.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="that all of it may use")
    arguments = options.parse_args()
    fill_in(arguments, {"rounds": (2, 4)})
    # Told to end, too, it leaves no trainer behind that stands still or, worse, does not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    model_dir = resolve_model(arguments.model)
    with tempfile.TemporaryDirectory(prefix="slipstream-elasticity-", dir="/dev/shm") as scratch:
        windows = _measure(model_dir, Path(scratch), arguments, cores)
    _report(windows, arguments)


# -- the scene -----------------------------------------------------------------------------------------------------


def _measure(model_dir: Path, folder: Path, arguments: Any, cores: list[int]) -> dict[str, list[Window]]:
    recorded: list[Trace] = []
    pulse = Pulse(folder / "pulse")
    settings = {"depth": 0, "suffix_depth": 0, "control_share": 0.0}
    draft = fresh_draft(model_dir, seed=0)
    with (
        engine_with(model_dir, draft, len(cores), settings=settings, on_trace=recorded.append, pulse=pulse) as engine,
        contextlib.ExitStack() as running,
    ):
        prompts = _prompts(engine, arguments.prompts, 64)
        asyncio.run(answers_of(engine, prompts[: 16 if arguments.quick else 32], SEEDED_TOKENS))
        traces = list(recorded)
        trace = _arrivals(prompts, arguments)
        trainers: dict[str, Trainer] = {}
        for name, variables in (
            (YIELDING, {"PULSE_DIR": str(folder / "pulse")}),
            (PRIORITY, {}),
        ):
            trainers[name] = running.enter_context(_trainer(name, model_dir, folder / name, traces, variables))
        least_s = arguments.bursts * (arguments.burst_s + arguments.pause_s)
        _window(engine, trace, None, cores, least_s)
        found: dict[str, list[Window]] = {name: [] for name in (ABSENT, YIELDING, PRIORITY)}
        for number in range(arguments.rounds):
            names = list(found)
            for name in names[number % 3 :] + names[: number % 3]:
                found[name].append(_window(engine, trace, trainers.get(name), cores, least_s))
                print(f"round {number + 1} {name:<9} {_line(found[name][-1])}", flush=True)
        pulse.close()
    return found


def _prompts(engine: LocalEngine, path: Path | None, count: int) -> list[list[int]]:
    texts = [prompt.text for prompt in pick_prompts(path, count)]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}])[-128:] for text in texts]


def _arrivals(prompts: Sequence[Sequence[int]], arguments: Any) -> list[Arrival]:
    """The same for the same options."""
    rng, arrivals = random.Random(0), []
    for burst in range(arguments.bursts):
        begin_s = burst * (arguments.burst_s + arguments.pause_s)
        due_s = begin_s
        while due_s < begin_s + arguments.burst_s:
            arrivals.append(Arrival(due_s, prompts[len(arrivals) % len(prompts)], rng.randrange(12, 33)))
            due_s += rng.expovariate(arguments.rate)
    return arrivals


class Trainer:
    """A `slipstream train` that stands still but for its windows."""

    def __init__(self, child: Child, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._child = child
        self.process = psutil.Process(child.pid)

    def wait_until_learning(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self._child.check()
            with contextlib.suppress(httpx.TransportError):
                if self._metrics().total("slipstream_trainer_steps_total") >= 3:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the trainer made no step in {READY_S:.0f} s")

    def progress(self) -> tuple[float, float]:
        """Tokens learnt from, and seconds waited for engines, so far."""
        metrics = self._metrics()
        names = "slipstream_trainer_learnt_tokens_total", "slipstream_trainer_yielded_seconds_total"
        return metrics.total(names[0]), metrics.total(names[1])

    def _metrics(self) -> Sample:
        return Sample.parse(0.0, httpx.get(self._url, timeout=30, trust_env=False).text)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def stand_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def _trainer(
    name: str, model_dir: Path, folder: Path, traces: Sequence[Trace], variables: Mapping[str, str]
) -> Iterator[Trainer]:
    """One with a Redis, a store and a state of its own, which has begun to learn and then stands still."""
    port, fingerprint = free_port(), target_fingerprint(model_dir)
    with EmbeddedRedis(folder / "redis") as redis:
        stream_of = TraceStream(connect(redis.url), model_key(model_dir, fingerprint), max_bytes=512 * 1024 * 1024)
        for trace in traces:
            stream_of.append(encode_trace(trace), trace_id=trace.header.trace_id)
        arguments = ["--model", str(model_dir), "--redis-url", redis.url, "--store", str(folder / "drafts")]
        arguments += ["--state", str(folder / "state"), "--metrics-port", str(port)]
        with _environment({ENV_PREFIX + key: value for key, value in {**ALWAYS_AT_WORK, **variables}.items()}):
            child = Child(name, ["train", *arguments], log_path=folder / "train.log", num_threads=1)
        trainer = Trainer(child, port)
        try:
            trainer.wait_until_learning()
            trainer.stand_still()
            yield trainer
        finally:
            trainer.go_on()
            child.stop()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


# -- one window ----------------------------------------------------------------------------------------------------


def _window(
    engine: LocalEngine, trace: Sequence[Arrival], trainer: Trainer | None, cores: list[int], least_s: float
) -> Window:
    learnt = waited_s = before_s = 0.0
    if trainer is not None:
        trainer.go_on()
        time.sleep(1.0)
        learnt, waited_s = trainer.progress()
        before_s = trainer.cpu_s()
    own, machine, started_s = time.process_time(), _machine(cores), time.monotonic()
    gaps_ms, latencies_ms = asyncio.run(_serve(engine, trace, least_s))
    wall_s = time.monotonic() - started_s
    idle_s = _machine(cores) - machine
    own_s = time.process_time() - own
    trainer_s = 0.0
    if trainer is not None:
        trainer_s = trainer.cpu_s() - before_s
        learnt_after, waited_after_s = trainer.progress()
        learnt, waited_s = learnt_after - learnt, waited_after_s - waited_s
        trainer.stand_still()
    others_s = len(cores) * wall_s - idle_s - own_s - trainer_s
    return Window(gaps_ms, latencies_ms, idle_s, trainer_s, others_s, learnt, waited_s)


def _machine(cores: list[int]) -> float:
    """Idle seconds of these cores so far."""
    times = psutil.cpu_times(percpu=True)
    return float(sum(times[core].idle + times[core].iowait for core in cores))


async def _serve(engine: LocalEngine, trace: Sequence[Arrival], least_s: float) -> tuple[list[float], list[float]]:
    gaps_ms: list[float] = []
    latencies_ms: list[float] = []
    started_s = time.monotonic() + 0.5

    async def answer(number: int, arrival: Arrival) -> None:
        due_s = started_s + arrival.due_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        last_s: float | None = None
        async for _ in stream(engine, str(number), arrival.prompt, arrival.num_tokens):
            now_s = time.monotonic()
            if last_s is not None:
                gaps_ms.append(1000 * (now_s - last_s))
            last_s = now_s
        latencies_ms.append(1000 * (time.monotonic() - due_s))

    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(trace):
            group.create_task(answer(number, arrival))
    # The pause after the last burst belongs to the window.
    await asyncio.sleep(max(0.0, started_s + least_s - time.monotonic()))
    return gaps_ms, latencies_ms


# -- the figures ---------------------------------------------------------------------------------------------------


def _line(window: Window) -> str:
    return (
        f"gap p99 {window.gap_p99:6.1f} ms  latency p99 {window.latency_p99:7.1f} ms  idle {window.idle_s:5.1f} s  "
        f"trainer {window.trainer_s:5.1f} s  others {window.others_s:5.1f} s  learnt {window.learnt_tokens:.0f}  "
        f"waited {window.waited_s:.1f} s"
    )


def _report(windows: dict[str, list[Window]], arguments: Any) -> None:
    absent = windows[ABSENT]
    if any(one.idle_s <= one.others_s for one in absent):
        raise SystemExit("other programs used more CPU than was idle without a trainer: nothing can be said, try again")

    def against(name: str, figure: str) -> Spread:
        pairs = zip(windows[name], absent, strict=True)
        return Spread.of([getattr(one, figure) / getattr(base, figure) for one, base in pairs])

    def over(name: str, figure: str) -> Spread:
        return Spread.of([getattr(one, figure) for one in windows[name]])

    used = {
        name: Spread.of([one.trainer_s / base.idle_s for one, base in zip(windows[name], absent, strict=True)])
        for name in (YIELDING, PRIORITY)
    }
    num_gaps, num_requests = len(absent[0].gaps_ms), len(absent[0].latencies_ms)
    rows: list[tuple[str, object]] = [
        (f"{arguments.rounds} rounds, {num_requests} requests and {num_gaps} gaps a window", "median    (min … max)"),
        ("absent: gap p99, ms", over(ABSENT, "gap_p99")),
        ("absent: latency p99, ms", over(ABSENT, "latency_p99")),
        ("absent: idle CPU, s", over(ABSENT, "idle_s")),
        ("absent: CPU of other programs, s", over(ABSENT, "others_s")),
    ]
    document: dict[str, Any] = {"rounds": arguments.rounds, "requests": num_requests, "gaps": num_gaps}
    for name in (YIELDING, PRIORITY):
        gap, latency, learnt = against(name, "gap_p99"), against(name, "latency_p99"), over(name, "learnt_tokens")
        rows += [
            (f"{name}: gap p99 over absent", gap),
            (f"{name}: latency p99 over absent", latency),
            (f"{name}: trainer CPU over idle CPU", used[name]),
            (f"{name}: tokens learnt from", learnt),
            (f"{name}: waited for the engine, s", over(name, "waited_s")),
        ]
        document[name] = {
            "gap_p99_ratio": gap.to_dict(),
            "latency_p99_ratio": latency.to_dict(),
            "idle_cpu_share": used[name].to_dict(),
            "learnt_tokens": learnt.to_dict(),
        }
    document["windows"] = {
        name: [
            {key: value for key, value in dataclasses.asdict(one).items() if not isinstance(value, list)}
            | {"gap_p99_ms": one.gap_p99, "latency_p99_ms": one.latency_p99}
            for one in every
        ]
        for name, every in windows.items()
    }
    finish(
        rows,
        [
            Target("gap_p99_ratio", against(YIELDING, "gap_p99").median, P99_BOUND, at_least=False),
            Target("latency_p99_ratio", against(YIELDING, "latency_p99").median, P99_BOUND, at_least=False),
            Target("idle_cpu_share", used[YIELDING].median, IDLE_BOUND),
        ],
        document,
        arguments.json,
    )


if __name__ == "__main__":
    main()
