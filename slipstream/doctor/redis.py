"""Redis: reachable, new enough, keeps what it is given, and lets us do everything that the services do."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.doctor.finding import Finding, failed, ok, skipped, warning
from slipstream.start.shared_defaults import DEFAULT_STREAM_MAX_BYTES
from speculator.errors import StreamError
from speculator.redis.client import RedisKeys, connect, is_denied, redis_errors
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream

_LEAST_VERSION = (6, 2)
_LEAST_TIMES_CAP = 1.5
"""What the trainer has acked stays up to the cap: from 0.7 of `maxmemory` on capture would be sampled for good."""
_MIB = 2**20


def check_own_redis() -> Iterator[Finding]:
    """The server that the demo and the tests start for themselves."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch, EmbeddedRedis(Path(scratch)) as own:
        with connect(own.url) as client:
            info: Any = client.info("server")
        yield ok("redis", f"{info['redis_version']} of our own, started and stopped; --redis-url looks at another")


def check_redis(url: str) -> Iterator[Finding]:
    with connect(url) as client:
        try:
            info = _info(client)
        except StreamError as error:
            if not is_denied(error):
                raise
            yield skipped("redis", "reached; this user may not ask for its version, persistence and memory (INFO)")
        else:
            yield _version(info["redis_version"])
            yield _persistence(info)
            yield _memory(info)
        yield _rights(client)


@redis_errors
def _info(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.info()
    return found


def _version(text: str) -> Finding:
    version = tuple(int(part) for part in text.split(".")[:2])
    if version < _LEAST_VERSION:
        return failed("redis", f"version {text}: 6.2 or newer is needed, it has the stream commands")
    return ok("redis", f"version {text}")


def _persistence(info: dict[str, Any]) -> Finding:
    name = "redis persistence"
    for part in ("aof_last_write_status", "rdb_last_bgsave_status"):
        if info.get(part, "ok") != "ok":
            return failed(name, f"{part} is {info[part]}: give Redis a directory that it can write, with free space")
    if not info.get("aof_enabled"):
        return warning(name, "no append-only file, a restart of Redis loses traces: set appendonly yes")
    return ok(name, "append-only file")


def _memory(info: dict[str, Any]) -> Finding:
    name, limit, policy = "redis memory", info["maxmemory"], info["maxmemory_policy"]
    used = f"{info['used_memory'] / _MIB:.0f} MiB in use"
    if policy != "noeviction":
        find = failed if limit else warning
        return find(name, f"{used}; {policy} would evict the stream unseen: set maxmemory-policy noeviction")
    if not limit:
        return ok(name, f"{used}, no limit; the stream keeps its own (--stream-max-bytes)")
    if limit < _LEAST_TIMES_CAP * DEFAULT_STREAM_MAX_BYTES:
        return warning(
            name,
            f"{used}, maxmemory {limit / _MIB:.0f} MiB is less than {_LEAST_TIMES_CAP:g} times the stream's cap of "
            f"{DEFAULT_STREAM_MAX_BYTES // _MIB}, which history fills: raise it, or lower --stream-max-bytes",
        )
    return ok(name, f"{used} of {limit / _MIB:.0f} MiB")


def _rights(client: Any) -> Finding:
    """What the services do, under the keys of a model that does not exist. Raises StreamError."""
    keys = RedisKeys(model_key=f"doctor-{secrets.token_hex(4)}")
    stream = TraceStream(client, keys.model_key, max_bytes=_MIB, consumer="doctor")
    pointer = DraftPointer(client, keys.model_key)
    tried: dict[str, Callable[[], object]] = {
        "append traces": lambda: stream.append(b"doctor", trace_id="doctor"),
        "read and settle them": lambda: (stream.ack([entry.id for entry in stream.read(1, 0)]), stream.lag()),
        "publish drafts": lambda: pointer.publish(1),
        "report an engine": lambda: pointer.report_engine("doctor", {"version": 1}),
        "see engines": pointer.engines,
    }
    denied = {what: reason for what, do in tried.items() if (reason := _denial(do))}
    for key in _keys(keys):
        _denial(partial(_remove, client, key))
    name, may = "redis rights", ", ".join(what for what in tried if what not in denied)
    if not denied:
        return ok(name, f"this user may {may}")
    if not may:
        reason = next(iter(denied.values()))
        return failed(name, f"{reason}: give the user the keys slipstream:* and the commands on them")
    return warning(name, f"this user may {may}; not {', '.join(denied)}: right for the user of one service alone")


def _denial(do: Callable[[], object]) -> str:
    """Redis's reason not to allow it, or nothing where it does."""
    try:
        do()
    except StreamError as error:
        if not is_denied(error):
            raise
        return str(error.__cause__)
    return ""


def _keys(keys: RedisKeys) -> tuple[str, ...]:
    """All that `_rights` may have written; a user who may not remove one of them may remove others."""
    return (
        *(keys.traces, keys.sizes, keys.num_appended, keys.accounts, keys.open),
        *(keys.dead_letters, keys.desired_draft, keys.engines, keys.engine("doctor")),
    )


@redis_errors
def _remove(client: Any, key: str) -> None:
    client.delete(key)
