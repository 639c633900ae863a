"""The whole app for strangers to meet: the double engine, a real store with versions in it, a real Redis."""

from __future__ import annotations

from pathlib import Path

import redis
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from serving.engine import Engine
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.keys import ApiKey, change_keys, digest
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import State
from speculator.versions.operator import DraftDesk
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.drafts import CONFIG, make_draft
from tests.hostile.drafts import FINGERPRINT

ADMIN_KEY = "admin-key-of-the-hostile-tests"
API_KEY = "sk-slipstream-of-the-hostile-tests"
KEYS = (API_KEY, ADMIN_KEY)


def full_app(folder: Path, client: redis.Redis, engine: DoubleEngine | None = None) -> FastAPI:
    """Three versions: one promoted, one on its way, one barred."""
    store = DraftStore(folder)
    for number in range(3):
        store.write(
            draft_state(make_draft(number)),
            draft_config_json(CONFIG),
            parent=number or None,
            target_fingerprint=FINGERPRINT,
            info={},
        )
    for state in (State.VALIDATED, State.SCORED, State.LIVE, State.PROMOTED):
        store.lifecycle.move(1, state, actor="test")
    store.lifecycle.move(2, State.VALIDATED, actor="test")
    store.lifecycle.move(3, State.QUARANTINED, actor="test", reason="test")
    pointer = DraftPointer(client, "hostile")
    pointer.publish(1)
    desk = DraftDesk(store, lambda: pointer, target_fingerprint=FINGERPRINT)
    keys_file = folder / "keys.json"
    change_keys(keys_file, lambda _: [ApiKey(name="stranger", sha256=digest(API_KEY.encode()))])
    settings = GatewaySettings(admin_key=SecretStr(ADMIN_KEY), keys_file=keys_file)
    return create_app(engine or DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk)


def open_app(engine: Engine) -> FastAPI:
    """Without keys, so that every request gets as far as it can; a toy model takes long over none."""
    settings = GatewaySettings(max_samples=8, rollout_max_samples=32, rollout_max_tokens=1024)
    return create_app(engine, settings=settings, registry=CollectorRegistry())
