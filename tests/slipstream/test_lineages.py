"""A store says whose drafts it holds: every command that is given a lineage's works on that lineage's keys alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from slipstream import sglang_start
from slipstream.cli import app
from speculator.checkpoint import model_key, target_fingerprint
from speculator.erasures import Erasures
from speculator.lineage import ensure_lineage
from speculator.pointer import DraftPointer
from speculator.store import DraftStore
from speculator.stream import TraceStream

Cli = Callable[..., Any]


@pytest.fixture
def cli(toy_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command that must succeed and prints JSON."""
    monkeypatch.setenv("SLIPSTREAM_REDIS_URL", redis_url)

    def run(*words: object, code: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if result.stdout else None

    return run


@pytest.fixture
def base(toy_model: Path, tmp_path: Path) -> DraftStore:
    store = DraftStore(tmp_path / "drafts")
    ensure_lineage(store, toy_model, target_fingerprint(toy_model), draft_vocab_size=24)
    return store


@pytest.fixture
def code(base: DraftStore, cli: Cli) -> DraftStore:
    return DraftStore(cli("draft", "fork", "code", "--store", base.root, "--json")["store"])


def key(model: Path, lineage: str = "") -> str:
    return model_key(model, target_fingerprint(model), lineage)


def test_an_operator_steers_one_lineage(cli: Cli, code: DraftStore, toy_model: Path, redis_client: redis.Redis) -> None:
    cli("drafts", "pin", 1, "--store", code.root, "--model", toy_model, "--json")
    assert DraftPointer(redis_client, key(toy_model, "code")).pinned() == 1
    assert DraftPointer(redis_client, key(toy_model)).pinned() is None
    assert cli("drafts", "show", 1, "--store", code.root, "--json")["manifest"]["info"]["origin"] == "fork"


def test_trainer_and_engine_know_the_lineage_from_the_store(
    cli: Cli, code: DraftStore, base: DraftStore, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, served = [], []
    monkeypatch.setattr("trainer.run.run_trainer", trained.append)
    monkeypatch.setattr(sglang_start.SglangStart, "interpreter", lambda self: tmp_path / "python")
    monkeypatch.setattr(sglang_start.os, "execve", lambda *given: served.append(given))
    for store in (base, code):
        cli("train", "--model", toy_model, "--store", store.root, "--state", tmp_path / "state")
        cli("sglang", "--model", toy_model, "--store", store.root, "--device", "cpu")
    assert [config.model_key for config in trained] == [key(toy_model), key(toy_model, "code")]
    assert [config.state_dir for config in trained] == [tmp_path / "state", tmp_path / "state" / "lineages" / "code"]
    environments = [environment for _, _, environment in served]
    assert [each["SLIPSTREAM_MODEL_KEY"] for each in environments] == [key(toy_model), key(toy_model, "code")]
    assert [each["SLIPSTREAM_STORE"] for each in environments] == [str(base.root), str(code.root)]


def test_a_tenant_is_erased_from_every_lineage(
    cli: Cli, base: DraftStore, code: DraftStore, toy_model: Path, tmp_path: Path, redis_client: redis.Redis
) -> None:
    stream = TraceStream(redis_client, key(toy_model, "code"), max_bytes=10**6)
    stream.append(b"cannot be read, so it may be anybody's", trace_id="a")
    words = ("tenants", "erase", "anna", "--model", toy_model, "--store", base.root, "--json")
    states = [tmp_path / "state", tmp_path / "state" / "lineages" / "code"]
    for state in states:
        state.mkdir(parents=True)
    planned = cli(*words, "--state", states[0])
    assert planned["lineages"]["code"]["redis"]["stream"] == planned["redis"]["stream"] + 1
    done = cli(*words, "--state", states[0], "--yes", "--timeout-s", 0)
    assert done["lineages"]["code"]["left"] == []
    for lineage in ("", "code"):
        assert "anna" in Erasures(redis_client, key(toy_model, lineage)).orders()
    assert stream.lag().erased == 1
    states[1].rmdir()
    left = cli(*words, "--state", states[0], "--yes", "--timeout-s", 0, code=1)
    assert "lineages/code is not here" in left["lineages"]["code"]["left"][0]


def test_what_waits_in_the_stream_of_a_lineage_that_ends_goes(
    cli: Cli, code: DraftStore, toy_model: Path, redis_client: redis.Redis
) -> None:
    base, ended = (TraceStream(redis_client, key(toy_model, lineage), max_bytes=10**6) for lineage in ("", "code"))
    for stream in (base, ended):
        stream.append(b"a trace", trace_id="a")
    length = base.lag().length
    words = ("--model", toy_model, "--lineage", code.lineage, "--older-than-hours", 1e-9, "--json")
    assert cli("traces", "prune", *words)["removed"]["stream"] >= 1
    assert (base.lag().length, ended.lag().length) == (length, 0)
