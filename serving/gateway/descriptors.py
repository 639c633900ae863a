"""File descriptors: a connection is one, and processes are often given 1,024 until they ask for more."""

from __future__ import annotations

import math
import resource

from serving.gateway.config import ENV_PREFIX, GatewaySettings
from speculator.errors import ConfigError

_OTHERS = 100
"""Files, Redis, pipes, the loop's own."""


def make_room(settings: GatewaySettings, *, each: int) -> None:
    """Have this process open what its limits let in; a request under way is `each` connections.

    Raises ConfigError where the system gives too few for the requests that the gateway promises to take.
    """
    least = each * settings.max_in_flight + _OTHERS
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if hard < least:
        raise ConfigError(
            f"{ENV_PREFIX}MAX_IN_FLIGHT={settings.max_in_flight} takes {least} file descriptors and this process may "
            f"open {hard:.0f}: lower it, or raise the limit (`ulimit -Hn`, LimitNOFILE=)"
        )
    wanted = min(least + settings.max_connections - settings.max_in_flight, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), _limits()[1]))


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
