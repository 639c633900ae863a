"""Our own forward pass gives what Hugging Face's gives, over the same slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from serving.local.target import layers
from serving.local.target.forward import FusedLayer
from serving.local.target.layers import Replaced, can_pack
from serving.local.target.model import Target
from speculator.draft.eagle3 import aux_layer_ids
from speculator.errors import ConfigError
from tests.fixtures.toy import make_toy_model, set_every_bias_and_norm
from tests.serving.local.harness import run_pass, toy_engine

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
# Batch, new tokens, first slot, starts.
WINDOWS = [
    (1, 1, 0, [0]),
    (1, 1, 2, [7]),
    (1, 5, 0, [11]),
    (4, 3, 0, [0, 12, 5, 9]),
    (8, 1, 0, [12, 3, 0, 7, 7, 1, 11, 2]),
    (8, 1, 0, [6] * 8),
]
PREFIX = 12
# Relative to the norm. Norms and rotary tables are float32 whatever the dtype: float64 does not agree to 1e-16.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5}


def _target(model_dir: Path, dtype: torch.dtype, *, fused: bool) -> Target:
    target = Target(model_dir, num_slots=8, context_length=64, cache_margin=4, dtype=dtype, fused=fused)
    assert all(isinstance(layer, FusedLayer) == fused for layer in target.model.model.layers)
    return target


def _tokens(target: Target, *shape: int, seed: int) -> Tensor:
    return torch.randint(len(target.embed), shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def _outputs(target: Target, batch: int, num_new: int, first: int, starts: list[int]) -> list[Tensor]:
    """Hidden states, features and logits of a window after all slots have read a prefix and one was moved."""
    run_pass(target, _tokens(target, 8, PREFIX, seed=0), first_slot=0, starts=[0] * 8)
    target.cache.move(5, 0, PREFIX)
    tokens = _tokens(target, batch, num_new, seed=1)
    hidden, aux = run_pass(target, tokens, first_slot=first, starts=starts)
    return [hidden, aux, target.logits(hidden)]


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_features_and_logits_are_hugging_faces(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model_dir = make_toy_model(tmp_path, family=family)
    set_every_bias_and_norm(model_dir)
    ours, theirs = (_target(model_dir, dtype, fused=fused) for fused in (True, False))
    for window in WINDOWS:
        for mine, reference in zip(_outputs(ours, *window), _outputs(theirs, *window), strict=True):
            assert mine.shape == reference.shape
            assert mine.dtype == reference.dtype
            assert _error(mine, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_we_are_as_near_to_the_exact_result_as_hugging_face(tmp_path: Path, family: str) -> None:
    """Both round at every step, in different places."""
    model_dir = make_toy_model(tmp_path, family=family)
    set_every_bias_and_norm(model_dir)
    exact = _target(model_dir, torch.float64, fused=False)
    ours, theirs = (_target(model_dir, torch.bfloat16, fused=fused) for fused in (True, False))
    for part in range(3):
        pooled = [
            torch.cat([_outputs(t, *window)[part].flatten() for window in WINDOWS]) for t in (exact, ours, theirs)
        ]
        noise = _error(pooled[2], pooled[0])
        assert 0 < noise < 0.1
        assert _error(pooled[1], pooled[0]) < 1.3 * noise


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_text_agrees_with_the_plain_model(tmp_path: Path, family: str) -> None:
    """Neither our cache nor our attention is in the reference here."""
    model_dir = make_toy_model(tmp_path, family=family)
    set_every_bias_and_norm(model_dir)
    target = _target(model_dir, torch.float64, fused=True)
    tokens = _tokens(target, 1, 20, seed=3)
    with torch.inference_mode():
        chunks = [
            run_pass(target, tokens[:, start:end], first_slot=3, starts=[start])
            for start, end in ((0, 9), (9, 10), (10, 14), (14, 20))
        ]
        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)(
            tokens, output_hidden_states=True
        )
        logits = target.logits(torch.cat([hidden for hidden, _ in chunks], 1))
    features = torch.cat([reference.hidden_states[index] for index in aux_layer_ids(8)], -1)
    assert _error(logits, reference.logits) < 2e-6
    assert _error(torch.cat([aux for _, aux in chunks], 1), features) < 2e-6


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_short_context_is_not_padded_to_a_long_one(tmp_path: Path, num_new: int) -> None:
    target = _target(make_toy_model(tmp_path), torch.float64, fused=True)
    window = 4, num_new, 0, [50, 3, 12, 0]
    with mock.patch.object(layers, "_PADDING_OF_A_CALL", 64):
        together = _outputs(target, *window)
    wraps = layers.F.scaled_dot_product_attention
    with (
        mock.patch.object(layers, "_PADDING_OF_A_CALL", 16),
        mock.patch.object(layers.F, "scaled_dot_product_attention", wraps=wraps) as attend,
    ):
        apart = _outputs(target, *window)
    assert {call.args[1].shape[2] for call in attend.call_args_list[8:]} == {start + num_new for start in window[3]}
    for one, other in zip(apart, together, strict=True):
        assert _error(one, other) < 1e-12


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("padding", [16, 64])
@torch.inference_mode()
def test_each_token_of_a_tree_is_what_it_is_at_the_end_of_its_path(tmp_path: Path, fused: bool, padding: int) -> None:
    """Beside a chain, whose context is longer; a path can be kept."""
    target = _target(make_toy_model(tmp_path), torch.float64, fused=fused)
    parents, starts = [-1, 0, 0, 2, 1], [5, 50]
    tokens, last = _tokens(target, 2, len(parents), seed=2), _tokens(target, 1, 1, seed=3)
    paths = [0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]

    def begin() -> None:
        run_pass(target, _tokens(target, 2, 50, seed=1), first_slot=0, starts=[0, 0])

    with mock.patch.object(layers, "_PADDING_OF_A_CALL", padding):
        for path in paths:
            begin()
            hidden, aux = run_pass(target, tokens, first_slot=0, starts=starts, parents=[parents, None])
            target.cache.keep_path(0, 5, path)
            after, _ = run_pass(target, last, first_slot=0, starts=[5 + len(path)])
            begin()
            alone, aux_alone = run_pass(target, tokens[:1, path], first_slot=0, starts=[5])
            after_alone, _ = run_pass(target, last, first_slot=0, starts=[5 + len(path)])
            beside, _ = run_pass(target, tokens[1:], first_slot=1, starts=[50])
            pairs = (
                (hidden[0, path], alone[0]),
                (aux[0, path], aux_alone[0]),
                (after, after_alone),
                (hidden[1], beside[0]),
            )
            for one, other in pairs:
                assert _error(one, other) < 1e-6


def test_a_text_is_no_longer_than_a_window_that_slides_in_every_layer(tmp_path: Path) -> None:
    model_dir = make_toy_model(tmp_path, family="mistral")
    config = json.loads((model_dir / "config.json").read_text())
    for window, length in ((16, 16), (None, 64)):
        (model_dir / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        assert _target(model_dir, torch.float64, fused=True).context_length == length


def test_a_text_is_no_longer_than_what_leaves_the_rotation_of_others_alone(tmp_path: Path) -> None:
    """LongRoPE has other factors, for the whole batch, once one position is beyond the original window."""
    model_dir = make_toy_model(tmp_path)
    config = json.loads((model_dir / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    (model_dir / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    target = _target(model_dir, torch.float64, fused=True)
    with torch.inference_mode():
        alone, _ = target.forward([[1, 2, 3]], first_slot=0, starts=[0])
        beside, _ = target.forward([[1, 2, 3], [4, 5, 6]], first_slot=0, starts=[0, target.context_length])
    assert _error(beside[:3], alone) < 1e-6
    assert target.context_length == 32 - 4


def test_slots_do_not_see_each_other_and_leftovers_are_never_read(tmp_path: Path) -> None:
    target = _target(make_toy_model(tmp_path), torch.float64, fused=True)
    with torch.inference_mode():
        prefix, new = _tokens(target, 1, PREFIX, seed=4), _tokens(target, 1, 2, seed=5)
        run_pass(target, prefix, first_slot=1, starts=[0])
        alone, _ = run_pass(target, new, first_slot=1, starts=[PREFIX])
        # Rejected proposals behind slot 1, and other texts of other lengths around it.
        run_pass(target, _tokens(target, 1, 9, seed=6), first_slot=1, starts=[PREFIX])
        run_pass(target, _tokens(target, 3, 30, seed=7), first_slot=2, starts=[0, 0, 0])
        others = _tokens(target, 3, 2, seed=8)
        together, _ = run_pass(target, torch.cat([new, others]), first_slot=1, starts=[PREFIX, 30, 3, 17])
    assert _error(together[0], alone[0]) < 1e-6


@pytest.mark.skipif(not can_pack(), reason="a CPU on which oneDNN has no bfloat16")
def test_weights_are_packed_in_bfloat16_on_the_cpu_and_the_originals_are_gone(tmp_path: Path) -> None:
    target = _target(make_toy_model(tmp_path), torch.bfloat16, fused=True)
    layer = target.model.model.layers[0]
    projections = [layer.qkv, layer.out, layer.gate_up, layer.down]
    assert all(isinstance(projection, Replaced) for projection in projections)
    assert not [name for name, _ in target.model.named_parameters() if "_proj" in name]


@torch.inference_mode()
def test_where_onednn_has_no_bfloat16_weights_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with AVX2 alone. The target and its draft, without kernels of our own."""
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.ops.mkldnn._reorder_linear_weight", None)
    model_dir = make_toy_model(tmp_path)
    target = _target(model_dir, torch.bfloat16, fused=True)
    assert not any(isinstance(module, Replaced) for module in target.model.modules())
    with toy_engine(model_dir, target=target) as engine:
        (answer,) = engine.ask(engine.request("hello", max_tokens=20))
    assert len(answer.token_ids) == 20


