"""`slipstream doctor`: looks at everything that the services need, and says how to mend what is missing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving.gateway.server import bind
from slipstream.models import cache_root, resolve_model
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import ConfigError, SlipstreamError
from speculator.store import DraftStore
from speculator.stream import connect

_NEEDED_DISK_GIB = 2.0
_NEEDED_MEMORY_GIB = 4.0


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(*, model: str, redis_url: str | None, store: Path | None, port: int) -> list[Finding]:
    """All checks, in the order in which a start would meet them; none of them raises."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("memory", _memory),
        ("disk", _disk),
        ("torch", _torch),
        ("model", lambda: str(resolve_model(model))),
        ("redis", partial(_redis, redis_url)),
        ("port", partial(_port, port)),
    ]
    if store is not None:
        checks.append(("store", partial(_store, store)))
    return [_run(name, check) for name, check in checks]


def _run(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except SlipstreamError as error:
        return Finding(name, False, str(error))


def _python() -> str:
    return sys.version.split()[0]


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if total < _NEEDED_MEMORY_GIB:
        raise ConfigError(f"{total:.1f} GiB of memory; the demo needs {_NEEDED_MEMORY_GIB:.0f}")
    return f"{total:.1f} GiB, {os.cpu_count()} cores"


def _disk() -> str:
    place = cache_root()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    if free < _NEEDED_DISK_GIB:
        raise ConfigError(f"{free:.1f} GiB free at {place}: free some, or set SLIPSTREAM_CACHE to another place")
    return f"{free:.0f} GiB free at {place}"


def _torch() -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__} on {device}"


def _redis(url: str | None) -> str:
    if url is not None:
        server = connect(url).info("server")
        return f"{server['redis_version']} at the given URL"
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch, EmbeddedRedis(Path(scratch)) as own:
        return f"{connect(own.url).info('server')['redis_version']}, started and stopped"


def _port(port: int) -> str:
    bind("127.0.0.1", port).close()
    return f"{port} is free"


def _store(root: Path) -> str:
    versions = DraftStore(root).versions()
    return f"{root} holds {len(versions)} versions"
