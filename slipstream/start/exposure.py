"""What has to be locked before a port that others can reach is opened."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

from serving.gateway.config import ENV_PREFIX, GatewaySettings
from serving.gateway.keys import read_keys
from speculator.errors import ConfigError
from speculator.host import read_secret
from speculator.redis.client import PASSWORD_FILE_VARIABLE, RedisUrl

_ADMIN_KEY = f"{ENV_PREFIX}ADMIN_KEY"
_LEAST_DISTINCT = 6
_WELL_KNOWN = ("admin", "changeme", "default", "example", "guest", "password", "redis", "secret", "slipstream", "test")
"""Beginnings of passwords from examples and first guesses."""
_LEAST_LENGTH = 12


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; a name but `localhost` may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, redis_url: str, settings: GatewaySettings) -> None:
    """Raise ConfigError for a file of keys that is not usable, and for an unsafe start on an address that others reach.

    Unsafe: no API keys, no admin key beside a file of them, a key or a password of Redis that can be guessed, another
    machine's Redis without a password. An operator who has something in front that authenticates says so
    (AUTH_ELSEWHERE), and then needs no API keys, but all the rest.
    """
    if settings.keys_file is not None:
        read_keys(settings.keys_file)
    if is_loopback(host):
        return
    where = f"others can reach --host {host}"
    if settings.api_key is not None:
        if is_weak(settings.api_key.get_secret_value()):
            raise ConfigError(f"{where} and --api-key can be guessed: give it 32 random bytes")
    elif settings.keys_file is None and not settings.auth_elsewhere:
        raise ConfigError(
            f"{where} and there are no API keys: pass --api-key, or make keys with `slipstream keys add` and set "
            f"{ENV_PREFIX}KEYS_FILE, or set {ENV_PREFIX}AUTH_ELSEWHERE=1 where something in front of the gateway lets "
            "in the right clients alone"
        )
    # Where all have one key, /admin may stay closed.
    if settings.admin_key is None and settings.api_key is None:
        raise ConfigError(
            f"{where} and there is no admin key: set {_ADMIN_KEY} to 32 random bytes, or {_ADMIN_KEY}_FILE"
        )
    if settings.admin_key is not None and is_weak(settings.admin_key.get_secret_value()):
        raise ConfigError(f"{where} and the admin key can be guessed: set {_ADMIN_KEY} to 32 random bytes")
    _check_redis(redis_url, where)


def check_sglang_exposure(host: str, redis_url: str, *, is_private: bool) -> None:
    """The same for SGLang's own port, which asks for no key. Raises ConfigError."""
    if is_loopback(host):
        return
    where = f"others can reach --host {host}"
    if not is_private:
        raise ConfigError(
            f"{where}, and whoever reaches SGLang's own port may replace its weights: leave --host out, or pass "
            "--private-network where nobody but the gateway is on that network"
        )
    _check_redis(redis_url, where)


def _check_redis(url: str, where: str) -> None:
    try:
        parsed = RedisUrl.parse(url)
    except ValueError:
        return  # connecting says what is wrong with it
    password = parsed.options.get("password", "")
    remote = next((host for host, _ in parsed.hosts if not is_loopback(host)), None)
    if not password and "username" in parsed.options and (file := os.environ.get(PASSWORD_FILE_VARIABLE)):
        password = read_secret(Path(file), PASSWORD_FILE_VARIABLE)
    fix = f"give it a random one, and set it in --redis-url or {PASSWORD_FILE_VARIABLE}"
    if password and is_weak(password):
        raise ConfigError(f"{where} and the password of Redis can be guessed: {fix}")
    # With TLS it may know its clients by their certificates.
    if not password and not parsed.has_tls and remote is not None:
        raise ConfigError(f"{where} and Redis at {remote} has no password: {fix}")


def is_weak(secret: str) -> bool:
    """Whether it looks made up rather than drawn: no test of randomness, a net for defaults and examples."""
    return len(secret) < _LEAST_LENGTH or len(set(secret)) < _LEAST_DISTINCT or secret.lower().startswith(_WELL_KNOWN)
