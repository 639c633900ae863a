"""Soak test: run the real loop under steady load, sample memory, descriptors, threads and latency, and test for growth.

    make soak MINUTES=10
    python -m benchmarks.soak [--minutes 10] [--quick] [--json FILE] [--model NAME] [--rate R]

`slipstream serve` (gateway, local engine, recorder, follower), `slipstream train` and a real Redis run as processes of
their own. Requests come at a fixed rate whatever becomes of the ones before; a request's latency counts from the moment
at which it was due. A third of them are streams and one in ten clients leaves in the middle of one. No prompt comes
twice, every tenth comes from a group of its own, and every twentieth brings a domain that never came before: whatever
remembers traffic has something to remember, for as long as it runs. Bounds of stream and replay are small, and after a
minute and a half more domains have come than are told apart, so that all of it is full long before sampling begins:
what is bounded by design has then stopped growing. The first half of the time is left out for that.

Sampled every second or two: of each process the resident memory, descriptors and threads; pending and undelivered
entries; the memory of Redis, without the stream of traces, which is trimmed by whole
blocks and so goes up and down below its cap, and must never be above it; by stretches of ten seconds the latency's
median and 99th percentile. Each series gets a slope an hour with a 99% interval (benchmarks/common/growth.py). It is
flat where the interval reaches down to the tolerance, which is a tenth of a percent of the level for memory, and
nothing for everything else. `--json` has all samples.

All processes run with one arena, without caches of freed pieces, and give freed memory back soon: so resident memory
follows what is in use. What is known to fill up to a bound is printed with the level that it had at the beginning and
at the end of the window.

The model is a toy by default (eight random layers): it makes the most requests, swaps and traces a minute, and leaks
are of those. It computes in float32: in bfloat16 oneDNN compiles a kernel of 0.7 MB for each number of rows and each
shape of weights, and it takes hours until all of a thousand have come. `--model` takes a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.common.growth import Slope, slope
from benchmarks.common.report import Target, fill_in, finish, parser
from slipstream.children import running_child
from slipstream.demo.servers import Scrape, wait_until_ready
from slipstream.models import resolve_model
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.host import free_port
from speculator.redis.client import RedisKeys, connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.versions.store import DraftStore
from tests.fixtures.toy import make_toy_model
from trainer.config import ENV_PREFIX

MIB = 1024 * 1024
STREAM_BYTES = 8 * MIB
TRAINER = {
    "STREAM_MAX_BYTES": str(STREAM_BYTES),
    "REPLAY_MAX_BYTES": str(16 * MIB),
    "PUBLISH_INTERVAL_S": "5",
    "PUBLISH_MIN_TOKENS": "500",
    "CHECKPOINT_INTERVAL_S": "2",
    "KEEP_VERSIONS": "5",
    "MAX_KNOWN_TRACES": "500",
}
WARM_UP_SHARE = 0.5
STRETCH_S = 10.0
TOY = "toy"
_MEMORY_TOLERANCE = 0.001
_LEAKING_SHARE = 0.005
"""Share of the traces: a backlog that grows by more is a leak; less follows from varying load."""
_EXACT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 1024),
}
_ALPHABET = "abcdefghijklmnopqrstuvwxyz "


# -- load --------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Requests at a fixed rate; `done` holds (second at which it was due, latency in seconds) of whole answers."""

    url: str
    model: str
    rate: float
    max_tokens: int
    done: list[tuple[float, float]] = field(default_factory=list)
    num_sent: int = 0
    num_left: int = 0
    """Streams that the client left in the middle."""
    num_failed: int = 0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, started_s: float, duration_s: float) -> None:
        # Shorter than the gateway keeps idle connections: a request on one that it is closing would fail.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
        async with (
            httpx.AsyncClient(base_url=self.url, limits=limits, timeout=60) as http,
            asyncio.TaskGroup() as group,
        ):
            while (due_s := self.num_sent / self.rate) < duration_s:
                await asyncio.sleep(max(0.0, started_s + due_s - time.monotonic()))
                group.create_task(self._one(http, self.num_sent, started_s + due_s))
                self.num_sent += 1

    async def _one(self, http: httpx.AsyncClient, number: int, due_s: float) -> None:
        body = self._body(number)
        try:
            if number % 3 == 0:
                leaves = number % 30 == 0
                if not await self._stream(http, body, leaves=leaves):
                    return
            else:
                (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        except httpx.HTTPError:
            self.num_failed += 1
            return
        self.done.append((due_s, time.monotonic() - due_s))

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> bool:
        """Stream an answer; returns whether it came to its end."""
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for _ in response.aiter_raw():
                if leaves:
                    self.num_left += 1
                    return False
        return True

    def _body(self, number: int) -> dict[str, Any]:
        text = "".join(self._rng.choices(_ALPHABET, k=self._rng.randrange(20, 120)))
        group = f"group-{number}" if number % 10 == 0 else ""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": self._rng.choice([0, 1]),
            "slipstream": {"domain": f"domain-{number // 20}", "group_id": group},
        }


