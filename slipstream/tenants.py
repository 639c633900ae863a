"""`slipstream tenants erase`: remove everything that was kept of a tenant's traffic.

    order in Redis ──▶ running engines, gateways and trainers forget, and confirm it
                   ──▶ stream, dead letters, texts of prompt groups, Redis's own file
                   ──▶ the trainer's folder, recordings ──▶ event

In this sequence no trace comes back: when the stream is searched, no process has older traces left to write to it. The
command can be killed and repeated at any point. Services that start later also follow the order in Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis

from serving.group_cache.texts import GroupTexts
from speculator.errors import (
    ConfigError,
    DraftFileError,
    SlipstreamError,
    StoreError,
    StreamError,
    TraceError,
    UnknownDraftError,
)
from speculator.redis.client import is_denied
from speculator.redis.control_plane import DraftPointer
from speculator.redis.model_names import is_known
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover, remove_from_recording
from speculator.redis.trace_stream import RewardStream
from speculator.trace import TraceHeader, read_header
from speculator.versions.lineage import counts_of
from speculator.versions.store import DraftStore
from trainer.replay.trace_source import TEMPORARY, trace_folder

_POLL_S = 0.2

_T = TypeVar("_T")
_Confirmed = dict[str, bool]
IsTheirs = Callable[[TraceHeader], bool]


@dataclass(frozen=True, kw_only=True)
class Eraser:
    """Erases one tenant of one model from Redis, the trainer's folder and recordings."""

    tenant: str
    client: redis.Redis
    model_key: str
    store: DraftStore
    state: Path
    """The trainer's folder; it may be on another machine."""
    recordings: tuple[Path, ...]
    actor: str
    timeout_s: float
    """How long engines, gateways and trainers may take to answer."""

    def preview(self) -> dict[str, Any]:
        """Count what `erase` would remove; changes nothing. Raises StreamError, StoreError or ConfigError.

        `left` says whether `erase` would reach no service.
        """
        is_served = self._is_served()
        return {
            "tenant": self.tenant,
            "dry_run": True,
            **self._remove(is_served, dry_run=True),
            "drafts": self._drafts(),
            "left": [] if is_served else [self._not_served()],
        }

    def erase(self) -> dict[str, Any]:
        """Remove the tenant's traffic and record an event. `left` lists, in sentences, what could not be done.

        Once the order is given, Redis may be away for as long as services may take to answer. Raises StreamError,
        StoreError or ConfigError, and SlipstreamError where the order stands and Redis stays away.
        """
        is_served = self._is_served()
        # Refuse an unreadable file while there is no order yet.
        self._remove_files(is_served, dry_run=True)
        at_ms = ErasureOrders(self.client, self.model_key).order(self.tenant)
        deadline = time.monotonic() + self.timeout_s
        engines, gateways, trainers = self._await_reports(at_ms, deadline)
        removed = self._until(deadline, lambda: self._remove(is_served, dry_run=False))
        compacted = self._until(deadline, TraceRemover(self.client, self.model_key).compact)
        confirmed = {**engines, **gateways, **trainers}
        left = [f"{name} has not confirmed it" for name, done in confirmed.items() if not done]
        if not compacted:
            left.append("Redis's append-only file: Redis refuses to rewrite it; run BGREWRITEAOF as a user who may")
        if not is_served:
            left.append(self._not_served())
        elif not trainers and not self.state.is_dir():
            left.append(f"no trainer runs and {self.state} does not exist here: pass --state, or start the trainer")
        if (forks := self.store.root / "lineages").is_dir():
            left.append(f"{forks} has forks of an older Slipstream: erase with that version, then remove the folder")
        document = {
            "tenant": self.tenant,
            "dry_run": False,
            "ordered_ms": at_ms,
            "engines": engines,
            "gateways": gateways,
            "trainers": trainers,
            **removed,
            "drafts": self._drafts(),
            "left": left,
        }
        try:
            self._record(document)
        except StoreError as error:
            left.append(f"the event of this erasure is not in the store: {error}")
        return document

    def _is_served(self) -> bool:
        """Whether Redis knows engines, traces or trainers of the model; not if --model spells its name differently."""
        return is_known(self.client, self.model_key) or bool(ErasureOrders(self.client, self.model_key).trainers())

    def _not_served(self) -> str:
        return (
            f"this Redis knows no engine, trainer or trace of {self.model_key!r}: check --model and --redis-url, or "
            f"start the trainer; files in {self.state} stay"
        )

    def _remove(self, is_served: bool, *, dry_run: bool) -> dict[str, Any]:
        return {
            "redis": asdict(TraceRemover(self.client, self.model_key).remove(self._is_of_tenant, dry_run=dry_run)),
            "rewards": RewardStream(self.client, self.model_key).remove(self.tenant, dry_run=dry_run),
            "group_texts": GroupTexts(self.client, self.model_key).erase(self.tenant, dry_run=dry_run),
            **self._remove_files(is_served, dry_run=dry_run),
        }

    def _remove_files(self, is_served: bool, *, dry_run: bool) -> dict[str, Any]:
        # A trainer that runs under another name of the model has not heard of the order, and needs its files.
        return {
            "trainer_files": remove_files(self.state, self._is_of_tenant, dry_run=dry_run) if is_served else 0,
            "recordings": {
                str(path): asdict(remove_from_recording(path, self._is_of_tenant, dry_run=dry_run))
                for path in self.recordings
            },
        }

    def _is_of_tenant(self, header: TraceHeader) -> bool:
        return header.tenant == self.tenant

    def _await_reports(self, at_ms: int, deadline: float) -> tuple[_Confirmed, _Confirmed, _Confirmed]:
        """(running engines, gateways, trainers): whether each has carried the order out, by name."""
        while True:
            found = self._until(deadline, lambda: self._reports(at_ms))
            if all(done for confirmed in found for done in confirmed.values()) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def _reports(self, at_ms: int) -> tuple[_Confirmed, _Confirmed, _Confirmed]:
        pointer, erasures = DraftPointer(self.client, self.model_key), ErasureOrders(self.client, self.model_key)
        engines = {
            f"engine {name}": int(report.get("erased_ms", 0)) >= at_ms for name, report in pointer.engines().items()
        }
        gateways = {f"gateway {name}": erased_ms >= at_ms for name, erased_ms in erasures.gateways().items()}
        trainers = {name: report.erased_ms >= at_ms for name, report in erasures.trainers().items()}
        return engines, gateways, trainers

    def _until(self, deadline: float, step: Callable[[], _T]) -> _T:
        """Do a step after the order, again while Redis is away. Every step may be done twice."""
        while True:
            try:
                return step()
            except StreamError as error:
                if is_denied(error) or time.monotonic() > deadline:
                    raise SlipstreamError(
                        f"the order to erase {self.tenant!r} stands, but not all of its traces are removed "
                        f"({error}): repeat this command"
                    ) from None
            time.sleep(_POLL_S)

    def _drafts(self) -> list[dict[str, Any]]:
        """Versions in the store that have learnt from the tenant; tokens None: it may have."""
        found = []
        for version in self.store.versions():
            tokens = self._tokens(version)
            if tokens != 0:
                state = self.store.lifecycle.state(version)
                found.append({"version": version, "state": None if state is None else state.value, "tokens": tokens})
        return found

    def _tokens(self, version: int) -> int | None:
        try:
            return counts_of(self.store.manifest(version).info).learnt_from(self.tenant)
        except UnknownDraftError:
            return 0  # removed meanwhile
        except DraftFileError:
            return None

    def _record(self, document: Mapping[str, Any]) -> None:
        recordings = document["recordings"].values()
        self.store.lifecycle.events.append(
            "erase",
            actor=self.actor,
            tenant=self.tenant,
            **document["redis"],
            rewards=document["rewards"],
            group_texts=document["group_texts"],
            trainer_files=document["trainer_files"],
            from_recordings=sum(recording["removed"] for recording in recordings),
            drafts=[draft["version"] for draft in document["drafts"]],
            left=document["left"],
        )


