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
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from serving.gateway.server import bind
from slipstream.demo.report import DemoRun, progress
from slipstream.demo.servers import Child, Scrape, running_child, wait_until_ready
from slipstream.demo.topics import Prompt, built_in_prompts, endless
from slipstream.demo.traffic import SETTLING_S, Traffic
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream, cap_for
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

_POLL_S = 0.5
_READY_TIMEOUT_S = 180.0
_CATCH_UP_S = 45.0
"""How long the trainer may take, after the last answer, to use the traces that are still in the stream."""
_HEAD_OFF_SHARE = 0.25
"""Of the drafting rounds, for the A/B of the draft head beside remembered text."""
_PLAIN_SHARE = 0.06
"""Of the rounds, for the end-to-end speedup: twice what a server has, or a short demo would see too few stretches."""
_STRETCH_S = 60.0
_FEWEST_STRETCHES = 6
"""Of live traffic: an interval needs five."""
_PLAIN_S = 8.0
_LEAST_PLAIN_S = 2.0
_LINE_EVERY_S = 15.0


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


def run_demo(options: DemoOptions, console: Console) -> DemoRun:
    """Run the loop for `options.minutes` of traffic. Raises SlipstreamError when a part cannot start or ends early."""
    bind("127.0.0.1", options.port).close()  # a busy port is worth knowing before anything slow starts
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch, contextlib.ExitStack() as running:
        folder = Path(scratch)
        redis_url = options.redis_url or running.enter_context(EmbeddedRedis(folder / "redis")).url
        fingerprint = target_fingerprint(options.model_dir)
        key = model_key(options.model_dir, fingerprint)
        stream = TraceStream(connect(redis_url), key, max_bytes=cap_for(options.model_dir), consumer="demo")
        if stream.lag().appended:
            raise ConfigError(f"Redis already holds traces of this model: pass an empty --redis-url or drop {key}")
        ensure_lineage(
            DraftStore(folder / "drafts"),
            options.model_dir,
            fingerprint,
            draft_vocab_size=options.draft_vocab_size,
            seed=options.seed,
        )
        # The plain server's Redis and store are its own: no trainer writes there, so nothing is swapped.
        (folder / "plain").mkdir()
        plain_redis = running.enter_context(EmbeddedRedis(folder / "plain" / "redis"))
        port, plain_port = options.port, free_port()
        live_arguments = [
            *("--capture", "--head-off-share", str(_HEAD_OFF_SHARE), "--plain-share", str(_PLAIN_SHARE)),
            *("--depth", str(options.depth), "--suffix-depth", str(options.suffix_depth)),
        ]
        serve = running.enter_context(_server(options, folder, redis_url, port, live_arguments))
        plain_arguments = ["--depth", "0", "--suffix-depth", "0"]
        plain = running.enter_context(_server(options, folder / "plain", plain_redis.url, plain_port, plain_arguments))
        console.print(f"loading [bold]{options.model_name}[/] …")
        url, plain_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{plain_port}"
        for each in (url, plain_url):
            wait_until_ready(each, [serve, plain], timeout_s=_READY_TIMEOUT_S)
        console.print(f"page: {url}   openai client: {url}/v1")
        training = [*_places(options, folder, redis_url), "--state", str(folder / "trainer")]
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
        demo = _Demo(
            options=options,
            console=console,
            url=url,
            stream=stream,
            plain=plain,
            children=[serve, plain],
            start_trainer=partial(running_child, "train", training, folder),
            observed=DemoRun(
                traffic=traffic,
                plain=plain_traffic,
                num_clients=options.clients,
                num_prompts=len({prompt.text for prompt in asked}),
            ),
        )
        return asyncio.run(demo.run())


def _places(options: DemoOptions, folder: Path, redis_url: str) -> list[str]:
    return ["--model", str(options.model_dir), "--redis-url", redis_url, "--store", str(folder / "drafts")]


def _server(
    options: DemoOptions, folder: Path, redis_url: str, port: int, arguments: list[str]
) -> contextlib.AbstractContextManager[Child]:
    same = ["--name", options.model_name, "--dtype", options.dtype, "--context-length", str(options.context_length)]
    return running_child(
        "serve", [*_places(options, folder, redis_url), *same, "--port", str(port), *arguments], folder
    )


