"""A lineage, all versions of one draft for one target: begin it, admit versions, load them, count tokens by tenant.

A manifest counts tokens by tenant for the whole lineage up to its version, so older versions may be removed. The counts
are bounded: tenants beyond MAX_TENANTS share one count, and such a version may have learned from any tenant that it
does not name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor

from speculator.draft.checkpoint import (
    apply_state,
    check_fits,
    config_from_json,
    draft_config_json,
    draft_state,
    expected_shapes,
)
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import Text, draft_vocab_of, fresh_draft
from speculator.draft.public_heads import PublicHead
from speculator.errors import ConfigError, DraftError, DraftMismatchError, LifecycleError, StoreError, VersionTakenError
from speculator.versions.lifecycle import BARRED, Number, VersionState
from speculator.versions.store import ANOTHER_STORE, DraftStore, d2t_sha256

log = structlog.get_logger(__name__)
_ACTOR = "lineage"
FIRST = 1


def ensure_lineage(
    store: DraftStore,
    model_dir: Path,
    target_fingerprint: str,
    *,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    seed: int | None = None,
    texts: Iterable[Text] = (),
    switches: Iterable[str] = (),
) -> int:
    """The newest version that may be served; writes a fresh draft as the first one where the store is empty.

    The other arguments are those of `fresh_draft`; None means its default.

    Raises ConfigError where the store's drafts contradict them, StoreError when it cannot be read or written or every
    version is barred, DraftFileError or DraftMismatchError for a version without a state that does not fit, and what
    `fresh_draft` raises.
    """
    asked: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": intermediate_size,
        "seed": seed,
        "texts": texts,
        "switches": switches,
    }
    latest = store.latest()
    if latest is not None:
        store.check_target(version_to_serve(store, latest), target_fingerprint)
        check_lineage(store, latest, model_dir, **asked)
    servable = store.lifecycle.newest_servable()
    if servable is not None and (store.lifecycle.last_good() is not None or store.versions() != [servable]):
        return servable
    newest = latest
    if newest is None:
        newest = FIRST
        draft = fresh_draft(model_dir, **asked)
        # Engine and trainer may start together on an empty store, with different vocabularies: the first one wins.
        with contextlib.suppress(VersionTakenError):
            store.write(
                draft_state(draft),
                draft_config_json(draft.config),
                parent=None,
                target_fingerprint=target_fingerprint,
                info={"origin": "fresh", "seed": seed or 0},
                actor=_ACTOR,
                number=FIRST,
            )
            log.info("fresh draft written", version=newest)
    if store.lifecycle.state(newest) in BARRED:
        raise StoreError(f"no draft in {store.root} may be served: `slipstream drafts promote` releases one of them")
    # Also completes this after a crash, or beside another process: there is no other version to serve.
    begin(store, newest, target_fingerprint=target_fingerprint)
    return newest


def import_head(store: DraftStore, head: PublicHead, *, target_fingerprint: str, source: str) -> int:
    """Write an imported head as the first version of a store, and return its number.

    Raises ConfigError where the store has versions, StoreError or DraftError where it cannot be written or read back.
    """
    if (newest := store.latest()) is not None:
        raise ConfigError(f"{store.root} already holds draft versions, {newest} is the newest: {ANOTHER_STORE}")
    store.write(
        head.state,
        draft_config_json(head.config),
        parent=None,
        target_fingerprint=target_fingerprint,
        info={"origin": "imported", "layout": head.layout, "source": source},
        actor=_ACTOR,
        number=FIRST,
    )
    begin(store, FIRST, target_fingerprint=target_fingerprint)
    return FIRST


def check_lineage(
    store: DraftStore,
    latest: int,
    model_dir: Path,
    *,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    seed: int | None = None,
    texts: Iterable[Text] = (),
    switches: Iterable[str] = (),
) -> None:
    """Check that a store's drafts fit the target, and the options for a fresh draft, which will not be written.

    Raises ConfigError, DraftMismatchError if they do not fit, and the errors of reading them.
    """
    version = version_to_serve(store, latest)
    config, manifest = config_from_json(store.config(version)), store.manifest(version)
    check_fits(config, model_dir)
    there = f"{store.root} has drafts already"
    if draft_vocab_size is not None and min(draft_vocab_size, config.vocab_size) != config.draft_vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} is asked for, and {there}, of {config.draft_vocab_size} tokens: "
            f"leave it out, or {ANOTHER_STORE}"
        )
    if intermediate_size is not None and intermediate_size != config.intermediate_size:
        raise ConfigError(
            f"an intermediate size of {intermediate_size} is asked for, and {there}, of {config.intermediate_size}: "
            f"leave it out, or {ANOTHER_STORE}"
        )
    for name in switches:
        if not getattr(config, name):
            raise ConfigError(
                f"a draft with {name} is asked for, and {there}, without it: leave it out, or {ANOTHER_STORE}"
            )
    if (texts := list(texts)) and d2t_sha256(draft_vocab_of(model_dir, config, texts)) != manifest.d2t_sha256:
        # A warning only: such files grow while a service runs, and it must restart with the same options.
        log.warning(
            "--vocab-from has no effect: other texts chose the vocabulary of the stored draft",
            store=str(store.root),
        )
    if seed is not None:
        first = store.manifest(FIRST).info.get("seed") if FIRST in store.versions() else None
        if first is None:
            log.warning("the seed of a fresh draft has no effect: the store has drafts", seed=seed)
        elif first != seed:
            raise ConfigError(f"{there}, from seed {first}: leave --seed {seed} out, or {ANOTHER_STORE}")


def begin(store: DraftStore, version: int, *, target_fingerprint: str) -> None:
    """Promote the only version of a store, without a trial. Raises what `admit` raises."""
    admit(store, version, target_fingerprint=target_fingerprint, actor=_ACTOR, reason="the first of its lineage")
    for state in (VersionState.LIVE, VersionState.PROMOTED):
        _step(store, version, state, actor=_ACTOR, reason="the first of its lineage")


def admit(
    store: DraftStore,
    version: int,
    *,
    target_fingerprint: str,
    actor: str,
    reason: str,
    numbers: Mapping[str, Number] | None = None,
) -> None:
    """Read back and verify a written version, and move it to `scored`; continues after a crash.

    Safe beside other processes that move the same version.

    Raises DraftFileError or DraftMismatchError, with the version in quarantine, or StoreError.
    """
    states = store.lifecycle
    if states.state(version) is None:
        _step(store, version, VersionState.WRITTEN, actor=actor)
    if states.state(version) is VersionState.WRITTEN:
        try:
            shapes = expected_shapes(config_from_json(store.config(version)))
            store.load(version, expected_fingerprint=target_fingerprint, expected_shapes=shapes)
        except DraftError as error:
            states.move(version, VersionState.QUARANTINED, actor=actor, reason=str(error))
            raise
        _step(store, version, VersionState.VALIDATED, actor=actor)
    if states.state(version) is VersionState.VALIDATED:
        _step(store, version, VersionState.SCORED, actor=actor, reason=reason, numbers=numbers)


def _step(store: DraftStore, version: int, state: VersionState, **why: Any) -> None:
    """Make one transition, unless another process has already made it."""
    with contextlib.suppress(LifecycleError):
        store.lifecycle.move(version, state, **why)


def version_to_serve(store: DraftStore, newest: int) -> int:
    """The version that an engine starts with: the last good one, else `newest`.

    Not the published version: that may still be on trial, and an engine that has just started has no baseline to
    compare with. The follower installs it later (serving/hotswap/follower.py).
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


