"""A lineage: the versions of one draft for one target, from the first, fresh one on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog
import torch
from torch import Tensor

from speculator.checkpoint import apply_state, config_from_json, draft_config_json, draft_state, expected_shapes
from speculator.errors import DraftError, DraftMismatchError, LifecycleError, StoreError, VersionTakenError
from speculator.fresh import DEFAULT_DRAFT_VOCAB_SIZE, fresh_draft
from speculator.lifecycle import BARRED, Number, State
from speculator.model import Eagle3Draft
from speculator.store import DraftStore

log = structlog.get_logger(__name__)

_ACTOR = "lineage"
FIRST = 1


def ensure_lineage(
    store: DraftStore,
    model_dir: Path,
    target_fingerprint: str,
    *,
    draft_vocab_size: int = DEFAULT_DRAFT_VOCAB_SIZE,
    seed: int = 0,
    texts: Iterable[str] = (),
) -> int:
    """The newest version that may be served; writes a fresh draft as the first one where the store is empty.

    `texts` like those to be served choose the fresh draft's vocabulary.

    Raises StoreError when the store cannot be read or written or every version is barred, DraftFileError or
    DraftMismatchError for a version that nothing is known of and that does not fit, and what `fresh_draft` raises.
    """
    servable = store.lifecycle.newest_servable()
    if servable is not None and (store.lifecycle.last_good() is not None or store.versions() != [servable]):
        return servable
    newest = store.latest()
    if newest is None:
        if store.lineage:
            raise StoreError(f"{store.root} has no draft yet: repeat `slipstream draft fork {store.lineage}`")
        newest = FIRST
        draft = fresh_draft(model_dir, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
        # Engine and trainer may start on an empty store together, with another vocabulary each: one of them is first.
        with contextlib.suppress(VersionTakenError):
            store.write(
                draft_state(draft),
                draft_config_json(draft.config),
                parent=None,
                target_fingerprint=target_fingerprint,
                info={"origin": "fresh", "seed": seed},
                actor=_ACTOR,
                number=FIRST,
            )
            log.info("fresh draft written", version=newest)
    if store.lifecycle.state(newest) in BARRED:
        raise StoreError(f"no draft in {store.root} may be served: `slipstream drafts promote` releases one of them")
    # Also where a crash came between two of these, or another process is at it: nothing else is there to be served.
    begin(store, newest, target_fingerprint=target_fingerprint)
    return newest


def begin(store: DraftStore, version: int, *, target_fingerprint: str) -> None:
    """Promote the only version of a store, which nothing can be compared with. Raises what `admit` does."""
    admit(store, version, target_fingerprint=target_fingerprint, actor=_ACTOR, reason="the first of its lineage")
    for state in (State.LIVE, State.PROMOTED):
        with contextlib.suppress(LifecycleError):
            store.lifecycle.move(version, state, actor=_ACTOR, reason="the first of its lineage")


def admit(
    store: DraftStore,
    version: int,
    *,
    target_fingerprint: str,
    actor: str,
    reason: str,
    numbers: Mapping[str, Number] | None = None,
) -> None:
    """Take a written version to `scored`, by way of reading it back and verifying it; goes on where a crash ended it.

    Another process may do the same, or have taken the version further.

    Raises DraftFileError or DraftMismatchError, with the version in quarantine, or StoreError.
    """
    states = store.lifecycle
    if states.state(version) is None:
        with contextlib.suppress(LifecycleError):
            states.move(version, State.WRITTEN, actor=actor)
    if states.state(version) is State.WRITTEN:
        try:
            shapes = expected_shapes(config_from_json(store.config(version)))
            store.load(version, expected_fingerprint=target_fingerprint, expected_shapes=shapes)
        except DraftError as error:
            states.move(version, State.QUARANTINED, actor=actor, reason=str(error))
            raise
        with contextlib.suppress(LifecycleError):
            states.move(version, State.VALIDATED, actor=actor)
    if states.state(version) is State.VALIDATED:
        with contextlib.suppress(LifecycleError):
            states.move(version, State.SCORED, actor=actor, reason=reason, numbers=numbers)


def version_to_serve(store: DraftStore, newest: int) -> int:
    """The version that an engine starts with: the last good one, else `newest`.

    Not what the pointer names: that may still be on trial, and an engine that has just started has nothing to compare
    it with. It comes by the same way as every other version (serving/hotswap.py).
    """
    return store.lifecycle.last_good() or newest


def load_draft(store: DraftStore, version: int, *, embed: Tensor, target_fingerprint: str) -> Eagle3Draft:
    """A stored version as a float32 network over the target's embedding [V, d].

    Raises StoreError, DraftFileError when the file is damaged, DraftMismatchError when it belongs to another target.
    """
    config = config_from_json(store.config(version))
    state = store.load(version, expected_fingerprint=target_fingerprint, expected_shapes=expected_shapes(config))
    target_ids_D = state["d2t"] + torch.arange(config.draft_vocab_size)
    if not bool(((target_ids_D >= 0) & (target_ids_D < len(embed))).all()):
        raise DraftMismatchError(f"draft version {version}: it can propose tokens that the target does not have")
    draft = Eagle3Draft(config, embed, state["d2t"].to(embed.device)).to(embed.device)
    apply_state(draft, state)
    return draft
