"""`slipstream drafts` as an operator types it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file

from speculator.draft.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore
from tests.fixtures.toy import random_draft
from tests.slipstream.conftest import SampleEnd

TO_SCORED = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)
TO_GOOD = (*TO_SCORED, VersionState.LIVE, VersionState.PROMOTED)

Refused = Callable[..., str]
Cli = Callable[..., str]


@pytest.fixture
def store(toy_model: Path, tmp_path: Path) -> DraftStore:
    """Version 1 is good, version 2 waits to be served."""
    fresh = {"num_traces": 19, "change": 0.097, "lower": 0.015, "upper": 0.178}
    store = DraftStore(tmp_path / "drafts")
    for seed, states in enumerate((TO_GOOD, TO_SCORED)):
        draft = random_draft(toy_model, seed=seed)
        version = store.write(
            draft_state(draft),
            draft_config_json(draft.config),
            parent=seed or None,
            target_fingerprint=target_fingerprint(toy_model),
            info={"trained_tokens": 1000 * seed, "gate": {"outcome": "promote", "seconds": 3.25, "fresh": fresh}},
        ).version
        for state in states[1:]:
            store.lifecycle.move(version, state, actor="test")
    return store


@pytest.fixture
def pointer(redis_client: redis.Redis, toy_model: Path) -> DraftPointer:
    return DraftPointer(redis_client, model_key(toy_model, target_fingerprint(toy_model)))


@pytest.fixture
def cli(invoke: Callable[..., SampleEnd], store: DraftStore) -> Cli:
    """Run `slipstream drafts …` on the store, which must succeed; returns what it prints."""

    def run(*arguments: object) -> str:
        ended = invoke("drafts", *arguments, "--store", store.root)
        assert ended.code == 0, ended.err
        return ended.out

    return run


@pytest.fixture
def served(redis_url: str, toy_model: Path) -> tuple[object, ...]:
    return ("--redis-url", redis_url, "--model", toy_model)


def document(printed: str) -> Any:
    return json.loads(printed)


def test_list_shows_states_and_what_is_served(cli: Cli, served: tuple[object, ...], pointer: DraftPointer) -> None:
    pointer.publish(2)
    pointer.report_engine("engine-7", {"version": 1, "role": "canary", "draft_accept_length": 1.5})
    listed = document(cli("list", "--json", *served))
    assert [(row["version"], row["state"], row["engines"]) for row in listed["drafts"]] == [
        (1, "promoted", ["engine-7"]),
        (2, "scored", []),
    ]
    assert (listed["published"], listed["pinned"], listed["last_good"], listed["no_redis"]) == (2, None, 1, "")
    table = cli("list", *served)
    assert re.search(
        r"1 .* promoted .* promote \+9\.7% \(\+1\.5% to \+17\.8%\), 19 traces .* last good, engine-7", table
    )
    assert re.search(r"2 .* scored .* 1 .* published", table)
    assert re.search(r"engine-7 .* 1 .* canary .* 1\.500", table)
    assert "from Redis" not in table


def test_in_a_pipe_a_row_is_one_line_and_a_terminal_folds_it(
    cli: Cli, served: tuple[object, ...], pointer: DraftPointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer.report_engine("e" * 60, {"version": 1, "role": "canary", "draft_accept_length": 1.5})
    monkeypatch.setenv("COLUMNS", "60")
    assert re.search(
        r"1 .* promoted .* promote \+9\.7% \(\+1\.5% to \+17\.8%\), 19 traces .* last good, e{60}", cli("list", *served)
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    folded = re.sub(r"\x1b\[\d*m", "", cli("list", *served))
    assert max(map(len, folded.splitlines())) <= 60
    assert "…" not in folded


def test_list_show_diff_and_export_work_without_redis(cli: Cli, tmp_path: Path, toy_model: Path) -> None:
    away = ("--redis-url", f"unix://{tmp_path}/none.sock", "--model", toy_model)
    assert "nothing from Redis: unix://" in cli("list", *away)
    assert "pass --model" in document(cli("list", "--json"))["no_redis"]
    assert document(cli("show", 2, "--json", *away))["manifest"]["parent"] == 1
    shown = cli("show", 2)
    assert re.search(r"scored .* test", shown)
    assert "trained_tokens" in shown
    changes = document(cli("diff", 1, 2, "--json"))
    assert changes["manifest"]["info.trained_tokens"] == [0, 1000]
    assert changes["config"] == {}
    fc = next(change for change in changes["tensors"] if change["name"] == "fc.weight")
    # Two independent Gaussian matrices of 32 × 96: √2 apart and orthogonal, within 1/√3072 or so.
    assert fc["relative_l2"] == pytest.approx(2**0.5, abs=0.1)
    assert fc["cosine"] == pytest.approx(0, abs=0.1)
    assert "fc.weight" in cli("diff", 1, 2)
    out = tmp_path / "out"
    assert cli("export", 2, "--out", out).strip() == str(out)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "fc.weight" in load_file(out / "model.safetensors")
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "a server may run as another user"


def test_a_model_that_redis_knows_by_another_name_is_refused(
    cli: Cli,
    pointer: DraftPointer,
    store: DraftStore,
    redis_url: str,
    toy_model: Path,
    tmp_path: Path,
    refused: Refused,
) -> None:
    """No engine would hear of the change. A pin of an earlier mistake is no engine."""
    (link := tmp_path / "link").symlink_to(toy_model)
    same = ("--redis-url", redis_url, "--model", link, "--store", store.root)
    assert "engines should run 1" in cli("pin", 1, *same)
    pointer.report_engine("engine-7", {"version": 1})
    names = model_key(link, target_fingerprint(link)), model_key(toy_model, target_fingerprint(toy_model))
    told = "no engine reports as {!r}: set --model to the one of {}".format(*names)
    for words in (("pin", 1), ("promote", 2), ("rollback", "--reason", "slow"), ("unpin",)):
        assert told in refused("drafts", *words, *same)
    assert f"nothing from Redis: {told}" in cli("list", *same)
    assert document(cli("list", "--json", *same))["no_redis"] == told
    assert pointer.desired() is None
    assert not [
        event for event in store.lifecycle.events.tail(9) if event.kind == "asked" and event.fields["action"] != "pin"
    ]


def test_a_version_is_promoted_pinned_and_rolled_back(
    cli: Cli, served: tuple[object, ...], pointer: DraftPointer, store: DraftStore
) -> None:
    assert cli("promote", 2, *served).startswith("promoted: draft version 2, scored; engines should run 2")
    assert pointer.published() == 2
    assert "engines should run 1" in cli("pin", 1, *served)
    assert pointer.desired() == 1
    assert "engines should run 2" in cli("unpin", *served)
    assert "engines should run 1" in cli("rollback", "--reason", "slow answers", *served)
    assert (pointer.published(), store.lifecycle.state(2)) == (1, VersionState.QUARANTINED)
    history = document(cli("show", 2, "--json"))["history"]
    assert (history[-1]["reason"], history[-1]["actor"].split(":")[0]) == ("slow answers", "operator")
    kinds = [event.kind for event in store.lifecycle.events.tail(9) if event.kind != "asked"][-5:]
    assert kinds == ["promote", "pin", "unpin", "quarantined", "rollback"]
    assert "scored" in cli("promote", 2, *served)


def test_what_cannot_be_done_is_one_line(
    refused: Refused, store: DraftStore, served: tuple[object, ...], pointer: DraftPointer, tmp_path: Path
) -> None:
    here = ("--store", store.root)
    assert "check --store" in refused("drafts", "list", "--store", tmp_path / "nowhere")
    assert "version 9 is not in" in refused("drafts", "show", 9, *here)
    assert "version 9 is not in" in refused("drafts", "diff", 1, 9, *here)
    assert "version 9 is not in" in refused("drafts", "promote", 9, *here, *served)
    assert "pass --model" in refused("drafts", "promote", 2, *here)
    assert "no other draft version" in refused("drafts", "rollback", "--reason", "r", *here, *served)
    assert "no draft version is pinned" in refused("drafts", "unpin", *here, *served)
    assert "cannot be reached" in refused(
        *("drafts", "pin", 1, *here, "--model", served[-1], "--redis-url", f"unix://{tmp_path}/none.sock")
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "--out" in refused("drafts", "export", 1, "--out", tmp_path / "full", *here)
    assert pointer.desired() is None


def test_everything_is_found_in_the_folder_of_a_server_that_learns(
    invoke: Callable[..., SampleEnd], toy_model: Path, store: DraftStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slipstream serve --learn` keeps its store, and the socket of its Redis, there."""

    def run(*words: object) -> Any:
        ended = invoke("drafts", *words, "--json")
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        shutil.copytree(store.root, data / "drafts")
        with EmbeddedRedis(data / "redis") as own, connect(own.url) as client:
            there = ("--data-dir", data, "--model", toy_model)
            assert run("pin", 1, *there)["desired"] == 1
            assert run("list", *there)["drafts"][0]["is_pinned"]
            assert DraftPointer(client, model_key(toy_model, target_fingerprint(toy_model))).desired() == 1
            assert run("diff", 1, 2, "--data-dir", data)["a"] == 1
            # What is typed goes before, and the folder was typed, too.
            run("list", *there, "--store", store.root)
            assert "draft versions" in invoke("drafts", "list", *there, "--store", data / "none").err
            monkeypatch.setenv("SLIPSTREAM_STORE", str(data / "none"))
            monkeypatch.setenv("SLIPSTREAM_REDIS_URL", f"unix://{data}/none.sock")
            assert run("list", *there)["drafts"][0]["is_pinned"]
            assert "draft versions" in invoke("drafts", "list", "--model", toy_model).err
