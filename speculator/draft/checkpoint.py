"""Draft files as SGLang's `LlamaForCausalLMEagle3` loads them (tensors, `config.json`), and the target's fingerprint.

Tensors: `fc.weight`, `midlayer.*`, `norm.weight` and `lm_head.weight` in bfloat16, `d2t` [D] int64 (offsets: target
id − draft id) and `t2d` [V] bool (whether a target id is in the draft vocabulary). Never `embed_tokens`: in SGLang the
draft's embedding is the target's own storage, and a file that has it would overwrite the target.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from speculator.draft.eagle3 import NUM_AUX_LAYERS, DraftConfig, Eagle3Draft
from speculator.errors import ConfigError, DraftFileError, DraftMismatchError
from speculator.host import sync, write_synced
from speculator.target_folder import check_folder, open_weights, read_config, reading, stored_name, weight_files

ARCHITECTURE = "LlamaForCausalLMEagle3"

# The fields of config.json that affect what the target computes; the others may change freely.
TARGET_ESSENTIALS = (
    "architectures",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "quantization_config",
)


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a draft file, no more and no less."""
    d, f = config.hidden_size, config.intermediate_size
    norms: dict[str, tuple[int, ...]] = {}
    if config.fc_norm:
        norms |= {f"fc_norm.{number}.weight": (d,) for number in range(NUM_AUX_LAYERS)}
    if config.norm_before_fc:
        norms["input_norm.weight"] = (NUM_AUX_LAYERS * d,)
    heads, groups = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        **norms,
        "fc.weight": (d, NUM_AUX_LAYERS * d),
        "midlayer.input_layernorm.weight": (d,),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.post_attention_layernorm.weight": (d,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * d),
        "midlayer.self_attn.k_proj.weight": (groups, 2 * d),
        "midlayer.self_attn.v_proj.weight": (groups, 2 * d),
        "midlayer.self_attn.o_proj.weight": (d, heads),
        "midlayer.mlp.gate_proj.weight": (f, d),
        "midlayer.mlp.up_proj.weight": (f, d),
        "midlayer.mlp.down_proj.weight": (d, f),
        "norm.weight": (d,),
        "lm_head.weight": (config.draft_vocab_size, d),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def draft_state(model: Eagle3Draft) -> dict[str, Tensor]:
    """A copy of the model's tensors on the CPU, in the types and under the names of a draft file."""
    state = {
        name: parameter.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
        for name, parameter in model.named_parameters()
    }
    t2d = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    t2d[model.target_ids.cpu()] = True
    return {**state, "d2t": model.d2t.to("cpu", torch.int64, copy=True), "t2d": t2d}


def check_fits(draft: DraftConfig, model_dir: Path) -> None:
    """Raise DraftMismatchError for a draft whose sizes or window do not fit the target. Its rotary base is its own.

    A window as long as the target's before rope scaling is enough for all but SGLang, which checks its own context.
    """
    target = read_config(model_dir)
    for name in ("hidden_size", "vocab_size", "max_position_embeddings"):
        ours, theirs = getattr(draft, name), target[name]
        if ours < theirs or (ours != theirs and name != "max_position_embeddings"):
            fix = "set them alike" if name == "max_position_embeddings" else "take another draft"
            raise DraftMismatchError(
                f"the draft's {name} is {ours}, the target's {theirs}, by config.json in {model_dir}: {fix}, or start "
                "with a new --store or, if you pass one, --data-dir"
            )


def check_state(config: DraftConfig, d2t: Tensor, state: dict[str, Tensor]) -> None:
    """Raise DraftFileError or DraftMismatchError unless a draft file has these shapes and this draft vocabulary."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if shapes != expected_shapes(config):
        raise DraftFileError("the draft's tensors do not have this model's names and shapes")
    if not torch.equal(state["d2t"].to(d2t.device), d2t):
        raise DraftMismatchError("the draft has another draft vocabulary (d2t) than the one in service")


def apply_state(model: Eagle3Draft, state: dict[str, Tensor]) -> None:
    """Copy a draft file into the model's own parameters: addresses stay, so captured graphs stay valid.

    Raises DraftFileError or DraftMismatchError before anything is changed.
    """
    check_state(model.config, model.d2t, state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def draft_config_json(config: DraftConfig) -> dict[str, Any]:
    """The `config.json` of a draft file."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        # If tied, SGLang would use the target's embedding as the draft's output layer.
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **config.to_dict(),
    }


def config_from_json(values: dict[str, Any]) -> DraftConfig:
    """Parse a draft's `config.json`; raises DraftFileError where it is not an EAGLE-3 draft's."""
    if values.get("architectures") != [ARCHITECTURE]:
        raise DraftFileError(f"config.json is for {values.get('architectures')}, expected {ARCHITECTURE}")
    try:
        shapes = DraftConfig.for_target(values, draft_vocab_size=int(values["draft_vocab_size"]))
        config = replace(shapes, **{name: _switch(values, name) for name in SWITCHES})
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DraftFileError(f"config.json is not a draft's: {error!r}") from error
    for name, value in shapes.to_dict().items():
        # Only these two may be fractions; and `True` would pass as an int.
        kinds = (int, float) if name in ("rms_norm_eps", "rope_theta") else (int,)
        if type(value) not in kinds or not 0 < value < math.inf:
            raise DraftFileError(f"config.json is not a draft's: {name} is {str(value)[:50]}")
    return config


SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
"""Optional features in config.json. SGLang reads the norms of EAGLE-3.1; our plugin adds that of `speculators`."""


