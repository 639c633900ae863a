"""Targets for which SGLang serves EAGLE-3, by config.json alone: the draft's shapes, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculator.draft.checkpoint import check_fits, config_from_json, draft_config_json
from speculator.draft.eagle3 import DraftConfig, aux_layer_ids
from speculator.errors import ConfigError, DraftMismatchError
from speculator.target_folder import read_config

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "Qwen2ForCausalLM": {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 14},
    "Qwen3ForCausalLM": {"head_dim": 16, "rope_theta": 1_000_000, "sliding_window": None},
    "Qwen3MoeForCausalLM": {"head_dim": 16, "num_experts": 8, "decoder_sparse_step": 1, **MIXTURE},
    "Qwen3NextForCausalLM": {"head_dim": 32, "num_experts": 8, "full_attention_interval": 4, **MIXTURE},
    "GptOssForCausalLM": {
        "head_dim": 16,
        "num_local_experts": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 8,
        "sliding_window": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        **MIXTURE,
    },
    "Glm4MoeForCausalLM": {"head_dim": 16, "partial_rotary_factor": 0.5, "n_routed_experts": 8, **MIXTURE},
    "MiniMaxM2ForCausalLM": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8},
    "Gemma3ForCausalLM": {"head_dim": 32, "rope_local_base_freq": 10_000, "sliding_window": 64},
    "Gemma3ForCausalLM by transformers 5": {
        "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
    "Exaone4ForCausalLM": {"sliding_window": 64, "sliding_window_pattern": "LLLG"},
    "ApertusForCausalLM": {"hidden_act": "xielu", "qk_norm": True},
    "MistralForCausalLM": {"head_dim": 16, "rope_parameters": {"rope_theta": 1e8, "rope_type": "default"}},
}
NESTED = {"vision_config": {"hidden_size": 32}, "text_config": LLAMA}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Llama4ForConditionalGeneration": (NESTED, "in vision_config"),
    "Qwen2_5_VLForConditionalGeneration": ({"text_config": LLAMA, "vision_config": {"depth": 4}}, "in text_config"),
    "KimiK25ForConditionalGeneration": ({"text_config": {**LLAMA, **MIXTURE}}, "models that read more than text"),
    "OPTForCausalLM": (
        {key: value for key, value in LLAMA.items() if key != "intermediate_size"} | {"ffn_dim": 224},
        "intermediate_size",
    ),
}


def written(folder: Path, architecture: str, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_draft_of_each_architecture_fits_its_target(architecture: str, tmp_path: Path) -> None:
    given = LLAMA | ARCHITECTURES[architecture]
    target = read_config(written(tmp_path, architecture, given))
    draft = DraftConfig.for_target(target, draft_vocab_size=32)
    assert (draft.hidden_size, draft.vocab_size, draft.max_position_embeddings) == (64, 128, 512)
    assert (draft.draft_vocab_size, draft.intermediate_size) == (32, 224), "of a mixture what its dense layers have"
    assert draft.num_attention_heads % draft.num_key_value_heads == 0
    assert draft.head_dim == given.get("head_dim", 8)
    rope = given.get("rope_parameters", given)
    assert draft.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert aux_layer_ids(target["num_hidden_layers"]) == (2, 8, 13), "as SGLang captures them by default"


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}, 768),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}, 1024),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, 512),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512),
        ({"max_sequence_length": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_sequence_length": 256}, 512),
    ],
)
def test_a_drafts_window_is_the_context_that_sglang_gives_its_target(
    given: dict[str, Any], window: int, tmp_path: Path
) -> None:
    target = read_config(written(tmp_path, "LlamaForCausalLM", LLAMA | given))
    draft = DraftConfig.for_target(target, draft_vocab_size=32)
    assert draft.max_position_embeddings == window
    assert config_from_json(draft_config_json(draft)) == draft
    check_fits(draft, tmp_path)


def test_a_context_that_no_table_can_hold_is_refused(tmp_path: Path) -> None:
    scaled = {"rope_scaling": {"type": "linear", "factor": 1e9}}
    with pytest.raises(ConfigError, match=r"5\.12e\+11 tokens"):
        read_config(written(tmp_path, "LlamaForCausalLM", LLAMA | scaled))


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_has_no_draft_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    config, says = REFUSED[architecture]
    with pytest.raises(ConfigError, match=says):
        read_config(written(tmp_path, architecture, config))


def test_a_target_with_too_few_layers_is_refused() -> None:
    with pytest.raises(DraftMismatchError, match="at least 8"):
        aux_layer_ids(7)
