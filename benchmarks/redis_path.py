"""The path of traces of an 8B-sized target: engines' recorders, a real Redis, a trainer's source that learns nothing.

    python -m benchmarks.redis_path [--quick] [--json FILE] [--prompts FILE.jsonl] [--producers 2]

Part 1: producer processes submit traces of 512 tokens (d = 4096, K = 64, float8 features) to recorders, more than the
path carries; this process reads, decodes, makes examples, keeps them on its shelf and acks, as a trainer does. Capture
sampling is on: it is what keeps the stream from losing anything. How busy each part is comes from the system's count of
processor time, so what one core of each carries is known, too.

Part 2: the gaps between the chunks of a local engine's streams, with every request captured into that Redis and with
none, in turns. Target: at most 3% at the 99th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.common import Target, fill_in, finish, parser, pick_prompts
from benchmarks.engines import engine_with
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.engine import LocalEngine
from serving.recorder import TraceRecorder
from serving.sampler import CaptureSampler
from slipstream.models import resolve_model
from speculator.clock import now_ms
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.redis_client import connect
from speculator.sampling import SamplingParams
from speculator.stream import TraceStream
from speculator.trace import Trace, TraceHeader, VerifyRounds
from trainer.batch import make_example
from trainer.metrics import TrainerMetrics
from trainer.shelf import Shelf
from trainer.source import TraceSource

KEY, FINGERPRINT = "redis-path", "f" * 64
D, K, P, T, NUM_PROMPT = 4096, 64, 5, 512, 128
VOCAB_SIZE, DRAFT_VOCAB_SIZE = 128_256, 32_000
TOKENS_PER_ENGINE = 1000.0
RATES = (1.0, 0.1, 0.01)
CAP = 512 * 2**20
BATCH, ANSWER_TOKENS = 4, 32
_TICKS = os.sysconf("SC_CLK_TCK")


def make_trace(seed: int) -> Trace:
    """Of an answer of T − NUM_PROMPT tokens, two to a verification."""
    rng = np.random.default_rng(seed)
    position = np.arange(NUM_PROMPT, T - 2, 2, dtype=np.int32)
    R = len(position)
    return Trace(
        header=TraceHeader(
            trace_id="0",
            request_id="0",
            engine_id=f"engine-{seed}",
            target_fingerprint=FINGERPRINT,
            num_prompt_tokens=NUM_PROMPT,
            first_position=0,
            created_ms=now_ms(),
            sampling=SamplingParams(temperature=0.7),
        ),
        token_ids=rng.integers(0, VOCAB_SIZE, T, dtype=np.int32),
        aux_hidden=torch.from_numpy(rng.standard_normal((T, 3 * D), np.float32)).bfloat16(),
        target_topk_ids=rng.integers(0, VOCAB_SIZE, (T, K), dtype=np.int32),
        target_topk_logprobs=-np.sort(rng.exponential(3.0, (T, K))).astype(np.float16),
        constrained=np.zeros(T, np.bool_),
        rounds=VerifyRounds(
            position=position,
            draft_tokens=rng.integers(0, VOCAB_SIZE, (R, P), dtype=np.int32),
            draft_logprobs=-rng.exponential(1.0, (R, P)).astype(np.float16),
            draft_parents=np.tile(np.arange(-1, P - 1, dtype=np.int8), (R, 1)),
            num_accepted=rng.integers(0, 3, R, dtype=np.int8),
            draft_version=np.ones(R, np.int32),
        ),
    )


def produce(url: str, seed: int, tokens_per_s: float) -> None:
    """A recorder in a process of its own, with as many traces as engines of so many tokens a second finish. It is ready
    when it says so, begins with the first line of its input and ends with that. At most two traces wait in the
    recorder, so nothing is dropped for want of room; what comes meanwhile is not made.
    """
    torch.set_num_threads(1)
    trace, number, shares, stop = make_trace(seed), 0, [1.0], threading.Event()
    with connect(url) as client:
        stream = TraceStream(client, KEY, max_bytes=CAP)
        sampler = CaptureSampler(lambda: stream, floor=0.01)
        recorder = TraceRecorder(lambda: stream, max_buffer_bytes=2**30, sampler=sampler)
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        before_s, due_s = time.process_time(), time.monotonic()
        while not stop.is_set():
            if recorder.stats().pending >= 2 or time.monotonic() < due_s:
                time.sleep(0.001)
                continue
            due_s = max(due_s + T / tokens_per_s, time.monotonic() - 1)
            header = msgspec.structs.replace(trace.header, trace_id=f"{seed}-{number}", request_id=str(number))
            recorder.submit(dataclasses.replace(trace, header=header))
            number += 1
            shares.append(sampler.share)
        recorder.close(30)
        stats = recorder.stats()
    figures = {
        "captured": stats.captured,
        "appended": stats.appended,
        "dropped": dict(stats.dropped_by_reason),
        "share": statistics.fmean(shares),
        "cpu_s": time.process_time() - before_s,
    }
    print(json.dumps(figures), flush=True)


class Producer:
    def __init__(self, url: str, seed: int, tokens_per_s: float) -> None:
        words = [sys.executable, "-m", "benchmarks.redis_path", "--produce", str(seed), "--redis-url", url]
        words += ["--offered", str(tokens_per_s)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("begin\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        output, _ = self._process.communicate(timeout=60)
        found: dict[str, Any] = json.loads(output)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Consumer:
    """The trainer's source, and what it needs; acks twice a second what it has read."""

    def __init__(self, stream: TraceStream, folder: Path) -> None:
        draft_ids_V = torch.full((VOCAB_SIZE,), -1)
        draft_ids_V[:DRAFT_VOCAB_SIZE] = torch.arange(DRAFT_VOCAB_SIZE)
        self._shelf = Shelf(folder)
        self._source = TraceSource(
            stream,
            lambda trace: make_example(trace, draft_ids_V, feature_width=3 * D),
            target_fingerprint=FINGERPRINT,
            used_trace_ids=(),
            shelf=self._shelf,
            metrics=TrainerMetrics(CollectorRegistry()),
        )
        self.num_traces = 0
        self._acked_s = time.monotonic()

    def run_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            traces = self._source.read(4, 100)
            self._source.mark_used(traces)
            self.num_traces += len(traces)
            if time.monotonic() - self._acked_s > 0.5:
                self.ack()

    def ack(self) -> None:
        self._source.ack_used()
        self._shelf.keep(set())
        self._acked_s = time.monotonic()


