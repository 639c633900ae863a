"""What an operator can fix ends in one line that names the fix, and exit code 2."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slipstream.models import BUNDLED_MODEL
from speculator.versions.store import DraftStore
from tests.slipstream.conftest import RunCli, SampleEnd

Refused = Callable[..., str]


def test_unknown_model_directory(refused: Refused) -> None:
    assert "--model" in refused("serve", "--model", "/nowhere/at/all")
    assert "--model" in refused("demo", "--model", "/nowhere/at/all")


def test_a_wrong_path_is_told_what_there_is(
    refused: Refused, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refused("serve", "--model", toy_model.parent / "tyo")
    assert f"another directory, an id, {toy_model}" in line
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert BUNDLED_MODEL not in refused("serve", "--model", toy_model.parent / "tyo")
    assert "is not a directory" in refused("serve", "--model", toy_model / "config.json")


def test_directory_without_a_model(refused: Refused, tmp_path: Path) -> None:
    assert "config.json" in refused("serve", "--model", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "--model" in refused("train", "--model", tmp_path)


def test_busy_port(refused: Refused, toy_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("serve", "--model", toy_model, "--port", port)
        assert str(port) in line
        assert "--port" in line
        assert "--port" in refused("demo", "--model", toy_model, "--port", port)


def test_busy_metrics_port(run_cli: RunCli, toy_model: Path, redis_url: str, tmp_path: Path) -> None:
    """In a process of its own: a trainer changes its niceness before it begins."""
    places = ("--redis-url", redis_url, "--store", tmp_path / "drafts", "--state", tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_cli("train", "--model", toy_model, *places, "--metrics-port", port)
    assert ended.returncode == 2
    assert f"error: cannot listen on --metrics-port {port} of 127.0.0.1" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "drafts").exists()


@pytest.mark.parametrize("command", ["serve", "train"])
def test_no_redis_and_an_unwritable_store(
    refused: Refused, toy_model: Path, redis_url: str, tmp_path: Path, command: str
) -> None:
    words = (command, "--model", toy_model, *(("--port", 0) if command == "serve" else ("--state", tmp_path / "state")))
    no_redis = ("--redis-url", f"unix://{tmp_path}/redis.sock", "--store", tmp_path / "drafts")
    assert "redis" in refused(*words, *no_redis).lower()
    (tmp_path / "file").touch()
    store = tmp_path / "file" / "drafts"
    assert str(store) in refused(*words, "--redis-url", redis_url, "--store", store)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "--port", 0), "up_proj.weight is missing"),
        (("train", "--state", "state"), "up_proj.weight is missing"),
        (("serve", "--port", 0, "--device", "cuda:99"), "--device cuda:99 cannot be used"),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_loaded_leaves_no_first_draft(
    refused: Refused, toy_model: Path, redis_url: str, tmp_path: Path, words: tuple[object, ...], says: str
) -> None:
    target, store = shutil.copytree(toy_model, tmp_path / "target"), tmp_path / "drafts"
    if "--device" not in words:
        weights = load_file(target / "model.safetensors")
        del weights["model.layers.3.mlp.up_proj.weight"]
        save_file(weights, target / "model.safetensors")
    words = tuple(tmp_path / word if word == "state" else word for word in words)
    assert says in refused(*words, "--model", target, "--redis-url", redis_url, "--store", store)
    assert DraftStore(store).latest() is None


def test_unusable_settings(refused: Refused, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LEARNING_RATE", "-1")
    assert "SLIPSTREAM_TRAINER_LEARNING_RATE" in refused("train", "--model", toy_model)
    (tmp_path / "prompts.jsonl").write_text('{"domain": "a"}\n')
    assert "--temperature" in refused("demo", "--model", toy_model, "--samples", 2)
    line = refused("demo", "--model", toy_model, "--prompts", tmp_path / "prompts.jsonl")
    assert "line 1" in line
    assert "does not exist" in refused("demo", "--model", toy_model, "--json", tmp_path / "no" / "out.json")
    assert "is a folder" in refused("demo", "--model", toy_model, "--json", tmp_path)
    assert "is no picture" in refused("demo", "--model", toy_model, "--plot", tmp_path / "out.json")
    # Root may write everywhere.
    monkeypatch.setattr("slipstream.cli.options.os.access", lambda *_: False)
    assert "cannot be written" in refused("demo", "--model", toy_model, "--plot", tmp_path / "out.png")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--port", 0),
        ("train", "--state", "state"),
        ("traces", "record", "--out", "new.rec"),
        ("traces", "prune", "--older-than-hours", 1),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_an_option_of_other_redis_clients(
    refused: Refused, toy_model: Path, redis_url: str, tmp_path: Path, words: tuple[object, ...]
) -> None:
    """Refused by name before anything is written."""
    words = tuple(tmp_path / word if word in ("state", "new.rec") else word for word in words)
    store = () if words[0] == "traces" else ("--store", tmp_path / "drafts")
    (tmp_path / "drafts").mkdir()
    url = f"{redis_url}&decode_responses=true"
    assert "sets decode_responses," in refused(*words, "--model", toy_model, "--redis-url", url, *store)
    assert [path.name for path in tmp_path.rglob("*")] == ["drafts"]


def test_doctor_names_the_option_of_another_redis_client(
    invoke: Callable[..., SampleEnd], toy_model: Path, redis_url: str
) -> None:
    ended = invoke("doctor", "--model", toy_model, "--redis-url", f"{redis_url}&decode_responses=true")
    assert ended.code == 1
    assert "sets decode_responses," in ended.err


def test_a_demo_without_its_extra_says_what_to_install(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.cli.demo.find_spec", lambda name: None if name == "openai" else object())
    assert "openai: pip install 'slipstream-spec[demo]'" in refused("demo")