# -- samples -----------------------------------------------------------------------------------------------------


@dataclass
class Series:
    """Values by time; `unit` is for people, `scale` divides the values for the table."""

    unit: str = ""
    scale: float = 1
    tolerance: float = 0.0
    """Growth an hour that is tolerated, as a share of the level."""
    tolerated: float = 0.0
    """Further growth an hour that is tolerated, in the series' unit."""
    is_judged: bool = True
    at_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at_s: float, value: float) -> None:
        self.at_s.append(at_s)
        self.values.append(value / self.scale)

    def bound(self, level: float) -> float:
        """The most growth an hour that is tolerated."""
        return self.tolerance * level + self.tolerated


_COUNT = Series()
_MEMORY = Series(unit="MiB", scale=MIB, tolerance=_MEMORY_TOLERANCE)
_UNJUDGED_MEMORY = replace(_MEMORY, is_judged=False)
_STREAM = "traces in the stream"
FILLS = {
    "text for suffix drafts, tokens": "slipstream_suffix_tokens",
    "replay": "slipstream_trainer_replay_bytes",
    "known trace ids": "slipstream_trainer_known_traces",
}
"""Gauges of caches and buffers that grow up to a bound."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A loop: the addresses of its parts, and the process of each."""

    url: str
    """URL of the gateway."""
    trainer_url: str
    redis_url: str
    pids: dict[str, int]


