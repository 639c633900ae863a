"""`slipstream demo`: run server, trainer and traffic on one machine, chapter by chapter (slipstream/demo/chapters.py).

Start: Redis → draft lineage → gateway with engine → plain server → traffic → trainer.
Stop:  traffic (answers in flight finish) → trainer catches up → trainer → gateways → Redis.

The plain server is the same model in a second process without drafts; nothing is captured there. Before, between and
after stretches of live traffic the same clients send it the next prompts, while the trainer is paused or has ended. So
it measures what clients would see without Slipstream, at nearly the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from serving.gateway.server import bind
from slipstream.children import KEYS_FILE, Child, running_child
from slipstream.demo import TENANTS
from slipstream.demo.chapters import (
    CHAPTERS,
    GUEST,
    LEARNING,
    METRICS,
    POISON,
    RESTART,
    SHIFT,
    Chapter,
    make_keys,
    publish_poisoned,
    verdict_on,
)
from slipstream.demo.report import ChapterRun, DemoRun
from slipstream.demo.servers import Scrape, wait_until_ready
from slipstream.demo.summary import chapter_sentences, progress
from slipstream.demo.topics import Prompt, TenantTraffic, built_in_prompts
from slipstream.demo.traffic import SETTLING_S, Traffic
from slipstream.terminal import spinner
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import free_port, write_synced
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream, cap_for
from speculator.target_folder import check_folder
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

_POLL_S = 0.5
_READY_TIMEOUT_S = 180.0
_CATCH_UP_S = 45.0
"""How long the trainer may take, after the last answer, to use the traces that are still in the stream."""
_FLUSH_S = 20.0
"""How long the engine may take to write its last traces before the restart."""
_HEAD_OFF_SHARE = 0.25
"""Share of drafting rounds without the draft head, for the A/B of the head beside remembered text."""
_PLAIN_SHARE, _MOST_PLAIN_SHARE = 0.06, 0.2
"""Share of rounds in plain stretches: twice a server's default, and more in a shorter demo than `_PLAIN_MINUTES`, since
the interval of the end-to-end speedup needs five stretches before the restart.
"""
_PLAIN_MINUTES = 3
_MLP_WIDTH = 512
"""Width of the draft's MLP: a slim head costs half as much (benchmarks/slim_heads.py)."""
_STRETCH_S = 60.0
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
    keep: Path | None
    """Folder in which store, trainer's state and keys are kept; the run begins with the last good draft there."""
    tenants: int
    clients: int
    samples: int
    temperature: float
    max_tokens: int
    depth: int
    suffix_depth: int
    context_length: int
    draft_vocab_size: int
    seed: int
    dtype: str


