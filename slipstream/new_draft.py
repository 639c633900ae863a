"""`slipstream draft init`: a fresh draft alone, for an SGLang that somebody else starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculator.draft.checkpoint import (
    check_can_write,
    draft_config_json,
    draft_state,
    target_fingerprint,
    write_folder,
)
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore


def init_checkpoint(
    model_dir: Path, out: Path, *, draft_vocab_size: int | None, seed: int | None, texts: Sequence[str]
) -> Path:
    """Write a draft as a Hugging Face folder and return it; it is there completely or not at all.

    Raises ConfigError where `out` holds something or cannot be written, and what `fresh_draft` raises.
    """
    check_can_write(out)
    check_target(model_dir)
    draft = fresh_draft(model_dir, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
    return write_folder(out, draft_state(draft), draft_config_json(draft.config))


def init_lineage(
    model_dir: Path,
    root: Path,
    *,
    draft_vocab_size: int | None,
    seed: int | None,
    texts: Sequence[str],
    if_missing: bool = False,
) -> Path:
    """Write a draft as the first version of a store and return its folder.

    With `if_missing`, a store that has versions stays as it is and the folder is its newest one's.
    Raises ConfigError where the store has versions, or others than asked for, and what `ensure_lineage` raises.
    """
    store = DraftStore(root)
    latest = store.latest()
    if latest is not None and not if_missing:
        raise ConfigError(f"{root} already holds draft versions, {latest} is the newest: choose another --store")
    # What is there says which target it was made for: reading a large target's weights takes minutes.
    fingerprint = checked_fingerprint(model_dir, store) if latest is None else store.manifest(latest).target_fingerprint
    version = ensure_lineage(store, model_dir, fingerprint, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
    return version_folder(store, version)


def checked_fingerprint(model_dir: Path, store: DraftStore) -> str:
    """The target's fingerprint. A store's first draft is tied to it, so the target is checked before there is one.

    Raises ConfigError.
    """
    if store.latest() is None:
        check_target(model_dir)
    return target_fingerprint(model_dir)


def check_target(model_dir: Path) -> dict[str, Any]:
    """Its config.json. Raises ConfigError for a model whose tensors are not all there."""
    # Imports transformers, which takes seconds.
    from serving.local.target.loading import check_known_model

    return check_known_model(model_dir)


def version_folder(store: DraftStore, version: int) -> Path:
    """The folder that SGLang loads a version from."""
    return store.root.absolute() / "versions" / f"{version:06d}"
