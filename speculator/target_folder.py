"""Validate a target's model folder before use.

`reading` turns any exception of a loader into a ConfigError of one line. `check_folder` finds what would fail later, or
silently compute something else: unreadable files, invalid sizes in config.json, missing tensors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from safetensors import safe_open

from speculator.errors import ConfigError, SlipstreamError

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"

_READ = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.*", "vocab.*", "merges.txt"),
)
"""Files that loaders read besides the weights."""
_LARGEST = 2**24
_Size = Annotated[int, Meta(ge=1, le=_LARGEST)]
"""A size in config.json (layers, widths, vocabulary, window); the bound is far above any model's."""
_Positive = Annotated[float, Meta(gt=0, le=1e300)]
_Window = Annotated[int, Meta(ge=0, le=2**24)]
"""A sliding window; transformers writes 0 for none into some configurations."""


class _Rope(msgspec.Struct):
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    full_attention: _Rope | None = None


class _Sizes(msgspec.Struct, kw_only=True):
    """Fields of the target's config.json that a draft uses."""

    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    sliding_window: _Window | None = None
    logit_scale: _Positive | None = None
    logits_scaling: _Positive | None = None
    dim_model_base: _Size | None = None
    rms_norm_eps: _Positive | msgspec.UnsetType = msgspec.UNSET
    """May be absent; transformers refuses null."""
    rope_theta: _Positive | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    max_sequence_length: _Size | None = None
    seq_length: _Size | None = None
    max_seq_len: _Size | None = None
    model_max_length: _Size | None = None


_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
"""Fields from which SGLang takes the context length rather than from max_position_embeddings, the first one first."""
_LONGEST_REASON = 300


@contextlib.contextmanager
def reading(folder: Path, what: str = "language model", fix: str = "check --model") -> Iterator[None]:
    """Convert any exception of a library that reads a model into a ConfigError of one line: folder and reason."""
    try:
        yield
    except SlipstreamError:
        raise
    except BaseException as error:
        # A panic in a Rust library is a BaseException, not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        # PyTorch has no exception type of its own for a lack of memory.
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise ConfigError(f"not enough memory to load {folder}: choose a smaller --model") from error
        raise ConfigError(f"{folder} is no complete {what} ({reason_of(error)}): {fix}") from error


def reason_of(error: BaseException) -> str:
    """An exception's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    text = " ".join(str(error).split())[:_LONGEST_REASON]
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def check_folder(model_dir: Path) -> dict[str, Any]:
    """Check that a model folder's files can be opened and the tensors that a draft uses fit config.json; returns that.

    Reads no weights. Raises ConfigError.
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
        # As transformers reads it; from bytes, json would take other encodings, too.
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ConfigError(f"{model_dir}: config.json is not a JSON object: check --model")
    for name in ("hidden_size", "vocab_size"):
        nested = [key for key, value in config.items() if isinstance(value, dict) and name in value]
        if name not in config and nested:
            raise ConfigError(
                f"{model_dir}: config.json has no {name}, it is in {nested[0]}: models that read more than text have "
                "no draft: check --model"
            )
    try:
        sizes = msgspec.convert(config, _Sizes)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{model_dir}: config.json does not fit a target ({error}): check --model") from None
    heads = sizes.num_attention_heads
    head_dim = sizes.head_dim or sizes.hidden_size // heads
    if heads % (sizes.num_key_value_heads or heads) or head_dim % 2 or not head_dim:
        raise ConfigError(
            f"{model_dir}: config.json says hidden_size {sizes.hidden_size}, num_attention_heads {heads}, "
            f"num_key_value_heads {sizes.num_key_value_heads} and head_dim {sizes.head_dim}, which do not fit: "
            "check --model"
        )
    if not 0 < (length := context_length(config)) <= _LARGEST:
        raise ConfigError(f"{model_dir}: by config.json the context has {length:.3g} tokens: check --model")
    return config


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a model's rotary embedding; transformers 5 has another name for them in config.json."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def context_length(config: Mapping[str, Any]) -> int:
    """The tokens of a target's context by config.json, as SGLang's `get_context_length` counts them."""
    given = (config[name] for name in _CONTEXT_KEYS if config.get(name) is not None)
    length: int = next(given, config["max_position_embeddings"])
    rope = rope_of(config)
    factor: float = rope.get("factor") or 1
    # To the types named here transformers adds `original_max_position_embeddings`. Of Gemma 3 SGLang sees no factor.
    is_counted = (rope.get("rope_type") or rope.get("type")) in ("llama3", "yarn", "longrope")
    if is_counted or "original_max_position_embeddings" in rope or str(config.get("model_type")).startswith("gemma"):
        return length
    return int(factor * length) if factor != 1 else length


