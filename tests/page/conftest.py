"""A headless Chromium, and gateways in front of a toy engine that can be stopped and started again on their port.

Everything here is of module scope: while the browser is there, this thread has an event loop, and no test of another
module could run one of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, sync_playwright
from pydantic import SecretStr

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer
from serving.metrics import ServingCollector
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lifecycle import VersionState
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore
from tests.fixtures.drafts import CONFIG, make_draft
from tests.fixtures.toy import make_toy_model, random_draft
from tests.serving.gateway.client import serve
from tests.serving.local.harness import toy_engine

KEY = "xyzzy-canary-of-the-admin-key"
GATE = {
    "outcome": "promote",
    "reason": "better on held-out traces",
    "fresh": {
        "num_traces": 24,
        "candidate_length": 2.31,
        "incumbent_length": 2.1,
        "change": 0.1,
        "lower": 0.04,
        "upper": 0.16,
    },
}
OUTAGE = "Failed to load resource"
"""What Chromium itself writes to the console for a request that fails."""

Open = Callable[[int], AbstractAsyncContextManager[GatewayServer]]


@dataclass
class Gateway:
    """One address with a gateway behind it, or none."""

    open: Open
    """Serves on that port; 0 for any free one."""
    port: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)))
        self._thread.start()
        assert started.wait(20)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self.open(self.port) as server:
            self.port = int(server.url.rpartition(":")[2])
            started.set()
            await self._stop.wait()

    def stop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def ask(self, prompt: str, max_tokens: int = 40) -> str:
        body = {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30).raise_for_status().json()
        text: str = answer["choices"][0]["text"]
        return text


@contextmanager
def opened(open_: Open) -> Iterator[Gateway]:
    gateway = Gateway(open_)
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    """Version 1 is good and in service, version 2 passed the gate."""
    store = DraftStore(tmp_path_factory.mktemp("drafts"))
    good = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED)
    for number, states in ((1, good), (2, good[:3])):
        version = store.write(
            draft_state(make_draft(number)),
            draft_config_json(CONFIG),
            parent=number - 1 or None,
            target_fingerprint="toy",
            info={"gate": GATE} if number > 1 else {},
        ).version
        for state in states[1:]:
            store.lifecycle.move(version, state, actor="test")
    return store


@pytest.fixture(scope="module")
def pointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftPointer]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as redis:
        client = connect(redis.url)
        yield DraftPointer(client, "toy")
        client.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, store: DraftStore, pointer: DraftPointer) -> Iterator[FastAPI]:
    """In front of a toy engine that drafts with a random head and from earlier text."""
    model = make_toy_model(tmp_path_factory.mktemp("models") / "toy")
    draft = random_draft(model, seed=9)
    with toy_engine(model, draft=draft, control_share=0.25, plain_share=0.5, dtype="float64") as toy:
        toy.registry.register(ServingCollector(toy.meter, None, end_to_end=toy.engine.end_to_end.measure))
        yield create_app(
            toy.engine,
            settings=GatewaySettings(admin_key=SecretStr(KEY)),
            registry=toy.registry,
            drafts=DraftOperator(store, lambda: pointer, target_fingerprint="toy"),
        )


@pytest.fixture(scope="module")
def gateway(app: FastAPI) -> Iterator[Gateway]:
    with opened(lambda port: serve(app, port=port, grace_s=1)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs Chromium: `make system-packages` installs it where there is apt-get")
    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, what it wrote to the console as errors, and the addresses that it asked."""

    page: Page
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def open(self, gateway: Gateway) -> Page:
        self.page.goto(gateway.url)
        self.page.wait_for_selector("[data-connection=live]")
        return self.page

    @contextmanager
    def beside(self, open_: Open) -> Iterator[Gateway]:
        """A gateway of the test's own. The page closes first, or it would look for one that has ended."""
        with opened(open_) as gateway:
            yield gateway
            self.page.close()

    def expected(self) -> list[str]:
        """Take the requests that failed while the test wanted them to."""
        outage = [error for error in self.errors if error.startswith(OUTAGE)]
        self.errors = [error for error in self.errors if error not in outage]
        return outage


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A page at desktop width; at the end it has made no error, and asked nobody but its own gateway."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(15_000)
    watched = Watched(context.new_page())
    watched.page.on("console", lambda said: watched.errors.append(said.text) if said.type == "error" else None)
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    watched.page.on("request", lambda request: watched.urls.append(request.url))
    yield watched
    context.close()
    assert watched.errors == []
    assert all(httpx.URL(url).host == "127.0.0.1" for url in watched.urls)
    assert len({httpx.URL(url).port for url in watched.urls}) == 1
