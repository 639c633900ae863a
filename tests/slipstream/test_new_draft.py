"""How a store begins: `slipstream drafts init`, with a fresh draft, and `drafts import`, with somebody else's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from slipstream.cli.main import app
from speculator.draft.checkpoint import (
    config_from_json,
    draft_config_json,
    draft_state,
    expected_shapes,
    target_fingerprint,
    write_folder,
)
from speculator.draft.initialization import choose_draft_vocab, count_tokens
from speculator.versions.store import DraftStore, check_tensors
from tests.fixtures.toy import random_draft
from tests.slipstream.conftest import SampleEnd
from tests.trainer.answers import answer_traces
from tests.trainer.examples import record

Invoke = Callable[..., SampleEnd]
Refused = Callable[..., str]


def test_a_folder_of_its_own_loads(invoke: Invoke, toy_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"domain": "a", "prompt": "zz zz zz zz qq qq"}) + "\n")
    out = tmp_path / "new" / "draft"
    words = ("--model", toy_model, "--out", out, "--draft-vocab-size", 8, "--seed", 3, "--vocab-from", prompts)
    done = invoke("drafts", "init", *words, "--norm-before-fc")
    assert (done.code, done.out.strip()) == (0, str(out)), done.err
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["draft"]
    values = json.loads((out / "config.json").read_text())
    target = json.loads((toy_model / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["max_position_embeddings"] == target["max_position_embeddings"]
    assert "fc_norm" not in values
    assert values["norm_before_fc"] is True
    weights = load_file(out / "model.safetensors")
    check_tensors(weights, expected_shapes(config_from_json(values)))
    chosen = set((weights["d2t"] + torch.arange(8)).tolist())
    vocab = json.loads((toy_model / "tokenizer.json").read_text())["model"]["vocab"]
    assert {vocab["z"], vocab["q"]} <= chosen


def test_a_slim_draft_proposes_the_tokens_of_recorded_answers(toy_model: Path, tmp_path: Path) -> None:
    traces = answer_traces(toy_model, num_traces=4)
    recording, root = record(tmp_path / "traffic.rec", traces), tmp_path / "drafts"
    words = ["--model", str(toy_model), "--store", str(root), "--draft-vocab-size", "6", "--intermediate-size", "16"]
    init = CliRunner().invoke(app, ["drafts", "init", *words, "--vocab-from", str(recording)], catch_exceptions=False)
    assert init.exit_code == 0, init.output
    store = DraftStore(root)
    config = config_from_json(store.config(1))
    assert (config.draft_vocab_size, config.intermediate_size) == (6, 16)
    weights = store.load(1, expected_fingerprint=target_fingerprint(toy_model), expected_shapes=expected_shapes(config))
    counted = [trace.token_ids.tolist() for trace in traces]
    wanted = choose_draft_vocab(config.vocab_size, 6, count_tokens(toy_model, counted, config.vocab_size))
    assert torch.equal(weights["d2t"], wanted)
    assert not torch.equal(wanted, choose_draft_vocab(config.vocab_size, 6))


def test_a_residual_that_plain_sglang_ignores_begins_a_store_and_no_folder(
    invoke: Invoke, toy_model: Path, tmp_path: Path
) -> None:
    words = ("drafts", "init", "--model", toy_model, "--norm-before-residual")
    refused = invoke(*words, "--out", tmp_path / "draft")
    assert refused.code == 2
    assert "ignore norm_before_residual" in refused.err
    assert not (tmp_path / "draft").exists()
    done = invoke(*words, "--store", tmp_path / "drafts")
    assert done.code == 0, done.err
    assert DraftStore(tmp_path / "drafts").config(1)["norm_before_residual"] is True


def test_a_store_gets_its_first_version(invoke: Invoke, toy_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "drafts"
    done = invoke("drafts", "init", "--model", toy_model, "--store", root)
    assert (done.code, done.out.strip()) == (0, str(root / "versions" / "000001")), done.err
    store = DraftStore(root)
    config = config_from_json(store.config(1))
    store.load(1, expected_fingerprint=target_fingerprint(toy_model), expected_shapes=expected_shapes(config))
    again = invoke("drafts", "init", "--model", toy_model, "--store", root)
    assert again.code == 2
    assert "already holds" in again.err
    kept = invoke("drafts", "init", "--model", toy_model, "--store", root, "--if-missing")
    assert (kept.code, kept.out) == (0, done.out), kept.err
    assert store.versions() == [1]


def test_what_cannot_be_written_names_the_fix(refused: Refused, toy_model: Path, tmp_path: Path) -> None:
    init = ("drafts", "init", "--model", toy_model)
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
            "drafts",
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
    assert "--model" in refused("drafts", "init", "--model", broken, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_public_head_begins_a_store(toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its folder, and by its id in the local cache of the hub."""
    draft = random_draft(toy_model, seed=1)
    cache = tmp_path / "hub"
    head = cache / "models--someone--toy-eagle3" / "snapshots" / "abc"
    (cache / "models--someone--toy-eagle3" / "refs").mkdir(parents=True)
    (cache / "models--someone--toy-eagle3" / "refs" / "main").write_text("abc")
    write_folder(head, draft_state(draft), draft_config_json(draft.config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(head), "someone/toy-eagle3"):
        store = tmp_path / name.replace("/", "-")
        words = ["drafts", "import", name, "--model", str(toy_model), "--store", str(store), "--json"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["layout"] == "specforge"
        assert DraftStore(store).manifest(1).info["source"] == name
    assert CliRunner().invoke(app, words).exit_code != 0, "it has drafts"
    out = tmp_path / "again"
    words = ["drafts", "export", "1", "--store", str(store), "--out", str(out), "--layout", "speculators"]
    assert CliRunner().invoke(app, words).exit_code != 0, "it needs --model"
    assert CliRunner().invoke(app, [*words, "--model", str(toy_model)], catch_exceptions=False).exit_code == 0
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "eagle3"


def test_the_old_name_says_the_new_one(toy_model: Path, tmp_path: Path) -> None:
    words = ["draft", "init", "--model", str(toy_model), "--store", str(tmp_path / "drafts")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "`slipstream drafts`" in done.stderr
