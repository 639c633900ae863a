"""What a deployment is made of: settings, API keys, Redis, the draft store, the trainer's state, the trace stream."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.doctor.finding import Finding, failed, ok, skipped, warning
from slipstream.models import resolve_model
from slipstream.settings import COMPOSE_VARIABLES, DEFAULT_STREAM_MAX_BYTES, PREFIX, unknown_variables
from speculator.errors import ConfigError, SlipstreamError, StreamError
from speculator.redis.client import RedisKeys, connect, is_denied, redis_errors
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream

if TYPE_CHECKING:
    from speculator.redis.control_plane import DraftPointer


def check_settings(known: Set[str]) -> Iterator[Finding]:
    from serving.gateway.config import load_settings as load_gateway
    from serving.sglang.settings import is_enabled
    from serving.sglang.settings import load_settings as load_plugin
    from slipstream.logs import load_settings as load_logs
    from speculator.tracing import is_wanted as load_spans
    from trainer.config import load_config

    nowhere = Path()
    num_faults = 0
    for load in (
        load_logs,
        load_spans,
        load_gateway,
        is_enabled,
        load_plugin,
        lambda: load_config(model_dir=nowhere, redis_url="", model_key="", store_dir=nowhere, state_dir=nowhere),
    ):
        try:
            load()
        except ConfigError as error:
            num_faults += 1
            yield failed("settings", str(error))
    for name in sorted((COMPOSE_VARIABLES - known) & os.environ.keys()):
        yield skipped("settings", f"{name} is docker compose's: nothing here reads it")
    unknown = unknown_variables(os.environ, known | COMPOSE_VARIABLES)
    for name, nearest in unknown.items():
        fix = f"is {nearest} meant?" if nearest else "unset it, docs/configuration.md has all that are read"
        yield warning("settings", f"nothing reads {name}: {fix}")
    if not num_faults and not unknown:
        yield ok("settings", f"{sum(name in known for name in os.environ)} {PREFIX}* variables set, all of them usable")


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
    ledger = keys.ledger
    return (
        *(ledger.traces, ledger.sizes, ledger.num_appended, ledger.accounts, ledger.open),
        *(keys.dead_letters, keys.desired_draft, keys.engines, keys.engine("doctor")),
    )


@redis_errors
def _remove(client: Any, key: str) -> None:
    client.delete(key)


def check_store(root: Path) -> Iterator[Finding]:
    from speculator.versions.operator import overview
    from speculator.versions.store import DraftStore

    name = "store"
    if not _is_writable(root):
        yield failed(name, f"{root} cannot be written: let the services' user write there, or pass another --store")
    store = DraftStore(root)
    rows = overview(store, _no_redis).drafts
    if not rows:
        yield ok(name, f"{root} holds no version yet; serve or train writes the first")
        return
    damaged = [row.version for row in rows if row.damage]
    served = store.lifecycle.newest_servable()
    if damaged:
        versions = ", ".join(map(str, damaged))
        yield failed(name, f"{root}: versions {versions} are damaged: restore them, or remove their folders")
    elif served is None:
        yield failed(name, f"{root}: no version may be served: `slipstream drafts promote` releases one of them")
    else:
        store.load(served)
        yield ok(name, f"{root} holds {len(rows)} versions, {served} is whole and may be served")


def check_fit(model: str, root: Path) -> Iterator[Finding]:
    """Whether the store's drafts are for a target of these sizes and this window. Raises DraftError where not."""
    from speculator.versions.lineage import check_lineage
    from speculator.versions.store import DraftStore

    store = DraftStore(root)
    latest = store.latest()
    if latest is not None:
        check_lineage(store, latest, resolve_model(model))
        yield ok("draft", f"those in {root} fit the target")


def _no_redis() -> DraftPointer:
    raise ConfigError("not asked")


def _is_writable(root: Path) -> bool:
    place = root
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def check_trainer(state: Path) -> Iterator[Finding]:
    """The trainer's own checkpoint. Raises StoreError where it is damaged."""
    from trainer.session import load_checkpoint

    found = load_checkpoint(state)
    if found is None:
        yield ok("trainer", f"{state} holds no checkpoint yet")
    else:
        progress = found[1]
        yield ok("trainer", f"{state}: {progress.num_traces} traces, version {progress.version}")


def check_stream(url: str, model: str, store_root: Path) -> Iterator[Finding]:
    """Traces of the store's target in Redis, and the engines that report themselves there. Raises StreamError."""
    from speculator.draft.checkpoint import model_key
    from speculator.versions.store import DraftStore

    name, store = "stream", DraftStore(store_root)
    newest = store.latest()
    if newest is None:
        yield skipped(name, "the store does not say yet which target it is for")
        return
    try:
        key = model_key(resolve_model(model), store.manifest(newest).target_fingerprint)
    except SlipstreamError as error:
        yield skipped(name, str(error))
        return
    with connect(url) as client:
        try:
            finding = _standing(client, key)
        except StreamError as error:
            if not is_denied(error):
                raise
            finding = skipped(name, "this user may not see traces; the trainer's may")
    yield finding


def _standing(client: Any, key: str) -> Finding:
    """With commands that engine and trainer may run, and without making a stream where none is."""
    from speculator.redis.client import RedisKeys
    from speculator.redis.control_plane import DraftPointer
    from speculator.redis.trace_stream import TraceStream

    name = "stream"
    if not _num_appended(client, RedisKeys(model_key=key).ledger.num_appended):
        return ok(name, f"no trace yet of {key}: serve with --capture")
    lag = TraceStream(client, key, max_bytes=_MIB, consumer="doctor").lag()
    engines = DraftPointer(client, key).engines()
    detail = (
        f"{lag.appended} traces, {lag.acked} settled, {lag.pending + lag.undelivered} waiting, {lag.lost} lost, "
        f"{lag.dead_lettered} set aside, {lag.bytes / _MIB:.1f} MiB; {len(engines)} engines report"
    )
    others = {"skipped": lag.skipped, "redelivered": lag.redelivered, "foreign": lag.foreign}
    if told := ", ".join(f"{count} {name}" for name, count in others.items() if count):
        return warning(name, f"{detail}; {told}: another client changes the stream or its group; find out which")
    if lag.lost:
        return warning(name, f"{detail}: the trainer is too slow or was away; raise --stream-max-bytes, or start it")
    return ok(name, detail)


@redis_errors
def _num_appended(client: Any, key: str) -> int:
    count: bytes = client.get(key) or b"0"
    if not count.isdigit():
        raise StreamError(f"{key} in Redis holds no number: another client wrote there; remove that key")
    return int(count)
