"""`slipstream draft init`: a fresh draft alone, for an SGLang that somebody else starts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from speculator.checkpoint import draft_config_json, draft_state, target_fingerprint
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.lineage import ensure_lineage
from speculator.store import DraftStore


def init_checkpoint(model_dir: Path, out: Path, *, draft_vocab_size: int, seed: int, texts: Sequence[str]) -> Path:
    """Write a draft as a Hugging Face folder and return it; it is there completely or not at all.

    Raises ConfigError where `out` holds something or cannot be written, and what `fresh_draft` raises.
    """
    out = out.absolute()
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is not an empty directory: choose another --out")
        draft = fresh_draft(model_dir, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / "draft"
            folder.mkdir()
            save_file(draft_state(draft), folder / "model.safetensors", {"format": "pt"})
            (folder / "config.json").write_text(json.dumps(draft_config_json(draft.config), indent=2) + "\n")
            folder.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out} ({error.strerror}): choose another --out") from error
    return out


def init_lineage(model_dir: Path, root: Path, *, draft_vocab_size: int, seed: int, texts: Sequence[str]) -> Path:
    """Write a draft as the first version of a store and return its folder.

    Raises ConfigError where the store has versions, StoreError, and what `fresh_draft` raises.
    """
    store = DraftStore(root)
    if (latest := store.latest()) is not None:
        raise ConfigError(f"{root} already holds draft versions, {latest} is the newest: choose another --store")
    version = ensure_lineage(
        store, model_dir, target_fingerprint(model_dir), draft_vocab_size=draft_vocab_size, seed=seed, texts=texts
    )
    return version_folder(store, version)


def version_folder(store: DraftStore, version: int) -> Path:
    """The folder that SGLang loads a version from."""
    return store.root.absolute() / "versions" / f"{version:06d}"
