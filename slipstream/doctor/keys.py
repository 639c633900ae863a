"""The gateway's keys: a file that can be read and trusted, and keys in it that still open something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.doctor.finding import Finding, ok, warning
from speculator.errors import ConfigError

_NAME = "keys"


def check_keys() -> Iterator[Finding]:
    from serving.gateway.config import load_settings

    try:
        settings = load_settings()
    except ConfigError:
        return  # the check of the settings says it
    if settings.keys_file is not None:
        yield _check_file(settings.keys_file)
    elif settings.auth_elsewhere:
        yield ok(_NAME, "no API keys: something in front lets in the right clients alone, as AUTH_ELSEWHERE says")
    else:
        yield ok(_NAME, "no API keys: whoever reaches the gateway is let in, so it starts on loopback alone")
        return
    if settings.admin_key is None:
        yield warning(_NAME, "no admin key: /admin is closed to everyone, and only loopback is served without one")


def _check_file(file: Path) -> Finding:
    from serving.gateway.keys import read_keys

    keys = read_keys(file)
    over = [key.name for key in keys if key.is_expired(time.time())]
    if len(over) == len(keys):
        return warning(_NAME, f"{file} opens the gateway to nobody: make one with `slipstream keys add`")
    if over:
        return warning(_NAME, f"{len(keys) - len(over)} in {file}; expired: {', '.join(over)}")
    return ok(_NAME, f"{len(keys)} in {file}")
