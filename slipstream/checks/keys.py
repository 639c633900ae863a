"""The gateway's keys: a file that can be read and trusted, and keys in it that still open something."""

from __future__ import annotations

import time
from collections.abc import Iterator

from slipstream.checks.finding import Finding, ok, warning
from speculator.errors import ConfigError


def check_keys() -> Iterator[Finding]:
    from serving.gateway.config import load_settings
    from serving.gateway.keys import read_keys

    name = "keys"
    try:
        settings = load_settings()
    except ConfigError:
        return  # the check of the settings says it
    if settings.keys_file is None:
        yield ok(name, "no API keys: whoever reaches the gateway is let in, so it starts on loopback alone")
        return
    keys = read_keys(settings.keys_file)
    over = [key.name for key in keys if key.is_expired(time.time())]
    if len(over) == len(keys):
        yield warning(name, f"{settings.keys_file} opens the gateway to nobody: make one with `slipstream keys add`")
    elif over:
        yield warning(name, f"{len(keys) - len(over)} in {settings.keys_file}; expired: {', '.join(over)}")
    else:
        yield ok(name, f"{len(keys)} in {settings.keys_file}")
    if settings.admin_key is None:
        yield warning(name, "no admin key: /admin is closed to everyone, and only loopback is served without one")
