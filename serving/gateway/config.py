"""Settings of the gateway, each read from `SLIPSTREAM_GATEWAY_<NAME>` in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from serving.rollout.interactive_share import SlotsShare
from speculator.errors import ConfigError
from speculator.host import invalid_setting, read_secret

ENV_PREFIX = "SLIPSTREAM_GATEWAY_"
_API_KEY = "SLIPSTREAM_API_KEY"
_OPTIONS = {_API_KEY: "--api-key", f"{ENV_PREFIX}ROOT_PATH": "--root-path"}
"""Variables that have an option of the command line, too."""
_SPARE_CONNECTIONS = 200
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^\s,/]+"


def _as_prefix(path: object) -> object:
    return f"/{path.strip('/')}".removesuffix("/") if isinstance(path, str) else path


def _stripped(key: object) -> object:
    """A key without space around it, such as the line end of a Kubernetes secret: no header can carry that."""
    key = key.get_secret_value() if isinstance(key, SecretStr) else key
    return key.strip() if isinstance(key, str) else key


Key = Annotated[SecretStr | None, BeforeValidator(_stripped)]


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
    """Completion tokens of a request that names no limit; fewer if the context has less room."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Maximum completion tokens that a request may ask for; default: what the context holds."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a prompt, with `--engine local`; default: what the context holds."""
    max_samples: int = Field(default=64, ge=1)
    """Maximum samples of a request: its prompts times `n`."""
    strict_fields: bool = False
    """Refuse request fields that have no effect, with `--engine local`; 0 logs each field once."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Longer request bodies are refused with status 413."""
    max_request_s: float = Field(default=600.0, gt=0)
    """Seconds until an unfinished answer ends with an error."""
    stream_comment_s: float = Field(default=15.0, gt=0)
    """Seconds of silence until a stream sends a comment, so that proxies keep its connection."""
    idle_connection_s: float = Field(default=620.0, gt=0)
    """Seconds until an idle connection is closed; a proxy in front must close it earlier."""
    root_path: Annotated[str, BeforeValidator(_as_prefix)] = Field(default="", pattern=r"^(/[\w.~-]+)*$")
    """Path below which a proxy shows this gateway, such as /slipstream; the proxy may strip it."""
    cors_origins: str = Field(default="", pattern=rf"^(\*|{_ORIGIN}(,\s*{_ORIGIN})*)?$")
    """Sites whose pages may call from a browser, separated by commas, such as https://chat.example.com; * for all."""
    max_in_flight: int = Field(default=400, ge=1)
    """Requests at once, waiting ones included; more are refused with status 429."""
    max_key_share: float = Field(default=0.5, gt=0, le=1)
    """Share of `max_in_flight` for one API key that has no limit of its own."""
    rollout_slots_share: float = Field(default=0.75, gt=0, le=1)
    """Share of the engine's slots for rollouts, at least one slot; other requests go first."""
    interactive_ttft_p99_s: float | None = Field(default=None, gt=0)
    """Seconds to first token for 99% of the requests other than rollouts; while more exceed it, rollouts get fewer
    slots, down to none."""
    interactive_itl_p99_s: float | None = Field(default=None, gt=0)
    """The same for the time between two chunks."""
    rollout_chunk_tokens: int = Field(default=128, ge=1)
    """Tokens until the scheduler decides again which rollout samples run."""
    rollout_max_samples: int = Field(default=16_384, ge=1)
    """Samples of all rollouts, kept finished ones included; more get status 429."""
    rollout_max_tokens: int = Field(default=8_388_608, ge=1)
    """Tokens of all rollouts, prompts and limits together, at about 40 bytes each; more get status 429."""
    rollout_grace_s: float = Field(default=60.0, ge=0)
    """Seconds without a request about a rollout until it is cancelled."""
    rollout_keep_s: float = Field(default=600.0, ge=0)
    """Seconds that a finished rollout can be read and rewarded; fewer if others need its room."""
    keys_file: Path | None = None
    """API keys, as `slipstream keys` writes them; without keys, everyone who reaches the port is let in."""
    api_key: Key = Field(default=None, validation_alias=_API_KEY, min_length=1)
    """The one API key, instead of a file; its tenant is `default`."""
    auth_elsewhere: bool = False
    """1 if something in front checks clients; otherwise a port that other machines reach needs keys."""
    targets_dir: Path | None = None
    """Folder below which POST /v1/target-version may name new target weights; default: nowhere."""
    admin_key: Key = Field(default=None, min_length=16)
    """Key for /admin and POST /v1/target-version; without it, nobody may call them."""
    admin_key_file: Path | None = None
    """File that holds the admin key."""

    @property
    def max_connections(self) -> int:
        """Most connections: running requests, plus pages, probes, idle clients, and requests to be refused."""
        return self.max_in_flight + _SPARE_CONNECTIONS

    def make_slots_share(self) -> SlotsShare:
        """A new controller of what rollouts may hold."""
        return SlotsShare(
            self.rollout_slots_share, ttft_p99_s=self.interactive_ttft_p99_s, itl_p99_s=self.interactive_itl_p99_s
        )

    @property
    def max_in_flight_of_key(self) -> int:
        """Most running requests of a key that has no limit of its own."""
        return max(1, int(self.max_key_share * self.max_in_flight))


def load_settings(*, api_key: str | None = None, root_path: str | None = None) -> GatewaySettings:
    """Read the settings from the environment; `api_key` and `root_path` override it. Raises ConfigError naming the
    variable at fault, and its option.
    """
    given: dict[str, Any] = {} if api_key is None else {_API_KEY: SecretStr(api_key)}
    given |= {} if root_path is None else {"root_path": root_path}
    try:
        settings = GatewaySettings(**given)
    except ValidationError as invalid:
        raise invalid_setting(ENV_PREFIX, invalid, _OPTIONS) from None
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
