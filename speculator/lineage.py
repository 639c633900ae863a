"""A lineage: the versions of one draft for one target, from the first, fresh one on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import structlog
from torch import Tensor

from speculator.checkpoint import apply_state, config_from_json, draft_config_json, draft_state, expected_shapes
from speculator.fresh import DEFAULT_DRAFT_VOCAB_SIZE, fresh_draft
from speculator.model import Eagle3Draft
from speculator.store import DraftStore
from speculator.stream import DraftPointer

log = structlog.get_logger(__name__)


def ensure_lineage(
    store: DraftStore,
    model_dir: Path,
    target_fingerprint: str,
    *,
    draft_vocab_size: int = DEFAULT_DRAFT_VOCAB_SIZE,
    seed: int = 0,
    texts: Iterable[str] = (),
) -> int:
    """The newest version in the store; writes a fresh draft as the first one where there is none.

    `texts` like those to be served choose the fresh draft's vocabulary.

    Raises StoreError when the store cannot be read or written, and what `fresh_draft` raises.
    """
    latest = store.latest()
    if latest is not None:
        return latest
    draft = fresh_draft(model_dir, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
    manifest = store.write(
        draft_state(draft),
        draft_config_json(draft.config),
        parent=None,
        target_fingerprint=target_fingerprint,
        info={"origin": "fresh", "seed": seed},
    )
    log.info("fresh draft written", version=manifest.version)
    return manifest.version


def version_to_serve(store: DraftStore, pointer: DraftPointer, newest: int) -> int:
    """The version that an engine starts with: the one that the pointer names, else the last good one, else the newest.

    Raises StreamError when Redis cannot be asked.
    """
    return pointer.desired() or store.last_good() or newest


def load_draft(store: DraftStore, version: int, *, embed: Tensor, target_fingerprint: str) -> Eagle3Draft:
    """A stored version as a float32 network over the target's embedding [V, d].

    Raises StoreError, DraftFileError when the file is damaged, DraftMismatchError when it belongs to another target.
    """
    config = config_from_json(store.config(version))
    state = store.load(version, expected_fingerprint=target_fingerprint, expected_shapes=expected_shapes(config))
    draft = Eagle3Draft(config, embed, state["d2t"].to(embed.device)).to(embed.device)
    apply_state(draft, state)
    return draft
