"""A target's folder is checked before anything of it is used; what is wrong is one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculator.draft.checkpoint import read_target_tensor
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError, DraftMismatchError
from speculator.target_folder import check_folder, reading, weight_files
from tests.fixtures.toy import make_toy_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "target")


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("num_attention_heads", 0),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("sliding_window", [64]),
        ("sliding_window", "576"),
        ("vocab_size", -1),
        ("max_position_embeddings", 10**9),
        ("max_position_embeddings", None),
        ("num_hidden_layers", 10**6),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", None),
        ("rope_theta", "10000"),
        ("rope_parameters", [1]),
    ],
)
def test_a_size_that_is_none_is_named(folder: Path, field: str, value: object) -> None:
    change(folder, **{field: value})
    with pytest.raises(ConfigError, match=field) as refused:
        check_folder(folder)
    assert str(folder) in str(refused.value)


def test_a_draft_larger_than_its_target_is_not_allocated(folder: Path) -> None:
    change(folder, intermediate_size=10**7)
    with pytest.raises(ConfigError, match="a draft has"):
        fresh_draft(folder)


def test_sizes_that_lie_deeper_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    with pytest.raises(ConfigError, match="no hidden_size, it is in text_config"):
        fresh_draft(folder)


def test_output_rows_that_are_not_there_are_not_made_up(folder: Path) -> None:
    assert read_target_tensor(folder, "lm_head.weight").shape == (47, 32)
    change(folder, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight.*tie_word_embeddings"):
        read_target_tensor(folder, "lm_head.weight")
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        fresh_draft(folder)


def test_an_index_that_names_a_file_that_is_not_there(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    # transformers prefers the one file, too.
    assert set(weight_files(folder).values()) == {folder / "model.safetensors"}
    check_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"No such file.*model-2\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_weights_in_another_format_are_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=f"{name}: convert them to safetensors"):
        check_folder(folder)


def test_weights_in_one_file_and_in_shards_are_refused(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    shutil.copy(folder / "model.safetensors", folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"model-1\.safetensors.*: remove model\.safetensors, or .*index"):
        weight_files(folder)
    (folder / "model.safetensors").unlink()
    assert set(weight_files(folder).values()) == {folder / "model-1.safetensors"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_config_is_read_as_transformers_reads_it(folder: Path, encoding: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text(), encoding=encoding)
    with pytest.raises(ConfigError, match="utf-8"):
        check_folder(folder)


def test_an_output_layer_that_cannot_be_read_is_no_tied_one(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name, says in (
        ("lm_head.qweight", "lm_head.qweight but no"),
        ("lm_head.weight", "lm_head.weight is torch.int8"),
    ):
        save_file(
            {**weights, name: torch.ones(47, 32, dtype=torch.int8)}, folder / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(ConfigError, match=says):
            read_target_tensor(folder, "lm_head.weight")


def test_an_index_may_name_tensors_that_no_file_has(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    named = dict.fromkeys(("model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"), "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    check_folder(folder)


def test_files_that_no_loader_reads_are_let_be(folder: Path) -> None:
    for name in ("notes.json", "consolidated.safetensors", "other.model", "tokenizer"):
        (folder / name).mkdir()
    check_folder(folder)
    (folder / "tokenizer.model").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.model"):
        check_folder(folder)


def lock(path: Path) -> None:
    path.chmod(0)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lock, "Permission denied"),
        (to_pipe, "Not a regular file"),
        (to_loop, "Too many levels"),
        (Path.unlink, "No such"),
    ],
)
def test_the_systems_own_reason_is_told(folder: Path, spoil: Callable[[Path], None], says: str) -> None:
    if spoil is lock and os.geteuid() == 0:
        pytest.skip("root may read everything; tests/hostile takes the permission away from another user")
    spoil(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{says}.*model\.safetensors"):
        check_folder(folder)


class PanicException(BaseException):
    """As Rust libraries raise it."""


@pytest.mark.parametrize(
    "error", [KeyError("a"), RecursionError(), RuntimeError("a\nb"), OSError(5, "x"), PanicException("a")]
)
def test_whatever_a_loader_raises_is_one_line(error: BaseException) -> None:
    with pytest.raises(ConfigError) as refused, reading(Path("/a/model")):
        raise error
    assert "/a/model" in str(refused.value)
    assert "--model" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_not_the_folders_fault(error: Exception) -> None:
    with pytest.raises(ConfigError, match="not enough memory to load /a/model"), reading(Path("/a/model")):
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), DraftMismatchError("8 layers")])
def test_what_no_folder_is_to_blame_for_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), reading(Path("/a/model")):
        raise error
