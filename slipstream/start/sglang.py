"""Start SGLang with the plugin: as a child of `slipstream serve`, or as a service of its own."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import structlog
import torch

from serving.sglang.outside.launcher import (
    SglangOptions,
    SglangStart,
    adaptive_config,
    check_interpreter,
    command,
    environment,
    find_interpreter,
    tp_size,
)
from slipstream.start.gpu_memory import FRACTION, gpu_memory_needs
from slipstream.terminal import spinner
from speculator.draft.checkpoint import config_from_json, expected_shapes, model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import exit_on_signal
from speculator.versions.lineage import version_to_serve
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)


def checked_interpreter(given: Path | None) -> Path:
    """The interpreter that has SGLang. Raises ConfigError where SGLang or the plugin in it is missing."""
    python = find_interpreter(given)
    check_interpreter(python)
    return python


def with_draft(
    start: SglangStart,
    python: Path,
    store: DraftStore,
    newest: int,
    *,
    fingerprint: str,
    engine_id: str,
    shares_gpu: bool = False,
) -> tuple[SglangOptions, int]:
    """(options that start SGLang with the version to serve, that version). Verifies the version's files.

    With `shares_gpu` the trainer uses the same GPU, and SGLang leaves room for it, unless `start.extra` says how
    much. Raises ConfigError, StoreError or DraftError.
    """
    version = version_to_serve(store, newest)
    store.load(version, expected_fingerprint=fingerprint)
    options = SglangOptions(
        **{**vars(start), "python": python},
        draft_dir=store.folder(version).absolute(),
        engine_id=engine_id,
        model_key=model_key(start.model_dir, fingerprint),
        target_fingerprint=fingerprint,
    )
    if options.capture and not any(word.partition("=")[0] == _DEFAULTS for word in options.extra):
        _warn_of_defaults(options.model_dir)
    if shares_gpu and not any(word.partition("=")[0] == FRACTION for word in options.extra):
        options = replace(options, extra=(*options.extra, FRACTION, str(_fraction(options, store, version))))
    return options, version


_DEFAULTS = "--sampling-defaults"
"""SGLang's option: whether requests get what they leave out from the model's generation_config.json."""


def _warn_of_defaults(model_dir: Path) -> None:
    """Warn where the model's own defaults leave hardly a trace with a label to learn from."""
    try:
        min_p = json.loads((model_dir / "generation_config.json").read_bytes()).get("min_p")
    except (OSError, ValueError, AttributeError):
        return
    if min_p:
        fix = f"let requests say min_p 0, or pass {_DEFAULTS} openai after --"
        log.warning("generation_config.json changes all answers, which teach nothing then", min_p=min_p, fix=fix)


def exec_sglang(start: SglangStart, *, host: str, port: int, engine_id: str, shares_gpu: bool = False) -> NoReturn:
    """Replace this process by SGLang with the last good draft of the store; `shares_gpu` as in `with_draft`.

    Raises ConfigError, StoreError or DraftError where it could not start.
    """
    # Until SGLang handles it: reading a large target takes minutes.
    exit_on_signal()
    python = checked_interpreter(start.python)
    store = DraftStore(start.store)
    newest = store.lifecycle.newest_servable()
    if newest is None:
        raise ConfigError(f"{start.store} holds no draft to serve: run `slipstream drafts init --store` first")
    with spinner(f"reading {start.model_name}"):
        fingerprint = target_fingerprint(start.model_dir)
        options, version = with_draft(
            start, python, store, newest, fingerprint=fingerprint, engine_id=engine_id, shares_gpu=shares_gpu
        )
    # SGLang reads this file while it starts. It stays: no code of ours runs after execve.
    candidates = Path(tempfile.mkdtemp(prefix="slipstream-sglang-")) / "adaptive.json"
    candidates.write_text(json.dumps(adaptive_config(options.depth, options.suffix_depth)))
    words = command(options, host=host, port=port, adaptive_config=candidates)
    log.info("becoming sglang", python=str(python), draft_version=version, engine=engine_id)
    os.execve(words[0], words, environment(options, os.environ))  # noqa: S606 - what the operator's own words say


def _fraction(options: SglangOptions, store: DraftStore, version: int) -> float:
    """Share of the GPU's memory for SGLang's weights and cache, beside the trainer. Raises ConfigError."""
    if not torch.cuda.is_available():
        raise ConfigError("PyTorch finds no GPU for SGLang and the trainer to share: pass --device cpu")
    free_bytes, all_bytes = torch.cuda.mem_get_info(0)
    shapes = expected_shapes(config_from_json(store.config(version)))
    shares = gpu_memory_needs(
        free_bytes,
        options.model_dir,
        shapes,
        used_bytes=all_bytes - free_bytes,
        tp_size=tp_size(options.extra),
    )
    log.info(
        "sharing the GPU with the trainer",
        **{name: f"{size / 2**30:.1f} GiB" for name, size in asdict(shares).items()},
    )
    return shares.fraction
