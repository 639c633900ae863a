"""`slipstream demo`: the whole loop on one machine, and the figures of what it did.

Start: Redis → draft lineage → gateway with engine → plain server → trainer → traffic.
Stop:  traffic (answers in flight finish) → trainer catches up → trainer → gateways → Redis.

The plain server is the same model in a second process without drafts, and nothing is captured or learned from there.
Before, between and after stretches of live traffic the same clients ask it the next prompts, while the trainer is
paused or has ended: what they see then is what they would see without Slipstream, in the same minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from serving.gateway.server import bind
from serving.speedup import Speedup, Sums, measure
from slipstream.demo.processes import Child, running_child, wait_until_ready
from slipstream.demo.scrape import History, Sample
from slipstream.demo.topics import Prompt, built_in_prompts, endless
from slipstream.demo.traffic import SETTLING_S, Traffic
from slipstream.settings import DEFAULT_STREAM_MAX_BYTES
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_stream import TraceStream
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

POLL_S = 0.5
READY_TIMEOUT_S = 180.0
CATCH_UP_S = 45.0
"""How long the trainer may take, after the last answer, to use the traces that are still in the stream."""
HEAD_OFF_SHARE = 0.25
"""Of the drafting rounds, for the A/B of the draft head beside remembered text."""
_STRETCH_S = 60.0
_FEWEST_STRETCHES = 6
"""Of live traffic: an interval needs five."""
_PLAIN_S = 8.0
_LEAST_PLAIN_S = 2.0
_NUM_BLOCKS = 20
"""Of a run, for the interval of the A/B."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model_dir: Path
    model_name: str
    minutes: float
    port: int
    redis_url: str | None
    prompts: list[Prompt] | None
    clients: int
    samples: int
    temperature: float
    max_tokens: int
    depth: int
    suffix_depth: int
    context_length: int
    draft_vocab_size: int | None
    seed: int
    dtype: str


@dataclass
class DemoRun:
    """What a demo observed; `report.py` turns it into figures. Times in `…_s` are seconds of live traffic."""

    history: History
    traffic: Traffic
    plain: Traffic
    """What the plain server was asked."""
    started_unix_s: float
    swaps_unix_s: list[float]
    num_clients: int = 1
    num_prompts: int = 0
    """That are different."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Of live traffic: from and to, unix time."""
    lag: StreamLag | None = None
    final: Sample | None = None
    duration_s: float = 0.0

    def at_s(self, unix_s: float) -> float:
        paused_s = sum(max(0.0, min(end, unix_s) - start) for start, end in self.pauses)
        return unix_s - self.started_unix_s - paused_s

    def head_added(self) -> Speedup:
        """Time a token with remembered text alone over time a token with the draft head beside it."""
        blocks = self.history.blocks(_NUM_BLOCKS, end_s=self.duration_s or math.inf)
        return measure([window.head_ab for window in blocks])

    def client_speedup(self) -> Speedup:
        """What the clients saw a second over what they saw of the plain server; a block is a stretch of either."""
        live, plain = self.traffic.stats.stretches, self.plain.stats.stretches
        blocks = [Sums() for _ in live]
        for block, before, stretch in zip(blocks, plain, live, strict=False):
            block.add(1, False, before.seconds, round(before.tokens))
            block.add(1, True, stretch.seconds, round(stretch.tokens))
        for after in plain[len(live) :] if blocks else ():
            blocks[-1].add(1, False, after.seconds, round(after.tokens))
        return measure(blocks)

    @property
    def swaps_s(self) -> list[float]:
        """Swaps while there was traffic; the last versions arrive while the trainer catches up."""
        times_s = [self.at_s(at) for at in self.swaps_unix_s]
        return [at for at in times_s if at <= self.duration_s]


def _with_interval(measured: Speedup) -> str:
    if measured.ratio is None:
        return "–"
    if measured.lower is None or measured.upper is None:
        return f"{measured.ratio:.2f}× (no interval yet)"
    return f"{measured.ratio:.2f}× ({measured.lower:.2f} … {measured.upper:.2f})"


