"""The target: found (an id is downloaded first), complete, of a kind that the engine runs. No weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.doctor.finding import Finding, ok
from slipstream.models import resolve_model


def check_model(name: str, *, local: bool) -> Iterator[Finding]:
    """`local`: for the engine in here; SGLang knows itself what it runs."""
    model_dir = resolve_model(name)
    yield ok("model", str(model_dir))
    yield _for_draft(model_dir)
    if local:
        yield _for_local_engine(model_dir)


def _for_draft(model_dir: Path) -> Finding:
    from slipstream.new_draft import check_target
    from speculator.draft.eagle3 import aux_layer_ids

    config = check_target(model_dir)
    layers = aux_layer_ids(config["num_hidden_layers"])
    return ok("draft for it", f"width {config['hidden_size']}, features of layers {', '.join(map(str, layers))}")


def _for_local_engine(model_dir: Path) -> Finding:
    from serving.local.target.forward import fusible
    from serving.local.target.loading import check_model, load_tokenizer

    model = check_model(model_dir)
    load_tokenizer(model_dir, vocab_size=model.config.vocab_size)
    way = "our own pass" if fusible(model) else "Hugging Face's modelling"
    return ok("local engine", f"runs {type(model).__name__} through {way}")
