"""Read settings from the environment and secrets from files, and tell the operator what is wrong with one."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from speculator.errors import ConfigError


def unusable(prefix: str, invalid: ValidationError) -> ConfigError:
    """The first fault of a settings class with that `env_prefix`, under its variable's name and without its value."""
    first = invalid.errors(include_url=False)[0]
    variable = prefix + "_".join(str(part) for part in first["loc"]).upper()
    return ConfigError(f"{variable} is not usable: {first['msg']}: set {variable} or unset it")


def read_secret(path: Path, variable: str) -> str:
    """The text of a file that `variable` names, without the end of its line; raises ConfigError naming the variable."""
    try:
        secret = path.read_text("utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise ConfigError(
            f"{variable} names {path}, which cannot be read ({reason}): check path and permissions"
        ) from None
    if not secret:
        raise ConfigError(f"{variable} names {path}, which is empty: write the secret into it")
    return secret
