"""Settings of the plugin, each `SLIPSTREAM_<NAME>` in the environment of the SGLang server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from serving.capture.sampling import DEFAULT_BRANCH_SHARE, DEFAULT_FLOOR, MAX_BRANCH_SHARE
from speculator.errors import ConfigError
from speculator.host import expanded, invalid_setting, memory_bytes
from speculator.trace import Features

PREFIX = "SLIPSTREAM_"
_LEAST_BUFFER_BYTES = 256 << 20


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `SLIPSTREAM_ENABLED` asks for the plugin; raises ConfigError where it says neither yes nor no."""
    text = environment.get(f"{PREFIX}ENABLED") or "0"
    try:
        return TypeAdapter(bool).validate_python(text)
    except ValidationError:
        raise ConfigError(f"{PREFIX}ENABLED must be 1 or 0, it is {text!r}") from None


class PluginSettings(BaseSettings):
    """The plugin's settings. Raises pydantic's ValidationError; `load_settings` turns it into a ConfigError."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Redis with the trace stream and the draft pointer; SGLang also starts and serves without it."""
    store: Path = Path("drafts")
    """Draft store; `--speculative-draft-model-path` must be one of its versions."""
    engine_id: str = ""
    """Name of this server in traces and reports; default: host and port."""
    model_key: str = ""
    """Name of the stream; default: from the model's name and fingerprint."""
    target_fingerprint: str = ""
    """SHA-256 of the target (`speculator.draft.checkpoint.target_fingerprint`); default: computed at start."""
    capture: bool = False
    """Record traces: prompts and answers go to Redis."""
    capture_unmarked: bool = True
    """Also record requests without a capture policy. `slipstream serve` and `slipstream sglang` set 0, because such a
    request may have lost its opt-out."""
    capture_topk: int = Field(default=64, ge=1)
    """Tokens of the target's distribution kept per position."""
    capture_features: Features = "float8"
    """Number type of features in traces; bfloat16 takes twice the size."""
    context_window: int = Field(default=512, ge=1)
    """Prompt positions kept in a trace."""
    branch_share: float = Field(default=DEFAULT_BRANCH_SHARE, ge=0, le=MAX_BRANCH_SHARE)
    """Share of rejected proposals kept in traces, with features and target distribution; at most a quarter as many as
    committed tokens. Trees (`--speculative-eagle-topk` above 1) keep none."""
    capture_bytes_per_s: int = Field(default=0, ge=0)
    """Maximum bytes of traces per second; requests above it are not captured. 0: no limit."""
    capture_floor: float = Field(default=DEFAULT_FLOOR, gt=0, le=1)
    """Minimum share of traces kept if Redis or the trainer cannot take all; 1 keeps all."""
    buffer_bytes: int = Field(default=0, ge=0)
    """Host memory for features of running requests, and as much again for traces that wait for Redis; more are dropped.
    0: a twentieth of the memory, at least 256 MiB."""
    stream_max_bytes: int = Field(default=0, ge=0)
    """Byte cap of the stream; beyond it the oldest traces go. 0 allows 160,000 tokens of the target, at least 512 MiB.
    """
    trace_ttl_hours: float = Field(default=0.0, ge=0)
    """Hours until traces are deleted from the stream; 0: never."""
    capture_filter: str = ""
    """MODULE:FUNCTION of text and tenant; False drops a trace before it leaves the process."""
    suffix_depth: int = Field(default=0, ge=0, le=64)
    """Maximum proposals per round from earlier text of the request, its prompt group or its tenant; 0: none. Only these
    use depths of `--speculative-adaptive-config` above `--speculative-num-steps`."""
    share_groups: bool = False
    """Share answers of a prompt group with other engines through Redis, while they are generated; needs
    `SLIPSTREAM_SUFFIX_DEPTH`."""
    control_share: float = Field(default=0.02, ge=0, le=0.5)
    """Share of decode steps without drafts, the baseline of the measured speedup; needs `--speculative-adaptive`."""
    plain_share: float = Field(default=0.03, ge=0, le=0.5)
    """Share of decode steps, in stretches of 48, that serve plainly, the baseline of the end-to-end speedup. 0: none;
    needs `--speculative-adaptive`."""
    watch: bool = True
    """Compare each new draft with the one before on live traffic and take a worse one back; 0 keeps all."""
    poll_s: float = Field(default=0.5, ge=0.01, le=5)
    """Seconds between reads of the draft pointer."""

    @field_validator("store")
    @classmethod
    def _at_home(cls, store: Path) -> Path:
        return expanded(str(store))


def buffer_bytes(settings: PluginSettings) -> int:
    """Most bytes of traces that may wait in host memory: the setting, or its default."""
    return settings.buffer_bytes or max(memory_bytes() // 20, _LEAST_BUFFER_BYTES)


def load_settings() -> PluginSettings:
    """The settings of this process's environment; raises ConfigError naming the variable at fault."""
    try:
        return PluginSettings()
    except ValidationError as invalid:
        raise invalid_setting(PREFIX, invalid) from None


def default_engine_id(port: int) -> str:
    return f"{socket.gethostname()}-{port}"