def output_scale(config: Mapping[str, Any]) -> float:
    """The factor between a target's logits and its output layer's product with the final norm, by config.json.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it, and MiniCPM
    by `dim_model_base` / `hidden_size`. Other models may have such a field and not read it.
    """
    kind = str(config.get("model_type"))
    if kind.startswith("cohere"):
        return config.get("logit_scale") or 1.0
    if kind.startswith("minicpm"):
        return (config.get("dim_model_base") or config["hidden_size"]) / config["hidden_size"]  # type: ignore[no-any-return]
    scaling: float = config.get("logits_scaling") or 1.0
    return 1 / scaling if kind.startswith("granite") else scaling if kind.startswith("hyperclovax") else 1.0


def weight_files(model_dir: Path, fix: str = "check --model") -> dict[str, Path]:
    """The file of every tensor by name: model.safetensors, or the files in an index. Raises ConfigError."""
    with reading(model_dir, fix=fix):
        others = sorted([*model_dir.glob("*.bin"), *model_dir.glob("*.gguf")])
        if others and not any(model_dir.glob("*.safetensors*")):
            raise ConfigError(f"{model_dir} has its weights in {others[0].name}: convert them to safetensors")
        return find_weights(model_dir)


def find_weights(folder: Path) -> dict[str, Path]:
    """As `weight_files`, for any folder; raises what the libraries raise."""
    index, single = folder / INDEX, folder / "model.safetensors"
    paths = [single]
    if index.exists():
        # Only the file name: a path could point anywhere.
        named = sorted({folder / Path(file).name for file in json.loads(index.read_bytes())["weight_map"].values()})
        if not single.exists():
            paths = named
        elif shards := [path for path in named if path != single and path.exists()]:
            raise ConfigError(
                f"{folder} has {single.name} and {shards[0].name}, and SGLang would load other weights than "
                f"transformers: remove {single.name}, or {index.name} with its files"
            )
    found: dict[str, Path] = {}
    for path in paths:
        with open_weights(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def check_file(path: Path) -> None:
    """Raise OSError, with the system's reason, unless a regular file can be opened; never blocks on a pipe."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    path.open("rb").close()


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises SafetensorError, or OSError with the reason, which the library would hide."""
    check_file(path)
    with safe_open(path, framework="pt") as file:
        yield file


def stored_name(model_dir: Path, name: str, config: dict[str, Any], files: dict[str, Path]) -> str:
    """The name under which a tensor is stored; a tied `lm_head.weight` is the embedding. Raises ConfigError."""
    if name == LM_HEAD and name not in files:
        others = sorted(other for other in files if other.startswith("lm_head."))
        if others and not config.get("tie_word_embeddings"):
            raise ConfigError(
                f"{model_dir} has {others[0]} but no {LM_HEAD}: take a model whose output layer is not quantised"
            )
        if config.get("tie_word_embeddings") is False:
            raise ConfigError(
                f"{model_dir} has no tensor {LM_HEAD}, and config.json says tie_word_embeddings false: check --model"
            )
        name = EMBEDDING
    if name not in files:
        raise ConfigError(f"{model_dir} has no tensor {name}: check --model")
    return name
