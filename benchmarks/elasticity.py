"""What a trainer on the same machine costs serving, and how much of the idle CPU it uses: bursts of requests.

    python -m benchmarks.elasticity [--quick] [--rounds N] [--json FILE] [--prompts FILE.jsonl]

One local engine, on all cores unless told otherwise, answers bursts of requests with pauses between them, Poisson
arrivals within a burst, greedy and at depth 0. Each round has its own requests, from a fixed seed, and all its windows
answer the same ones. A request counts from the moment at which it was due. A round's windows, in this order:

- absent: no trainer;
- yielding: `slipstream train` with the engine's pulse (trainer/sharing.py);
- priority, not with --quick: `slipstream train` as it is without it: one thread, nice 19;
- absent again: what the machine's own drift adds counts half on either side.

Both trainers learn from traces of the same engine, and go on as long as they may. In the others' windows a trainer is
stopped (SIGSTOP). Percentiles are over all windows of a variant, each with the 95% interval over resampled rounds; the
two windows without a trainer, set against each other in the same way, say what this machine can tell apart.

CPU time says little about learning where two cores are the two halves of one, or a second thread only waits. So the
yielding trainer learns alone for a while, too, and what it learnt beside serving is set against its speed then times
the idle share of the machine: 1 is all that could be had from idle time.

It needs a quiet machine, and says nothing where other programs take more than they leave.

Targets: the 99th percentile of the gaps between two tokens, and of the requests' latency, at most 1.03 × those of
absent; the yielding trainer's CPU time at least 0.60 of what is idle without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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

ABSENT, YIELDING, PRIORITY, AGAIN = "absent", "yielding", "priority", "absent again"
P99_BOUND, IDLE_BOUND = 1.03, 0.60
SEEDED_TOKENS = 48
READY_S = 120.0
NUM_RESAMPLED = 1000
ALONE_S = 6.0
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


def p99(windows: Sequence[Sequence[float]]) -> float:
    return float(np.percentile(np.concatenate(windows), 99))


@dataclass(frozen=True)
class Ratio:
    """Of two 99th percentiles, with the 95% interval over resampled rounds."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Self:
        """By round, as they belong together."""
        rng = np.random.default_rng(0)

        def ratio(rounds: Sequence[int]) -> float:
            return p99([ours[one] for one in rounds]) / p99([base[one] for one in rounds])

        resampled = [ratio(rng.integers(len(ours), size=len(ours)).tolist()) for _ in range(NUM_RESAMPLED)]
        low, high = np.percentile(resampled, (2.5, 97.5))
        return cls(ratio(range(len(ours))), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:8.3f}  ({self.low:.3f} … {self.high:.3f})"


def main() -> None:
    options = parser("A trainer beside a local engine under bursts")
    options.add_argument("--rounds", type=int, help="windows of each variant; without a trainer twice")
    options.add_argument("--bursts", type=int, default=3, help="in a window")
    options.add_argument("--burst-s", type=float, default=3.0)
    options.add_argument("--pause-s", type=float, default=3.0, help="between the bursts' last arrivals and the next")
    options.add_argument("--rate", type=float, default=2.0, help="requests a second within a burst")
    options.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="that all of it may use")
    options.add_argument("--engine-threads", type=int, help="of the engine; default all cores")
    options.add_argument("--known-s", type=float, default=0.0, help="serving beside the trainer before it is measured")
    arguments = options.parse_args()
    fill_in(arguments, {"rounds": (2, 6)})
    # Told to end, too, it leaves no trainer behind that stands still or, worse, does not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(arguments.engine_threads or len(cores))
    model_dir = resolve_model(arguments.model)
    with tempfile.TemporaryDirectory(prefix="slipstream-elasticity-", dir="/dev/shm") as scratch:
        windows, alone_per_s = _measure(model_dir, Path(scratch), arguments, cores)
    _report(windows, alone_per_s, arguments)


# -- the scene -----------------------------------------------------------------------------------------------------