@dataclass(kw_only=True)
class _Demo:
    """One run: traffic and the observer beside it."""

    options: DemoOptions
    console: Console
    url: str
    stream: TraceStream
    plain: Child
    children: list[Child]
    start_trainer: Callable[[], contextlib.AbstractContextManager[Child]]
    observed: DemoRun
    decodes_plainly: bool = False

    async def run(self) -> DemoRun:
        run = self.observed
        total_s = 60 * self.options.minutes
        num_stretches = max(_FEWEST_STRETCHES, round(total_s / _STRETCH_S))
        stretch_s = total_s / num_stretches
        plain_s = max(_LEAST_PLAIN_S, min(_PLAIN_S, stretch_s / 2))
        # A full collection that walked all that was imported would hold up the clients, and count as the service's gap.
        gc.collect()
        gc.freeze()
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http, run.traffic, run.plain:
            with self._display() as show:
                await self._decode_plainly(SETTLING_S / 2, show)  # its first answers load what later ones find loaded
                await self._decode_plainly(plain_s, show)
                run.started_unix_s = time.time()
                with self.start_trainer() as trainer:
                    self.children.append(trainer)
                    for number in range(num_stretches):
                        if number:
                            await self._pause_for_plain_decoding(trainer, plain_s, show)
                        await self._serve(http, stretch_s, show)
                    run.duration_s = run.at_s(time.time())
                    await self._catch_up(http, show)
                    self.children.remove(trainer)
                await self._decode_plainly(plain_s, show)
        gc.unfreeze()
        return run

    async def _serve(self, http: httpx.AsyncClient, stretch_s: float, show: Callable[[], None]) -> None:
        """Live traffic, observed."""
        run = self.observed
        end_s = run.at_s(time.time()) + stretch_s
        async with self._asking(run.traffic) as clients:
            while run.at_s(time.time()) < end_s:
                await self._observe(http)
                show()
                await _wait(clients, _POLL_S)

    async def _pause_for_plain_decoding(self, trainer: Child, seconds: float, show: Callable[[], None]) -> None:
        began_s = time.time()
        trainer.pause()
        try:
            await self._decode_plainly(seconds, show)
        finally:
            trainer.resume()
        self.observed.pauses.append((began_s, time.time()))

    async def _decode_plainly(self, seconds: float, show: Callable[[], None]) -> None:
        """The same clients ask the plain server, which is paused before and after."""
        self.plain.check()
        self.plain.resume()
        self.decodes_plainly = True
        show()
        async with self._asking(self.observed.plain) as clients:
            await _wait(clients, seconds)
        self.decodes_plainly = False
        self.plain.pause()

    @contextlib.asynccontextmanager
    async def _asking(self, traffic: Traffic) -> AsyncIterator[asyncio.Task[None]]:
        """All clients, until the end of the block; then their answers in flight finish."""
        clients = asyncio.create_task(traffic.run(self.options.clients))
        try:
            yield clients
        finally:
            traffic.stop()
            await clients

    async def _observe(self, http: httpx.AsyncClient) -> None:
        run = self.observed
        for child in self.children:
            child.check()
        at_s = run.at_s(time.time())
        sample = Scrape.parse(at_s, (await http.get(f"{self.url}/metrics")).text)
        swapped = sample.total("slipstream_last_swap_timestamp_seconds")
        if swapped and swapped not in run.swaps_unix_s:
            run.swaps_unix_s.append(swapped)
        run.samples.append(sample)
        run.lag = await asyncio.to_thread(self.stream.lag)

    async def _catch_up(self, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        """Wait until every captured trace was used, or the time for it is over."""
        deadline = time.monotonic() + _CATCH_UP_S
        while time.monotonic() < deadline:
            await self._observe(http)
            show()
            lag = self.observed.lag
            assert lag is not None, "observed above"
            if not lag.pending + lag.undelivered + self.observed.samples[-1].total("slipstream_traces_pending"):
                return
            await asyncio.sleep(_POLL_S)

    @contextlib.contextmanager
    def _display(self) -> Iterator[Callable[[], None]]:
        """A table on a terminal, elsewhere a line now and then."""
        if self.console.is_terminal:
            with Live(console=self.console, auto_refresh=False) as live:
                yield lambda: live.update(self._table(), refresh=True)
            return
        shown_s = -_LINE_EVERY_S

        def line() -> None:
            nonlocal shown_s
            at_s = self.observed.samples[-1].at_s if self.observed.samples else shown_s
            if at_s - shown_s >= _LINE_EVERY_S:
                shown_s = at_s
                words = "  ".join(f"{name} {value}" for name, value in progress(self.observed).items())
                self.console.print(f"{at_s:5.0f} s  {words}")

        yield line

    def _table(self) -> Table:
        samples, total_s = self.observed.samples, 60 * self.options.minutes
        at_s = min(samples[-1].at_s if samples else 0.0, total_s)
        now = " (plain decoding, for comparison)" if self.decodes_plainly else ""
        table = Table(title=f"{self.options.model_name}, {at_s:.0f} of {total_s:.0f} s{now}", min_width=56)
        table.add_column("last minute")
        table.add_column("", justify="right")
        for name, value in progress(self.observed).items():
            table.add_row(name, value)
        return table


async def _wait(clients: asyncio.Task[None], seconds: float) -> None:
    """Let the clients ask for so long; raises what ended them."""
    await asyncio.wait([clients], timeout=seconds)
    if clients.done():
        clients.result()