def _switch(values: Mapping[str, Any], name: str) -> bool:
    """Read a boolean field; absent means False. Raises TypeError for another value."""
    found = values.get(name, False)
    if not isinstance(found, bool):
        raise TypeError(f"{name} is {str(found)[:50]}, neither true nor false")
    return found


def target_fingerprint(model_dir: Path) -> str:
    """SHA-256 over the target's weight files and `target_essentials`; hex, 64 characters.

    Raises ConfigError for a folder that `check_folder` refuses.
    """
    digest = hashlib.sha256()
    check_folder(model_dir)
    digest.update(json.dumps(target_essentials(model_dir), sort_keys=True).encode())
    with reading(model_dir):
        for path in sorted(set(weight_files(model_dir).values())):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def target_essentials(model_dir: Path) -> dict[str, Any]:
    """The fields of config.json that affect the computation. Raises ConfigError where it cannot be read."""
    config = read_config(model_dir)
    return {name: config[name] for name in TARGET_ESSENTIALS if name in config}


def model_name(model_dir: Path) -> str:
    """A target's display name: its folder's name, or in the Hugging Face cache the model id.

    A cached model lies in `models--ORGANISATION--NAME/snapshots/COMMIT`.
    """
    # `.` and `..` have no name, and a symbolic link has one of its own: `Path.resolve` would lose it.
    model_dir = Path(os.path.abspath(model_dir))
    if model_dir.parent.name != "snapshots":
        return model_dir.name
    return model_dir.parent.parent.name.removeprefix("models--").replace("--", "/")


def model_key(model_dir: Path, target_fingerprint: str) -> str:
    """The target's name in Redis keys: readable, and different for other weights."""
    # Without the organisation, so that an SGLang that was started with a model id gets the same key.
    name = re.sub(r"[^a-z0-9]+", "-", model_name(model_dir).rpartition("/")[2].lower()).strip("-")
    return f"{name}-{target_fingerprint[:12]}"


def read_target_tensor(model_dir: Path, name: str) -> Tensor:
    """Read one tensor of the target without the others; a tied `lm_head.weight` is the embedding. One that is quantized
    to float8 is multiplied by its scale, and bfloat16.

    Raises ConfigError when the tensor is missing, of integers or not finite, or its scale is.
    """
    files = weight_files(model_dir)
    stored = stored_name(model_dir, name, read_config(model_dir), files)
    with reading(model_dir):
        tensor = _stored_tensor(files, stored)
        if tensor.is_floating_point() and tensor.itemsize == 1:
            scale = next((_stored_tensor(files, stored + end) for end in _SCALES if stored + end in files), None)
            if scale is None or (scaled := _scaled(tensor, scale)) is None:
                raise ConfigError(f"{model_dir}: {stored} is {tensor.dtype}, with no scale that fits: check --model")
            tensor = scaled
    if not tensor.is_floating_point():
        raise ConfigError(f"{model_dir}: {stored} is {tensor.dtype}: take a model where it is a floating-point tensor")
    if not is_finite(tensor):
        raise ConfigError(f"{model_dir}: {stored} is not finite: check --model")
    return tensor


_SCALES = ("_scale", "_scale_inv")
"""Both are factors; DeepSeek names the factors of blocks by what it divided by."""
_BLOCK = 128


def _stored_tensor(files: Mapping[str, Path], name: str) -> Tensor:
    with open_weights(files[name]) as file:
        return file.get_tensor(name)  # type: ignore[no-any-return]


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor | None:
    """A quantized tensor in bfloat16; None unless it has one scale, one a row, or one a block of 128 × 128."""
    scaled, scale = tensor.bfloat16(), scale.float()
    if scale.numel() == 1:
        return scaled.mul_(scale.reshape(()))
    if tensor.ndim == 2 and scale.shape in (tensor.shape[:1], (len(tensor), 1)):
        return scaled.mul_(scale.reshape(-1, 1))
    if tensor.ndim != 2 or scale.shape != tuple(-(-size // _BLOCK) for size in tensor.shape):
        return None
    for start, factors in zip(range(0, len(tensor), _BLOCK), scale, strict=True):
        scaled[start : start + _BLOCK].mul_(factors.repeat_interleave(_BLOCK)[: tensor.shape[1]])
    return scaled


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; without temporary memory, except for float8."""
    numbers = tensor.half() if tensor.itemsize == 1 else tensor
    return not numbers.numel() or bool(torch.isfinite(torch.stack(numbers.aminmax())).all())


def check_can_write(out: Path) -> None:
    """Raise ConfigError unless `out` is absent or an empty folder, and can be written."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is not an empty directory: choose another --out")
    except OSError as error:
        raise _unwritable(out, error) from error


def write_folder(out: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write a draft atomically and return its folder. Raises ConfigError."""
    out = out.absolute()
    check_can_write(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / "draft"
            folder.mkdir()
            write_tensors(folder / "model.safetensors", weights)
            sync(folder / "model.safetensors")
            write_synced(folder / "config.json", (json.dumps(dict(config), indent=2) + "\n").encode())
            sync(folder)
            folder.rename(out)
            sync(out.parent)
    except OSError as error:
        raise _unwritable(out, error) from error
    return out


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with default permissions; the library would make it readable by its owner alone.

    Raises OSError, also for the library's own errors.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error
    # Drives of Windows and SMB shares have no modes to change.
    with contextlib.suppress(PermissionError):
        path.chmod(mode)


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {out} ({error.strerror}): choose another --out")