def _measure(model_dir: Path, folder: Path, arguments: Any, cores: list[int]) -> tuple[dict[str, list[Window]], float]:
    """The windows, and the tokens that the yielding trainer learns from in a second of its own."""
    recorded: list[Trace] = []
    pulse = Pulse(folder / "pulse")
    settings = {"depth": 0, "suffix_depth": 0, "control_share": 0.0}
    draft = fresh_draft(model_dir, seed=0)
    threads = arguments.engine_threads or len(cores)
    with (
        engine_with(model_dir, draft, threads, settings=settings, on_trace=recorded.append, pulse=pulse) as engine,
        contextlib.ExitStack() as running,
    ):
        prompts = _prompts(engine, arguments.prompts, 64)
        asyncio.run(answers_of(engine, prompts[: 16 if arguments.quick else 32], SEEDED_TOKENS))
        traces = list(recorded)
        variants = {YIELDING: {"PULSE_DIR": str(folder / "pulse")}}
        if not arguments.quick:
            variants[PRIORITY] = {}
        trainers: dict[str, Trainer] = {}
        for name, variables in variants.items():
            trainers[name] = running.enter_context(_trainer(name, model_dir, folder / name, traces, variables))
        least_s = arguments.bursts * (arguments.burst_s + arguments.pause_s)
        # Warm.
        _window(engine, _arrivals(prompts, 0, arguments), None, cores, least_s)
        for number in range(math.ceil(arguments.known_s / least_s)):
            _window(engine, _arrivals(prompts, number, arguments), trainers[YIELDING], cores, least_s)
        alone_per_s = [trainers[YIELDING].speed()]
        found: dict[str, list[Window]] = {name: [] for name in (ABSENT, *trainers, AGAIN)}
        for number in range(arguments.rounds):
            trace = _arrivals(prompts, number, arguments)
            for name, windows in found.items():
                windows.append(_window(engine, trace, trainers.get(name), cores, least_s))
                print(f"round {number + 1} {name:<12} {_line(windows[-1])}", flush=True)
        alone_per_s.append(trainers[YIELDING].speed())
        pulse.close()
    return found, float(np.mean(alone_per_s))


def _prompts(engine: LocalEngine, path: Path | None, count: int) -> list[list[int]]:
    texts = [prompt.text for prompt in pick_prompts(path, count)]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}])[-128:] for text in texts]


def _arrivals(prompts: Sequence[Sequence[int]], number: int, arguments: Any) -> list[Arrival]:
    """Of a round; the same for the same options."""
    rng, arrivals = random.Random(number), []
    for burst in range(arguments.bursts):
        begin_s = burst * (arguments.burst_s + arguments.pause_s)
        due_s = begin_s
        while due_s < begin_s + arguments.burst_s:
            arrivals.append(Arrival(due_s, rng.choice(prompts), rng.randrange(12, 33)))
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

    def speed(self) -> float:
        """Tokens learnt from a second while nothing else happens; it stands still again afterwards."""
        self.go_on()
        time.sleep(1.0)
        (before, _), began_s = self.progress(), time.monotonic()
        time.sleep(ALONE_S)
        (after, _), ended_s = self.progress(), time.monotonic()
        self.stand_still()
        return (after - before) / (ended_s - began_s)

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
        f"gap p99 {p99([window.gaps_ms]):6.1f} ms  latency p99 {p99([window.latencies_ms]):7.1f} ms  "
        f"idle {window.idle_s:5.1f} s  trainer {window.trainer_s:5.1f} s  others {window.others_s:5.1f} s  "
        f"learnt {window.learnt_tokens:.0f}  waited {window.waited_s:.1f} s"
    )


