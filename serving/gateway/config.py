"""Settings of the gateway, each read from `SLIPSTREAM_GATEWAY_<NAME>` in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from speculator.errors import ConfigError
from speculator.host import read_secret, unusable

ENV_PREFIX = "SLIPSTREAM_GATEWAY_"
_SPARE_CONNECTIONS = 200


def _as_prefix(path: object) -> object:
    return f"/{path.strip('/')}".removesuffix("/") if isinstance(path, str) else path


class GatewaySettings(BaseSettings):
    """Limits on requests, and the keys that open the gateway."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        populate_by_name=True,
    )

    default_max_tokens: int = Field(default=512, ge=1)
    """Completion tokens when the request names no limit, less where the context has less room."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Completion tokens that one request may ask for; default: what the context holds."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt, where the gateway counts them (--engine local); default: what the context holds."""
    max_samples: int = Field(default=64, ge=1)
    """Prompts times `n` of one request."""
    strict_fields: bool = False
    """Refuse fields of a request that are not acted on (--engine local); default: list them once in the log."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Longer requests are refused with status 413."""
    max_request_s: float = Field(default=600.0, gt=0)
    """An answer that takes longer ends with an error that says so."""
    stream_comment_s: float = Field(default=15.0, gt=0)
    """A stream that has nothing to send for so long sends a comment, so that no proxy takes its connection for dead."""
    idle_connection_s: float = Field(default=620.0, gt=0)
    """A connection without a request is closed after so long; a proxy in front must give it up earlier."""
    root_path: Annotated[str, BeforeValidator(_as_prefix)] = Field(default="", pattern=r"^(/[\w.~-]+)*$")
    """The path below which a proxy in front shows this gateway, such as /slipstream; it may leave it out or in."""
    max_in_flight: int = Field(default=400, ge=1)
    """Requests to the model under way at once, those that wait included; more are refused with status 429."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of these that one API key may have where it has no limit of its own."""
    rollout_slots_share: float = Field(default=0.75, gt=0, le=1)
    """Of the engine's slots, what rollouts may hold (at least one slot), as far as other requests leave it free."""
    rollout_chunk_tokens: int = Field(default=128, ge=1)
    """After so many tokens it is decided anew which samples of rollouts run."""
    rollout_max_samples: int = Field(default=16_384, ge=1)
    """Of all rollouts together, those that ended and are kept included; beyond it, status 429."""
    rollout_max_tokens: int = Field(default=8_388_608, ge=1)
    """The same of tokens, prompts and what may be generated: about 40 bytes of memory each."""
    rollout_grace_s: float = Field(default=60.0, ge=0)
    """A rollout that no client has asked about for so long is cancelled."""
    rollout_keep_s: float = Field(default=600.0, ge=0)
    """For so long after its end a rollout can be read again, and rewarded; less where others need the room."""
    keys_file: Path | None = None
    """The API keys, as `slipstream keys` writes them; without it whoever reaches the port is let in."""
    api_key: SecretStr | None = Field(default=None, validation_alias="SLIPSTREAM_API_KEY", min_length=1)
    """The one key, in place of a file with keys: whoever has it is let in, as the tenant `default`."""
    auth_elsewhere: bool = False
    """1 where something in front lets in the right clients alone; a port that others reach needs keys otherwise."""
    targets_dir: Path | None = None
    """Folder below which POST /v1/target-version may name new weights for the target; nowhere where it is not set."""
    admin_key: SecretStr | None = Field(default=None, min_length=16)
    """What opens /admin; nothing does where it is not set."""
    admin_key_file: Path | None = None
    """A file with that key, for deployments that keep secrets in files."""

    @property
    def max_connections(self) -> int:
        """Most connections: running requests, plus pages, probes, idle clients, and requests to be refused."""
        return self.max_in_flight + _SPARE_CONNECTIONS

    @property
    def max_in_flight_of_key(self) -> int:
        """Most running requests of a key that has no limit of its own."""
        return max(1, int(self.max_key_share * self.max_in_flight))


def load_settings(*, api_key: str | None = None, root_path: str | None = None) -> GatewaySettings:
    """Read the settings from the environment; `api_key` and `root_path` override it. Raises ConfigError naming the
    variable at fault.
    """
    given: dict[str, Any] = {} if api_key is None else {"api_key": SecretStr(api_key)}
    given |= {} if root_path is None else {"root_path": root_path}
    try:
        settings = GatewaySettings(**given)
    except ValidationError as invalid:
        raise unusable(ENV_PREFIX, invalid) from None
    if settings.api_key is not None and settings.keys_file is not None:
        raise ConfigError(f"--api-key (SLIPSTREAM_API_KEY) and {ENV_PREFIX}KEYS_FILE are both set: leave one out")
    file, variable = settings.admin_key_file, f"{ENV_PREFIX}ADMIN_KEY_FILE"
    if file is None:
        return settings
    if settings.admin_key is not None:
        raise ConfigError(f"{ENV_PREFIX}ADMIN_KEY and {variable} are both set: unset one of them")
    try:
        return GatewaySettings(admin_key=SecretStr(read_secret(file, variable)), **given)
    except ValidationError as invalid:
        reason = invalid.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{variable} names {file}, whose text is not usable as a key: {reason}") from None
