"""`slipstream demo`: start server, trainer and traffic on one machine, then run chapter by chapter (chapter_runner.py).

Start: Redis → draft lineage → gateway with engine → plain server → traffic → trainer.
Stop:  traffic (answers in flight finish) → trainer catches up → trainer → gateways → Redis.

The plain server is the same model in a second process without drafts; nothing is captured there.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from serving.gateway.server import bind
from slipstream.children import KEYS_FILE, Child, running_child
from slipstream.demo import TENANTS
from slipstream.demo.chapter_runner import ChapterRunner
from slipstream.demo.chapters import GUEST, METRICS, make_keys
from slipstream.demo.report import DemoRun
from slipstream.demo.servers import wait_until_ready
from slipstream.demo.topics import Prompt, TenantTraffic, built_in_prompts
from slipstream.demo.traffic import Traffic
from slipstream.terminal import spinner
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import free_port, write_synced
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream, cap_for
from speculator.target_folder import check_folder
from speculator.versions.lineage import ensure_lineage, version_to_serve
from speculator.versions.store import DraftStore

_HEAD_OFF_SHARE = 0.25
"""Share of drafting rounds without the draft head, for the A/B of the head beside remembered text."""
_PLAIN_SHARE, _MOST_PLAIN_SHARE = 0.06, 0.2
"""Share of rounds in plain stretches: twice a server's default, and more in a shorter demo than `_PLAIN_MINUTES`, since
the interval of the end-to-end speedup needs five stretches before the restart.
"""
_PLAIN_MINUTES = 3
_MLP_WIDTH = 512
"""Width of the draft's MLP: a slim head costs half as much (benchmarks/results/slim_heads.md)."""


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
        return asyncio.run(_started(options, console, Path(scratch), running).run())


def _started(options: DemoOptions, console: Console, folder: Path, running: contextlib.ExitStack) -> ChapterRunner:
    """Start everything but the trainer; `running` ends it."""
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
    newest = ensure_lineage(
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
    places = _places(options, store.root, redis_url)
    start_server = partial(_live_server, options, folder, places, kept / "keys.json")
    serve = running.enter_context(contextlib.ExitStack())
    server = serve.enter_context(start_server())
    plain_port = free_port()
    plain = _plain_server(options, folder / "plain", plain_port, running)
    url, plain_url = (f"http://127.0.0.1:{port}" for port in (options.port, plain_port))
    with spinner(f"loading {options.model_name}"):
        for each in (url, plain_url):
            wait_until_ready(each, [server, plain])
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
    return ChapterRunner(
        model_name=options.model_name,
        minutes=options.minutes,
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
        start_trainer=partial(
            running_child,
            "train",
            [*places, "--state", str(kept / "trainer")],
            folder,
            # The demo reads drift alarms in the log.
            SLIPSTREAM_LOG_FORMAT="json",
            SLIPSTREAM_LOG_LEVEL="info",
        ),
        observed=DemoRun(
            traffic=traffic,
            plain=plain_traffic,
            num_clients=options.clients,
            num_prompts=len({prompt.text for prompt in asked}),
            begun_with=version_to_serve(store, newest),
        ),
    )


def _live_server(
    options: DemoOptions, folder: Path, places: list[str], keys_file: Path
) -> contextlib.AbstractContextManager[Child]:
    arguments = [
        *places,
        *("--capture", "--head-off-share", str(_HEAD_OFF_SHARE)),
        *("--plain-share", str(_plain_share(options.minutes))),
        *("--depth", str(options.depth), "--suffix-depth", str(options.suffix_depth)),
    ]
    return _server(options, folder, arguments, options.port, **{KEYS_FILE: str(keys_file)})


def _plain_server(options: DemoOptions, folder: Path, port: int, running: contextlib.ExitStack) -> Child:
    """Has a Redis and a store of its own, to which no trainer writes, so its draft is never swapped."""
    folder.mkdir()
    redis = running.enter_context(EmbeddedRedis(folder / "redis", ends_with_us=True))
    arguments = [*_places(options, folder / "drafts", redis.url), "--depth", "0", "--suffix-depth", "0"]
    return running.enter_context(_server(options, folder, arguments, port))


def _plain_share(minutes: float) -> float:
    return min(_PLAIN_SHARE * max(1.0, _PLAIN_MINUTES / minutes), _MOST_PLAIN_SHARE)


def _places(options: DemoOptions, store: Path, redis_url: str) -> list[str]:
    return ["--model", str(options.model_dir), "--redis-url", redis_url, "--store", str(store)]


def _server(
    options: DemoOptions, folder: Path, arguments: list[str], port: int, **settings: str
) -> contextlib.AbstractContextManager[Child]:
    same = ["--name", options.model_name, "--dtype", options.dtype, "--context-length", str(options.context_length)]
    return running_child("serve", [*arguments, *same, "--port", str(port)], folder, **settings)
