"""The GPU variant's services as processes, with a stand-in for SGLang: `slipstream sglang`, and the gateway in front.

The tests follow one another on one deployment: up, used, SGLang away and back, down.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.client import PASSWORD_FILE_VARIABLE, connect
from speculator.redis.control_plane import DraftPointer
from tests.deploy.compose import CPU, GPU, argv, load
from tests.deploy.machine import Machine
from tests.fixtures.command_line import check_slipstream
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.outside.fake_sglang import EVENTS, WHOLE, FakeSglang, in_background, install
from tests.slipstream.conftest import invoke, refused

__all__ = ["invoke", "refused"]

BODY = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}


class _WithStandIn(Machine):
    """Finds the stand-in where the image has SGLang."""

    def environment(self, name: str) -> dict[str, str]:
        told = super().environment(name)
        return {**told, **self.stand_in} if name == "sglang" else told

    stand_in: dict[str, str]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_WithStandIn]:
    root = tmp_path_factory.mktemp("compose")
    settings = {"SLIPSTREAM_MODEL": "/models/toy", "SLIPSTREAM_MODEL_NAME": "toy", "SLIPSTREAM_DEPTH": "2"}
    machine = _WithStandIn(GPU, root, {**settings, "SLIPSTREAM_SGLANG_ARGS": "--tp-size 2"})
    machine.stand_in = install(root / "site")
    make_toy_model(Path(machine.here("/models/toy")))
    yield machine
    machine.close()


@pytest.fixture
def pointer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftPointer]:
    """What the plugin in a real SGLang would report with."""
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, machine.here("/run/secrets/redis_engine"))
    model = Path(machine.here("/models/toy"))
    with connect(machine.here("redis://engine@redis:6379/0")) as client:
        yield DraftPointer(client, model_key(model, target_fingerprint(model)))


def started(machine: _WithStandIn) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(machine.stand_in["FAKE_SGLANG_RECORD"]).read_text())
    return record


def keyed(machine: Machine, name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {machine.secret(name)}"}


def ready(machine: Machine) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{machine.url(8000)}/ready").json()
    return answer


def test_sglang_and_its_plugin_are_told_all_they_need(machine: _WithStandIn) -> None:
    machine.up("redis", "init", "sglang")
    found = started(machine)
    words, environment = found["arguments"], found["environment"]
    folder = words[words.index("--speculative-draft-model-path") + 1]
    assert Path(folder) == Path(machine.environment("sglang")["SLIPSTREAM_STORE"]) / "versions" / "000001"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[-2:] == ["--tp-size", "2"]
    assert "--mem-fraction-static" not in words, "SGLang chooses"
    assert environment["SLIPSTREAM_ENABLED"] == "1"
    assert environment["SLIPSTREAM_CAPTURE"] == "0"
    assert environment["SLIPSTREAM_ENGINE_ID"] == "sglang"
    assert environment[PASSWORD_FILE_VARIABLE] == machine.here("/run/secrets/redis_engine")


def test_the_gateway_passes_answers_through(machine: _WithStandIn, pointer: DraftPointer) -> None:
    pointer.report_engine("sglang", {"version": 1, "swaps": 4})
    machine.up("gateway")
    assert ready(machine)["draft_version"] == 1
    url, key = f"{machine.url(8000)}/v1/chat/completions", keyed(machine, "gateway_client")
    assert httpx.post(url, json=BODY).status_code == 401
    assert httpx.post(url, json=BODY, headers=key).content == WHOLE
    assert httpx.post(url, json={**BODY, "stream": True}, headers=key).content == b"".join(EVENTS)
    metrics, reader = f"{machine.url(8000)}/metrics", keyed(machine, "gateway_metrics")
    wait_until(lambda: 'slipstream_swaps_total{outcome="installed"} 4.0' in httpx.get(metrics, headers=reader).text)


def test_it_outlives_sglang(machine: _WithStandIn, pointer: DraftPointer) -> None:
    url, key = f"{machine.url(8000)}/v1/chat/completions", keyed(machine, "gateway_client")
    machine.stop("sglang")
    away = httpx.post(url, json=BODY, headers=key)
    assert (away.status_code, "retry-after" in away.headers) == (503, True)
    machine.up("sglang")
    assert httpx.post(url, json=BODY, headers=key).content == WHOLE
    pointer.report_engine("sglang", {"version": 7})
    wait_until(lambda: ready(machine).get("draft_version") == 7)


def test_down(machine: _WithStandIn) -> None:
    assert machine.stop("gateway") == 0, machine.log("gateway").read_text()
    machine.stop("sglang")
    assert machine.stop("redis") == 0


# -- without SGLang, without a store, without a report -----------------------------------------------------------------


@pytest.mark.usefixtures("redis_client")
def test_what_is_missing_is_named(
    machine: Machine, refused: Callable[..., str], tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculator.draft.checkpoint import target_fingerprint
    from speculator.versions.lineage import ensure_lineage
    from speculator.versions.store import DraftStore

    model = Path(machine.here("/models/toy"))
    common = ("--model", model, "--redis-url", redis_url, "--store", tmp_path / "drafts")
    front = ("gateway", *common, "--port", 0, "--sglang", "http://127.0.0.1:9", "--start-timeout-s", 1)
    assert "drafts init" in refused(*front)
    for name, value in install(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    assert "drafts init" in refused("sglang", *common, "--sglang-python", sys.executable)
    ensure_lineage(DraftStore(tmp_path / "drafts"), model, target_fingerprint(model), draft_vocab_size=16)
    assert "no SGLang answers at http://127.0.0.1:9" in refused(*front)
    assert "no sglang-router with an engine answers at http://127.0.0.1:9" in refused(*front, "--pool")
    assert "leave --engine-id out" in refused(*front, "--pool", "--engine-id", "mine")
    url, stop = in_background(FakeSglang())
    assert "none reports to Redis" in refused(*front, "--pool", "--sglang", url)
    assert "add --pool, or pass only one" in refused(*front, "--sglang", url)
    stop()


# -- every command line of both variants -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (files, name)
        for files in (GPU, CPU)
        for name, service in load(files, {"SLIPSTREAM_MODEL": "some/model"})["services"].items()
        if "build" in service
    ],
    ids=lambda value: value if isinstance(value, str) else ("cpu" if len(value) > 1 else "gpu"),
)
def test_our_command_line_knows_the_words(files: tuple[Path, ...], name: str) -> None:
    check_slipstream(argv(load(files, {"SLIPSTREAM_MODEL": "some/model"})["services"][name]["command"]))
