"""Operator commands on draft versions: list, compare, promote, roll back, pin, export.

Command line and gateway both use `DraftOperator`. Each change of the served draft is recorded twice: as the event
`asked` before it begins, and with its result when it is done; a crash in between leaves only the first. Engines keep
comparing versions that an operator chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor

from speculator.draft.checkpoint import check_can_write, config_from_json, expected_shapes, write_folder
from speculator.draft.eagle3 import DraftConfig
from speculator.draft.public_heads import check_sglang_layout
from speculator.errors import ConfigError, DraftFileError, LifecycleError, StoreError, StreamError, UnknownDraftError
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import BARRED, SERVABLE, Event, Transition, VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore, Manifest

log = structlog.get_logger(__name__)


Layout = Callable[[DraftConfig, Mapping[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]
"""Converts config and tensors of a draft file to config.json and tensors of another layout."""


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version in an overview."""

    version: int
    state: VersionState | None
    """None for an unknown version: a crash came before its state was written."""
    parent: int | None = None
    created_ms: int | None = None
    gate: Any = None
    """The gate's figures in the manifest."""
    damage: str = ""
    """Why the manifest cannot be read; empty if it can."""
    is_last_good: bool
    is_published: bool
    is_pinned: bool
    engines: list[str]
    """Engines that have the version in service."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's report; None, or empty, for fields that it lacks."""

    engine_id: str
    version: int | None
    role: str
    """The engine's part in the trial of a version: canary, waiting, needs traffic, settled."""
    accept_length: float | None
    """Recent tokens a verification of the version in service."""
    target_version: int | None
    verdicts: str
    """Outcomes of the engine's trials."""
    last_verdict: str


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    drafts: list[DraftRow]
    """Oldest first."""
    engines: list[EngineRow]
    """By engine id."""
    last_good: int | None
    published: int | None
    pinned: int | None
    trainer_rests: bool
    """Whether the trainer pauses because no engine uses its draft head."""
    no_redis: str
    """Why the published, pinned and served versions are unknown; empty if Redis answered."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    draft: DraftRow
    manifest: Manifest
    history: list[Transition]
    """Oldest first."""


def overview(store: DraftStore, pointer: Callable[[], DraftPointer]) -> Overview:
    """Every version and engine; without data from Redis if it cannot be reached. Raises StoreError."""
    published, pinned, trainer_rests, no_redis = None, None, False, ""
    reports: dict[str, dict[str, str]] = {}
    try:
        asked = pointer()
        published, pinned, reports = asked.published(), asked.pinned(), asked.engines()
        trainer_rests = asked.is_trainer_resting()
    except (StreamError, ConfigError) as error:
        no_redis = str(error)
    states, last_good = store.lifecycle.states(), store.lifecycle.last_good()

    def row(version: int) -> DraftRow:
        return DraftRow(
            version=version,
            state=states.get(version),
            is_last_good=version == last_good,
            is_published=version == published,
            is_pinned=version == pinned,
            engines=sorted(each for each, report in reports.items() if report.get("version") == str(version)),
            **_manifest_fields(store, version),
        )

    return Overview(
        drafts=[row(version) for version in store.versions()],
        engines=[_engine(engine_id, report) for engine_id, report in sorted(reports.items())],
        last_good=last_good,
        published=published,
        pinned=pinned,
        trainer_rests=trainer_rests,
        no_redis=no_redis,
    )


def _engine(engine_id: str, report: Mapping[str, str]) -> EngineRow:
    """Parse an engine's report; leaves out missing and unreadable fields, since it may run another release."""

    def whole(name: str) -> int | None:
        text = report.get(name, "")
        return int(text) if text.isdecimal() else None

    try:
        accept_length = float(report["draft_accept_length"])
    except (KeyError, ValueError):
        accept_length = None
    return EngineRow(
        engine_id=engine_id,
        version=whole("version"),
        role=report.get("role", ""),
        accept_length=accept_length,
        target_version=whole("target_version"),
        verdicts=report.get("verdicts", ""),
        last_verdict=report.get("last_verdict", ""),
    )


def _manifest_fields(store: DraftStore, version: int) -> dict[str, Any]:
    """Fields of a `DraftRow` from the version's manifest."""
    try:
        manifest = store.manifest(version)
    except (DraftFileError, UnknownDraftError) as error:
        # Damaged, or pruned since the versions were listed.
        return {"damage": str(error)}
    return {"parent": manifest.parent, "created_ms": manifest.created_ms, "gate": manifest.info.get("gate")}


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor changed from version `a` to `b`, each flattened to a vector."""

    name: str
    shapes: list[list[int]]
    """[shape in a, shape in b]; if they differ, the other fields are None."""
    num_changed: int | None = None
    """Elements that are not equal."""
    relative_l2: float | None = None
    """|b − a| / |a|; None for a map of token ids, and where a is 0."""
    cosine: float | None = None
    """a·b / (|a| |b|)."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    a: int
    b: int
    tensors: list[TensorChange]
    config: dict[str, list[Any]]
    """Fields that differ, as [in a, in b]; null also for absent ones."""
    manifest: dict[str, list[Any]]
    """The same for manifests; nested fields have dotted names: `info.trained_tokens`."""


