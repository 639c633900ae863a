"""Heads in the layouts of other projects, written by their names and keys, become drafts with the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from speculator.draft.checkpoint import SWITCHES, draft_state, read_target_tensor, target_fingerprint, write_folder
from speculator.draft.eagle3 import Eagle3Draft, aux_layer_ids
from speculator.draft.public_heads import as_speculators, check_sglang_layout, read_public_head
from speculator.errors import ConfigError, DraftFileError, DraftMismatchError, SlipstreamError
from speculator.versions.lineage import import_head, load_draft
from speculator.versions.store import DraftStore
from tests.fixtures.toy import make_toy_model, random_draft

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def draft(model_dir: Path) -> Eagle3Draft:
    return random_draft(model_dir, seed=1)


def layer_of(draft: Eagle3Draft) -> dict[str, Any]:
    config = draft.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {
        **{name: getattr(config, name) for name in names},
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 32,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
    }


def specforge(folder: Path, draft: Eagle3Draft, **changes: Any) -> Path:
    """As SpecForge writes it; a change of None takes a key out."""
    said = {**layer_of(draft), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(draft.d2t)}
    said |= {name: True for name in SWITCHES if getattr(draft.config, name)}
    tensors = {**draft_state(draft), "embed_tokens.weight": draft.embed.to(torch.bfloat16).clone()}
    return written(folder, said | changes, tensors)


def speculators(folder: Path, draft: Eagle3Draft, model_dir: Path, **changes: Any) -> Path:
    """As `speculators` writes it."""
    num_layers = json.loads((model_dir / "config.json").read_text())["num_hidden_layers"]
    said = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": len(draft.d2t),
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids(num_layers)),
        "embed_requires_grad": False,
        "fc_norm": draft.config.fc_norm,
        "norm_before_fc": draft.config.norm_before_fc,
        "norm_before_residual": draft.config.norm_before_residual,
        "norm_output": draft.config.norm_output,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "toy"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer_of(draft),
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft_state(draft).items()}
    return written(folder, said | changes, {**tensors, "embed_tokens.weight": draft.embed.to(torch.bfloat16).clone()})


def written(folder: Path, said: dict[str, Any], tensors: State) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in said.items() if value is not ...}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def rewritten(folder: Path, change: Callable[[State], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    assert all(
        torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype for name, tensor in ours.items()
    )


@pytest.mark.parametrize(
    "switches", [(), ("fc_norm", "norm_output"), ("norm_before_fc",), ("norm_before_residual",), SWITCHES]
)
def test_both_layouts_give_the_draft_that_was_trained(
    model_dir: Path, tmp_path: Path, switches: tuple[str, ...]
) -> None:
    draft = random_draft(model_dir, seed=2, switches=switches)
    folders = [specforge(tmp_path / "a", draft), speculators(tmp_path / "b", draft, model_dir)]
    for folder, layout in zip(folders, ("specforge", "speculators"), strict=True):
        head = read_public_head(folder, model_dir)
        assert head.config == draft.config
        assert head.layout == layout
        assert_same(head.state, draft_state(draft))
        assert any("window" in note for note in head.notes)


def test_a_head_keeps_the_rotary_base_that_it_was_trained_with(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    head = read_public_head(specforge(tmp_path / "head", draft, rope_theta=77.0), model_dir)
    assert head.config == replace(draft.config, rope_theta=77.0)
    assert [note for note in head.notes if "rotary" in note] == [
        f"it keeps its own rotary base of 77; the target's is {draft.config.rope_theta:g}"
    ]


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_rotary_base_may_stand_in_either_field(
    name: str, model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    """Only the base is read: a factor of the plain embedding changes nothing."""
    rope = {name: {"rope_type": "default", "rope_theta": 5e5, "factor": 4.0}}
    folder = specforge(tmp_path / "head", draft, **({"rope_theta": ..., "rope_scaling": None} | rope))
    assert read_public_head(folder, model_dir).config == replace(draft.config, rope_theta=5e5)


def test_an_imported_head_is_served_trained_on_and_written_back_bit_by_bit(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    head = read_public_head(speculators(tmp_path / "head", draft, model_dir), model_dir)
    store, fingerprint = DraftStore(tmp_path / "store"), target_fingerprint(model_dir)
    version = import_head(store, head, target_fingerprint=fingerprint, source="someone/head")
    assert store.lifecycle.newest_servable() == version == 1
    assert store.manifest(1).info == {"origin": "imported", "layout": "speculators", "source": "someone/head"}
    loaded = load_draft(store, 1, embed=read_target_tensor(model_dir, "model.embed_tokens.weight"),
                        target_fingerprint=fingerprint)  # fmt: skip
    assert_same(draft_state(loaded), draft_state(draft))
    values, tensors = as_speculators(head.config, head.state, model_dir, "toy")
    assert torch.equal(tensors["embed_tokens.weight"], draft.embed.bfloat16()), "speculators loads no other"
    again = read_public_head(write_folder(tmp_path / "out", tensors, values), model_dir)
    assert again.config == draft.config
    assert_same(again.state, draft_state(draft))
    with pytest.raises(ConfigError, match="already holds draft versions"):
        import_head(store, head, target_fingerprint=fingerprint, source="someone/head")


def test_a_draft_that_readers_of_sglangs_layout_would_compute_otherwise_is_not_written_in_it(model_dir: Path) -> None:
    check_sglang_layout(random_draft(model_dir, seed=1, switches=("fc_norm", "norm_output")).config)
    with pytest.raises(ConfigError, match="ignore norm_before_residual: pass --layout speculators to"):
        check_sglang_layout(random_draft(model_dir, seed=1, switches=("norm_before_residual",)).config)


def test_two_norms_that_speculators_has_one_at_a_time_are_not_written_in_its_layout(model_dir: Path) -> None:
    draft = random_draft(model_dir, seed=1, switches=("fc_norm", "norm_before_fc"))
    with pytest.raises(ConfigError, match="fc_norm and norm_before_fc one at a time"):
        as_speculators(draft.config, draft_state(draft), model_dir, "toy")


def test_a_pickle_is_not_read(model_dir: Path, draft: Eagle3Draft, tmp_path: Path) -> None:
    folder = specforge(tmp_path / "head", draft)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DraftFileError, match=r"no model\.safetensors: .* convert it to safetensors"):
        read_public_head(folder, model_dir)
    # As a download has it, which takes no pickle.
    (folder / "pytorch_model.bin").rename(folder / "other.safetensors")
    with pytest.raises(DraftFileError, match=r"no model\.safetensors: .* convert it to safetensors"):
        read_public_head(folder, model_dir)


def test_a_whole_vocabulary_needs_no_map_and_no_output_layer(model_dir: Path, tmp_path: Path) -> None:
    draft = random_draft(model_dir, seed=3, draft_vocab_size=1000)
    folder = specforge(tmp_path / "head", draft, draft_vocab_size=...)

    def strip(tensors: State) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    head = read_public_head(rewritten(folder, strip), model_dir)
    assert head.config.draft_vocab_size == draft.config.vocab_size
    assert not head.state["d2t"].any()
    assert head.state["t2d"].all()
    assert torch.equal(head.state["lm_head.weight"], read_target_tensor(model_dir, "lm_head.weight").bfloat16())
    assert any("output layer" in note for note in head.notes)


def test_the_output_layer_of_a_tied_head_is_the_embedding_also_where_the_target_is_not_tied(tmp_path: Path) -> None:
    target = make_toy_model(tmp_path / "toy")
    said = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": False}))
    tensors = load_file(target / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed + 1}, target / "model.safetensors")
    whole = random_draft(target, seed=3, draft_vocab_size=1000)

    def strip(tensors: State) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    for tied, expected in ((True, embed), (False, embed + 1)):
        folder = rewritten(specforge(tmp_path / str(tied), whole, tie_word_embeddings=tied), strip)
        head = read_public_head(folder, target)
        assert torch.equal(head.state["lm_head.weight"], expected.bfloat16())
        assert sum("output layer" in note for note in head.notes) == 1


def test_a_sliding_window_is_noted_where_it_is_used(model_dir: Path, draft: Eagle3Draft, tmp_path: Path) -> None:
    """`speculators` writes a window into each head's layer, and by the type of the layer whether it uses it."""
    layers = {"full": ["full_attention"], "sliding": ["sliding_attention"]}
    notes = {}
    for name, types in layers.items():
        layer = {**layer_of(draft), "sliding_window": 2048, "layer_types": types}
        folder = speculators(tmp_path / name, draft, model_dir, transformer_layer_config=layer)
        notes[name] = [note for note in read_public_head(folder, model_dir).notes if "sees" in note]
    assert notes == {
        "full": [],
        "sliding": ["it was trained to see the last 2048 tokens, and sees all of them here"],
    }


