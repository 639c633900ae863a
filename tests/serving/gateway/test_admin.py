"""The operator's endpoints: who may call them, what they pass on and back, and how refusals read."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

from serving.engine import TargetReport
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings, load_settings
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.errors import (
    ConfigError,
    DraftFileError,
    EngineBusyError,
    EngineDeadError,
    EngineError,
    LifecycleError,
    RequestError,
    SlipstreamError,
    StoreError,
    StreamError,
    TargetError,
    UnknownDraftError,
)
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import VersionState
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.drafts import CONFIG, make_draft
from tests.serving.gateway.client import ask, error_of

KEY = "xyzzy-canary-of-the-admin-key"
KEYS = {"authorization": f"Bearer {KEY}"}


@dataclass
class DeskDouble:
    """Answers every call with its name and arguments, or fails as told."""

    failure: Exception | None = None
    threads: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        def call(*args: int, **kwargs: Any) -> dict[str, Any]:
            self.threads.add(threading.current_thread().name)
            if self.failure is not None:
                raise self.failure
            return {"called": name, "args": args, **kwargs}

        return call


def app(desk: DeskDouble | None = None, *, key: str | None = KEY) -> FastAPI:
    settings = GatewaySettings(admin_key=None if key is None else SecretStr(key))
    return create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk or DeskDouble())


def request(app: FastAPI, method: str, path: str, **how: Any) -> httpx.Response:
    return ask(app, lambda client: client.request(method, path, **how))


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/admin/drafts", {"called": "overview", "args": []}),
        ("GET", "/admin/drafts/7", {"called": "show", "args": [7]}),
        ("GET", "/admin/drafts/7/diff/8", {"called": "diff", "args": [7, 8]}),
        ("GET", "/admin/drafts/events", {"called": "events", "args": [100]}),
        ("GET", "/admin/drafts/events?count=3", {"called": "events", "args": [3]}),
        ("GET", "/admin/drafts/events?count=99999", {"called": "events", "args": [1000]}),
        ("POST", "/admin/drafts/7/promote", {"called": "promote", "args": [7], "actor": "operator:admin"}),
        ("POST", "/admin/drafts/7/pin", {"called": "pin", "args": [7], "actor": "operator:admin"}),
        ("POST", "/admin/drafts/unpin", {"called": "unpin", "args": [], "actor": "operator:admin"}),
    ],
)
def test_each_request_is_one_call_of_the_desk(method: str, path: str, expected: dict[str, Any]) -> None:
    desk = DeskDouble()
    response = request(app(desk), method, path, headers=KEYS)
    assert (response.status_code, response.json()) == (200, expected)
    # A store or a Redis that hangs must not hold up the answers of others.
    assert threading.current_thread().name not in desk.threads


def test_a_rollback_has_a_reason() -> None:
    def roll_back(body: Any) -> httpx.Response:
        return request(app(), "POST", "/admin/drafts/rollback", headers=KEYS, json=body)

    expected = {"called": "rollback", "args": [], "actor": "operator:admin", "reason": "slow", "version": None}
    assert roll_back({"reason": "slow"}).json() == expected
    assert roll_back({"reason": "slow", "version": 4}).json()["version"] == 4
    for body in ({}, {"reason": ""}, {"reason": "r", "version": 0}, {"reason": "r", "version": "4"}, {"r": 1}, []):
        response = roll_back(body)
        assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error"), body


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "9" * 10, "9" * 5000, "%C2%B2"])
def test_a_version_is_a_number(version: str) -> None:
    for method, path in (("GET", ""), ("GET", "/diff/1"), ("POST", "/promote"), ("POST", "/pin")):
        response = request(app(), method, f"/admin/drafts/{version}{path}", headers=KEYS)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (UnknownDraftError("draft version 7 is not there"), 404, "draft_not_found"),
        (LifecycleError("draft version 7 is pinned"), 409, "draft_not_usable"),
        (DraftFileError("draft version 7 is damaged"), 409, "draft_not_usable"),
        (StoreError("the disk is full"), 503, "drafts_unavailable"),
        (StreamError("Redis cannot be reached"), 503, "drafts_unavailable"),
    ],
)
def test_a_refusal_reaches_the_operator_in_its_own_words(failure: SlipstreamError, status: int, code: str) -> None:
    response = request(app(DeskDouble(failure)), "POST", "/admin/drafts/7/promote", headers=KEYS)
    error = error_of(response)
    assert (response.status_code, error["code"], error["message"]) == (status, code, str(failure))


def test_nobody_gets_in_where_there_is_no_key() -> None:
    for headers in ({}, KEYS, {"authorization": "Bearer None"}):
        desk = DeskDouble()
        response = request(app(desk, key=None), "GET", "/admin/drafts", headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (403, "no_admin_key")
        assert "set SLIPSTREAM_GATEWAY_ADMIN_KEY" in error_of(response)["message"]
        assert not desk.threads


def test_without_a_desk_there_is_nothing_there() -> None:
    plain = create_app(DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry())
    assert request(plain, "GET", "/admin/drafts", headers=KEYS).status_code == 404


def test_the_key_is_in_no_log_error_metric_or_schema(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", KEY)
    settings = load_settings()
    desk = DeskDouble()
    gateway = create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk)

    async def talk(client: httpx.AsyncClient) -> list[str]:
        bodies = []
        for failure in (None, StoreError("full"), RuntimeError(KEY)):
            desk.failure = failure
            for headers in ({}, KEYS, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}):
                bodies.append((await client.get("/admin/drafts", headers=headers)).text)
                bodies.append((await client.post("/admin/drafts/rollback", headers=headers, json={KEY: 1})).text)
        bodies += [(await client.get(path)).text for path in ("/metrics", "/openapi.json")]
        return bodies

    with capture_logs() as logs:
        bodies = ask(gateway, talk)
    assert len(logs) >= 24
    # A field's name comes back to whoever sent it: that body is the request's, not the key's.
    assert [body for body in bodies if KEY in body and "unknown_parameter" not in body] == []
    for told in (repr(logs), repr(settings), str(settings), "".join(capfd.readouterr())):
        assert KEY not in told


@pytest.mark.parametrize("key", ["", "short", "x" * 15])
def test_a_key_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match="SLIPSTREAM_GATEWAY_ADMIN_KEY is not usable") as refused:
        load_settings()
    assert not key or key not in str(refused.value)


def test_the_real_desk_answers_in_json(tmp_path: Path, redis_client: redis.Redis) -> None:
    store, pointer = DraftStore(tmp_path), DraftPointer(redis_client, "toy")
    for _ in range(2):
        version = store.write(
            draft_state(make_draft()), draft_config_json(CONFIG), parent=None, target_fingerprint="a" * 64, info={}
        ).version
        for state in (VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED):
            store.lifecycle.move(version, state, actor="test")
    desk = DraftOperator(store, lambda: pointer, target_fingerprint="a" * 64)
    settings = GatewaySettings(admin_key=SecretStr(KEY))
    gateway = create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk)

    async def talk(client: httpx.AsyncClient) -> None:
        client.headers.update(KEYS)
        assert (await client.post("/admin/drafts/1/promote")).json() == {
            "version": 1,
            "state": "promoted",
            "desired": 1,
            "num_unrecorded": 0,
        }
        assert (await client.post("/admin/drafts/2/pin")).json()["desired"] == 2
        assert [row["is_pinned"] for row in (await client.get("/admin/drafts")).json()["drafts"]] == [False, True]
        rolled_back = await client.post("/admin/drafts/rollback", json={"reason": "slow"})
        assert rolled_back.json() == {"version": 2, "state": "quarantined", "desired": 1, "num_unrecorded": 0}
        assert (await client.get("/admin/drafts/2")).json()["history"][-1]["reason"] == "slow"
        assert (await client.get("/admin/drafts/1/diff/2")).json()["tensors"][0]["num_changed"] == 0
        events = (await client.get("/admin/drafts/events?count=2")).json()
        assert [(each["kind"], each["actor"]) for each in events] == [
            ("quarantined", "operator:admin"),
            ("rollback", "operator:admin"),
        ]
        assert (await client.post("/admin/drafts/unpin")).status_code == 409
        assert (await client.get("/admin/drafts/9")).status_code == 404

    ask(gateway, talk)


PATH = "/v1/target-version"


@dataclass
class TargetsDouble:
    failure: Exception | None = None
    announced: list[tuple[int, str | None]] = field(default_factory=list)

    def announce(self, version: int, path: str | None) -> TargetReport:
        if self.failure is not None:
            raise self.failure
        self.announced.append((version, path))
        return TargetReport(version=version, previous=1, stall_ms=2.5)


def post(targets: TargetsDouble, body: Any) -> httpx.Response:
    settings = GatewaySettings(admin_key=SecretStr(KEY))
    app = create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), targets=targets)
    return ask(app, lambda client: client.post(PATH, headers=KEYS, json=body))


def test_an_announcement_is_passed_on_and_answered_when_it_is_in_service() -> None:
    targets = TargetsDouble()
    assert post(targets, {"version": 2, "path": "step-2"}).json() == {"version": 2, "previous": 1, "stall_ms": 2.5}
    assert post(targets, {"version": 3}).status_code == 200
    assert targets.announced == [(2, "step-2"), (3, None)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "version"),
        ({"version": 0}, "version"),
        ({"version": "2"}, "version"),
        ({"version": 10**9}, "version"),
        ({"version": 2, "path": ""}, "path"),
        ({"version": 2, "path": "x" * 1001}, "path"),
        ({"version": 2, "wieghts": "x"}, "wieghts"),
    ],
)
def test_a_bad_body_is_refused_by_field(body: dict[str, Any], param: str) -> None:
    targets = TargetsDouble()
    response = post(targets, body)
    assert (response.status_code, error_of(response)["param"], targets.announced) == (400, param, [])


@pytest.mark.parametrize(
    ("failure", "status", "code", "says"),
    [
        (TargetError("model.norm.weight is not finite"), 409, "target_refused", "not finite"),
        (EngineBusyError("busy"), 409, "target_is_moving", "try again"),
        (RequestError("no path is taken here", param="path"), 400, "invalid_value", "no path"),
        (StreamError("Redis is away"), 503, "target_unavailable", "Redis"),
        (EngineDeadError("gone"), 503, "engine_unavailable", ""),
        (EngineError("version 2 is not on http://b: no room"), 503, "target_unavailable", "http://b: no room"),
    ],
)
def test_a_refusal_says_why(failure: Exception, status: int, code: str, says: str) -> None:
    response = post(TargetsDouble(failure), {"version": 2})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert says in error_of(response)["message"]


def test_there_is_no_such_route_without_a_target_that_moves() -> None:
    app = create_app(DoubleEngine(), settings=GatewaySettings(admin_key=SecretStr(KEY)), registry=CollectorRegistry())
    assert ask(app, lambda client: client.post(PATH, headers=KEYS, json={"version": 2})).status_code == 404
