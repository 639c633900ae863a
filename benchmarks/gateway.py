"""What the gateway costs, and what it does with more requests than its engine takes. The engine is the tests' double.

    python -m benchmarks.gateway [--quick] [--json FILE]         needs `hey` (Debian's package of that name)

The gateway runs in a process of its own on a loopback port, as it does in service (one process, one event loop); the
load comes from `hey`, in a second process with kept connections. On a machine with two cores each has one. Every answer
is 32 tokens, alone whole, streamed in 8 events or more; the prompt is 200 characters.

Overhead: median time of a whole answer through the gateway, less the median of the same requests put to the same engine
in this process, without any HTTP. First one request at a time and an engine that takes no time, so that all of it is
computing: that is the overhead with a target. Then 16 at a time and an engine that takes 10 ms a chunk, as in service:
what is added there is also waiting for the computing of the other fifteen.

Saturation: 32 clients that ask again at once, an engine that takes no time.

Beyond saturation: an engine with 16 slots, 64 places in its queue and 10 ms a chunk can answer 200 requests a second
at most. Ever more clients ask for up to four requests a second each, whatever they were told before. Those beyond the
queue must get 429 with `retry-after` at once, and the others their answer in the time that the queue takes, which is
bounded by its length: 64 + 16 requests at the rate that was answered when 200 a second were asked for. That is less
than 200, since a chunk's 10 ms are at least so many on a loop that is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gc
import io
import json
import multiprocessing  # noqa: TID251 - between our own processes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection  # noqa: TID251
from typing import Any, cast

import httpx
import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.common import Target, finish, parser
from serving.engine import Chunk, EngineHealth, GenerateRequest
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import serve
from slipstream.logs import configure_logs
from slipstream.scrape import Sample
from speculator.errors import EngineBusyError
from speculator.sampling import SamplingParams
from tests.doubles import DoubleEngine

MAX_TOKENS = 32
PROMPT = "What does the river say to the stone? " * 5
CHUNK_S = 0.01
AT_ONCE = 16
CLIENTS = 32
SLOTS, PLACES = 16, 64
ROUTE = "/v1/chat/completions"


class QueuedEngine(DoubleEngine):
    """The double behind a bounded number of slots and a bounded queue; keeps no list of what it answered."""

    def __init__(self, *, slots: int, max_waiting: int, delay_s: float) -> None:
        super().__init__(delay_s=delay_s)
        self._slots = asyncio.Semaphore(slots)
        self._num_waiting, self._max_waiting = 0, max_waiting

    def health(self) -> EngineHealth:
        return replace(super().health(), is_full=self._num_waiting >= self._max_waiting)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self._num_waiting >= self._max_waiting:
            raise EngineBusyError(f"{self._num_waiting} requests are waiting already")
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            async with aclosing(cast(AsyncGenerator[Chunk, None], super().generate(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._slots.release()
            self.requests.clear()
            self.finished.clear()
            self.aborted.clear()


def engine_of(delay_s: float, *, is_bounded: bool) -> QueuedEngine:
    slots, places = (SLOTS, PLACES) if is_bounded else (1000, 1)
    return QueuedEngine(slots=slots, max_waiting=places, delay_s=delay_s)


# -- the gateway, in a process of its own ------------------------------------------------------------------------


def _serve(pipe: Connection, delay_s: float, is_bounded: bool) -> None:
    async def run() -> None:
        engine = engine_of(delay_s, is_bounded=is_bounded)
        app = create_app(engine, settings=GatewaySettings(), registry=CollectorRegistry())
        async with serve(app, port=0) as server:
            gc.collect()
            gc.freeze()  # as in service
            pipe.send(server.url)
            await asyncio.to_thread(pipe.recv)

    # Its log lines are part of its work; nobody reads them here.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        configure_logs()
        asyncio.run(run())


@contextlib.contextmanager
def gateway(delay_s: float, *, is_bounded: bool = False) -> Iterator[str]:
    """The URL of a running gateway."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, delay_s, is_bounded))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


