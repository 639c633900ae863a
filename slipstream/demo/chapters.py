"""The chapters of a demo, its API keys, and the draft that it poisons on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
import torch

from serving.gateway.keys import ApiKey, change_keys, make_key, new_secret
from slipstream.demo import TENANTS
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import Number, VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from trainer.drift import ALL

GUEST = "guest"
"""Tenant for the person who opens the page or sends own requests."""
METRICS = "metrics"
_ACTOR = "demo"


@dataclass(frozen=True)
class Chapter:
    """A part of the run, which takes `share` of its minutes."""

    name: str
    share: float
    title: str
    opening: str


DAY_0, LEARNING, SHIFT, POISON, RESTART = CHAPTERS = (
    Chapter("day_0", 0.1, "Day 0", "The draft head has random weights, and nothing learns yet."),
    Chapter("learning", 0.4, "Learning", "The trainer starts. It learns from every answer, of all tenants."),
    Chapter("shift", 0.2, "A shift of traffic", "All tenants change their topics."),
    Chapter(
        "poisoned_draft",
        0.1,
        "A poisoned draft",
        "The first topics are back. A draft whose every proposal is wrong is published past the gate.",
    ),
    Chapter(
        "restart", 0.2, "A restart", "The engine starts again. Its memory of text is gone; the trained head is not."
    ),
)


def make_keys(file: Path) -> Mapping[str, str]:
    """Write a file of API keys for the tenants, a guest and the scraper of /metrics; returns the secrets by name.

    Raises ConfigError where it cannot be written.
    """
    secrets = {name: new_secret() for name in (*TENANTS, GUEST, METRICS)}

    def made(_: Sequence[ApiKey]) -> list[ApiKey]:
        return [
            make_key(name, secret, lifetime_s=None, tenant=name, read_only=name == METRICS)
            for name, secret in secrets.items()
        ]

    change_keys(file, made)
    return secrets


@dataclass(frozen=True)
class PoisonedDraft:
    """A poisoned version, and the version in service from which it was made."""

    version: int
    parent: int


def publish_poisoned(
    store: DraftStore, pointer: DraftPointer, parent: int, *, target_fingerprint: str
) -> PoisonedDraft:
    """Publish a copy of version `parent` with shuffled output rows, without the gate.

    Its proposals are as confident as before, but for wrong tokens. Raises StoreError, DraftError or StreamError.
    """
    state = store.load(parent, expected_fingerprint=target_fingerprint)
    rows = torch.randperm(len(state["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    manifest = store.write(
        {**state, "lm_head.weight": state["lm_head.weight"][rows].contiguous()},
        store.config(parent),
        parent=parent,
        target_fingerprint=target_fingerprint,
        info={"origin": "poisoned by the demo"},
        actor=_ACTOR,
    )
    admit(store, manifest.version, target_fingerprint=target_fingerprint, actor=_ACTOR, reason="poisoned on purpose")
    pointer.publish(manifest.version)
    return PoisonedDraft(manifest.version, parent)


def drift_alarms(log_path: Path) -> list[float]:
    """Times (unix) of the drift alarms about all traffic in a trainer's log."""
    lines = [line for line in log_path.read_bytes().splitlines() if b'"acceptance fell"' in line]
    events = [msgspec.json.decode(line) for line in lines]
    return [datetime.fromisoformat(event["timestamp"]).timestamp() for event in events if event["domain"] == ALL]


def verdict_on(store: DraftStore, poisoned: PoisonedDraft) -> tuple[str, Mapping[str, Number]] | None:
    """Why the version was rolled back, and the figures behind it; None while it has not been."""
    for transition in store.lifecycle.history(poisoned.version):
        if transition.state is VersionState.ROLLED_BACK:
            return transition.reason, transition.numbers
    return None