def tensor_change(name: str, a: Tensor | None, b: Tensor | None) -> TensorChange:
    """Compare a tensor of version `a` with that of `b`; None for a missing tensor."""
    shapes = [[] if tensor is None else list(tensor.shape) for tensor in (a, b)]
    if a is None or b is None or a.shape != b.shape:
        return TensorChange(name=name, shapes=shapes)
    num_changed = int((a != b).sum())
    if not a.is_floating_point():
        return TensorChange(name=name, shapes=shapes, num_changed=num_changed)
    # In float64: float32 sums of millions of products are wrong in the fourth decimal, even for equal tensors.
    x, y = a.flatten().double(), b.flatten().double()
    length_x, length_y = float(x.norm()), float(y.norm())
    return TensorChange(
        name=name,
        shapes=shapes,
        num_changed=num_changed,
        relative_l2=float((y - x).norm()) / length_x if length_x else None,
        cosine=float(torch.dot(x, y)) / (length_x * length_y) if length_x and length_y else None,
    )


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    pairs = {name: [flat_a.get(name), flat_b.get(name)] for name in sorted(flat_a.keys() | flat_b.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class DraftChange(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an operator's change."""

    version: int
    """The version that was promoted, rolled back, pinned or unpinned."""
    state: VersionState | None
    desired: int | None
    """The version that engines should run now."""
    num_unrecorded: int = 0
    """Events of this change that could not be written: a rollback does not depend on the event log."""


class DraftOperator:
    """Operator commands on one store, and on the engines that serve its versions.

    `pointer` is called for each use; it may raise StreamError, or ConfigError where Redis is not configured.
    """

    def __init__(
        self, store: DraftStore, pointer: Callable[[], DraftPointer], *, target_fingerprint: str | None = None
    ) -> None:
        self._store, self._pointer, self._fingerprint = store, pointer, target_fingerprint
        self._states = store.lifecycle

    def overview(self) -> Overview:
        """Every version and engine; without data from Redis if it cannot be reached. Raises StoreError."""
        return overview(self._store, self._pointer)

    def show(self, version: int) -> Details:
        """One version in detail. Raises StoreError (UnknownDraftError), or DraftFileError for a damaged manifest."""
        manifest = self._store.manifest(version)
        for row in self.overview().drafts:
            if row.version == version:
                return Details(draft=row, manifest=manifest, history=self._states.history(version))
        raise UnknownDraftError(f"draft version {version} has just been removed")

    def diff(self, a: int, b: int) -> Difference:
        """Compare version `a` with version `b`. Raises StoreError or DraftError."""
        weights_a, weights_b = self._store.load(a), self._store.load(b)
        manifests = [msgspec.to_builtins(self._store.manifest(version)) for version in (a, b)]
        return Difference(
            a=a,
            b=b,
            tensors=[
                tensor_change(name, weights_a.get(name), weights_b.get(name))
                for name in sorted(weights_a.keys() | weights_b.keys())
            ],
            config=_unequal(self._store.config(a), self._store.config(b)),
            manifest=_unequal(*manifests),
        )

    def events(self, count: int) -> list[Event]:
        """The last events, oldest first. Raises StoreError."""
        return self._states.recent_events(count)

    def promote(self, version: int, *, actor: str) -> DraftChange:
        """Have engines serve a version, even a quarantined one, after reading it back and verifying it.

        Raises StoreError, DraftError for a version that no engine can load, LifecycleError while another one is pinned,
        StreamError.
        """
        pointer = self._pointer()
        self._refuse_other_pin(pointer, version)
        self._verified(version)
        self._record_request("promote", version, actor)
        self._release(version, actor)
        if self._states.state(version) is VersionState.PROMOTED:
            self._states.move(version, VersionState.PROMOTED, actor=actor, reason="promoted by operator")
        pointer.publish(version)
        return self._record_result("promote", version, pointer, actor)

    def rollback(self, *, actor: str, reason: str, version: int | None = None) -> DraftChange:
        """Quarantine a version, by default the one that engines should run, and have the last good one served instead.

        Repeating the call completes a rollback that a crash cut short, and otherwise changes nothing: without `version`
        it is refused if the version in service is itself the result of a rollback. Raises StoreError, LifecycleError
        then or without another good version, DraftError if that one cannot be loaded, StreamError. A rollback succeeds
        even if the event log cannot be written: lost events are logged and counted.
        """
        pointer = self._pointer()
        bad = version or self._in_service(pointer)
        good = self._states.last_good(other_than=bad)
        if good is None:
            raise LifecycleError(f"no other draft version than {bad} was ever good: `slipstream drafts promote` one")
        self._verified(good)
        if self._states.state(bad) is None:
            self._store.manifest(bad)
        is_asked = self._record("asked", actor, action="rollback", version=bad, reason=reason)
        if self._states.state(bad) is None:
            self._states.move(bad, VersionState.WRITTEN, actor=actor)
        self._states.bar(bad, actor=actor, reason=reason)
        if (pinned := pointer.pinned()) is not None and self._states.state(pinned) not in SERVABLE:
            pointer.unpin()
        published = pointer.published()
        if published is None:
            pointer.publish(good)
        elif self._states.state(published) not in SERVABLE:
            pointer.replace(published, good)
        desired = pointer.desired()
        is_done = self._record("rollback", actor, version=bad, desired=desired, reason=reason)
        return DraftChange(
            version=bad,
            state=self._states.state(bad),
            desired=desired,
            num_unrecorded=(not is_asked) + (not is_done),
        )

    def pin(self, version: int, *, actor: str) -> DraftChange:
        """Have engines serve this version, whatever the trainer publishes, until `unpin`.

        Raises StoreError, DraftError, LifecycleError for a version that may not be served, StreamError.
        """
        pointer = self._pointer()
        self._verified(version)
        state = self._states.state(version)
        if state not in SERVABLE:
            known = "unknown" if state is None else state.value
            raise LifecycleError(f"draft version {version} is {known}: promote it first")
        self._record_request("pin", version, actor)
        pointer.pin(version)
        return self._record_result("pin", version, pointer, actor)

    def unpin(self, *, actor: str) -> DraftChange:
        """Have engines serve the published version again.

        Raises LifecycleError where nothing is pinned, StreamError, StoreError.
        """
        pointer = self._pointer()
        pinned = pointer.pinned()
        if pinned is None:
            raise LifecycleError("no draft version is pinned")
        self._record_request("unpin", pinned, actor)
        pointer.unpin()
        return self._record_result("unpin", pinned, pointer, actor)

    def export(self, version: int, folder: Path, *, actor: str, layout: Layout | None = None) -> Path:
        """Write a version as a Hugging Face folder and return it: as SGLang loads it, or in another layout.

        Raises StoreError, DraftError, ConfigError where the folder holds something or cannot be written.
        """
        check_can_write(folder)
        weights, values = self._verified(version), self._store.config(version)
        config = config_from_json(values)
        if layout is None:
            check_sglang_layout(config)
        else:
            values, weights = layout(config, weights)
        written = write_folder(folder, weights, values)
        self._states.events.append("export", actor=actor, version=version)
        return written

    def _verified(self, version: int) -> dict[str, Tensor]:
        shapes = expected_shapes(config_from_json(self._store.config(version)))
        return self._store.load(version, expected_fingerprint=self._fingerprint, expected_shapes=shapes)

    def _release(self, version: int, actor: str) -> None:
        """Move a version from its state to one in which it may be served."""
        if self._states.state(version) in BARRED:
            self._states.move(version, VersionState.QUARANTINED, actor=actor)
            self._states.move(version, VersionState.SCORED, actor=actor, reason="released by operator")
        else:
            fingerprint = self._store.manifest(version).target_fingerprint
            admit(
                self._store,
                version,
                target_fingerprint=fingerprint,
                actor=actor,
                reason="promoted by operator, unscored",
            )

    def _refuse_other_pin(self, pointer: DraftPointer, version: int) -> None:
        pinned = pointer.pinned()
        if pinned not in (None, version):
            raise LifecycleError(f"draft version {pinned} is pinned: unpin it first")

    def _in_service(self, pointer: DraftPointer) -> int:
        """The version that engines should run. Refused if a rollback put it there: the operator may have meant the
        version that is already gone.
        """
        version = pointer.desired() or self._states.last_good()
        if version is None:
            raise LifecycleError("there is no draft version in service to roll back")
        histories = self._states.histories()
        own = histories.get(version, [])
        if own and own[-1].state in BARRED:
            return version  # complete an interrupted rollback
        since = max((one.sequence for one in own), default=0)
        for other, history in histories.items():
            was_servable = any(one.state in SERVABLE for one in history)
            if was_servable and history[-1].state in BARRED and history[-1].sequence > since:
                raise LifecycleError(
                    f"draft version {other} was rolled back already, and engines should run {version}: "
                    f"to roll that one back, too, say that it is version {version}"
                )
        return version

    def _record_request(self, action: str, version: int, actor: str) -> None:
        self._states.events.append("asked", actor=actor, action=action, version=version)

    def _record(self, kind: str, actor: str, **fields: str | int | None) -> bool:
        """Write an event; returns False if it could not be written."""
        try:
            self._states.events.append(kind, actor=actor, **fields)
        except StoreError as error:
            log.error("event not written", kind=kind, actor=actor, error=str(error), **fields)
            return False
        return True

    def _record_result(self, kind: str, version: int, pointer: DraftPointer, actor: str) -> DraftChange:
        desired = pointer.desired()
        self._states.events.append(kind, actor=actor, version=version, desired=desired)
        return DraftChange(version=version, state=self._states.state(version), desired=desired)
