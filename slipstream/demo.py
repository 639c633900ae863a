"""`slipstream demo`: the whole loop on one machine, and the figures of what it did.

Start: Redis → draft lineage → gateway with engine → trainer → traffic.
Stop:  traffic (answers in flight finish) → trainer catches up → trainer → gateway → Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from serving.gateway.server import bind
from slipstream.layout import DEFAULT_STREAM_MAX_BYTES
from slipstream.processes import Child, running_child, wait_until_ready
from slipstream.scrape import History, Sample
from slipstream.topics import Prompt, built_in_prompts, endless
from slipstream.traffic import Traffic
from speculator.checkpoint import model_key, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import ConfigError
from speculator.ledger import StreamLag
from speculator.lineage import ensure_lineage
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream

POLL_S = 0.5
READY_TIMEOUT_S = 180.0
CATCH_UP_S = 45.0
"""How long the trainer may take, after the last answer, to use the traces that are still in the stream."""


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
    draft_vocab_size: int
    seed: int
    dtype: str


@dataclass
class DemoRun:
    """What a demo observed; `report.py` turns it into figures. Times in `…_s` count from the traffic's start."""

    history: History
    traffic: Traffic
    started_unix_s: float
    swaps_unix_s: list[float]
    lag: StreamLag | None = None
    final: Sample | None = None
    duration_s: float = 0.0

    @property
    def swaps_s(self) -> list[float]:
        """Swaps while there was traffic; the last versions arrive while the trainer catches up."""
        times_s = [at - self.started_unix_s for at in self.swaps_unix_s]
        return [at for at in times_s if at <= self.duration_s]


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
        serve = running.enter_context(running_child("serve", [*common, *_serve_arguments(options)], state))
        console.print(f"loading [bold]{options.model_name}[/] …")
        url = f"http://127.0.0.1:{options.port}"
        wait_until_ready(url, [serve], timeout_s=READY_TIMEOUT_S)
        console.print(f"page: {url}   openai client: {url}/v1")
        train = running.enter_context(running_child("train", [*common, "--state", str(state / "trainer")], state))
        return asyncio.run(_Demo(options, console, url, stream, [serve, train]).run())


def _serve_arguments(options: DemoOptions) -> list[str]:
    return [
        *("--name", options.model_name, "--port", str(options.port), "--capture", "--dtype", options.dtype),
        *("--depth", str(options.depth), "--suffix-depth", str(options.suffix_depth)),
        *("--context-length", str(options.context_length)),
    ]


class _Demo:
    """One run: traffic and the observer beside it."""

    def __init__(
        self, options: DemoOptions, console: Console, url: str, stream: TraceStream, children: list[Child]
    ) -> None:
        self._options, self._console, self._url = options, console, url
        self._stream, self._children = stream, children
        prompts = endless(options.prompts or built_in_prompts(), options.seed)
        traffic = Traffic(
            url,
            options.model_name,
            prompts,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            samples=options.samples,
        )
        self._run = DemoRun(History(), traffic, time.time(), [])
        self._http = httpx.AsyncClient(timeout=5, trust_env=False)

    async def run(self) -> DemoRun:
        run = self._run
        # A full collection that walked all that was imported would hold up the clients, and count as the service's gap.
        gc.collect()
        gc.freeze()
        async with self._http, self._display() as show:
            clients = asyncio.create_task(run.traffic.run(self._options.clients))
            try:
                while (now := time.time() - run.started_unix_s) < 60 * self._options.minutes:
                    await self._observe(now)
                    show()
                    await asyncio.wait([clients], timeout=POLL_S)
                    if clients.done():
                        clients.result()
            finally:
                run.traffic.stop()
                run.duration_s = time.time() - run.started_unix_s
                await clients
            await self._catch_up(show)
        gc.unfreeze()
        return run

    async def _observe(self, at_s: float) -> None:
        for child in self._children:
            child.check()
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
            await self._observe(time.time() - self._run.started_unix_s)
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
            at_s = self._run.history.samples[-1].at_s
            if at_s - last_s >= 15:
                last_s = at_s
                self._console.print(f"{at_s:5.0f} s  " + "  ".join(f"{k} {v}" for k, v in self._figures().items()))

        yield line

    def _figures(self) -> dict[str, str]:
        run, sample = self._run, self._run.history.samples[-1]
        window = run.history.window(sample.at_s - 60, sample.at_s)
        length = window.accept_length if window else None
        ratio = window.speedup.ratio if window else None
        lag = run.lag
        return {
            "acceptance length": f"{length:.2f}" if length else "–",
            "measured speedup": f"{ratio:.2f}×" if ratio else "–",
            "token/s": f"{window.tokens_per_s:.0f}" if window else "–",
            "draft version": f"{sample.total('slipstream_draft_version'):.0f}",
            "swaps": str(len(run.swaps_unix_s)),
            "traces": f"{sample.total('slipstream_traces_captured_total'):.0f}",
            "used": str(lag.acked) if lag else "–",
            "failed": str(run.traffic.stats.failed),
        }

    def _table(self) -> Table:
        at_s = self._run.history.samples[-1].at_s
        total_s = 60 * self._options.minutes
        table = Table(title=f"{self._options.model_name}, {min(at_s, total_s):.0f} of {total_s:.0f} s", min_width=46)
        table.add_column("last minute")
        table.add_column("", justify="right")
        for name, value in self._figures().items():
            table.add_row(name, value)
        return table