def _report(windows: dict[str, list[Window]], alone_per_s: float, arguments: Any) -> None:
    pairs = list(zip(windows[ABSENT], windows[AGAIN], strict=True))
    if any(one.idle_s <= one.others_s for pair in pairs for one in pair):
        raise SystemExit("other programs used more CPU than was idle without a trainer: nothing can be said, try again")
    idle_s = [(one.idle_s + again.idle_s) / 2 for one, again in pairs]
    gaps_ms = [one.gaps_ms + again.gaps_ms for one, again in pairs]
    latencies_ms = [one.latencies_ms + again.latencies_ms for one, again in pairs]
    num_gaps, num_requests = sum(map(len, gaps_ms)) // 2, sum(map(len, latencies_ms)) // 2
    others = Spread.of([one.others_s for pair in pairs for one in pair])
    gap_noise = Ratio.of([one.gaps_ms for one, _ in pairs], [again.gaps_ms for _, again in pairs])
    latency_noise = Ratio.of([one.latencies_ms for one, _ in pairs], [again.latencies_ms for _, again in pairs])
    rows: list[tuple[str, object]] = [
        (f"{arguments.rounds} rounds, {num_requests} requests and {num_gaps} gaps a variant", ""),
        ("absent: gap p99, ms", f"{p99(gaps_ms):8.1f}"),
        ("absent: request p99, ms", f"{p99(latencies_ms):8.1f}"),
        ("absent: idle CPU, s a window", Spread.of(idle_s)),
        ("absent: CPU of other programs, s a window", others),
        ("absent over absent again: gap p99", gap_noise),
        ("absent over absent again: request p99", latency_noise),
        ("the yielding trainer alone: tokens learnt from a second", f"{alone_per_s:8.0f}"),
    ]
    document: dict[str, Any] = {
        "rounds": arguments.rounds,
        "requests": num_requests,
        "gaps": num_gaps,
        "alone_tokens_per_s": round(alone_per_s, 1),
        "absent": {"gap_p99_ratio": asdict(gap_noise), "latency_p99_ratio": asdict(latency_noise)},
    }
    targets: list[Target] = []
    for name in (YIELDING, PRIORITY):
        if name not in windows:
            continue
        ours = windows[name]
        gap = Ratio.of([one.gaps_ms for one in ours], gaps_ms)
        latency = Ratio.of([one.latencies_ms for one in ours], latencies_ms)
        means = [np.mean(one.gaps_ms) / np.mean(base_ms) for one, base_ms in zip(ours, gaps_ms, strict=True)]
        used = Spread.of([one.trainer_s / base_s for one, base_s in zip(ours, idle_s, strict=True)])
        learnt = Spread.of([one.learnt_tokens for one in ours])
        # Idle seconds of all cores together over their number: so long the whole machine was idle, as it were.
        could_learn = [alone_per_s * base_s / arguments.cores for base_s in idle_s]
        of_idle = Spread.of([one.learnt_tokens / could for one, could in zip(ours, could_learn, strict=True)])
        rows += [
            (f"{name}: gap p99 over absent", gap),
            (f"{name}: request p99 over absent", latency),
            (f"{name}: mean gap over absent, by round", Spread.of(means)),
            (f"{name}: trainer CPU over idle CPU", used),
            (f"{name}: tokens learnt from, a window", learnt),
            (f"{name}: the same over what idle time allows", of_idle),
            (f"{name}: waited for the engine, s a window", Spread.of([one.waited_s for one in ours])),
        ]
        document[name] = {
            "gap_p99_ratio": asdict(gap),
            "latency_p99_ratio": asdict(latency),
            "gap_mean_ratio": Spread.of(means).to_dict(),
            "idle_cpu_share": used.to_dict(),
            "learnt_tokens": learnt.to_dict(),
            "idle_learning_share": of_idle.to_dict(),
        }
        if name == YIELDING:
            targets = [
                Target("gap_p99_ratio", gap.value, P99_BOUND, at_least=False),
                Target("latency_p99_ratio", latency.value, P99_BOUND, at_least=False),
                Target("idle_cpu_share", used.median, IDLE_BOUND),
            ]
    document["windows"] = {
        name: [
            {key: value for key, value in asdict(one).items() if not isinstance(value, list)}
            | {"gap_p99_ms": p99([one.gaps_ms]), "latency_p99_ms": p99([one.latencies_ms])}
            for one in every
        ]
        for name, every in windows.items()
    }
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()
