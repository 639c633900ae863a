"""The draft store, the trainer's state, and how the stream stands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.doctor.finding import Finding, failed, ok, skipped, warning
from slipstream.models import resolve_model
from speculator.errors import ConfigError, SlipstreamError, StreamError
from speculator.redis.client import connect, is_denied, redis_errors

if TYPE_CHECKING:
    from speculator.redis.control_plane import DraftPointer

_MIB = 2**20


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
    if not _num_appended(client, RedisKeys(model_key=key).num_appended):
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
