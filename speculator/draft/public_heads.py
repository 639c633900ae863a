"""Import and export public EAGLE-3 heads.

Two layouts are supported. SpecForge's, also that of EAGLE-3's authors and SGLang: `config.json` of a Llama with one
layer and a `draft_vocab_size`, tensors `midlayer.*`. That of `speculators`, which vLLM serves: the layer's
configuration is a part of `config.json`, tensors `layers.0.*`. Both may have the vocabulary map `d2t` and `t2d`, the
target's embedding, and the norms of EAGLE-3.1.

A head is imported only if every engine computes the same with it as its trainer did; unsupported features are refused
by name. The head's window becomes the target's, since no weights depend on it. A sliding window, the default of
`speculators`, is dropped with a note: within its length the results are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculator.draft.checkpoint import (
    ARCHITECTURE,
    SWITCHES,
    check_fits,
    config_from_json,
    draft_config_json,
    expected_shapes,
    is_finite,
    read_target_tensor,
)
from speculator.draft.eagle3 import NUM_AUX_LAYERS, DraftConfig, aux_layer_ids
from speculator.errors import ConfigError, DraftFileError, DraftMismatchError
from speculator.target_folder import EMBEDDING, LM_HEAD, find_weights, open_weights, read_config, reading, rope_of

SPECFORGE, SPECULATORS = "specforge", "speculators"
_OWN_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_LEGACY_NORMS = {
    f"aux_norm_{name}.weight": f"fc_norm.{number}.weight" for number, name in enumerate(("low", "mid", "high"))
}
_TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of `speculators` that only its training uses."""
_DEFAULTS = {"rms_norm_eps": 1e-6}
"""Defaults of transformers' Llama for absent fields."""
_COUNT_INPUTS = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM"),
)
"""Targets whose layers SGLang counts as `speculators` does."""
_SHOWN = 4
_reading = partial(reading, what="EAGLE-3 head", fix="fetch it again")


@dataclass(frozen=True)
class PublicHead:
    """An imported head as a draft file, with notes on what was changed."""

    layout: str
    config: DraftConfig
    state: dict[str, Tensor]
    notes: tuple[str, ...]


def read_public_head(folder: Path, model_dir: Path) -> PublicHead:
    """Import a head. Raises ConfigError for an unreadable folder, DraftFileError or DraftMismatchError for a head that
    cannot be used.
    """
    with _reading(folder):
        values = json.loads((folder / "config.json").read_bytes())
    if not isinstance(values, dict):
        raise DraftFileError(f"{folder}: config.json is no object")
    layout, said = _read_config(folder, values)
    target, found = read_config(model_dir), dict(_tensors(folder))
    notes: list[str] = []
    try:
        _check_config(folder, said, layout, target)
        config = _config(folder, said, found, target)
        notes += _differences(said, config, target)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Any key of config.json may have a value of any type.
        raise DraftFileError(f"{folder}: config.json does not fit a draft head ({error!r})") from error
    _drop_embedding(folder, found, model_dir)
    if layout == SPECFORGE and said.get("tie_word_embeddings") and not found.keys() & {_HEAD, "d2t"}:
        # So SGLang computes it.
        found[_HEAD] = read_target_tensor(model_dir, EMBEDDING)
        notes.append("its output layer is the target's embedding")
    state = _state(folder, found, config, model_dir, notes)
    check_fits(config, model_dir)
    return PublicHead(layout, config, state, tuple(notes))


