"""Checks of a deployment: settings, API keys, Redis, the draft store, the trainer's state, the trace stream.

Modules that import PyTorch are imported inside the check that needs them, so that a broken PyTorch fails that one only.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.gateway.config import load_settings as load_gateway
from serving.gateway.keys import read_keys
from slipstream.doctor.finding import Finding, failed, ok, skipped, warning
from slipstream.doctor.machine import is_writable
from slipstream.models import resolve_model
from slipstream.settings import COMPOSE_VARIABLES, unknown_variables
from speculator.errors import ConfigError, SlipstreamError, StreamError
from speculator.host import PREFIX
from speculator.redis.client import RedisKeys, connect, is_denied, redis_errors
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.model_names import check_name
from speculator.redis.trace_stream import TraceStream, cap_for

if TYPE_CHECKING:
    from speculator.versions.store import DraftStore

_LEAST_VERSION = (6, 2)
_LEAST_TIMES_CAP = 1.5
"""Least maxmemory over the stream's cap. Acked traces fill the stream up to its cap, and from 0.7 of `maxmemory` on
capture keeps only a share of the traces, so a smaller Redis would sample for good."""
_MIB = 2**20


def check_settings(known: Set[str]) -> Iterator[Finding]:
    """Every setting in the environment is valid, and no variable with our prefix is unread (not in `known`)."""
    from serving.sglang.settings import is_enabled
    from serving.sglang.settings import load_settings as load_plugin
    from slipstream.logs import load_settings as load_logs
    from speculator.tracing import is_enabled as load_spans
    from trainer.config import load_config

    def load_trainer() -> object:
        nowhere = Path()
        return load_config(model_dir=nowhere, redis_url="", model_key="", store_dir=nowhere, state_dir=nowhere)

    num_faults = 0
    for load in (load_logs, load_spans, load_gateway, is_enabled, load_plugin, load_trainer):
        try:
            load()
        except ConfigError as error:
            num_faults += 1
            yield failed("settings", str(error))
    for name in sorted((COMPOSE_VARIABLES - known) & os.environ.keys()):
        yield skipped("settings", f"{name} is for docker compose: slipstream does not read it")
    unknown = unknown_variables(os.environ, known | COMPOSE_VARIABLES)
    for name, nearest in unknown.items():
        fix = f"is {nearest} meant?" if nearest else "unset it; docs/reference/configuration.md lists all variables"
        yield warning("settings", f"nothing reads {name}: {fix}")
    if not num_faults and not unknown:
        yield ok("settings", f"{sum(name in known for name in os.environ)} {PREFIX}* variables set, all of them valid")


def check_keys() -> Iterator[Finding]:
    """The gateway's key file is readable and private, and not all of its keys have expired."""
    try:
        settings = load_gateway()
    except ConfigError:
        return  # reported by `check_settings`
    file = settings.keys_file
    if file is not None:
        keys = read_keys(file)
        over = [key.name for key in keys if key.is_expired(time.time())]
        if len(over) == len(keys):
            yield warning("keys", f"{file} has no valid key: make one with `slipstream keys add`")
        elif over:
            yield warning("keys", f"{len(keys) - len(over)} in {file}; expired: {', '.join(over)}")
        else:
            yield ok("keys", f"{len(keys)} in {file}")
    elif settings.api_key is not None:
        yield ok("keys", "one for all clients: SLIPSTREAM_API_KEY")
        return
    elif settings.auth_elsewhere:
        yield ok("keys", "no API keys: AUTH_ELSEWHERE is set, so a proxy in front must authenticate clients")
    else:
        yield ok("keys", "no API keys: the gateway serves any client, so it starts only on a loopback address")
        return
    if settings.admin_key is None:
        yield warning("keys", "no admin key: /admin is closed, and the gateway starts only on a loopback address")


def check_own_redis() -> Iterator[Finding]:
    """The Redis server that the demo and `serve --learn` start themselves works here."""
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-") as scratch,
        EmbeddedRedis(Path(scratch), ends_with_us=True) as own,
    ):
        with connect(own.url) as client:
            info: Any = client.info("server")
        yield ok("redis", f"{info['redis_version']}, our own, starts and stops; --redis-url checks another")


