"""`slipstream draft init`: a fresh draft as a folder of its own and as the first version of a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from slipstream.cli.main import app
from speculator.draft.checkpoint import config_from_json, expected_shapes, target_fingerprint
from speculator.versions.store import DraftStore, check_tensors
from tests.slipstream.conftest import RunCli

Refused = Callable[..., str]


def test_a_folder_of_its_own_loads(run_cli: RunCli, toy_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"domain": "a", "prompt": "zz zz zz zz qq qq"}) + "\n")
    out = tmp_path / "new" / "draft"
    words = ("--model", toy_model, "--out", out, "--draft-vocab-size", 8, "--seed", 3, "--vocab-from", prompts)
    done = run_cli("draft", "init", *words)
    assert (done.returncode, done.stdout.strip()) == (0, str(out)), done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["draft"]
    values = json.loads((out / "config.json").read_text())
    target = json.loads((toy_model / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["max_position_embeddings"] == target["max_position_embeddings"]
    weights = load_file(out / "model.safetensors")
    check_tensors(weights, expected_shapes(config_from_json(values)))
    chosen = set((weights["d2t"] + torch.arange(8)).tolist())
    vocab = json.loads((toy_model / "tokenizer.json").read_text())["model"]["vocab"]
    assert {vocab["z"], vocab["q"]} <= chosen


def test_a_store_gets_its_first_version(run_cli: RunCli, toy_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "drafts"
    done = run_cli("draft", "init", "--model", toy_model, "--store", root)
    assert (done.returncode, done.stdout.strip()) == (0, str(root / "versions" / "000001")), done.stderr
    store = DraftStore(root)
    config = config_from_json(store.config(1))
    store.load(1, expected_fingerprint=target_fingerprint(toy_model), expected_shapes=expected_shapes(config))
    again = run_cli("draft", "init", "--model", toy_model, "--store", root)
    assert again.returncode == 2
    assert "already holds" in again.stderr
    kept = run_cli("draft", "init", "--model", toy_model, "--store", root, "--if-missing")
    assert (kept.returncode, kept.stdout) == (0, done.stdout), kept.stderr
    assert store.versions() == [1]


def test_what_cannot_be_written_names_the_fix(refused: Refused, toy_model: Path, tmp_path: Path) -> None:
    init = ("draft", "init", "--model", toy_model)
    assert "--out" in refused(*init)
    assert "--store" in refused(*init, "--out", tmp_path / "a", "--store", tmp_path / "b")
    assert "--if-missing" in refused(*init, "--out", tmp_path / "a", "--if-missing")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert str(full) in refused(*init, "--out", full)
    assert "--out" in refused(*init, "--out", full / "file")
    assert "--out" in refused(*init, "--out", full / "file" / "below")
    assert [path.name for path in full.iterdir()] == ["file"]


def test_an_empty_folder_is_filled_and_the_same_seed_writes_the_same(toy_model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "empty", tmp_path / "again"]
    folders[0].mkdir()
    for out in folders:
        words = [
            "draft",
            "init",
            "--model",
            str(toy_model),
            "--out",
            str(out),
            "--draft-vocab-size",
            "16",
            "--seed",
            "1",
        ]
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    first, again = ((out / "model.safetensors").read_bytes() for out in folders)
    assert first == again


def test_a_target_that_cannot_be_read_leaves_nothing_behind(refused: Refused, toy_model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(toy_model, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"not a model")
    assert "--model" in refused("draft", "init", "--model", broken, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