@pytest.mark.parametrize("family", ["gemma", "olmo2"])
def test_other_layers_run_through_hugging_face(tmp_path: Path, family: str) -> None:
    """Gemma's norms add one to their weights; OLMo 2 norms in other places."""
    model_dir = make_toy_model(tmp_path, family=family)
    target = Target(model_dir, num_slots=2, context_length=64, cache_margin=4, dtype=torch.float64)
    tokens = _tokens(target, 1, 16, seed=9)
    with torch.inference_mode():
        hidden, _ = run_pass(target, tokens, first_slot=1, starts=[0])
        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)(tokens).logits
        assert _error(target.logits(hidden), reference) < 2e-6


# What transforms the logits behind the output layer; a wrong factor leaves greedy answers as they are.
SCALED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.125},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.3},
    "hyperclovax": {"logits_scaling": 0.25},
    "mixtral": {"num_local_experts": 4},
}


def _changed(folder: Path, family: str, **values: object) -> Path:
    torch.manual_seed(0)
    plain = json.loads((make_toy_model(folder / "llama") / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    shapes = {name: plain[name] for name in (*kept, "num_key_value_heads", "max_position_embeddings", "pad_token_id")}
    config = AutoConfig.for_model(family, **{**shapes, "initializer_range": 0.3, **values})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder / family


@pytest.mark.parametrize("family", SCALED)
def test_logits_are_scaled_and_capped_as_the_model_says(tmp_path: Path, family: str) -> None:
    model_dir = _changed(tmp_path, family, **SCALED[family])
    target = _target(model_dir, torch.float32, fused=False)
    tokens = _tokens(target, 1, 12, seed=3)
    with torch.inference_mode():
        hidden = torch.cat(
            [run_pass(target, tokens[:, s:e], first_slot=0, starts=[s])[0] for s, e in ((0, 7), (7, 12))], 1
        )
        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(tokens).logits
    assert _error(target.logits(hidden), reference) < 1e-4


def test_a_cap_on_logits_is_applied(tmp_path: Path) -> None:
    model_dir = make_toy_model(tmp_path, family="gemma3_text")
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"final_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 8}
    (model_dir / "config.json").write_text(json.dumps(config))
    target = _target(model_dir, torch.float32, fused=False)
    tokens = _tokens(target, 1, 9, seed=3)
    with torch.inference_mode():
        hidden, _ = run_pass(target, tokens, first_slot=0, starts=[0])
        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(tokens).logits
    assert _error(target.logits(hidden), reference) < 1e-4


FULL = {"layer_types": ["full_attention"] * 8}
OTHER: dict[str, dict[str, Any]] = {
    "gemma2": {**FULL, "attn_logit_softcapping": 1.0},  # caps attention scores
    "gpt_oss": {
        **FULL,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },  # sinks
    "doge": {},  # a mask of its own
    "diffllama": {},  # two attentions a layer
    "stablelm": {},  # keeps the pass's cache from its attention
    "deepseek_v3": {  # keys and values of other sizes
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "first_k_dense_replace"), 8),
    },
}


@pytest.mark.parametrize("family", OTHER)
def test_attention_that_we_would_compute_wrongly_is_refused_at_the_start(tmp_path: Path, family: str) -> None:
    model_dir = _changed(tmp_path, family, **OTHER[family])
    with pytest.raises(ConfigError, match="Llama-like models with full attention only"):
        _target(model_dir, torch.float32, fused=False)


def test_a_model_with_another_output_layer_is_refused_at_the_start(tmp_path: Path) -> None:
    model_dir = _changed(tmp_path, "granite", logits_scaling=8.0)
    with (
        mock.patch("serving.local.target.model.output_scale", return_value=1.0),
        pytest.raises(ConfigError, match="plain"),
    ):
        _target(model_dir, torch.float32, fused=False)


def test_a_config_that_says_0_for_no_sliding_window_is_read(tmp_path: Path) -> None:
    model_dir = _changed(tmp_path, "qwen2_moe", num_experts=4, moe_intermediate_size=32, sliding_window=0)
    assert json.loads((model_dir / "config.json").read_text())["sliding_window"] == 0
    assert _target(model_dir, torch.float32, fused=False).context_length == 64