def check_redis(url: str, model: str) -> Iterator[Finding]:
    """Redis is reachable, new enough, persistent, has room for the traces of `model`, and grants the rights that the
    services need.
    """
    from serving.sglang.settings import load_settings as load_plugin

    with connect(url) as client:
        try:
            info: Any = _ask(client, "info")
        except StreamError as error:
            if not is_denied(error):
                raise
            yield skipped("redis", "reached; version, persistence and memory unknown: this user may not run INFO")
        else:
            cap = 0
            with suppress(ConfigError):  # reported by `check_settings`
                cap = load_plugin().stream_max_bytes
            yield from judge_server(info, cap or cap_for(resolve_model(model)))
        yield _check_permissions(client)


def judge_server(info: Mapping[str, Any], stream_bytes: int) -> Iterator[Finding]:
    """Check version, persistence and memory in the reply to Redis's INFO; `stream_bytes` is the stream's cap."""
    version = info["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST_VERSION:
        yield failed("redis", f"version {version}: upgrade to 6.2 or newer, which has the stream commands")
    else:
        yield ok("redis", f"version {version}")

    name = "redis persistence"
    writes = {part: info.get(part, "ok") for part in ("aof_last_write_status", "rdb_last_bgsave_status")}
    if broken := [part for part, status in writes.items() if status != "ok"]:
        part = broken[0]
        yield failed(name, f"{part} is {writes[part]}: give Redis a writable directory with free space")
    elif not info.get("aof_enabled"):
        yield warning(name, "no append-only file, so a restart of Redis loses traces: set appendonly yes")
    else:
        yield ok(name, "append-only file")

    name, limit, policy = "redis memory", info.get("maxmemory"), info.get("maxmemory_policy")
    used = f"{info['used_memory'] / _MIB:.0f} MiB in use"
    if policy is None:
        yield skipped(name, f"{used}; this server does not say its eviction policy: it must be noeviction")
    elif policy != "noeviction":
        find = failed if limit else warning
        yield find(name, f"{used}; {policy} may evict the stream silently: set maxmemory-policy noeviction")
    elif not limit:
        yield ok(name, f"{used}, no limit; the stream has its own cap (--stream-max-bytes)")
    elif limit < _LEAST_TIMES_CAP * stream_bytes:
        yield warning(
            name,
            f"{used}, maxmemory {limit / _MIB:.0f} MiB is less than {_LEAST_TIMES_CAP:g} times the stream's cap of "
            f"{stream_bytes // _MIB}, which history fills: raise it, or lower --stream-max-bytes",
        )
    else:
        yield ok(name, f"{used} of {limit / _MIB:.0f} MiB")


def _check_permissions(client: Any) -> Finding:
    """Try everything that the services do, with the keys of a made-up model. Raises StreamError."""
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
    written = (keys.traces, keys.sizes, keys.num_appended, keys.accounts, keys.open)
    # One by one: a user who may not delete one key may delete others.
    for key in (*written, keys.dead_letters, keys.desired_draft, keys.engines, keys.engine("doctor")):
        _denial(partial(_ask, client, "delete", key))
    name, may = "redis rights", ", ".join(what for what in tried if what not in denied)
    if not denied:
        return ok(name, f"this user may {may}")
    if not may:
        reason = next(iter(denied.values()))
        return failed(name, f"{reason}: give the user the keys slipstream:* and the commands on them")
    return warning(name, f"this user may {may}; not {', '.join(denied)}: fine only for the user of a single service")


@redis_errors
def _ask(client: Any, command: str, *arguments: str) -> Any:
    return getattr(client, command)(*arguments)


def _denial(do: Callable[[], object]) -> str:
    """Redis's reason to deny the action, or "" where it is allowed."""
    try:
        do()
    except StreamError as error:
        if not is_denied(error):
            raise
        return str(error.__cause__)
    return ""


def check_store(root: Path) -> Iterator[Finding]:
    """The draft store can be written, is whole, and has a version that may be served."""
    from speculator.versions.operator import overview
    from speculator.versions.store import DraftStore

    def no_redis() -> DraftPointer:
        raise ConfigError("not asked")

    if not is_writable(root):
        yield failed("store", f"{root} is not writable: give the services' user write access, or pass another --store")
    store = DraftStore(root)
    rows = overview(store, no_redis).drafts
    damaged = ", ".join(str(row.version) for row in rows if row.damage)
    served = store.lifecycle.newest_servable()
    if not rows:
        yield ok("store", f"{root} holds no version yet; serve or train writes the first")
    elif damaged:
        yield failed("store", f"{root}: versions {damaged} are damaged: restore them, or remove their folders")
    elif served is None:
        yield failed("store", f"{root}: all versions are barred: release one with `slipstream drafts promote`")
    else:
        store.load(served)
        yield ok("store", f"{root} holds {len(rows)} versions; version {served} is intact and may be served")


def check_fit(model: str, root: Path) -> Iterator[Finding]:
    """The store's drafts fit the target's sizes and context window. Raises DraftError where they do not."""
    from speculator.versions.lineage import check_lineage
    from speculator.versions.store import DraftStore

    store = DraftStore(root)
    latest = store.latest()
    if latest is not None:
        check_lineage(store, latest, resolve_model(model))
        yield ok("draft", f"the drafts in {root} fit the target")


def check_trainer(state: Path) -> Iterator[Finding]:
    """The trainer's checkpoint is readable. Raises StoreError where it is damaged."""
    from trainer.checkpoint import load_checkpoint

    found = load_checkpoint(state)
    if found is None:
        yield ok("trainer", f"{state} holds no checkpoint yet")
    else:
        progress = found[1]
        yield ok("trainer", f"{state}: {progress.num_traces} traces, version {progress.version}")


def check_stream(url: str, model: str, store_root: Path) -> Iterator[Finding]:
    """Traces of the store's target in Redis, and the engines that report there.

    Raises ConfigError where Redis knows the target by other names only, and StreamError.
    """
    from speculator.versions.store import DraftStore

    store = DraftStore(store_root)
    newest = store.latest()
    if newest is None:
        yield skipped("stream", "the store is empty, so its target is not known")
        return
    try:
        key = _model_key(model, store, newest)
    except SlipstreamError as error:
        yield skipped("stream", str(error))
        return
    with connect(url) as client:
        try:
            yield _stream_state(client, key)
        except StreamError as error:
            if not is_denied(error):
                raise
            yield skipped("stream", "this Redis user may not read traces: pass the trainer's user in --redis-url")


def _model_key(model: str, store: DraftStore, version: int) -> str:
    from speculator.draft.checkpoint import model_key

    return model_key(resolve_model(model), store.manifest(version).target_fingerprint)


def _stream_state(client: Any, key: str) -> Finding:
    """State of the stream, read with commands that engine and trainer may run, and without creating a stream."""
    name, counter = "stream", RedisKeys(model_key=key).num_appended
    count: bytes = _ask(client, "get", counter) or b"0"
    if not count.isdigit():
        raise StreamError(f"{counter} in Redis is not a number: another client wrote it; remove that key")
    if not int(count):
        check_name(client, key)
        return ok(name, f"no trace yet of {key}: serve with --capture")
    lag = TraceStream(client, key, max_bytes=_MIB, consumer="doctor").lag()
    engines = DraftPointer(client, key).engines()
    detail = (
        f"{lag.appended} traces, {lag.acked} settled, {lag.pending + lag.undelivered} waiting, {lag.lost} lost, "
        f"{lag.dead_lettered} set aside, {lag.bytes / _MIB:.1f} MiB; {len(engines)} engines report"
    )
    if idle := sum(report.get("role") == "needs traffic" for report in engines.values()):
        detail += f", {idle} of them need traffic before they try the newest version"
    others = {"skipped": lag.skipped, "redelivered": lag.redelivered, "foreign": lag.foreign}
    if told := ", ".join(f"{count} {name}" for name, count in others.items() if count):
        return warning(name, f"{detail}; {told}: another client changes the stream or its consumer group; stop it")
    if lag.lost:
        return warning(name, f"{detail}: the trainer is too slow or was down; raise --stream-max-bytes, or start it")
    return ok(name, detail)