def path(redis: EmbeddedRedis, num_producers: int, offered: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Sustained figures of the whole path, and what a core of each part would carry alone."""
    num_bytes = len(encode_trace(make_trace(0)))
    with ExitStack() as opened:
        client = opened.enter_context(connect(redis.url))
        producers = [Producer(redis.url, seed, offered / num_producers) for seed in range(num_producers)]
        for producer in producers:
            opened.callback(producer.close)
            producer.wait_until_ready()
        stream = TraceStream(client, KEY, max_bytes=CAP)
        consumer = Consumer(stream, folder)
        for producer in producers:
            producer.begin()
        consumer.run_until(time.monotonic() + seconds / 4)
        consumer.num_traces, redis_s, own_s, start_s = 0, cpu_seconds(redis.pid), time.process_time(), time.monotonic()
        lags = []
        for part in range(1, 11):
            consumer.run_until(start_s + seconds * part / 10)
            lags.append(stream.lag().undelivered)
        wall_s = time.monotonic() - start_s
        redis_s, own_s = cpu_seconds(redis.pid) - redis_s, time.process_time() - own_s
        num_traces = consumer.num_traces
        reports = [producer.end() for producer in producers]
        while stream.lag().undelivered:
            consumer.run_until(time.monotonic() + 0.2)
        consumer.ack()
        lag = stream.lag()
    appended = sum(one["appended"] for one in reports)
    return {
        "offered_tokens_per_s": offered,
        "bytes_per_token": num_bytes / T,
        "bytes_per_trace": num_bytes,
        "traces_per_s": num_traces / wall_s,
        "mb_per_s": num_traces * num_bytes / wall_s / 1e6,
        "tokens_per_s": num_traces * T / wall_s,
        "undelivered_median": statistics.median(lags),
        "undelivered_max": max(lags),
        "share_mean": statistics.fmean(one["share"] for one in reports),
        "captured": sum(one["captured"] for one in reports),
        "appended": appended,
        "acked": lag.acked,
        "lost": lag.lost,
        "unaccounted": appended - lag.acked - lag.lost - lag.pending,
        "recorder_us_per_token": 1e6 * sum(one["cpu_s"] for one in reports) / (appended * T),
        "redis_us_per_token": 1e6 * redis_s / (num_traces * T),
        "source_us_per_token": 1e6 * own_s / (num_traces * T),
        "redis_busy": redis_s / wall_s,
        "source_busy": own_s / wall_s,
    }


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def engines(tokens_per_s: float) -> dict[str, float]:
    """How many engines that commit 1,000 tokens a second each a path of so many tokens a second carries."""
    return {str(rate): tokens_per_s / (TOKENS_PER_ENGINE * rate) for rate in RATES}


def serving(model_dir: Path, prompts: list[str], redis: EmbeddedRedis, blocks: int) -> dict[str, Any]:
    """Gaps of streams, blocks with and without capture in turns, in a random order within each pair."""
    gaps_ms: dict[bool, list[float]] = {False: [], True: []}
    with connect(redis.url) as client:
        stream = TraceStream(client, "serving", max_bytes=CAP)
        recorder = TraceRecorder(
            lambda: stream, max_buffer_bytes=2**28, sampler=CaptureSampler(lambda: stream, floor=0.01)
        )
        settings = {
            "depth": 2,
            "min_confidence": 0.0,
            "suffix_depth": 0,
            "control_share": 0.0,
            "num_slots": BATCH,
            "context_length": 512,
        }
        draft = fresh_draft(model_dir, seed=0)
        with engine_with(model_dir, draft, 1, settings=settings, on_trace=recorder.submit) as engine:
            asyncio.run(_block(engine, prompts[:BATCH], capture=True))
            rng = random.Random(0)
            for block in range(blocks):
                asked = [prompts[(BATCH * block + row) % len(prompts)] for row in range(BATCH)]
                for capture in rng.sample((False, True), 2):
                    gaps_ms[capture] += asyncio.run(_block(engine, asked, capture=capture))
        recorder.close(10)
        stats = recorder.stats()
    found: dict[str, Any] = {"traces": stats.appended, "dropped": stats.dropped, "share": stats.share}
    for capture, name in ((False, "off"), (True, "on")):
        found[name] = {
            "gaps": len(gaps_ms[capture]),
            **{f"p{at}_ms": float(np.percentile(gaps_ms[capture], at)) for at in (50, 90, 99)},
        }
    for at in ("p50", "p90", "p99"):
        found[f"{at}_ratio"] = found["on"][f"{at}_ms"] / found["off"][f"{at}_ms"]
    found["p99_ratio_interval"] = _interval(gaps_ms)
    return found


async def _block(engine: LocalEngine, prompts: list[str], *, capture: bool) -> list[float]:
    """Milliseconds between the chunks of each stream; the answers begin one after the other, and so end apart."""
    gaps: list[float] = []

    async def one(row: int, text: str) -> None:
        tokens = engine.tokenizer.encode_chat([{"role": "user", "content": text}])[-128:]
        request = GenerateRequest(
            request_id=f"{row}",
            prompt_token_ids=tuple(tokens),
            max_tokens=ANSWER_TOKENS + 8 * row,
            sampling=SamplingParams(temperature=0),
            ignore_eos=True,
            policy=CapturePolicy(capture=capture),
        )
        last_s = None
        async for _ in engine.generate(request):
            now_s = time.perf_counter()
            if last_s is not None:
                gaps.append(1000 * (now_s - last_s))
            last_s = now_s

    await asyncio.gather(*(one(row, text) for row, text in enumerate(prompts)))
    return gaps


def _interval(gaps_ms: dict[bool, list[float]]) -> list[float]:
    """Of the ratio of the 99th percentiles, 95%, from gaps drawn again. Too narrow: those of one block are alike."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(400):
        on, off = (np.percentile(rng.choice(gaps_ms[capture], len(gaps_ms[capture])), 99) for capture in (True, False))
        ratios.append(on / off)
    return [float(bound) for bound in np.percentile(ratios, (2.5, 97.5))]


def main() -> None:
    options = parser("Traces from engines to the trainer through Redis")
    options.add_argument("--producers", type=int, default=2)
    options.add_argument("--offered", type=float, default=20_000.0, help="tokens a second of all producers")
    options.add_argument("--seconds", type=float)
    options.add_argument("--blocks", type=int, help="of part 2, each with and without capture")
    options.add_argument("--produce", type=int, help=argparse.SUPPRESS)
    options.add_argument("--redis-url", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.produce is not None:
        produce(arguments.redis_url, arguments.produce, arguments.offered)
        return
    fill_in(arguments, {"seconds": (24.0, 60.0), "blocks": (12, 60)})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        with EmbeddedRedis(Path(scratch) / "redis") as redis:
            sustained = path(redis, arguments.producers, arguments.offered, arguments.seconds, Path(scratch) / "shelf")
        prompts = [prompt.text for prompt in pick_prompts(arguments.prompts, 32)]
        with EmbeddedRedis(Path(scratch) / "redis-of-serving") as redis:
            added = serving(resolve_model(arguments.model), prompts, redis, arguments.blocks)
    per_core = {part: 1e6 / sustained[f"{part}_us_per_token"] for part in ("recorder", "redis", "source")}
    carried = {"this_machine": engines(sustained["tokens_per_s"]), "one_redis_core": engines(per_core["redis"])}
    carried["one_source_core"] = engines(per_core["source"])
    rows = [
        ("sustained", f"{sustained['mb_per_s']:.1f} MB/s, {sustained['traces_per_s']:.2f} traces/s"),
        ("", f"{sustained['tokens_per_s']:.0f} tokens/s of {sustained['bytes_per_token']:.0f} bytes"),
        ("not taken yet", f"median {sustained['undelivered_median']}, at most {sustained['undelivered_max']} traces"),
        ("kept by sampling", f"{sustained['share_mean']:.3f} of {sustained['captured']} traces"),
        ("appended, acked, lost", f"{sustained['appended']}, {sustained['acked']}, {sustained['lost']}"),
        *((f"one core of a {part}", f"{rate:.0f} tokens/s") for part, rate in per_core.items()),
        *((f"engines, {name}", _engines_row(row)) for name, row in carried.items()),
        *(
            (
                f"gaps, capture {name}",
                f"p50 {added[name]['p50_ms']:.2f}, p90 {added[name]['p90_ms']:.2f}, p99 {added[name]['p99_ms']:.2f} ms",
            )
            for name in ("off", "on")
        ),
        ("p99 on/off", f"{added['p99_ratio']:.3f} ({' … '.join(f'{one:.3f}' for one in added['p99_ratio_interval'])})"),
    ]
    targets = [
        Target("lost_traces", sustained["lost"] + abs(sustained["unaccounted"]), 0, at_least=False),
        Target("p99_ratio", added["p99_ratio"], 1.03, at_least=False),
    ]
    document = {"path": sustained, "tokens_per_core_s": per_core, "engines": carried, "serving": added}
    finish(rows, targets, document, arguments.json)


def _engines_row(row: dict[str, float]) -> str:
    return ", ".join(f"{count:.2f} at {rate}" for rate, count in row.items())


if __name__ == "__main__":
    main()