def run_demo(options: DemoOptions, console: Console) -> DemoRun:
    """Run the loop for `options.minutes` of traffic. Raises SlipstreamError when a part cannot start or ends early."""
    bind("127.0.0.1", options.port).close()  # fail on a busy port before anything slow starts
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch, contextlib.ExitStack() as running:
        folder = Path(scratch)
        kept = options.keep or folder
        kept.mkdir(parents=True, exist_ok=True)
        redis_url = options.redis_url or running.enter_context(EmbeddedRedis(folder / "redis", ends_with_us=True)).url
        fingerprint = target_fingerprint(options.model_dir)
        key = model_key(options.model_dir, fingerprint)
        connection = connect(redis_url)
        stream = TraceStream(connection, key, max_bytes=cap_for(options.model_dir), consumer="demo")
        if stream.lag().appended:
            raise ConfigError(f"Redis already holds traces of this model: pass an empty --redis-url or drop {key}")
        store = DraftStore(kept / "drafts")
        # Both servers take prompts from one list, so that neither gets a prompt that the other has answered.
        asked = options.prompts or built_in_prompts()
        width = check_folder(options.model_dir)["intermediate_size"]
        begun_with = ensure_lineage(
            store,
            options.model_dir,
            fingerprint,
            draft_vocab_size=options.draft_vocab_size,
            intermediate_size=min(_MLP_WIDTH, width),
            seed=options.seed,
            texts=[prompt.text for prompt in asked],
        )
        keys = make_keys(kept / "keys.json")
        write_synced(kept / "metrics.key", keys[METRICS].encode())
        (kept / "metrics.key").chmod(0o600)
        # The plain server has its own Redis and store, to which no trainer writes, so its draft is never swapped.
        (folder / "plain").mkdir()
        plain_redis = running.enter_context(EmbeddedRedis(folder / "plain" / "redis", ends_with_us=True))
        port, plain_port = options.port, free_port()
        live_arguments = [
            *("--capture", "--head-off-share", str(_HEAD_OFF_SHARE)),
            *("--plain-share", str(_plain_share(options.minutes))),
            *("--depth", str(options.depth), "--suffix-depth", str(options.suffix_depth)),
        ]
        places = _places(options, kept / "drafts", redis_url)
        start_server = partial(
            _server, options, folder, [*places, *live_arguments], port, **{KEYS_FILE: str(kept / "keys.json")}
        )
        serve = running.enter_context(contextlib.ExitStack())
        server = serve.enter_context(start_server())
        plain_arguments = [
            *_places(options, folder / "plain" / "drafts", plain_redis.url),
            *("--depth", "0", "--suffix-depth", "0"),
        ]
        plain = running.enter_context(_server(options, folder / "plain", plain_arguments, plain_port))
        url, plain_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{plain_port}"
        with spinner(f"loading {options.model_name}"):
            for each in (url, plain_url):
                wait_until_ready(each, [server, plain], timeout_s=_READY_TIMEOUT_S)
        console.print(f"page: {url}/#key={keys[GUEST]}", soft_wrap=True)
        console.print(f"openai client: {url}/v1, API key {keys[GUEST]}", soft_wrap=True)
        prompts = TenantTraffic(asked, TENANTS[: options.tenants], options.seed)
        traffic, plain_traffic = (
            Traffic(
                each,
                options.model_name,
                prompts,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                samples=options.samples,
                keys=keys,
            )
            for each in (url, plain_url)
        )
        training = [*places, "--state", str(kept / "trainer")]
        demo = _Demo(
            options=options,
            console=console,
            url=url,
            metrics_key=keys[METRICS],
            stream=stream,
            store=store,
            pointer=DraftPointer(connection, key),
            fingerprint=fingerprint,
            prompts=prompts,
            plain=plain,
            serve=serve,
            server=server,
            start_server=start_server,
            start_trainer=partial(running_child, "train", training, folder),
            observed=DemoRun(
                traffic=traffic,
                plain=plain_traffic,
                num_clients=options.clients,
                num_prompts=len({prompt.text for prompt in asked}),
                begun_with=begun_with,
            ),
        )
        return asyncio.run(demo.run())


def _plain_share(minutes: float) -> float:
    return min(_PLAIN_SHARE * max(1.0, _PLAIN_MINUTES / minutes), _MOST_PLAIN_SHARE)


def _places(options: DemoOptions, store: Path, redis_url: str) -> list[str]:
    return ["--model", str(options.model_dir), "--redis-url", redis_url, "--store", str(store)]


def _server(
    options: DemoOptions, folder: Path, arguments: list[str], port: int, **settings: str
) -> contextlib.AbstractContextManager[Child]:
    same = ["--name", options.model_name, "--dtype", options.dtype, "--context-length", str(options.context_length)]
    return running_child("serve", [*arguments, *same, "--port", str(port)], folder, **settings)


@dataclass(kw_only=True)
class _Demo:
    """One run: sends the traffic and scrapes the metrics."""

    options: DemoOptions
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
        return max(_LEAST_PLAIN_S, min(_PLAIN_S, 60 * self.options.minutes * CHAPTERS[0].share / 2))

    async def _run_chapter(self, chapter: Chapter, http: httpx.AsyncClient, show: Callable[[], None]) -> None:
        """Run one chapter: the event at its beginning, then its stretches of live traffic."""
        run, chapter_s = self.observed, 60 * self.options.minutes * chapter.share
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
        await asyncio.to_thread(wait_until_ready, self.url, [self.server, self.plain], timeout_s=_READY_TIMEOUT_S)
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
        clients = asyncio.create_task(traffic.run(self.options.clients))
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
    """Let the clients run for so long; raises their error."""
    await asyncio.wait([clients], timeout=seconds)
    if clients.done():
        clients.result()
