"""Settings of the plugin, each `SLIPSTREAM_<NAME>` in the environment of the SGLang server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from serving.capture.sampling import DEFAULT_BRANCH_SHARE, DEFAULT_FLOOR, MAX_BRANCH_SHARE
from speculator.errors import ConfigError
from speculator.host import memory_bytes, unusable
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

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Redis with the trace stream and the draft pointer; it may be away, also at the start."""
    store: Path = Path("drafts")
    """The draft store; the server's `--speculative-draft-model-path` must be one of its versions."""
    engine_id: str = ""
    """Names this server in traces and reports; default: host and port."""
    model_key: str = ""
    """Names the stream; default: from the model's name and fingerprint, as the trainer does."""
    target_fingerprint: str = ""
    """SHA-256 of the target as `speculator.draft.checkpoint.target_fingerprint` computes it; default: computed at
    start."""
    capture: bool = False
    """Record traces: prompts and answers go to Redis."""
    capture_unmarked: bool = True
    """Record requests that have no capture policy, too. `slipstream serve` and `slipstream sglang` set 0: all requests
    come through the gateway then, and one without a policy has lost it on the way, with its opt-out."""
    capture_topk: int = Field(default=64, ge=1)
    """Kept tokens of the target's distribution."""
    capture_features: Features = "float8"
    """How traces carry features: float8 with a scale, or bfloat16 at twice the size."""
    context_window: int = Field(default=512, ge=1)
    """Prompt positions kept in a trace."""
    branch_share: float = Field(default=DEFAULT_BRANCH_SHARE, ge=0, le=MAX_BRANCH_SHARE)
    """Share of the rejected proposals whose features and target distribution are kept in traces, too, at most a quarter
    as many as were committed. Of trees, `--speculative-eagle-topk` above 1, none are."""
    capture_bytes_per_s: int = Field(default=0, ge=0)
    """Budget of encoded traces; requests above it are not captured. 0 sets no limit."""
    capture_floor: float = Field(default=DEFAULT_FLOOR, gt=0, le=1)
    """Least share of finished traces that is kept where Redis or the trainer cannot take all; 1 always keeps all."""
    buffer_bytes: int = Field(default=0, ge=0)
    """In host memory: features of running requests, and as much again of traces that wait for Redis; beyond it traces
    are dropped. 0 allows a twentieth of the memory, and at least 256 MiB."""
    stream_max_bytes: int = Field(default=0, ge=0)
    """Byte cap of the stream in Redis; beyond it the oldest traces go, and are counted where nobody has learnt them. 0
    allows 160,000 tokens of the target's width, and at least 512 MiB."""
    trace_ttl_hours: float = Field(default=0.0, ge=0)
    """Traces older than this are removed from the stream, and not written to it; 0 sets no limit."""
    capture_filter: str = ""
    """MODULE:FUNCTION of text and tenant: traces of which it says False are dropped before they leave the process."""
    suffix_depth: int = Field(default=0, ge=0, le=64)
    """Most proposals of a round from earlier text: the request's own, its prompt group's, its tenant's. Candidates of
    `--speculative-adaptive-config` above `--speculative-num-steps` are for these alone. 0 proposes none."""
    share_groups: bool = False
    """Answers of a prompt group go to Redis as they come, for the text that other engines propose; needs
    `SLIPSTREAM_SUFFIX_DEPTH`."""
    control_share: float = Field(default=0.02, ge=0, le=0.5)
    """Share of decode steps at depth 0 that give the measured baseline; needs SGLang's `--speculative-adaptive`."""
    plain_share: float = Field(default=0.03, ge=0, le=0.5)
    """Share of decode steps, in stretches of 48, in which all requests are served plainly: the end-to-end speedup. 0
    measures none; needs `--speculative-adaptive`."""
    watch: bool = True
    """Compare each new draft with the one before on live traffic and go back where it is worse; without it whatever is
    published comes into service and stays."""
    poll_s: float = Field(default=0.5, ge=0.01, le=5)
    """How often the draft pointer is read."""


def buffer_bytes(settings: PluginSettings) -> int:
    """Most bytes of traces that may wait in host memory: the setting, or its default."""
    return settings.buffer_bytes or max(memory_bytes() // 20, _LEAST_BUFFER_BYTES)


def load_settings() -> PluginSettings:
    """The settings of this process's environment; raises ConfigError naming the variable at fault."""
    try:
        return PluginSettings()
    except ValidationError as invalid:
        raise unusable(PREFIX, invalid) from None


def default_engine_id(port: int) -> str:
    return f"{socket.gethostname()}-{port}"
