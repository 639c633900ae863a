"""The target: found (an id is downloaded first), complete, of a kind that the engine runs. No weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.checks.finding import Finding, ok
from slipstream.models import resolve_model
from speculator.errors import ConfigError


def check_model(name: str, *, local: bool) -> Iterator[Finding]:
    """`local`: for the engine in here; SGLang knows itself what it runs."""
    model_dir = resolve_model(name)
    yield ok("model", str(model_dir))
    yield _for_draft(model_dir)
    if local:
        yield _for_local_engine(model_dir)


def _for_draft(model_dir: Path) -> Finding:
    from speculator.checkpoint import read_target_tensor
    from speculator.model import aux_layer_ids

    config = _read(model_dir, lambda: _config(model_dir))
    layers = aux_layer_ids(config.num_hidden_layers)
    read_target_tensor(model_dir, "model.norm.weight")
    return ok("draft for it", f"width {config.hidden_size}, features of layers {', '.join(map(str, layers))}")


def _for_local_engine(model_dir: Path) -> Finding:
    from serving.local.decoder import fusible
    from serving.local.target import refuse_unsupported

    model = _read(model_dir, lambda: _without_weights(model_dir))
    refuse_unsupported(model, model_dir)
    way = "our own pass" if fusible(model) else "Hugging Face's modelling"
    return ok("local engine", f"runs {type(model).__name__} through {way}")


def _config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


def _without_weights(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(model_dir), trust_remote_code=False)


def _read(model_dir: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{model_dir} is no complete causal language model ({reason}): check --model") from error