# -- the load ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What one run of `hey` saw: seconds to the last byte, seconds to the first one and status of every answer."""

    took_s: np.ndarray
    first_s: np.ndarray
    status: np.ndarray
    duration_s: float
    num_asked: int
    """Requests that the gateway counts: as many as answers, unless connections broke."""

    def percentile_ms(self, share: float, status: int = 200) -> float:
        took = self.took_s[self.status == status]
        return 1000 * float(np.percentile(took, share)) if len(took) else float("nan")

    def per_second(self, status: int = 200) -> float:
        return float((self.status == status).sum()) / self.duration_s

    @property
    def num_unexpected(self) -> int:
        """Answers that are neither 200 nor 429, and requests without an answer."""
        return int((~np.isin(self.status, (200, 429))).sum()) + self.num_asked - len(self.status)

    def to_dict(self) -> dict[str, Any]:
        refused = int((self.status == 429).sum())
        document = {
            "requests": len(self.status),
            "duration_s": round(self.duration_s, 2),
            "answered_per_s": round(self.per_second(), 1),
            "refused_per_s": round(self.per_second(429), 1),
            "unexpected": self.num_unexpected,
            "p50_ms": round(self.percentile_ms(50), 3),
            "p99_ms": round(self.percentile_ms(99), 3),
            "first_byte_p50_ms": round(1000 * float(np.median(self.first_s[self.status == 200])), 3),
        }
        return {**document, "refused_p99_ms": round(self.percentile_ms(99, 429), 3)} if refused else document


def ask(url: str, *, clients: int, seconds: float, stream: bool, rate_each: float | None = None) -> Load:
    """`clients` that ask again at once, or `rate_each` times a second at most.

    The clients of one `hey` ask all at the same moment, over and over. At a rate there are several of it, which begin
    one after the other, or the rate would be one of bursts.
    """
    before = _num_asked(url)
    parts = 1 if rate_each is None else _PARTS
    rows: list[dict[str, str]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as body:
        json.dump(_body(stream), body)
        body.flush()
        running, began_s = [], time.perf_counter()
        for part in range(parts):
            time.sleep(max(0.0, began_s + part / (parts * (rate_each or 1)) - time.perf_counter()))
            share = clients * (part + 1) // parts - clients * part // parts
            running.append((time.perf_counter() - began_s, _hey(url, body.name, share, seconds, rate_each)))
        for late_s, process in running:
            out, _ = process.communicate()
            if process.returncode:
                sys.exit(f"hey ended with code {process.returncode}")
            rows += ({**row, "offset": str(float(row["offset"]) + late_s)} for row in csv.DictReader(io.StringIO(out)))
    took, first, offset = (np.array([float(row[name]) for row in rows]) for name in _COLUMNS)
    status = np.array([int(row["status-code"]) for row in rows])
    return Load(took, first, status, float((offset + took).max() - offset.min()), _num_asked(url) - before)


def _hey(url: str, body: str, clients: int, seconds: float, rate_each: float | None) -> subprocess.Popen[str]:
    limit = [] if rate_each is None else ["-q", str(rate_each)]
    what = ["-m", "POST", "-T", "application/json", "-D", body, "-disable-compression", url + ROUTE]
    words = ["hey", "-z", f"{seconds}s", "-c", str(clients), *limit, "-cpus", "1", "-o", "csv", *what]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


_PARTS = 8
_COLUMNS = ("response-time", "Response-delay", "offset")


def _num_asked(url: str) -> int:
    scraped = Sample.parse(0, httpx.get(f"{url}/metrics", trust_env=False).text)
    return int(scraped.total("slipstream_gateway_requests_total", route=ROUTE))


def _body(stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "double", "messages": messages, "max_tokens": MAX_TOKENS, "stream": stream}


def retry_after(url: str) -> str:
    """The header of the first 429 among more requests at once than slots and queue hold."""

    async def run() -> str:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False) as http:
            asked = (http.post(url + ROUTE, json=_body(False)) for _ in range(2 * (SLOTS + PLACES)))
            answers = await asyncio.gather(*asked)
        return next((answer.headers["retry-after"] for answer in answers if answer.status_code == 429), "")

    return asyncio.run(run())