def run_demo(options: DemoOptions, console: Console) -> DemoRun:
    """Run the loop for `options.minutes` of traffic. Raises SlipstreamError when a part cannot start or ends early."""
    bind("127.0.0.1", options.port).close()  # a busy port is worth knowing before anything slow starts
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch, contextlib.ExitStack() as running:
        state = Path(scratch)
        redis_url = options.redis_url
        if redis_url is None:
            redis_url = running.enter_context(EmbeddedRedis(state / "redis")).url
        fingerprint = target_fingerprint(options.model_dir)
        key = model_key(options.model_dir, fingerprint)
        stream = TraceStream(connect(redis_url), key, max_bytes=DEFAULT_STREAM_MAX_BYTES, consumer="demo")
        if stream.lag().appended:
            raise ConfigError(f"Redis already holds traces of this model: pass an empty --redis-url or drop {key}")
        ensure_lineage(
            DraftStore(state / "drafts"),
            options.model_dir,
            fingerprint,
            draft_vocab_size=options.draft_vocab_size,
            seed=options.seed,
        )
        common = ["--model", str(options.model_dir), "--redis-url", redis_url, "--store", str(state / "drafts")]
        serve = running.enter_context(running_child("serve", [*common, *_live_arguments(options)], state))
        plain_url, plain = _start_plain_server(options, state / "plain", running)
        console.print(f"loading [bold]{options.model_name}[/] …")
        url = f"http://127.0.0.1:{options.port}"
        for each in (url, plain_url):
            wait_until_ready(each, [serve, plain], timeout_s=READY_TIMEOUT_S)
        console.print(f"page: {url}   openai client: {url}/v1")
        start_trainer = partial(running_child, "train", [*common, "--state", str(state / "trainer")], state)
        return asyncio.run(_Demo(options, console, url, plain_url, stream, serve, plain, start_trainer).run())


def _live_arguments(options: DemoOptions) -> list[str]:
    return [
        *_same_arguments(options),
        *("--port", str(options.port), "--capture", "--head-off-share", str(HEAD_OFF_SHARE)),
        *("--depth", str(options.depth), "--suffix-depth", str(options.suffix_depth)),
    ]


def _same_arguments(options: DemoOptions) -> list[str]:
    """Of both servers."""
    return [
        *("--name", options.model_name, "--dtype", options.dtype),
        *("--context-length", str(options.context_length)),
    ]


def _start_plain_server(options: DemoOptions, folder: Path, running: contextlib.ExitStack) -> tuple[str, Child]:
    """Its address and process. Its Redis and its store are its own: no trainer writes there, so nothing is swapped."""
    folder.mkdir()
    redis = running.enter_context(EmbeddedRedis(folder / "redis"))
    port = free_port()
    arguments = [
        *("--model", str(options.model_dir), "--redis-url", redis.url, "--store", str(folder / "drafts")),
        *(*_same_arguments(options), "--port", str(port), "--depth", "0", "--suffix-depth", "0"),
    ]
    return f"http://127.0.0.1:{port}", running.enter_context(running_child("serve", arguments, folder))


