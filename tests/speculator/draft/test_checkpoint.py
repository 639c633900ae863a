"""Draft files have the names, shapes and types that SGLang loads, and go back into the same storage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from speculator.draft.checkpoint import (
    SWITCHES,
    apply_state,
    config_from_json,
    draft_config_json,
    draft_state,
    expected_shapes,
    read_target_tensor,
    target_fingerprint,
    write_folder,
)
from speculator.errors import ConfigError, DraftFileError, DraftMismatchError
from tests.fixtures.drafts import CONFIG, TARGET_IDS, make_draft


def test_a_state_has_exactly_the_expected_tensors() -> None:
    state = draft_state(make_draft())
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected_shapes(CONFIG)
    assert {tensor.dtype for name, tensor in state.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)
    assert state["t2d"].nonzero().flatten().tolist() == TARGET_IDS.tolist()
    assert (torch.arange(6) + state["d2t"]).tolist() == TARGET_IDS.tolist()
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_a_state_is_a_copy() -> None:
    draft = make_draft().bfloat16()
    state = draft_state(draft)
    before = state["fc.weight"].clone()
    draft.fc.weight.data.zero_()
    assert torch.equal(state["fc.weight"], before)


def test_a_state_goes_into_the_same_storage() -> None:
    draft, other = make_draft(0), make_draft(1)
    addresses = {name: parameter.data_ptr() for name, parameter in draft.named_parameters()}
    embed = draft.embed.clone()
    apply_state(draft, draft_state(other))
    assert {name: parameter.data_ptr() for name, parameter in draft.named_parameters()} == addresses
    for (_, now), (_, wanted) in zip(draft.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(now, wanted.bfloat16().float())
        assert now.requires_grad
    assert torch.equal(draft.embed, embed)


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape"])
def test_a_state_of_another_form_changes_nothing(wrong: str) -> None:
    draft, state = make_draft(0), draft_state(make_draft(1))
    if wrong == "missing":
        del state["norm.weight"]
    elif wrong == "extra":
        state["model.embed_tokens.weight"] = torch.zeros(20, 8)
    else:
        state["norm.weight"] = state["norm.weight"][1:]
    before = draft_state(draft)
    with pytest.raises(DraftFileError):
        apply_state(draft, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft_state(draft).items())


def test_a_state_of_another_vocabulary_changes_nothing() -> None:
    draft, state = make_draft(0), draft_state(make_draft(1))
    state["d2t"][0] += 1
    before = draft_state(draft)
    with pytest.raises(DraftMismatchError, match="d2t"):
        apply_state(draft, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft_state(draft).items())


def test_the_config_comes_back_and_is_what_transformers_reads() -> None:
    values = json.loads(json.dumps(draft_config_json(CONFIG)))
    assert config_from_json(values) == CONFIG
    llama = LlamaConfig(**values)
    assert (llama.hidden_size, llama.head_dim, llama.num_hidden_layers) == (8, 4, 1)
    assert llama.max_position_embeddings == 64
    assert llama.rope_parameters["rope_theta"] == 100_000.0
    assert llama.tie_word_embeddings is False
    assert llama.architectures == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_comes_back_with_the_tensors_that_belong_to_it(name: str) -> None:
    draft = make_draft(1, **{name: True})
    values = json.loads(json.dumps(draft_config_json(draft.config)))
    assert values[name] is True
    assert config_from_json(values) == draft.config != CONFIG
    assert {key: tuple(value.shape) for key, value in draft_state(draft).items()} == expected_shapes(draft.config)
    other = make_draft(2, **{name: True})
    apply_state(other, draft_state(draft))
    assert all(torch.equal(tensor, draft_state(other)[key]) for key, tensor in draft_state(draft).items())
    assert not set(SWITCHES) & set(draft_config_json(CONFIG)), "as drafts were written before"


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"draft_vocab_size": None},
        {"hidden_size": None, "head_dim": None},
        {"fc_norm": "yes"},
    ],
)
def test_a_config_that_is_not_a_drafts_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(DraftFileError):
        config_from_json(draft_config_json(CONFIG) | change)


# -- the target

CONTENT = {"model.embed_tokens.weight": torch.arange(12.0).view(4, 3), "model.norm.weight": torch.ones(3)}
TARGET_CONFIG = {
    "hidden_size": 3,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 2,
    "vocab_size": 4,
    "max_position_embeddings": 64,
    "transformers_version": "5.19",
}


def write_target(folder: Path, *, sharded: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET_CONFIG))
    if sharded:
        files = {name: f"model-{i}.safetensors" for i, name in enumerate(CONTENT)}
        for name, file in files.items():
            save_file({name: CONTENT[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(CONTENT, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_one_tensor_of_the_target_is_read(tmp_path: Path, sharded: bool) -> None:
    target = write_target(tmp_path / "target", sharded=sharded)
    assert torch.equal(read_target_tensor(target, "model.norm.weight"), CONTENT["model.norm.weight"])
    assert torch.equal(read_target_tensor(target, "lm_head.weight"), CONTENT["model.embed_tokens.weight"])
    with pytest.raises(ConfigError, match=r"model\.other"):
        read_target_tensor(target, "model.other")


@pytest.mark.parametrize(
    ("end", "shape"),
    [("_scale", ()), ("_scale", (1,)), ("_scale", (300,)), ("_scale", (300, 1)), ("_scale_inv", (3, 2))],
)
def test_a_quantized_tensor_of_the_target_is_multiplied_by_its_scale(
    end: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Scales for the tensor, for each row, and for each block of 128 x 128."""
    wide, scale = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    (tmp_path / "config.json").write_text(json.dumps(TARGET_CONFIG))
    save_file({"lm_head.weight": wide, f"lm_head.weight{end}": scale}, tmp_path / "model.safetensors")
    rows, columns = torch.arange(300)[:, None], torch.arange(200)[None]
    factors = scale[rows // 128, columns // 128] if end == "_scale_inv" else scale.reshape(-1, 1).expand(300, 200)
    found = read_target_tensor(tmp_path, "lm_head.weight")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wide.float() * factors, rtol=2**-8, atol=0)


