"""Settings from the environment: what is wrong with one, said to the operator who set it."""

from __future__ import annotations

from pydantic import ValidationError

from speculator.errors import ConfigError


def unusable(prefix: str, invalid: ValidationError) -> ConfigError:
    """The first fault of a settings class with that `env_prefix`, under its variable's name and without its value."""
    first = invalid.errors(include_url=False)[0]
    variable = prefix + "_".join(str(part) for part in first["loc"]).upper()
    return ConfigError(f"{variable} is not usable: {first['msg']}: set {variable} or unset it")