class _Demo:
    """One run: traffic and the observer beside it."""

    def __init__(
        self,
        options: DemoOptions,
        console: Console,
        url: str,
        plain_url: str,
        stream: TraceStream,
        serve: Child,
        plain: Child,
        start_trainer: Callable[[], contextlib.AbstractContextManager[Child]],
    ) -> None:
        self._options, self._console, self._url = options, console, url
        self._stream, self._plain, self._start_trainer = stream, plain, start_trainer
        self._children = [serve, plain]
        self._is_plain = False
        # Of one list, so that no prompt is asked of both.
        asked = options.prompts or built_in_prompts()
        prompts = endless(asked, options.seed)
        traffic, plain_traffic = (
            Traffic(
                each,
                options.model_name,
                prompts,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                samples=options.samples,
            )
            for each in (url, plain_url)
        )
        self._run = DemoRun(
            History(),
            traffic,
            plain_traffic,
            time.time(),
            [],
            num_clients=options.clients,
            num_prompts=len({prompt.text for prompt in asked}),
        )
        self._http = httpx.AsyncClient(timeout=5, trust_env=False)

    async def run(self) -> DemoRun:
        run = self._run
        total_s = 60 * self._options.minutes
        num_stretches = max(_FEWEST_STRETCHES, round(total_s / _STRETCH_S))
        stretch_s = total_s / num_stretches
        plain_s = max(_LEAST_PLAIN_S, min(_PLAIN_S, stretch_s / 2))
        # A full collection that walked all that was imported would hold up the clients, and count as the service's gap.
        gc.collect()
        gc.freeze()
        async with self._http, run.traffic, run.plain, self._display() as show:
            await self._decode_plainly(SETTLING_S / 2, show)  # its first answers load what later ones find loaded
            await self._decode_plainly(plain_s, show)
            run.started_unix_s, run.pauses = time.time(), []
            with self._start_trainer() as trainer:
                self._children.append(trainer)
                for number in range(num_stretches):
                    if number:
                        await self._pause_for_plain_decoding(trainer, plain_s, show)
                    await self._serve(stretch_s, show)
                run.duration_s = run.at_s(time.time())
                await self._catch_up(show)
                self._children.remove(trainer)
            await self._decode_plainly(plain_s, show)
        gc.unfreeze()
        return run

    async def _serve(self, stretch_s: float, show: Callable[[], None]) -> None:
        """Live traffic, observed."""
        run = self._run
        end_s = run.at_s(time.time()) + stretch_s
        async with self._asking(run.traffic) as clients:
            while run.at_s(time.time()) < end_s:
                await self._observe()
                show()
                await asyncio.wait([clients], timeout=POLL_S)
                if clients.done():
                    clients.result()

    async def _pause_for_plain_decoding(self, trainer: Child, seconds: float, show: Callable[[], None]) -> None:
        began_s = time.time()
        trainer.pause()
        try:
            await self._decode_plainly(seconds, show)
        finally:
            trainer.resume()
        self._run.pauses.append((began_s, time.time()))

    async def _decode_plainly(self, seconds: float, show: Callable[[], None]) -> None:
        """The same clients ask the plain server, which is paused before and after."""
        self._plain.check()
        self._plain.resume()
        self._is_plain = True
        show()
        async with self._asking(self._run.plain) as clients:
            await asyncio.wait([clients], timeout=seconds)
            if clients.done():
                clients.result()
        self._is_plain = False
        self._plain.pause()

    @contextlib.asynccontextmanager
    async def _asking(self, traffic: Traffic) -> AsyncIterator[asyncio.Task[None]]:
        """All clients, until the end of the block; then their answers in flight finish."""
        clients = asyncio.create_task(traffic.run(self._options.clients))
        try:
            yield clients
        finally:
            traffic.stop()
            await clients

    async def _observe(self) -> None:
        for child in self._children:
            child.check()
        at_s = self._run.at_s(time.time())
        sample = Sample.parse(at_s, (await self._http.get(f"{self._url}/metrics")).text)
        swapped = sample.total("slipstream_last_swap_timestamp_seconds")
        if swapped and swapped not in self._run.swaps_unix_s:
            self._run.swaps_unix_s.append(swapped)
        self._run.history.samples.append(sample)
        self._run.final = sample
        self._run.lag = await asyncio.to_thread(self._stream.lag)

    async def _catch_up(self, show: Callable[[], None]) -> None:
        """Wait until every captured trace was used, or the time for it is over."""
        deadline = time.monotonic() + CATCH_UP_S
        while time.monotonic() < deadline:
            await self._observe()
            show()
            lag, final = self._run.lag, self._run.final
            assert lag is not None, "observed above"
            assert final is not None, "observed above"
            if lag.pending + lag.undelivered == 0 and final.total("slipstream_traces_pending") == 0:
                return
            await asyncio.sleep(POLL_S)

    @contextlib.asynccontextmanager
    async def _display(self) -> AsyncIterator[Callable[[], None]]:
        if self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False) as live:
                yield lambda: live.update(self._table(), refresh=True)
            return
        last_s = -15.0

        def line() -> None:
            nonlocal last_s
            if not self._run.history.samples:
                return
            at_s = self._run.history.samples[-1].at_s
            if at_s - last_s >= 15:
                last_s = at_s
                self._console.print(f"{at_s:5.0f} s  " + "  ".join(f"{k} {v}" for k, v in self._figures().items()))

        yield line

    def _figures(self) -> dict[str, str]:
        run = self._run
        if not run.history.samples:
            return {}
        sample = run.history.samples[-1]
        window = run.history.window(sample.at_s - 60, sample.at_s)
        length = window.accept_length if window else None
        ratio = window.speedup.ratio if window else None
        lag = run.lag
        return {
            "the head added, so far": _with_interval(run.head_added()),
            "a client's speedup, so far": _with_interval(run.client_speedup()),
            "measured speedup": f"{ratio:.2f}×" if ratio else "–",
            "acceptance length": f"{length:.2f}" if length else "–",
            "token/s": f"{window.tokens_per_s:.0f}" if window else "–",
            "draft version": f"{sample.total('slipstream_draft_version'):.0f}",
            "swaps": str(len(run.swaps_unix_s)),
            "traces": f"{sample.total('slipstream_traces_captured_total'):.0f}",
            "used": str(lag.acked) if lag else "–",
            "failed": str(run.traffic.stats.failed),
        }

    def _table(self) -> Table:
        samples = self._run.history.samples
        total_s = 60 * self._options.minutes
        at_s = min(samples[-1].at_s if samples else 0.0, total_s)
        now = " (plain decoding, for comparison)" if self._is_plain else ""
        table = Table(title=f"{self._options.model_name}, {at_s:.0f} of {total_s:.0f} s{now}", min_width=56)
        table.add_column("last minute")
        table.add_column("", justify="right")
        for name, value in self._figures().items():
            table.add_row(name, value)
        return table
