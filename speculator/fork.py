"""A new lineage: the base's version, copied as the first one of a store of its own (speculator/lineages.py)."""

from __future__ import annotations

import contextlib

import structlog

from speculator.checkpoint import config_from_json, expected_shapes
from speculator.errors import ConfigError, LifecycleError, UnknownDraftError, VersionTakenError
from speculator.lifecycle import BARRED, SERVABLE, State
from speculator.lineage import FIRST, begin, version_to_serve
from speculator.lineages import MAX_LINEAGES, below, check_name, lineages_of, write_name
from speculator.store import DraftStore
from speculator.tenants import MANIFEST_KEY, counts_of

log = structlog.get_logger(__name__)

_ACTOR = "fork"


def fork(base: DraftStore, name: str, *, version: int | None = None) -> DraftStore:
    """The store of the lineage `name`, whose first version is the base's `version`, by default the last good one.

    Killed on the way it can be repeated, and goes on with the version that it began with. Raises ConfigError where the
    name is taken or none, that was another `version`, or there are MAX_LINEAGES already; LifecycleError for a version
    that may not be served, StoreError, DraftError.
    """
    check_name(name)
    if base.lineage:
        raise ConfigError(
            f"{base.root} holds the lineage {base.lineage!r}: pass the base's store, two folders above it"
        )
    store = DraftStore(below(base.root, name))
    names = lineages_of(base.root)
    if _is_begun(store):
        raise ConfigError(f"there is a lineage {name!r} in {base.root} already: choose another name")
    if name not in names and len(names) >= MAX_LINEAGES:
        raise ConfigError(f"{base.root} has {len(names)} lineages, the most there may be: remove the folder of one")
    version = version or _begun_with(store) or _version_of(base)
    if base.lifecycle.state(version) not in SERVABLE:
        raise LifecycleError(f"draft version {version} may not be served: `slipstream drafts list` shows which may")
    manifest, config = base.manifest(version), base.config(version)
    weights = base.load(version, expected_shapes=expected_shapes(config_from_json(config)))
    # Before any version: a store without it is taken for a base.
    write_name(store.root, name)
    with contextlib.suppress(VersionTakenError):  # a fork that was killed has written it
        store.write(
            weights,
            config,
            parent=None,
            target_fingerprint=manifest.target_fingerprint,
            target_version=manifest.target_version,
            info={"origin": "fork", "forked_from": version, MANIFEST_KEY: counts_of(manifest.info)},
            actor=_ACTOR,
            number=FIRST,
        )
    if (begun := _begun_with(store)) != version:
        raise ConfigError(
            f"a fork of version {begun} has begun {store.root}: repeat it with --version {begun}, or remove that folder"
        )
    begin(store, FIRST, target_fingerprint=manifest.target_fingerprint)
    log.info("lineage forked", lineage=name, version=version)
    return store


def _is_begun(store: DraftStore) -> bool:
    """It holds more than a fork that was killed on the way."""
    begun = {State.PROMOTED, *BARRED}
    return store.versions() not in ([], [FIRST]) or store.lifecycle.state(FIRST) in begun


def _begun_with(store: DraftStore) -> int | None:
    """The base's version that is the first one here; None where there is none yet."""
    if FIRST not in store.versions():
        return None
    version: int | None = store.manifest(FIRST).info.get("forked_from")
    return version


def _version_of(base: DraftStore) -> int:
    newest = base.lifecycle.newest_servable()
    if newest is None:
        raise UnknownDraftError(f"{base.root} holds no draft to fork: run `slipstream draft init --store` first")
    return version_to_serve(base, newest)