class Sampler:
    """Samples the processes, Redis and both services' metrics."""

    def __init__(self, running: Running, stream: TraceStream, redis: Any, traces: str, *, rate: float) -> None:
        """`traces` is the key of the stream in Redis."""
        self._processes = {name: psutil.Process(pid) for name, pid in running.pids.items()}
        self._stream, self._redis, self._traces, self._running = stream, redis, traces, running
        self._http = httpx.Client(timeout=10, trust_env=False)
        self._entries = Series(tolerated=_LEAKING_SHARE * 3600 * rate)
        self.series: dict[str, Series] = {}
        self.fills: dict[str, list[float]] = {}
        self.metrics: Scrape | None = None

    def _add(self, name: str, at_s: float, value: float, kind: Series = _COUNT) -> None:
        blank = replace(kind, at_s=[], values=[])
        self.series.setdefault(name, blank).add(at_s, value)

    def look(self, at_s: float) -> None:
        for name, process in self._processes.items():
            with process.oneshot():
                kind = _UNJUDGED_MEMORY if name == "Redis" else _MEMORY
                self._add(f"{name} resident memory", at_s, process.memory_info().rss, kind)
                self._add(f"{name} descriptors", at_s, process.num_fds())
                self._add(f"{name} threads", at_s, process.num_threads())
        lag = self._stream.lag()
        self._add("stream entries pending", at_s, lag.pending, self._entries)
        self._add("stream entries undelivered", at_s, lag.undelivered, self._entries)
        used = self._redis.info("memory")["used_memory"]
        traces = self._redis.memory_usage(self._traces, samples=0)
        self._add("Redis memory, the stream of traces", at_s, traces, _UNJUDGED_MEMORY)
        self._add(_STREAM, at_s, lag.bytes, _UNJUDGED_MEMORY)
        self._add("Redis memory, all else", at_s, used - traces, _MEMORY)
        self.metrics = self._scraped(self._running.url, at_s)
        trainer = self._scraped(self._running.trainer_url, at_s)
        self._add("traces waiting for Redis", at_s, self.metrics.total("slipstream_traces_pending"))
        for name, metric in FILLS.items():
            source = trainer if metric.startswith("slipstream_trainer") else self.metrics
            self.fills.setdefault(name, []).append(source.total(metric))

    def _scraped(self, url: str, at_s: float) -> Scrape:
        return Scrape.parse(at_s, self._http.get(f"{url}/metrics").text)

    def add_latencies(self, done: list[tuple[float, float]], from_s: float, to_s: float) -> None:
        """Add median and p99 of ten-second stretches, each at its middle; `done` counts from the samples' zero."""
        for begin_s in np.arange(from_s, to_s - STRETCH_S + 1e-9, STRETCH_S):
            took = [1000 * latency_s for at_s, latency_s in done if begin_s <= at_s < begin_s + STRETCH_S]
            if took:
                for name, share in (("p50", 50), ("p99", 99)):
                    at_s = begin_s + STRETCH_S / 2
                    self._add(f"latency {name}", at_s, float(np.percentile(took, share)), Series(unit="ms"))

    def slopes(self) -> dict[str, Slope]:
        return {name: slope(one.at_s, one.values) for name, one in self.series.items()}


# -- the run -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def loop(model_dir: Path, name: str, folder: Path) -> Iterator[Running]:
    with EmbeddedRedis(folder / "redis") as redis, contextlib.ExitStack() as running:
        os.environ.update({ENV_PREFIX + variable: value for variable, value in TRAINER.items()} | _EXACT_MEMORY)
        common = ["--model", str(model_dir), "--redis-url", redis.url, "--store", str(folder / "drafts")]
        port, trainer_port = free_port(), free_port()
        url, trainer_url = (f"http://127.0.0.1:{number}" for number in (port, trainer_port))
        options = ["--name", name, "--port", str(port), "--capture", "--control-share", "0.1"]
        options += ["--context-length", "512", "--stream-max-bytes", str(STREAM_BYTES)]
        options += ["--draft-vocab-size", "24", "--dtype", "float32"] if name == TOY else []
        serve = running.enter_context(running_child("serve", [*common, *options], folder))
        wait_until_ready(url, [serve])
        state = ["--state", str(folder / "state"), "--metrics-port", str(trainer_port)]
        train = running.enter_context(running_child("train", [*common, *state], folder))
        pids = {"gateway": serve.pid, "trainer": train.pid, "Redis": redis.pid}
        yield Running(url=url, trainer_url=trainer_url, redis_url=redis.url, pids=pids)
        serve.check()
        train.check()


async def observe(load: Load, sampler: Sampler, duration_s: float, every_s: float) -> None:
    started_s, warm_s = time.monotonic(), WARM_UP_SHARE * duration_s
    loading = asyncio.create_task(load.run(started_s, duration_s))
    look_s = warm_s
    while look_s < duration_s and not loading.done():
        await asyncio.sleep(max(0.0, started_s + look_s - time.monotonic()))
        # In a thread: a slow answer from the gateway must not delay the requests of this event loop.
        await asyncio.to_thread(sampler.look, time.monotonic() - started_s)
        look_s += every_s
    await loading
    sampler.add_latencies([(due_s - started_s, took_s) for due_s, took_s in load.done], warm_s, duration_s)