@pytest.mark.parametrize("scale", [None, torch.ones(2), torch.ones(200), torch.ones(2, 2), torch.ones(3, 2, 1)])
def test_a_quantized_tensor_without_a_scale_that_fits_is_refused(scale: Tensor | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET_CONFIG))
    scales = {} if scale is None else {"lm_head.weight_scale": scale}
    quantized = {"lm_head.weight": torch.ones(300, 200).to(torch.float8_e4m3fn)}
    save_file({**quantized, **scales}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head\.weight is torch\.float8_e4m3fn, with no scale that fits"):
        read_target_tensor(tmp_path, "lm_head.weight")


@pytest.mark.parametrize("sharded", [False, True])
def test_the_fingerprint_changes_with_one_bit_of_the_target(tmp_path: Path, sharded: bool) -> None:
    target = write_target(tmp_path / "target", sharded=sharded)
    before = target_fingerprint(target)
    assert len(before) == 64
    assert target_fingerprint(write_target(tmp_path / "copy", sharded=sharded)) == before
    path = sorted(target.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    tensors["model.norm.weight"].view(torch.int32)[2] ^= 1
    save_file(tensors, path)
    assert target_fingerprint(target) != before


def test_the_fingerprint_follows_the_config_where_it_matters(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    before = target_fingerprint(target)
    (target / "config.json").write_text(json.dumps(TARGET_CONFIG | {"transformers_version": "6.0"}))
    assert target_fingerprint(target) == before
    for change in ({"rope_theta": 1.0}, {"partial_rotary_factor": 0.5}):
        (target / "config.json").write_text(json.dumps(TARGET_CONFIG | change))
        assert target_fingerprint(target) != before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "model-1.safetensors"])
def test_an_incomplete_target_is_explained(tmp_path: Path, missing: str) -> None:
    target = write_target(tmp_path / "target", sharded=missing == "model-1.safetensors")
    (target / missing).unlink()
    with pytest.raises(ConfigError, match="target"):
        target_fingerprint(target)
    if missing != "config.json":
        with pytest.raises(ConfigError):
            read_target_tensor(target, "model.norm.weight")


def test_a_folder_gets_its_name_when_it_would_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync, rename = list[str](), os.fsync, Path.rename

    def noting(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", renamed)
    write_folder(tmp_path / "out", {"a": torch.zeros(3)}, {"x": 1})
    assert done == ["model.safetensors", "config.json", "draft", "renamed", tmp_path.name]