def remove_files(state: Path, is_theirs: IsTheirs, *, dry_run: bool, written_s: float = 5.0) -> int:
    """Remove traces from a trainer's folder, unreadable ones too; returns how many. Raises ConfigError.

    A trainer may take `written_s` to write one trace; an older temporary file was left by a killed process.
    """
    paths: list[Path] = []
    try:
        # Not `glob`, which finds nothing in a folder that this user may not read.
        with suppress(FileNotFoundError):
            paths += (path for path in trace_folder(state).iterdir() if path.is_file())
        paths = [path for path in paths if _must_remove(path, is_theirs, written_s)]
        for path in paths if not dry_run else ():
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot remove files in {state} ({error.strerror}): run this as the trainer's user"
        ) from error
    return len(paths)


def _must_remove(path: Path, is_theirs: IsTheirs, written_s: float) -> bool:
    """Whether to remove a file: it has a trace of the tenant, or no readable one and no process is writing it."""
    deadline = time.monotonic() + (written_s if path.suffix == TEMPORARY else 0)
    while True:
        try:
            return is_theirs(read_header(path.read_bytes()))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"cannot read {path} ({error.strerror}): run this as the trainer's user") from error
        except TraceError:
            if time.monotonic() >= deadline:
                return True
            time.sleep(_POLL_S)


def sentences(document: Mapping[str, Any]) -> str:
    """The document of `preview` or `erase` as text for a terminal."""
    found = document["redis"]
    verb = "would go" if document["dry_run"] else "removed"
    lines = [
        f"tenant {document['tenant']}, {verb}: {found['stream']} traces in the stream, {found['dead_letters']} dead "
        f"letters ({found['unreadable']} unreadable), rewards of {document['rewards']} groups, "
        f"{document['group_texts']} texts of prompt groups, "
        f"{document['trainer_files']} files of the trainer",
        *(
            f"  {path}: {counts['removed']} of {counts['removed'] + counts['kept']} traces"
            for path, counts in document["recordings"].items()
        ),
        _about_drafts(document["drafts"]),
    ]
    if document["dry_run"]:
        lines.append("nothing was changed: pass --yes to erase")
    else:
        confirmed = {**document["engines"], **document["gateways"], **document["trainers"]}
        done = [name for name, is_done in confirmed.items() if is_done]
        lines.append(f"forgotten by: {', '.join(done) or 'none'}")
    lines += [f"left: {one}" for one in document["left"]]
    return "\n".join(lines)


def _about_drafts(drafts: list[dict[str, Any]]) -> str:
    if not drafts:
        return "no draft version has learnt from it"
    known = [f"{one['version']} ({one['tokens']} tokens)" for one in drafts if one["tokens"] is not None]
    unknown = [str(one["version"]) for one in drafts if one["tokens"] is None]
    parts = [f"draft versions that have learnt from it: {', '.join(known)}"] if known else []
    parts += [f"draft versions that may have: {', '.join(unknown)}"] if unknown else []
    return "; ".join(parts)