MAX_TENANTS = 2000
MANIFEST_KEY = "tenants"


class TenantCounts(msgspec.Struct, kw_only=True):
    """Answer tokens that a draft was trained on, by tenant, repetitions included."""

    tokens: dict[str, int] = {}
    others: int = 0
    """Tokens of the tenants beyond MAX_TENANTS."""
    complete: bool = True
    """False where the weights descend from a draft of unknown training data."""

    def add(self, tenant: str, num_tokens: int) -> None:
        if tenant in self.tokens or len(self.tokens) < MAX_TENANTS:
            self.tokens[tenant] = self.tokens.get(tenant, 0) + num_tokens
        else:
            self.others += num_tokens

    def learnt_from(self, tenant: str) -> int | None:
        """Trained tokens of a tenant; None where that is unknown."""
        if tenant in self.tokens:
            return self.tokens[tenant]
        return 0 if self.complete and not self.others else None


def joined_counts(parts: Iterable[TenantCounts]) -> TenantCounts:
    """Sum the counts of several training ranks."""
    whole = TenantCounts()
    for part in parts:
        for tenant, num_tokens in part.tokens.items():
            whole.add(tenant, num_tokens)
        whole.others += part.others
        whole.complete &= part.complete
    return whole


def counts_of(info: Mapping[str, Any]) -> TenantCounts:
    """Counts in a manifest's `info`; without any, zero for a fresh draft, else unknown."""
    try:
        return msgspec.convert(info[MANIFEST_KEY], type=TenantCounts)
    except (KeyError, msgspec.ValidationError):
        return TenantCounts(complete=info.get("origin") == "fresh")
