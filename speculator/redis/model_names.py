"""Models that Redis knows. A model's keys contain its folder's name, so one folder under two names has keys of both."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import redis

from speculator.errors import ConfigError
from speculator.redis.client import RedisKeys, redis_errors


@redis_errors
def is_known(client: redis.Redis, model_key: str) -> bool:
    """Whether an engine of the model has ever reported, or a trace was recorded; operators' commands do not count.

    By commands that engine and trainer may run (deploy/redis/users.acl.in). Raises StreamError.
    """
    return _is_known(client, model_key)


@redis_errors
def check_name(client: redis.Redis, model_key: str) -> None:
    """Raises ConfigError where Redis knows this target, by its fingerprint, under other names only, and StreamError."""
    # A user of Redis may lack the permission to look.
    with suppress(redis.exceptions.NoPermissionError):
        if _is_known(client, model_key):
            return
    keys = RedisKeys(model_key=f"*-{model_key.rpartition('-')[2]}")
    if names := _names(client, keys.engines, keys.num_appended):
        raise ConfigError(f"no engine reports as {model_key!r}: set --model to the one of {', '.join(names)}")


@redis_errors
def check_stream(client: redis.Redis, model_key: str) -> None:
    """Raises ConfigError where Redis has no traces of the model, and StreamError."""
    redis_client: Any = client
    if redis_client.get(RedisKeys(model_key=model_key).num_appended):
        return
    names = _names(client, RedisKeys(model_key="*").num_appended)
    places = f"set --model to the one of {', '.join(names)}" if names else "check --redis-url, or serve with --capture"
    raise ConfigError(f"no traces of {model_key!r} in this Redis: {places}")


def _is_known(client: Any, model_key: str) -> bool:
    keys = RedisKeys(model_key=model_key)
    return bool(client.zrange(keys.engines, 0, 0) or client.get(keys.num_appended))


def _names(client: Any, *patterns: str) -> list[str]:
    """Model keys of the keys that match; [] where this user may not list keys."""
    with suppress(redis.exceptions.NoPermissionError):
        found = {key for pattern in patterns for key in client.scan_iter(match=pattern, count=1000)}
        return sorted({key.decode(errors="replace").split("{")[1].split("}")[0] for key in found})
    return []
