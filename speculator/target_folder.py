"""A target's folder as it lies on disk: read by every service, believed by none.

`reading` turns whatever a loader raises into one line. `check_folder` finds what would fail later, or compute something
else without a word: files that cannot be opened, sizes in config.json that are none, tensors that are not there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from speculator.errors import ConfigError, SlipstreamError

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_READ = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*", "vocab.*", "merges.txt"),
)
"""What loaders read beside the weights."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_SIZES_OR_NONE = ("num_key_value_heads", "head_dim", "sliding_window")
_MEASURES_OR_NONE = ("rms_norm_eps", "rope_theta")
_LARGEST_SIZE = 2**24
"""Of layers, widths, vocabularies and windows; no model comes near it."""
_LONGEST_REASON = 300


@contextlib.contextmanager
def reading(model_dir: Path) -> Iterator[None]:
    """Raise ConfigError, in one line with the folder and the reason, for whatever a library raises about a model."""
    try:
        yield
    except SlipstreamError:
        raise
    except BaseException as error:
        # A panic in one of the Rust libraries is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        # PyTorch has no type of its own for it.
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise ConfigError(f"not enough memory to load {model_dir}: choose a smaller --model") from error
        raise ConfigError(f"{model_dir} is no complete language model ({reason_of(error)}): check --model") from error


def reason_of(error: BaseException) -> str:
    """What an exception says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split())[:_LONGEST_REASON]
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def check_folder(model_dir: Path) -> dict[str, Any]:
    """The folder's config.json, once what loaders read can be opened and the tensors that a draft is made of fit it.

    No weights are read. Raises ConfigError.
    """
    with reading(model_dir):
        for path in sorted(model_dir.iterdir()):
            if any(map(path.match, _READ)):
                check_file(path)
        config = read_config(model_dir)
        files = weight_files(model_dir)
        if config["num_hidden_layers"] > len(files):
            raise ConfigError(
                f"{model_dir}: config.json says num_hidden_layers {config['num_hidden_layers']}, "
                f"the weights are {len(files)} tensors: check --model"
            )
        num_rows, width = config["vocab_size"], config["hidden_size"]
        for name, shape in ((EMBEDDING, (num_rows, width)), (NORM, (width,)), (LM_HEAD, (num_rows, width))):
            stored = stored_name(model_dir, name, config, files)
            with open_weights(files[stored]) as file:
                found = tuple(file.get_slice(stored).get_shape())
            if found != shape:
                raise ConfigError(
                    f"{model_dir}: {stored} has shape {found}, by config.json it is {shape}: check --model"
                )
    return config


def read_config(model_dir: Path) -> dict[str, Any]:
    """A target's config.json, with the sizes that a draft takes from it. Raises ConfigError."""
    with reading(model_dir):
        config = json.loads((model_dir / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise ConfigError(f"{model_dir}: config.json is no object: check --model")
    if fault := _fault(config):
        raise ConfigError(f"{model_dir}: config.json {fault}: check --model")
    return config


def _fault(config: dict[str, Any]) -> str | None:
    for name in _SIZES:
        if name not in config:
            nested = [key for key, value in config.items() if isinstance(value, dict) and name in value]
            where = f", it is in {nested[0]}: models that read more than text have no draft" if nested else ""
            return f"has no {name}{where}"
    for name in (*_SIZES, *_SIZES_OR_NONE):
        value = config.get(name)
        if not (value is None and name in _SIZES_OR_NONE) and not _is_size(value):
            return f"says {name} {_told(value)}, which is no size"
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        return f"says rope_parameters {_told(rope)}, which is no object"
    measures = {name: config.get(name) for name in _MEASURES_OR_NONE} | {
        "rope_parameters.rope_theta": rope.get("rope_theta")
    }
    for name, value in measures.items():
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            return f"says {name} {_told(value)}, which is no number above 0"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if heads % (config.get("num_key_value_heads") or heads) or head_dim % 2 or not head_dim:
        return (
            f"says hidden_size {config['hidden_size']}, num_attention_heads {heads}, num_key_value_heads "
            f"{config.get('num_key_value_heads')} and head_dim {config.get('head_dim')}, which do not fit"
        )
    return None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_SIZE


def _told(value: object) -> str:
    return json.dumps(value)[:50]


def weight_files(model_dir: Path) -> dict[str, Path]:
    """The file of every tensor, in model.safetensors or in those that an index names. Raises ConfigError."""
    with reading(model_dir):
        index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
        paths = [single]
        # Beside the one file an index is of no use to transformers either.
        if index.exists() and not single.exists():
            # A name alone: a path could lead anywhere.
            paths = sorted(
                {model_dir / Path(file).name for file in json.loads(index.read_bytes())["weight_map"].values()}
            )
        found: dict[str, Path] = {}
        for path in paths:
            with open_weights(path) as file:
                found |= dict.fromkeys(file.keys(), path)
        return found


def check_file(path: Path) -> None:
    """Raise OSError, with the system's own reason, for what is no file or cannot be opened; waits for no writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    path.open("rb").close()


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises OSError, whose reason the library would take for absence, or SafetensorError."""
    check_file(path)
    with safe_open(path, framework="pt") as file:
        yield file


def stored_name(model_dir: Path, name: str, config: dict[str, Any], files: dict[str, Path]) -> str:
    """The name under which a tensor is stored; a tied `lm_head.weight` is the embedding. Raises ConfigError."""
    if name == LM_HEAD and name not in files:
        if config.get("tie_word_embeddings") is False:
            raise ConfigError(
                f"{model_dir} has no tensor {LM_HEAD}, and config.json says tie_word_embeddings false: check --model"
            )
        name = EMBEDDING
    if name not in files:
        raise ConfigError(f"{model_dir} has no tensor {name}: check --model")
    return name