def main() -> None:
    options = parser(
        "Whether memory, descriptors, pending entries or latency grow under steady load", has_prompts=False
    )
    options.set_defaults(model=TOY)
    options.add_argument("--minutes", type=float, help="of load; default 10, quick 2")
    options.add_argument("--rate", type=float, default=8.0, help="requests a second")
    options.add_argument("--max-tokens", type=int, default=40, help="of each answer")
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (2.0, 10.0)})
    if arguments.minutes < 2:
        options.error("--minutes must be at least 2, for a slope")
    duration_s = 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as scratch, contextlib.ExitStack() as opened:
        folder = Path(scratch)
        is_toy = arguments.model == TOY
        model_dir = make_toy_model(folder / TOY) if is_toy else resolve_model(arguments.model)
        running = opened.enter_context(loop(model_dir, arguments.model, folder))
        client = opened.enter_context(connect(running.redis_url))
        key = model_key(model_dir, target_fingerprint(model_dir))
        stream = TraceStream(client, key, max_bytes=STREAM_BYTES, consumer="soak")
        traces = RedisKeys(model_key=key).traces
        sampler = Sampler(running, stream, client, traces, rate=arguments.rate)
        load = Load(running.url, arguments.model, arguments.rate, arguments.max_tokens)
        asyncio.run(observe(load, sampler, duration_s, every_s=1.0 if arguments.quick else 2.0))
        versions = DraftStore(folder / "drafts").latest() or 0
    _finish(load, sampler, arguments, versions)


def _finish(load: Load, sampler: Sampler, arguments: Any, versions: int) -> None:
    slopes = sampler.slopes()
    assert sampler.metrics is not None, "looked at least once"
    swaps = sampler.metrics.total("slipstream_swaps_total", outcome="installed")
    dropped = {
        dict(labels)["reason"]: value
        for (name, labels), value in sampler.metrics.values.items()
        if name == "slipstream_traces_dropped_total" and value
    }
    rows: list[tuple[str, object]] = [("", f"{'median':>10}  {'an hour':>10}  99% interval")]
    targets = [
        Target("failed_requests", load.num_failed, 0, at_least=False),
        Target("largest_stream_mib", max(sampler.series[_STREAM].values), STREAM_BYTES / MIB, at_least=False),
    ]
    for name, found in slopes.items():
        series = sampler.series[name]
        told = f"{found.level:10.2f}  {found.per_hour:+10.2f}  {found.lower:+.2f} … {found.upper:+.2f} {series.unit}"
        rows.append((name, told))
        if series.is_judged:
            title = f"{name.lower().replace(' ', '_')}_growth_lower_bound"
            targets.append(Target(title, found.lower, series.bound(found.level), at_least=False))
    rows += [(f"fills: {name}", f"{levels[0]:,.0f} … {levels[-1]:,.0f}") for name, levels in sampler.fills.items()]
    rows += [
        ("requests", f"{load.num_sent}, of which {load.num_left} clients left in the middle"),
        ("requests a second", round(load.num_sent / (60 * arguments.minutes), 2)),
        ("draft versions, swaps", f"{versions}, {swaps:.0f}"),
        ("traces dropped", ", ".join(f"{reason} {count:.0f}" for reason, count in dropped.items()) or "0"),
    ]
    document = {
        "model": arguments.model,
        "minutes": arguments.minutes,
        "rate": arguments.rate,
        "requests": load.num_sent,
        "left": load.num_left,
        "failed": load.num_failed,
        "draft_versions": versions,
        "swaps": swaps,
        "traces_dropped": dropped,
        "fills": {name: [levels[0], levels[-1]] for name, levels in sampler.fills.items()},
        "slopes_per_hour": {name: found.to_dict() for name, found in slopes.items()},
        "series": {name: {"at_s": one.at_s, "values": one.values} for name, one in sampler.series.items()},
    }
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()
