"""Versions that a benchmark puts into a store past the gate, and who ran them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from speculator.checkpoint import draft_config_json, draft_state
from speculator.lineage import admit, begin
from speculator.model import Eagle3Draft
from speculator.store import DraftStore

_INSTALLED = re.compile(r"draft version (\d+) in service at step")


def add_version(store: DraftStore, state: Mapping[str, Tensor], like: Eagle3Draft, fingerprint: str) -> int:
    """A version with these tensors, of the shape of `like`, that may be published."""
    version = store.write(
        dict(state),
        draft_config_json(like.config),
        parent=store.latest(),
        target_fingerprint=fingerprint,
        info={"origin": "benchmark"},
    ).version
    admit(store, version, target_fingerprint=fingerprint, actor="benchmark", reason="benchmark")
    return version


def add_first(store: DraftStore, draft: Eagle3Draft, fingerprint: str) -> int:
    """The first version of a store, which is promoted: nothing can be compared with it."""
    version = add_version(store, draft_state(draft), draft, fingerprint)
    begin(store, version, target_fingerprint=fingerprint)
    return version


def num_that_ran(version: int, logs: Iterable[Path]) -> int:
    """How many engines ever had it in service, by their own logs."""
    return sum(str(version) in _INSTALLED.findall(log.read_text(errors="replace")) for log in logs)
