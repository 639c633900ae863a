"""Load a target's model and tokenizer with transformers; failures become a ConfigError of one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from serving.answer_text import LocalTokenizer
from speculator.draft.checkpoint import is_finite
from speculator.draft.initialization import check_vocabulary
from speculator.errors import ConfigError, RequestError
from speculator.target_folder import check_folder, open_weights, reading, weight_files

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""`trust_remote_code` is explicit: otherwise transformers asks on the terminal for a model with code."""
_TOLD: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
_MOST_NAMED = 3

# Its reports of many lines are replaced by one-line errors here.
logging.set_verbosity_error()
logging.disable_progress_bar()


def load_model(model_dir: Path, *, dtype: torch.dtype, attn_implementation: str) -> Any:
    """The causal language model of a folder, with all its weights. Raises ConfigError."""
    check_model(model_dir)
    with reading(model_dir):
        model, told = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=True, **_LOCAL, **_TOLD
        )
        _refuse(model_dir, told)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not is_finite(tensor):
                raise ConfigError(f"{model_dir}: {name} is not finite: check --model")
    return model


def check_model(model_dir: Path) -> Any:
    """The checks of `load_model` that need no weights; returns the model without weights. Raises ConfigError."""
    model = _without_weights(model_dir)
    _refuse_unsupported(model, model_dir)
    _check_tensors(model, model_dir)
    return model


def check_known_model(model_dir: Path) -> dict[str, Any]:
    """As `check_model` for another engine's target, which transformers may not know; returns its config.json. Raises
    ConfigError.
    """
    config = check_folder(model_dir)
    try:
        model = _without_weights(model_dir)
    except ConfigError:
        return config
    _check_tensors(model, model_dir)
    return config


def _without_weights(model_dir: Path) -> Any:
    check_folder(model_dir)
    with reading(model_dir), torch.device("meta"):
        config = AutoConfig.from_pretrained(model_dir, **_LOCAL)
        if (model_dir / "generation_config.json").exists():
            GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _check_tensors(model: Any, model_dir: Path) -> None:
    """Check names and shapes: transformers loads placeholder tensors of the stored shapes, without memory. Skipped for
    stacked or quantised weights, which it would have to read.
    """
    with reading(model_dir):
        conversions = get_model_conversion_mapping(model)
        if any(isinstance(each, WeightConverter) for each in conversions) or _is_quantised(model):
            return
        expected, stored = model.state_dict(), _stored(model_dir)
        shapes = {(name, stored[name].shape, expected[name].shape) for name in stored.keys() & expected.keys()}
        _refuse(model_dir, {"mismatched_keys": {each for each in shapes if each[1] != each[2]}})
        num_expected, num_stored = (sum(each.numel() for each in them.values()) for them in (expected, stored))
        if num_expected > 2 * num_stored:
            raise ConfigError(
                f"{model_dir}: by config.json the model has {num_expected:,} elements, its weights have "
                f"{num_stored:,}: check --model"
            )
        _, told = type(model).from_pretrained(
            None, config=model.config, state_dict=stored, dtype=torch.float32, **_TOLD
        )
        _refuse(model_dir, told)


def _stored(model_dir: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for path in set(weight_files(model_dir).values()):
        with open_weights(path) as file:
            stored |= {name: torch.zeros(()).expand(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    return stored


def _refuse(model_dir: Path, told: dict[str, Any]) -> None:
    """Raise ConfigError, with their names, for tensors that are missing, unexpected or of another shape."""
    faults = {
        "is missing": sorted(told.get("missing_keys", ())),
        "is not part of this model": sorted(told.get("unexpected_keys", ())),
        "does not have the shape of config.json": [
            f"{name} {tuple(stored)} instead of {tuple(expected)}"
            for name, stored, expected in sorted(told.get("mismatched_keys", ()))
        ],
        "cannot be loaded": sorted(map(str, told.get("error_msgs", ()))),
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise ConfigError(f"{model_dir}: {', '.join(names[:_MOST_NAMED])}{more} {fault}: check --model")


def _refuse_unsupported(model: Any, model_dir: Path) -> None:
    """Raise ConfigError for a kind of model that this engine cannot run; needs no weights."""
    if _is_quantised(model):
        raise ConfigError(
            f"{model_dir} is quantised, by config.json: the local engine runs floating-point weights; check --model"
        )
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or not hasattr(getattr(model, "model", None), "layers"):
        raise ConfigError(
            f"{model_dir}: the local engine runs Llama-like models with full attention only; check --model"
        )


def _is_quantised(model: Any) -> bool:
    return bool(getattr(model.config, "quantization_config", None))


def _decoders(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tokenizer's decoder as JSON, and the decoders that it consists of."""
    yield decoder
    for each in decoder.get("decoders", ()):
        yield from _decoders(each)


def load_tokenizer(model_dir: Path, *, vocab_size: int) -> LocalTokenizer:
    """Load a tokenizer; checks that the embedding has all its tokens and that its chat template parses. Raises
    ConfigError.
    """
    with reading(model_dir):
        tokenizer = LocalTokenizer(model_dir)
        check_vocabulary(model_dir, tokenizer.backend, vocab_size)
        decoder = json.loads(tokenizer.backend.to_str())["decoder"] or {}
        if any(each.get("type") == "Strip" and each["stop"] for each in _decoders(decoder)):
            raise ConfigError(
                f"{model_dir}: the tokenizer's decoder strips the ends of tokens (Strip, stop), and its library "
                "crashes on tokens shorter than that: set stop to 0 in tokenizer.json"
            )
        tokenizer.decode(tokenizer.encode("hello"))
        try:
            tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        except RequestError as refusal:
            # A missing template is fine, and one that refuses these messages may accept others.
            if isinstance(refusal.__context__, TemplateSyntaxError):
                raise ConfigError(
                    f"{model_dir}: its chat template is broken ({refusal.__context__}): mend it"
                ) from refusal
    return tokenizer
