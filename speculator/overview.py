"""The versions of a store as an operator looks at them: files, states and what Redis knows, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from speculator.errors import ConfigError, DraftFileError, StreamError, UnknownDraftError
from speculator.lifecycle import State, Transition
from speculator.pointer import DraftPointer
from speculator.store import DraftStore, Manifest


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version among the others."""

    version: int
    state: State | None
    """None where nothing is known of it: a crash came before its state was written."""
    parent: int | None = None
    created_ms: int | None = None
    gate: Any = None
    """The gate's numbers, as its manifest has them."""
    damage: str = ""
    """Why its manifest cannot be read."""
    is_last_good: bool
    is_published: bool
    is_pinned: bool
    engines: list[str]
    """The engines that have it in service."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine reports; None, or empty, for what it does not say."""

    engine_id: str
    version: int | None
    role: str
    """Its part in the trial of a version: canary, waiting, settled."""
    accept_length: float | None
    """Tokens a verification of the version in service, lately."""
    target_version: int | None
    verdicts: str
    """How its trials ended."""
    last_verdict: str


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    drafts: list[DraftRow]
    """Oldest first."""
    engines: list[EngineRow]
    """By engine id."""
    last_good: int | None
    published: int | None
    pinned: int | None
    no_redis: str
    """Why nothing is known of what is published, pinned and in service; empty where Redis answered."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    draft: DraftRow
    manifest: Manifest
    history: list[Transition]
    """Oldest first."""


class _Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis knows."""

    published: int | None = None
    pinned: int | None = None
    engines: dict[str, dict[str, str]] = {}
    no_redis: str = ""


def overview(store: DraftStore, pointer: Callable[[], DraftPointer]) -> Overview:
    """Every version; what Redis knows is left out where `pointer` or it cannot say. Raises StoreError."""
    serving = _serving(pointer)
    states, last_good = store.lifecycle.states(), store.lifecycle.last_good()

    def row(version: int) -> DraftRow:
        return DraftRow(
            version=version,
            state=states.get(version),
            is_last_good=version == last_good,
            is_published=version == serving.published,
            is_pinned=version == serving.pinned,
            engines=sorted(each for each, report in serving.engines.items() if report.get("version") == str(version)),
            **_told(store, version),
        )

    return Overview(
        drafts=[row(version) for version in store.versions()],
        engines=[_engine(engine_id, serving.engines[engine_id]) for engine_id in sorted(serving.engines)],
        last_good=last_good,
        published=serving.published,
        pinned=serving.pinned,
        no_redis=serving.no_redis,
    )


def _engine(engine_id: str, report: Mapping[str, str]) -> EngineRow:
    """An engine may be of another release: what it does not say, or what cannot be read, is left out."""

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


def _serving(pointer: Callable[[], DraftPointer]) -> _Serving:
    try:
        asked = pointer()
        return _Serving(published=asked.published(), pinned=asked.pinned(), engines=asked.engines())
    except (StreamError, ConfigError) as error:
        return _Serving(no_redis=str(error))


def _told(store: DraftStore, version: int) -> dict[str, Any]:
    """What its manifest says."""
    try:
        manifest = store.manifest(version)
    except (DraftFileError, UnknownDraftError) as error:
        # Damaged, or pruned since the versions were listed.
        return {"damage": str(error)}
    return {"parent": manifest.parent, "created_ms": manifest.created_ms, "gate": manifest.info.get("gate")}