def _read_config(folder: Path, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(layout, the head's configuration as one flat dict)."""
    kind = values.get("speculators_model_type")
    if kind is None:
        nested = values.get("eagle_config") or {}
        return SPECFORGE, {**values, **(nested if isinstance(nested, dict) else {})}
    if kind != "eagle3":
        raise DraftFileError(f"{folder} holds a {kind} of `speculators`: only EAGLE-3 heads can be imported")
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DraftFileError(f"{folder}: config.json has no transformer_layer_config")
    return SPECULATORS, {**layer, **{name: value for name, value in values.items() if name not in layer}}


def _check_config(folder: Path, said: Mapping[str, Any], layout: str, target: Mapping[str, Any]) -> None:
    """Raise DraftFileError or DraftMismatchError for a head that would not be computed as it was trained."""
    layers = said.get("num_hidden_layers", 1)
    if layers != 1:
        raise DraftFileError(f"{folder} has {layers} layers: only heads of one layer can be imported")
    if (activation := said.get("hidden_act", "silu")) != "silu":
        raise DraftFileError(f"{folder} computes with {activation}: only silu is supported")
    rope = rope_of(said)
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise DraftFileError(f"{folder} has a rotary embedding of type {kind}: only the plain one is supported")
    share = rope.get("partial_rotary_factor") or said.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise DraftFileError(f"{folder} rotates {share} of each attention head: only whole ones are supported")
    width = said.get("target_hidden_size") or said.get("hidden_size")
    for name, value in (("hidden_size", said.get("hidden_size")), ("target_hidden_size", width)):
        if value != target["hidden_size"]:
            raise DraftMismatchError(f"{folder}: {name} is {value}, the target's is {target['hidden_size']}")
    if said.get("vocab_size") != target["vocab_size"]:
        raise DraftMismatchError(
            f"{folder}: vocab_size is {said.get('vocab_size')}, the target's is {target['vocab_size']}: it was trained "
            "for another tokenizer"
        )
    asked = said.get("eagle_aux_hidden_state_layer_ids")
    if asked is not None:
        # SGLang counts the layers whose outputs are read, `speculators` those whose inputs are. So does SGLang for some
        # targets, unless the first number is 1.
        counts_inputs = layout == SPECULATORS or (_counts_inputs(target) and list(asked[:1]) != [1])
        read = [number + (not counts_inputs) for number in asked]
        ours = list(aux_layer_ids(target["num_hidden_layers"]))
        if read[:NUM_AUX_LAYERS] != ours:
            raise DraftMismatchError(f"{folder} reads the inputs of layers {read}: only those of {ours} are supported")


def _counts_inputs(target: Mapping[str, Any]) -> bool:
    return any(name in _COUNT_INPUTS for name in target.get("architectures") or ())


def _differences(said: Mapping[str, Any], config: DraftConfig, target: dict[str, Any]) -> Iterator[str]:
    """Notes on the head's window and sliding window, which are not kept, and on its rotary base, which is."""
    base = DraftConfig.for_target(target, draft_vocab_size=config.draft_vocab_size).rope_theta
    if config.rope_theta != base:
        yield f"it keeps its own rotary base of {config.rope_theta:g}; the target's is {base:g}"
    window, target_window = said.get("max_position_embeddings"), config.max_position_embeddings
    if window != target_window:
        yield f"its window of {window} tokens becomes the target's of {target_window}"
    if "sliding_attention" in (said.get("layer_types") or ()):
        yield f"it was trained to see the last {said.get('sliding_window')} tokens, and sees all of them here"


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The head's tensors, renamed as in a draft file."""
    if not any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        # A download leaves the pickle of a head out.
        raise DraftFileError(f"{folder} has no model.safetensors: if the head is a pickle, convert it to safetensors")
    with _reading(folder):
        files = find_weights(folder)
    for name, path in files.items():
        with _reading(folder), open_weights(path) as file:
            yield _named(name), file.get_tensor(name)


def _named(name: str) -> str:
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
    return _LEGACY_NORMS.get(name, name)


def _drop_embedding(folder: Path, found: dict[str, Tensor], model_dir: Path) -> None:
    """Remove copies of the target's tensors. Raises DraftMismatchError if the head's embedding is not the target's."""
    for name in [name for name in found if name in _TRAINING_ONLY or name.endswith("rotary_emb.inv_freq")]:
        del found[name]
    own = found.pop(_OWN_EMBEDDING, None)
    if own is None:
        return
    theirs = read_target_tensor(model_dir, EMBEDDING)
    if own.shape != theirs.shape or not torch.equal(own.to(torch.bfloat16), theirs.to(torch.bfloat16)):
        raise DraftMismatchError(
            f"{folder} has an embedding of its own, which is not the target's: engines serve drafts with the target's"
        )


def _config(folder: Path, said: Mapping[str, Any], found: Mapping[str, Tensor], target: dict[str, Any]) -> DraftConfig:
    size = len(found["d2t"]) if "d2t" in found else len(found.get(_HEAD, ())) or target["vocab_size"]
    told = said.get("draft_vocab_size")
    if told not in (None, size):
        raise DraftFileError(f"{folder}: draft_vocab_size is {told}, its tensors are of {size} tokens")
    switches = {name: said.get(name) or False for name in SWITCHES}
    switches["fc_norm"] = bool(switches["fc_norm"] or said.get("use_aux_norm"))
    window = DraftConfig.for_target(target, draft_vocab_size=size).max_position_embeddings
    own = {"draft_vocab_size": size, "max_position_embeddings": window, "architectures": [ARCHITECTURE]}
    return replace(config_from_json({**_DEFAULTS, **said, **switches, **own}), max_position_embeddings=window)


def _state(
    folder: Path, found: dict[str, Tensor], config: DraftConfig, model_dir: Path, notes: list[str]
) -> dict[str, Tensor]:
    """The tensors of a draft file. Raises DraftFileError."""
    state = {name: tensor for name, tensor in found.items() if name not in ("d2t", "t2d")}
    d2t, t2d = _vocabulary(folder, found, config)
    if _HEAD not in state:
        state[_HEAD] = read_target_tensor(model_dir, LM_HEAD)[d2t + torch.arange(len(d2t))]
        notes.append("it has no output layer of its own, and gets the target's")
    wanted = {name: shape for name, shape in expected_shapes(config).items() if name not in ("d2t", "t2d")}
    if missing := sorted(wanted.keys() - state.keys()):
        raise DraftFileError(f"{folder} lacks {_listed(missing)}")
    if extra := sorted(state.keys() - wanted.keys()):
        raise DraftFileError(f"{folder} has {_listed(extra)}, which no engine here reads")
    rounded = []
    for name, shape in wanted.items():
        tensor = state[name]
        if tuple(tensor.shape) != shape:
            raise DraftFileError(f"{folder}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        state[name] = tensor.to(torch.bfloat16).contiguous()
        if not tensor.is_floating_point() or not is_finite(state[name]):
            raise DraftFileError(f"{folder}: {name} is {tensor.dtype}, or not finite in bfloat16")
        if not torch.equal(state[name].to(tensor.dtype), tensor):
            rounded.append(name)
    if rounded:
        notes.append(f"rounded to bfloat16: {_listed(rounded)}")
    return {**state, "d2t": d2t, "t2d": t2d}


def _vocabulary(folder: Path, found: Mapping[str, Tensor], config: DraftConfig) -> tuple[Tensor, Tensor]:
    """`d2t` [D] int64 and `t2d` [V] bool. Raises DraftFileError for an invalid map."""
    size = config.draft_vocab_size
    if "d2t" not in found and size != config.vocab_size:
        raise DraftFileError(f"{folder} lacks d2t, which maps its {size:,} tokens to the target's")
    d2t = found.get("d2t", torch.zeros(size, dtype=torch.int64)).to(torch.int64)
    if d2t.shape != (size,):
        raise DraftFileError(f"{folder}: d2t has shape {tuple(d2t.shape)}, expected {(size,)}")
    target_ids = d2t + torch.arange(size)
    if not bool(((target_ids >= 0) & (target_ids < config.vocab_size)).all()) or len(set(target_ids.tolist())) != size:
        raise DraftFileError(f"{folder}: d2t names tokens twice, or tokens that the target does not have")
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    if "t2d" in found and not torch.equal(found["t2d"].bool(), t2d):
        raise DraftFileError(f"{folder}: t2d and d2t contradict each other")
    return d2t, t2d


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def check_sglang_layout(config: DraftConfig) -> None:
    """Raise ConfigError for a draft that other readers of SGLang's layout would compute wrongly."""
    if config.norm_before_residual:
        raise ConfigError(
            "SpecForge, and SGLang without Slipstream, read this layout and ignore norm_before_residual: pass --layout "
            "speculators to `drafts export`, or --store to `drafts init`"
        )


def as_speculators(
    config: DraftConfig, state: Mapping[str, Tensor], model_dir: Path, model: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors of a draft file in the layout of `speculators`, for the target of this name.

    Raises ConfigError for a draft that `speculators` cannot load.
    """
    if config.fc_norm and config.norm_before_fc:
        raise ConfigError("speculators has fc_norm and norm_before_fc one at a time: use --layout specforge")
    target = read_config(model_dir)
    layer = {
        name: value for name, value in draft_config_json(config).items() if name not in ("architectures", *SWITCHES)
    }
    del layer["draft_vocab_size"]
    values: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids(target["num_hidden_layers"])),
        **{name: getattr(config, name) for name in SWITCHES},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": model, "architectures": target.get("architectures", [])},
        },
    }
    tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in state.items()}
    # Without it, the loader of `speculators` 0.9.0 silently leaves the embedding unset.
    return values, {**tensors, _OWN_EMBEDDING: read_target_tensor(model_dir, EMBEDDING).bfloat16()}
