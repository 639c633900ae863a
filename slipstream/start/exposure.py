"""Refuse to open a port that other machines can reach without keys and passwords."""

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
"""Prefixes of common example passwords."""
_LEAST_LENGTH = 12


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. Of names only `localhost` counts: others may resolve to any."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, redis_url: str, settings: GatewaySettings) -> None:
    """Raise ConfigError for an invalid key file, and for an unsafe start on an address that others reach.

    Unsafe: no API keys; a key file without an admin key; a key or Redis password that can be guessed; a remote Redis
    without a password. With AUTH_ELSEWHERE (a proxy in front authenticates) no API keys are needed, but all the rest.
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
            f"{ENV_PREFIX}KEYS_FILE, or set {ENV_PREFIX}AUTH_ELSEWHERE=1 where a proxy in front of the gateway "
            "authenticates clients"
        )
    # With a single --api-key no admin key is required: /admin is closed then.
    if settings.admin_key is None and settings.api_key is None:
        raise ConfigError(
            f"{where} and there is no admin key: set {_ADMIN_KEY} to 32 random bytes, or {_ADMIN_KEY}_FILE"
        )
    if settings.admin_key is not None and is_weak(settings.admin_key.get_secret_value()):
        raise ConfigError(f"{where} and the admin key can be guessed: set {_ADMIN_KEY} to 32 random bytes")
    _check_redis(redis_url, where)


def check_sglang_exposure(host: str, redis_url: str, *, is_private: bool) -> None:
    """Raise ConfigError for an unsafe start of SGLang, whose own port needs no key."""
    if is_loopback(host):
        return
    where = f"others can reach --host {host}"
    if not is_private:
        raise ConfigError(
            f"{where}, and any client of SGLang's own port can replace its weights: leave --host out, or pass "
            "--private-network where only the gateway and Prometheus are on that network"
        )
    _check_redis(redis_url, where)


def _check_redis(url: str, where: str) -> None:
    try:
        parsed = RedisUrl.parse(url)
    except ValueError:
        return  # `connect` reports a bad URL
    password = parsed.options.get("password", "")
    remote = next((host for host, _ in parsed.hosts if not is_loopback(host)), None)
    if not password and "username" in parsed.options and (file := os.environ.get(PASSWORD_FILE_VARIABLE)):
        password = read_secret(Path(file), PASSWORD_FILE_VARIABLE)
    fix = f"give it a random one, and set it in --redis-url or {PASSWORD_FILE_VARIABLE}"
    if password and is_weak(password):
        raise ConfigError(f"{where} and the password of Redis can be guessed: {fix}")
    # With TLS, Redis may authenticate clients by their certificates.
    if not password and not parsed.has_tls and remote is not None:
        raise ConfigError(f"{where} and Redis at {remote} has no password: {fix}")


def is_weak(secret: str) -> bool:
    """Whether a secret looks like a default or an example; no test of randomness."""
    return len(secret) < _LEAST_LENGTH or len(set(secret)) < _LEAST_DISTINCT or secret.lower().startswith(_WELL_KNOWN)
