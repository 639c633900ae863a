"""What an operator may set about the plugin, each as `SLIPSTREAM_<NAME>` in the environment of the SGLang server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from serving.sampler import DEFAULT_FLOOR
from speculator.errors import ConfigError

PREFIX = "SLIPSTREAM_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `SLIPSTREAM_ENABLED` asks for the plugin; raises ConfigError where it says neither yes nor no."""
    return _flag("ENABLED", environment.get(f"{PREFIX}ENABLED", ""))


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    redis_url: str = "redis://127.0.0.1:6379/0"
    """Redis with the trace stream and the draft pointer; it may be away, also at the start."""
    store: Path = Path("drafts")
    """The draft store; the server's `--speculative-draft-model-path` must be one of its versions."""
    engine_id: str = ""
    """Names this server in traces and reports; default: host and port."""
    model_key: str = ""
    """Names the stream; default: from the model's name and fingerprint, as the trainer does."""
    target_fingerprint: str = ""
    """SHA-256 of the target as `speculator.checkpoint.target_fingerprint` computes it; default: computed at start."""
    capture: bool = False
    """Record traces: prompts and answers go to Redis."""
    capture_unmarked: bool = True
    """Record requests that have no capture policy, too. `slipstream serve` and `slipstream sglang` set 0: all requests
    come through the gateway then, and one without a policy has lost it on the way, with its opt-out."""
    capture_topk: int = 64
    """Kept tokens of the target's distribution."""
    capture_features: str = "float8"
    """How traces carry features: float8 with a scale, or bfloat16 at twice the size."""
    context_window: int = 512
    """Prompt positions kept in a trace."""
    capture_bytes_per_s: int = 0
    """Budget of encoded traces; requests above it are not captured. 0 sets no limit."""
    capture_floor: float = DEFAULT_FLOOR
    """Least share of finished traces that is kept where Redis or the trainer cannot take all; 1 always keeps all."""
    buffer_bytes: int = 256 * 1024 * 1024
    """Features and traces in host memory that wait for encoding or for Redis; beyond it traces are dropped."""
    stream_max_bytes: int = 512 * 1024 * 1024
    """Byte cap of the stream in Redis; beyond it the oldest traces go, and are counted where nobody has learnt them."""
    trace_ttl_hours: float = 0.0
    """Traces older than this are removed from the stream, and not written to it; 0 sets no limit."""
    capture_filter: str = ""
    """MODULE:FUNCTION of text and tenant: traces of which it says False are dropped before they leave the process."""
    control_share: float = 0.02
    """Share of decode steps at depth 0 that give the measured baseline; needs SGLang's `--speculative-adaptive`."""
    watch: bool = True
    """Compare each new draft with the one before on live traffic and go back where it is worse; without it whatever is
    published comes into service and stays."""
    poll_s: float = 0.5
    """How often the draft pointer is read."""

    def __post_init__(self) -> None:
        for name, least in (
            ("capture_topk", 1),
            ("context_window", 1),
            ("capture_bytes_per_s", 0),
            ("trace_ttl_hours", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{PREFIX}{name.upper()} must be at least {least}")
        if self.capture_features not in ("float8", "bfloat16"):
            raise ConfigError(f"{PREFIX}CAPTURE_FEATURES must be float8 or bfloat16")
        if not 0 < self.capture_floor <= 1:
            raise ConfigError(f"{PREFIX}CAPTURE_FLOOR must be above 0 and at most 1")
        if not 0 <= self.control_share <= 0.5:
            raise ConfigError(f"{PREFIX}CONTROL_SHARE must lie in 0…0.5")
        if not 0.01 <= self.poll_s <= 60:
            raise ConfigError(f"{PREFIX}POLL_S must lie in 0.01…60")

    @classmethod
    def load(cls, environment: Mapping[str, str] = os.environ) -> PluginSettings:
        """Raises ConfigError, naming the variable, for a value that cannot be read."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = environment.get(PREFIX + field.name.upper())
            if text is not None:
                values[field.name] = _parse(field.name.upper(), text, type(field.default))
        return cls(**values)


def default_engine_id(port: int) -> str:
    return f"{socket.gethostname()}-{port}"


def _parse(name: str, text: str, kind: type[Any]) -> Any:
    if kind is bool:
        return _flag(name, text)
    if issubclass(kind, Path):
        return Path(text)
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name} is not usable: {text!r} is no {kind.__name__}") from None


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigError(f"{PREFIX}{name} must be 1 or 0, it is {text!r}")
    return value in _TRUE
