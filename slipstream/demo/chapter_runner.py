"""The chapters of a demo's run, on parts that slipstream/demo/demo.py has started.

Before, between and after stretches of live traffic the same clients send the plain server the next prompts, while the
trainer is paused or has ended. So it measures what clients would see without Slipstream, at nearly the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from slipstream.children import Child
from slipstream.demo.chapters import (
    CHAPTERS,
    LEARNING,
    POISON,
    RESTART,
    SHIFT,
    Chapter,
    drift_alarms,
    publish_poisoned,
    verdict_on,
)
from slipstream.demo.report import ChapterRun, DemoRun
from slipstream.demo.servers import Scrape, wait_until_ready
from slipstream.demo.summary import chapter_sentences, progress
from slipstream.demo.topics import TenantTraffic
from slipstream.demo.traffic import SETTLING_S, Traffic
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.versions.store import DraftStore

_POLL_S = 0.5
_CATCH_UP_S = 45.0
"""How long the trainer may take, after the last answer, to use the traces that are still in the stream."""
_FLUSH_S = 20.0
"""How long the engine may take to write its last traces before the restart."""
_STRETCH_S = 60.0
_PLAIN_S = 8.0
_LEAST_PLAIN_S = 2.0
_LINE_EVERY_S = 15.0


@dataclass(kw_only=True)
class ChapterRunner:
    """One run: sends the traffic and scrapes the metrics."""

    model_name: str
    minutes: float
    """Of all chapters."""
    console: Console
    url: str
    metrics_key: str
    stream: TraceStream
    store: DraftStore
    pointer: DraftPointer
    fingerprint: str
    prompts: TenantTraffic
    plain: Child
    serve: contextlib.ExitStack
    """Ends `server`."""
    server: Child
    start_server: Callable[[], contextlib.AbstractContextManager[Child]]
    start_trainer: Callable[[], contextlib.AbstractContextManager[Child]]
    observed: DemoRun
    trainer: Child | None = None
    training: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Ends `trainer`."""
    before_restart: Scrape | None = None
    decodes_plainly: bool = False

    async def run(self) -> DemoRun:
        run = self.observed
        # A full garbage collection over all imported modules would delay the clients and look like the server's gap.
        gc.collect()
        gc.freeze()
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http, run.traffic, run.plain:
            with self._display() as show, self.training:
                await self._decode_plainly(SETTLING_S / 2, show)  # warm-up
                await self._decode_plainly(self._plain_s, show)
                run.started_unix_s = time.time()
                for chapter in CHAPTERS:
                    await self._run_chapter(chapter, http, show)
                run.duration_s = run.at_s(time.time())
                await self._catch_up(http, show)
                self.training.close()
                self.trainer = None
                await self._decode_plainly(self._plain_s, show)
        gc.unfreeze()
        return run

    @property
    def _plain_s(self) -> float:
        return max(_LEAST_PLAIN_S, min(_PLAIN_S, 60 * self.minutes * CHAPTERS[0].share / 2))

    async def _run_chapter(self, chapter: Chapter, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        """Run one chapter: the event at its beginning, then its stretches of live traffic."""
        run, chapter_s = self.observed, 60 * self.minutes * chapter.share
        if run.chapters:
            await self._pause_for_plain_decoding(show)
        self.console.print(f"[bold]{chapter.title}.[/] {chapter.opening}", highlight=False)
        await self._begin(chapter, http, show)
        start_s = run.at_s(time.time())
        run.chapters.append(ChapterRun(chapter, start_s, start_s + chapter_s))
        num_stretches = math.ceil(chapter_s / _STRETCH_S)
        for number in range(num_stretches):
            if number:
                await self._pause_for_plain_decoding(show)
            await self._serve(http, chapter_s / num_stretches, show)
        run.chapters[-1].end_s = run.at_s(time.time())
        if self.trainer is not None:
            run.drift_alarms_unix_s = drift_alarms(self.trainer.log_path)
        for sentence in chapter_sentences(run, run.chapters[-1]):
            self.console.print(f"  {sentence}", highlight=False)

    async def _begin(self, chapter: Chapter, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        run = self.observed
        self.prompts.shift(to_second=chapter is SHIFT)
        if chapter is LEARNING:
            self.trainer = self.training.enter_context(self.start_trainer())
        elif chapter is SHIFT and not self.prompts.can_shift:
            self.console.print("  All prompts are of one domain, so the topics stay.")
        elif chapter is POISON:
            run.published_at = run.samples[-1]
            run.poisoned = publish_poisoned(
                self.store,
                self.pointer,
                int(run.samples[-1].total("slipstream_draft_version")),
                target_fingerprint=self.fingerprint,
            )
        elif chapter is RESTART:
            with self._paused():
                await self._restart(http, show)

    async def _restart(self, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        """Restart the engine; later scrapes add the counters that it had before."""
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline:
            await self._observe(http)
            if not self.observed.samples[-1].total("slipstream_traces_pending"):
                break
            await asyncio.sleep(_POLL_S)
        self.before_restart = self.observed.samples[-1]
        await asyncio.to_thread(self.serve.close)
        self.server = self.serve.enter_context(self.start_server())
        await asyncio.to_thread(wait_until_ready, self.url, [self.server, self.plain])
        await self._observe(http)
        show()

    async def _serve(self, http: httpx.AsyncClient, stretch_s: float, show: Callable[[], None]) -> None:
        """Send live traffic and scrape the metrics meanwhile."""
        run = self.observed
        end_s = run.at_s(time.time()) + stretch_s
        async with self._clients_running(run.traffic) as clients:
            while run.at_s(time.time()) < end_s:
                await self._observe(http)
                show()
                await _wait(clients, _POLL_S)
        await self._observe(http)

    async def _pause_for_plain_decoding(self, show: Callable[[], None]) -> None:
        with self._paused():
            await self._decode_plainly(self._plain_s, show)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave the time of the block out of live traffic, and pause the trainer."""
        began_s, pauses = time.time(), self.observed.pauses
        pauses.append((began_s, math.inf))
        if self.trainer is not None:
            self.trainer.pause()
        try:
            yield
        finally:
            if self.trainer is not None:
                self.trainer.resume()
        pauses[-1] = (began_s, time.time())

    async def _decode_plainly(self, seconds: float, show: Callable[[], None]) -> None:
        """Send the clients' requests to the plain server, which is paused before and after."""
        self.plain.check()
        self.plain.resume()
        self.decodes_plainly = True
        show()
        async with self._clients_running(self.observed.plain) as clients:
            await _wait(clients, seconds)
        self.decodes_plainly = False
        self.plain.pause()

    @contextlib.asynccontextmanager
    async def _clients_running(self, traffic: Traffic) -> AsyncIterator[asyncio.Task[None]]:
        """Run all clients until the end of the block, then let their answers in flight finish."""
        clients = asyncio.create_task(traffic.run(self.observed.num_clients))
        try:
            yield clients
        finally:
            traffic.stop()
            await clients

    async def _observe(self, http: httpx.AsyncClient) -> None:
        run = self.observed
        for child in (self.server, self.plain, self.trainer):
            if child is not None:
                child.check()
        at_s = run.at_s(time.time())
        headers = {"authorization": f"Bearer {self.metrics_key}"}
        sample = Scrape.parse(at_s, (await http.get(f"{self.url}/metrics", headers=headers)).text)
        swapped = sample.total("slipstream_last_swap_timestamp_seconds")
        if swapped and swapped not in run.swaps_unix_s:
            run.swaps_unix_s.append(swapped)
        run.samples.append(sample if self.before_restart is None else sample.continued_from(self.before_restart))
        run.lag = await asyncio.to_thread(self.stream.lag)
        self._record_rollback()

    def _record_rollback(self) -> None:
        """Record when and why the poisoned draft was rolled back."""
        run = self.observed
        if run.poisoned is not None and run.verdict is None:
            run.verdict = verdict_on(self.store, run.poisoned)
            run.judged_by = run.samples[-1]

    async def _catch_up(self, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        """Wait until every captured trace was used, at most _CATCH_UP_S."""
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
        """Show progress: a live table on a terminal, elsewhere a line every 15 s."""
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
        samples, total_s = self.observed.samples, 60 * self.minutes
        at_s = min(samples[-1].at_s if samples else 0.0, total_s)
        now = " (plain decoding, for comparison)" if self.decodes_plainly else ""
        table = Table(title=f"{self.model_name}, {at_s:.0f} of {total_s:.0f} s{now}", min_width=56)
        table.add_column("last minute")
        table.add_column("", justify="right")
        for name, value in progress(self.observed).items():
            table.add_row(name, value)
        return table


async def _wait(clients: asyncio.Task[None], seconds: float) -> None:
    """Let the clients run for so long; raises their error."""
    await asyncio.wait([clients], timeout=seconds)
    if clients.done():
        clients.result()
