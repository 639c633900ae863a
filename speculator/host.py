"""What a process gets from its machine: settings, secrets, clock, CPU cores, a cache folder, free loopback ports."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from speculator.errors import ConfigError


def now_ms() -> int:
    """Unix time."""
    return time.time_ns() // 1_000_000


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


CACHE_VARIABLE = "SLIPSTREAM_CACHE"


def cache_root() -> Path:
    """The directory, which need not exist; `$SLIPSTREAM_CACHE` moves it. Raises RuntimeError where there is no home."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


_PORTS = range(10_000, 22_000)
"""Below what Linux hands out by itself (`ip_local_port_range`, from 32,768 on) to connections and to servers that
name no port, any of which could take a port that nobody listens at yet; and below 22,000 to 29,999, where SGLang
looks for its own."""
_first = os.getpid() * 61 % len(_PORTS)
_ports: Iterator[int] = itertools.cycle([*_PORTS[_first:], *_PORTS[:_first]])
"""Processes that start one after another walk through the ports far from each other."""


def free_port() -> int:
    """A port that nobody listens at, and that this process has not been given before it has seen all others.

    Raises OSError when all are taken.
    """
    for port in itertools.islice(_ports, len(_PORTS)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"no port of {_PORTS[0]} to {_PORTS[-1]} is free")


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