def alone_ms(delay_s: float, *, at_once: int, count: int) -> float:
    """Median milliseconds of an answer from the engine itself, to `at_once` callers that ask again at once."""
    engine = engine_of(delay_s, is_bounded=False)
    tokens = tuple(engine.tokenizer.encode_chat([{"role": "user", "content": PROMPT}]))
    request = GenerateRequest(request_id="0", prompt_token_ids=tokens, max_tokens=MAX_TOKENS, sampling=SamplingParams())
    took_s: list[float] = []

    async def caller() -> None:
        for _ in range(count // at_once):
            started_s = time.perf_counter()
            async for _ in engine.generate(request):
                pass
            took_s.append(time.perf_counter() - started_s)

    async def run() -> None:
        await asyncio.gather(*(caller() for _ in range(at_once)))

    asyncio.run(run())
    return 1000 * float(np.median(took_s))


# -- the table ---------------------------------------------------------------------------------------------------


def main() -> None:
    options = parser(
        "Overhead of the gateway, its throughput, and what happens beyond it", has_prompts=False, has_model=False
    )
    arguments = options.parse_args()
    if shutil.which("hey") is None:
        sys.exit("benchmarks.gateway needs the load generator `hey`: apt-get install hey")
    seconds = 3.0 if arguments.quick else 15.0
    rows: list[tuple[str, object]] = []
    targets: list[Target] = []
    document: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seconds": seconds}
    with gateway(0.0) as url:
        ask(url, clients=CLIENTS, seconds=1, stream=False)
        for stream in (False, True):
            kind = "streamed" if stream else "whole"
            one = ask(url, clients=1, seconds=seconds, stream=stream)
            over = _overhead(f"{kind}, one at a time", one, alone_ms(0.0, at_once=1, count=1000), rows, document)
            targets.append(Target(f"{kind}_overhead_p50_ms", over, 2.0, at_least=False))
            many = ask(url, clients=CLIENTS, seconds=seconds, stream=stream)
            document[f"{kind}_saturated"] = many.to_dict()
            told = f"{many.per_second():7.0f} a second, p50 {many.percentile_ms(50):.1f} ms, "
            rows.append((f"{kind}, {CLIENTS} clients", f"{told}p99 {many.percentile_ms(99):.1f} ms"))
            targets.append(Target(f"{kind}_requests_per_s", many.per_second(), 500))
            targets.append(Target(f"{kind}_unexpected", many.num_unexpected, 0, at_least=False))
    with gateway(CHUNK_S) as url:
        count = int(AT_ONCE * seconds / (CHUNK_S * MAX_TOKENS / 4))
        for stream in (False, True):
            kind = "streamed" if stream else "whole"
            alone = alone_ms(CHUNK_S, at_once=AT_ONCE, count=count)
            many = ask(url, clients=AT_ONCE, seconds=seconds, stream=stream)
            _overhead(f"{kind}, {AT_ONCE} at a time", many, alone, rows, document)
    _overload(seconds, rows, targets, document)
    finish(rows, targets, document, arguments.json)


def _overhead(name: str, load: Load, alone: float, rows: list[tuple[str, object]], document: dict[str, Any]) -> float:
    over = load.percentile_ms(50) - alone
    told = f"{over:7.2f} ms over the engine's {alone:.2f} ms (p99 {load.percentile_ms(99) - alone:.2f} ms)"
    rows.append((name, told))
    key = name.replace(", ", "_").replace(" ", "_")
    document[key] = {**load.to_dict(), "engine_alone_p50_ms": round(alone, 3), "overhead_p50_ms": round(over, 3)}
    return over


def _overload(seconds: float, rows: list[tuple[str, object]], targets: list[Target], document: dict[str, Any]) -> None:
    most_per_s = SLOTS / (CHUNK_S * MAX_TOKENS / 4)
    document["overload"] = {}
    loads: dict[float, Load] = {}
    with gateway(CHUNK_S, is_bounded=True) as url:
        for times in (0.5, 1.0, 2.0, 4.0):
            clients = round(times * most_per_s / 4)
            loads[times] = load = ask(url, clients=clients, seconds=seconds, stream=False, rate_each=4)
            document["overload"][f"{times:g}"] = {"clients": clients, **load.to_dict()}
            refused = f"; {load.per_second(429):.0f} refused, p99 {load.percentile_ms(99, 429):.0f} ms"
            told = f"{load.per_second():5.0f} answered a second, p50 {load.percentile_ms(50):.0f} ms, "
            told += f"p99 {load.percentile_ms(99):.0f} ms{refused if load.per_second(429) else ''}"
            rows.append((f"{clients} clients of 4 a second each", told))
            targets.append(Target(f"overload_{times:g}_unexpected", load.num_unexpected, 0, at_least=False))
        # Half as long again as the full queue takes at best.
        bound_ms = 1.5 * 1000 * (SLOTS + PLACES) / loads[1.0].per_second()
        targets.append(Target("overload_admitted_p99_ms", load.percentile_ms(99), bound_ms, at_least=False))
        targets.append(Target("overload_refused_per_s", load.per_second(429), 1))
        document["retry_after"] = retry_after(url)
        rows.append(("retry-after of a refused request", f"{document['retry_after']} s"))
        targets.append(Target("retry_after_s", float(document["retry_after"] or 0), 1))


if __name__ == "__main__":
    main()
