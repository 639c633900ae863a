"""POST /v1/target-version: what it passes on, and how refusals read. Who may call it is in test_access."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from serving.engine import TargetReport
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from speculator.errors import EngineBusyError, EngineDeadError, RequestError, StreamError, TargetError
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import ask, error_of
from tests.serving.gateway.operator.test_admin import KEY, KEYS

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
        ({"version": -1}, "version"),
        ({"version": 1.5}, "version"),
        ({"version": "2"}, "version"),
        ({"version": 10**9}, "version"),
        ({"version": 2, "path": ""}, "path"),
        ({"version": 2, "path": ["x"]}, "path"),
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
        (EngineBusyError("busy"), 409, "target_is_moving", "already"),
        (RequestError("no path is taken here", param="path"), 400, "invalid_value", "no path"),
        (StreamError("Redis is away"), 503, "target_unavailable", "Redis"),
        (EngineDeadError("gone"), 503, "engine_unavailable", ""),
    ],
)
def test_a_refusal_says_why(failure: Exception, status: int, code: str, says: str) -> None:
    response = post(TargetsDouble(failure), {"version": 2})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert says in error_of(response)["message"]


def test_there_is_no_such_route_without_a_target_that_moves() -> None:
    app = create_app(DoubleEngine(), settings=GatewaySettings(admin_key=SecretStr(KEY)), registry=CollectorRegistry())
    assert ask(app, lambda client: client.post(PATH, headers=KEYS, json={"version": 2})).status_code == 404
