"""How SGLang is started with the plugin: as a child of `slipstream serve`, or as a service of its own."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import structlog

from serving.capture.sampling import DEFAULT_FLOOR
from serving.sglang.outside.launcher import (
    SglangOptions,
    adaptive_config,
    check_interpreter,
    command,
    environment,
    find_interpreter,
)
from slipstream.new_draft import version_folder
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.versions.lineage import version_to_serve
from speculator.versions.store import DraftStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SglangStart:
    """What both ways need."""

    python: Path | None
    """The interpreter that has SGLang; None looks for one."""
    model_dir: Path
    model_name: str
    dtype: str
    device: str
    depth: int
    capture: bool
    control_share: float
    context_window: int
    capture_bytes_per_s: int
    trace_ttl_hours: float = 0
    capture_filter: str | None = None
    capture_floor: float = DEFAULT_FLOOR
    store: Path
    redis_url: str
    stream_max_bytes: int
    extra: tuple[str, ...]
    """Arguments for SGLang itself."""

    def interpreter(self) -> Path:
        """Raises ConfigError where SGLang or the plugin in it is missing."""
        python = find_interpreter(self.python)
        check_interpreter(python)
        return python

    def process(self, python: Path, draft_dir: Path, *, fingerprint: str, key: str, engine_id: str) -> SglangOptions:
        return SglangOptions(
            python=python,
            model_dir=self.model_dir,
            model_name=self.model_name,
            draft_dir=draft_dir,
            depth=self.depth,
            dtype=self.dtype,
            device=self.device,
            redis_url=self.redis_url,
            store=self.store,
            engine_id=engine_id,
            model_key=key,
            target_fingerprint=fingerprint,
            capture=self.capture,
            control_share=self.control_share,
            context_window=self.context_window,
            capture_bytes_per_s=self.capture_bytes_per_s,
            trace_ttl_hours=self.trace_ttl_hours,
            capture_filter=self.capture_filter,
            capture_floor=self.capture_floor,
            stream_max_bytes=self.stream_max_bytes,
            extra=self.extra,
        )


def verified_version(store: DraftStore, newest: int, fingerprint: str) -> int:
    """`version_to_serve`, verified before SGLang loads it. Raises StoreError or DraftError."""
    version = version_to_serve(store, newest)
    store.load(version, expected_fingerprint=fingerprint)
    return version


def become_sglang(start: SglangStart, *, host: str, port: int, engine_id: str) -> NoReturn:
    """Replace this process by SGLang with the last good draft of the store.

    Raises ConfigError, StoreError or DraftError where it would not start.
    """
    python = start.interpreter()
    store = DraftStore(start.store)
    newest = store.lifecycle.newest_servable()
    if newest is None:
        raise ConfigError(f"{start.store} holds no draft to serve: run `slipstream draft init --store` first")
    fingerprint = target_fingerprint(start.model_dir)
    version = verified_version(store, newest, fingerprint)
    options = start.process(
        python,
        version_folder(store, version),
        fingerprint=fingerprint,
        key=model_key(start.model_dir, fingerprint),
        engine_id=engine_id,
    )
    # SGLang reads it while it starts; nobody is left to remove it.
    candidates = Path(tempfile.mkdtemp(prefix="slipstream-sglang-")) / "adaptive.json"
    candidates.write_text(json.dumps(adaptive_config(options.depth)))
    words = command(options, host=host, port=port, adaptive_config=candidates)
    log.info("becoming sglang", python=str(python), draft_version=version, engine=engine_id)
    os.execve(words[0], words, environment(options, os.environ))  # noqa: S606 - what the operator's own words say
