"""The gateway as a stranger meets it: every documented operation with generated requests, and every other path.

The app is whole: the double engine, a real store with versions in it, a real Redis.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import redis
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from schemathesis import APIOperation, Case, GenerationMode

from serving.engine import Engine
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.keys import ApiKey, change_keys, digest
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import VersionState
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.drafts import CONFIG, make_draft
from tests.hostile.bodies import Body
from tests.hostile.drafts import FINGERPRINT
from tests.hostile.judge import DEADLINE_S, FailureError, Outcome, Tally
from tests.serving.gateway.client import serve

ADMIN_KEY = "admin-key-of-the-hostile-tests"
API_KEY = "sk-slipstream-of-the-hostile-tests"
KEYS = (API_KEY, ADMIN_KEY)
GENERATING = ("/v1/chat/completions", "/v1/completions")

T = TypeVar("T")
Operation = APIOperation[Any, Any, Any, Any]

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "FOO")
_HEADER_NAMES = (
    *("accept", "accept-encoding", "content-encoding", "content-type", "origin", "traceparent", "x-a", "authorization"),
    *("host", "range", "if-none-match", "x-forwarded-for", "x-request-id", "connection"),
)
_VISIBLE = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), min_size=1)


@dataclass(frozen=True)
class Site:
    """Where the gateway is, and the keys that open it."""

    url: str
    keys: tuple[str, ...]
    openapi: dict[str, Any]


def full_app(folder: Path, client: redis.Redis, engine: DoubleEngine | None = None) -> FastAPI:
    """Three versions: one promoted, one on its way, one barred."""
    store = DraftStore(folder)
    for number in range(3):
        store.write(
            draft_state(make_draft(number)),
            draft_config_json(CONFIG),
            parent=number or None,
            target_fingerprint=FINGERPRINT,
            info={},
        )
    for state in (VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED):
        store.lifecycle.move(1, state, actor="test")
    store.lifecycle.move(2, VersionState.VALIDATED, actor="test")
    store.lifecycle.move(3, VersionState.QUARANTINED, actor="test", reason="test")
    pointer = DraftPointer(client, "hostile")
    pointer.publish(1)
    desk = DraftOperator(store, lambda: pointer, target_fingerprint=FINGERPRINT)
    keys_file = folder / "keys.json"
    change_keys(keys_file, lambda _: [ApiKey(name="stranger", sha256=digest(API_KEY.encode()))])
    settings = GatewaySettings(admin_key=SecretStr(ADMIN_KEY), keys_file=keys_file)
    return create_app(engine or DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk)


def open_app(engine: Engine) -> FastAPI:
    """Without keys, so that every request gets as far as it can; a toy model takes long over none."""
    settings = GatewaySettings(max_samples=8, rollout_max_samples=32, rollout_max_tokens=1024)
    return create_app(engine, settings=settings, registry=CollectorRegistry())


@contextmanager
def running(app: FastAPI, *keys: str) -> Iterator[Site]:
    """The app on a real port, served by another thread."""
    started, ending = threading.Event(), threading.Event()
    url: list[str] = []

    async def run() -> None:
        async with serve(app, grace_s=1) as server:
            url.append(server.url)
            started.set()
            await asyncio.to_thread(ending.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(20), "the gateway did not start"
        yield Site(url[0], keys, app.openapi())
    finally:
        ending.set()
        thread.join()


def operations(site: Site) -> list[Operation]:
    found = schemathesis.openapi.from_dict(site.openapi).get_all_operations()
    return [each.ok() for each in found]  # type: ignore[union-attr]  # an invalid document has no `ok`


def authorisations(site: Site) -> st.SearchStrategy[str | None]:
    """None, one of the keys, or something that only looks like one; with a key more often than not."""
    right = st.sampled_from([f"Bearer {key}" for key in site.keys])
    return right | right | st.none() | st.builds("{} {}".format, st.sampled_from(["Bearer", "Basic", "b"]), _VISIBLE)


def _draw(drawn: st.SearchStrategy[T], use: Callable[[T], None], count: int, fixed_seed: int) -> None:
    """Call `use` with `count` drawn values. What fails is counted, and not shrunk."""

    @seed(fixed_seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def one(value: T) -> None:
        use(value)

    one()


def fuzz_operations(site: Site, tally: Tally, *, count: int, fixed_seed: int = 0) -> None:
    """`count` generated requests to each operation, half of them such as the schema allows and half such as not."""
    with requests.Session() as session:

        def ask(drawn: tuple[Case[Any], str | None]) -> None:
            case, key = drawn
            headers = {} if key is None else {"authorization": key.encode("latin-1")}
            label = str(case.operation.label)

            def attempt() -> Outcome:
                response = case.call(base_url=site.url, session=session, headers=headers, timeout=DEADLINE_S)
                return judged(response.status_code, response.content, label)

            tally.take(f"{label} {case.body!r}"[:300], attempt)

        for operation in operations(site):
            for mode in GenerationMode:
                drawn = st.tuples(operation.as_strategy(generation_mode=mode), authorisations(site))
                # An operation without parameters and body has no request that its schema forbids.
                with suppress(Unsatisfiable):
                    _draw(drawn, ask, count // 2, fixed_seed)


def fuzz_paths(site: Site, tally: Tally, *, count: int, fixed_seed: int = 0) -> None:
    """Any method on any path, known and unknown ones and mixtures, with any headers."""
    known = sorted({*site.openapi["paths"], "/", "/page/index.html", "/openapi.json", "/docs", "/admin", "/v1"})
    piece = st.sampled_from(sorted({part for path in known for part in path.split("/")})) | _VISIBLE
    paths = st.sampled_from(known) | st.lists(piece, max_size=6).map(lambda pieces: "/" + "/".join(pieces))
    headers = st.dictionaries(st.sampled_from(_HEADER_NAMES), _VISIBLE, max_size=4)
    drawn = st.tuples(st.sampled_from(_METHODS), paths, headers, authorisations(site), st.binary(max_size=60))
    with httpx.Client(base_url=site.url, timeout=DEADLINE_S) as client:

        def ask(drawn: tuple[str, str, dict[str, str], str | None, bytes]) -> None:
            method, path, sent, key, body = drawn
            keyed = {} if key is None else {"authorization": key}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in {**sent, **keyed}.items()]
            tally.take(f"{method} {path}", partial(_exchange, client, method, site.url + path, raw, body))

        _draw(drawn, ask, count, fixed_seed)


def send_bodies(site: Site, tally: Tally, path: str, bodies: Iterable[Body]) -> None:
    """With the first of the keys."""
    with httpx.Client(base_url=site.url, timeout=DEADLINE_S) as client:
        for name, raw, headers in bodies:
            sent = {"content-type": "application/json", "authorization": f"Bearer {site.keys[0]}", **headers}
            tally.take(f"{path} {name}", partial(_exchange, client, "POST", path, list(sent.items()), raw))


def _exchange(client: httpx.Client, method: str, url: str, headers: list[Any], body: bytes) -> Outcome:
    try:
        response = client.send(client.build_request(method, url, headers=headers, content=body))
    except (httpx.InvalidURL, httpx.LocalProtocolError, httpx.UnsupportedProtocol):
        return "the client library refuses to send it"
    except (httpx.WriteError, httpx.RemoteProtocolError):
        return "closed"
    return judged(response.status_code, response.content, f"{method} {url}")


def judged(status: int, content: bytes, what: str) -> Outcome:
    """The status; raises FailureError for a server error, and for an answer that is cut off by one."""
    if status >= 500:
        raise FailureError(f"{what} was answered with {status}: {content[:200]!r}")
    if b"internal_error" in content:
        raise FailureError(f"{what} broke off: {content[-200:]!r}")
    return str(status)