def test_what_a_head_does_not_say_is_as_transformers_has_it(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    head = read_public_head(specforge(tmp_path / "head", draft, rms_norm_eps=...), model_dir)
    assert head.config.rms_norm_eps == LlamaConfig().rms_norm_eps == 1e-6


def test_numbers_that_bfloat16_cannot_hold_are_rounded_and_said(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    folder = specforge(tmp_path / "head", draft)

    def widen(tensors: State) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float() + 1e-6

    head = read_public_head(rewritten(folder, widen), model_dir)
    assert head.state["norm.weight"].dtype == torch.bfloat16
    assert [note for note in head.notes if "rounded" in note] == ["rounded to bfloat16: norm.weight"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary embedding of type llama3"),
        ({"partial_rotary_factor": 0.5}, "rotates 0.5 of each attention head"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "rotates 0.25 of each"),
        ({"vocab_size": 9}, "another tokenizer"),
        ({"hidden_size": 16}, "hidden_size is 16"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"draft_vocab_size": 7}, "draft_vocab_size is 7, its tensors are of 24 tokens"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, "inputs of layers [1, 4, 7]"),
        ({"fc_norm": True}, "lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ({"speculators_model_type": "dflash"}, "a dflash of `speculators`"),
        ({"speculators_model_type": "eagle3"}, "no transformer_layer_config"),
        ({"rope_scaling": "llama3"}, "config.json does not fit a draft head"),
        ({"layer_types": 1}, "config.json does not fit a draft head"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "config.json does not fit a draft head"),
        ({"rms_norm_eps": "small"}, "config.json is not a draft's"),
    ],
)
def test_a_head_that_would_be_computed_otherwise_is_refused_by_name(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises((DraftFileError, DraftMismatchError)) as refused:
        read_public_head(specforge(tmp_path / "head", draft, **changes), model_dir)
    assert reason in str(refused.value)


def test_the_targets_own_layers_may_be_named(model_dir: Path, draft: Eagle3Draft, tmp_path: Path) -> None:
    """SGLang's numbers are of the layers before those whose inputs are read."""
    read = aux_layer_ids(json.loads((model_dir / "config.json").read_text())["num_hidden_layers"])
    nested = {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in read], "use_aux_hidden_state": True}
    assert read_public_head(specforge(tmp_path / "head", draft, eagle_config=nested), model_dir).config == draft.config


def test_sglang_counts_the_layers_of_some_targets_by_their_inputs(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(model_dir, target)
    said = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(said | {"architectures": ["DeepseekV3ForCausalLM"]}))
    read = list(aux_layer_ids(said["num_hidden_layers"]))
    outputs = [number - 1 for number in read]
    for number, ids in enumerate((read, outputs)):
        head = specforge(tmp_path / f"head{number}", draft, eagle_aux_hidden_state_layer_ids=ids)
        assert read_public_head(head, target).config == draft.config
    head = specforge(tmp_path / "shifted", draft, eagle_aux_hidden_state_layer_ids=[3, *read[1:]])
    for folder in (target, model_dir):
        with pytest.raises(DraftMismatchError, match="only those of"):
            read_public_head(head, folder)
    with pytest.raises(DraftMismatchError, match=r"inputs of layers \[3, "):
        read_public_head(specforge(tmp_path / "inputs", draft, eagle_aux_hidden_state_layer_ids=read), model_dir)


def _poison(tensors: State) -> None:
    tensors["fc.weight"][0, 0] = float("nan")


def _twice(tensors: State) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _overflow(tensors: State) -> None:
    """The largest float32 numbers round to infinity."""
    tensors["fc.weight"] = torch.full(tensors["fc.weight"].shape, 3.4e38)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"), "lacks midlayer.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"midlayer.self_attn.q_proj.bias": torch.zeros(4)}), "q_proj.bias, which no"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(5)}), "norm.weight has shape (5,)"),
        (lambda tensors: tensors.pop("d2t"), "lacks d2t"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t contradict"),
        (lambda tensors: tensors["embed_tokens.weight"].mul_(2), "an embedding of its own"),
        (_poison, "fc.weight is torch.bfloat16, or not finite"),
        (_overflow, "fc.weight is torch.float32, or not finite in bfloat16"),
        (_twice, "d2t names tokens twice"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][:, None].clone()), "d2t has shape (24, 1), expected (24,)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    model_dir: Path, draft: Eagle3Draft, tmp_path: Path, change: Callable[[State], object], reason: str
) -> None:
    with pytest.raises(SlipstreamError) as refused:
        read_public_head(rewritten(specforge(tmp_path / "head", draft), change), model_dir)
    assert reason in str(refused.value)


def test_a_damaged_head_is_not_blamed_on_the_target(model_dir: Path, draft: Eagle3Draft, tmp_path: Path) -> None:
    head = specforge(tmp_path / "head", draft)
    complete = (head / "model.safetensors").read_bytes()
    for written, data in (("model.safetensors", complete[:-10]), ("model.safetensors", b""), ("config.json", b"{")):
        (head / written).write_bytes(data)
        with pytest.raises(ConfigError, match=r"head is no complete EAGLE-3 head \(.*\): fetch it again"):
            read_public_head(head, model_dir)


def test_a_folder_that_is_no_heads(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_public_head(tmp_path, model_dir)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DraftFileError, match="no object"):
        read_public_head(tmp_path, model_dir)
