"""No stranger makes a server error or a hang; a small share of what benchmarks/bad_inputs.py sends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.toy import make_toy_model, random_draft
from tests.hostile import api, bodies, wire
from tests.hostile.api import API_KEY, KEYS, full_app, open_app
from tests.hostile.judge import Tally, tallied
from tests.serving.local.harness import toy_engine


@pytest.fixture
def engine() -> DoubleEngine:
    return DoubleEngine()


@pytest.fixture
def site(tmp_path: Path, redis_client: redis.Redis, engine: DoubleEngine) -> Iterator[api.Site]:
    with api.running(full_app(tmp_path, redis_client, engine), *KEYS) as site:
        yield site


def test_generated_requests_to_every_documented_operation(site: api.Site) -> None:
    tally = Tally("documented operations")
    api.fuzz_operations(site, tally, count=4)
    tally.check()
    # The keys open something, and generated bodies are not all refused before anybody looks at them.
    assert {"200", "400", "401"} <= tally.outcomes.keys(), tally.outcomes


def test_generated_requests_to_the_local_engine(tmp_path: Path) -> None:
    model_dir, tally = make_toy_model(tmp_path / bodies.MODEL), Tally("local engine")
    with (
        toy_engine(model_dir, draft=random_draft(model_dir, seed=0)) as toy,
        api.running(open_app(toy.engine), *KEYS) as site,
    ):
        api.fuzz_operations(site, tally, count=10)
        asked = {**bodies.fields(api.GENERATING[0]), "model": toy.engine.info.model}
        assert httpx.post(site.url + api.GENERATING[0], json=asked).status_code == 200
    tally.check()
    assert {"200", "400"} <= tally.outcomes.keys(), tally.outcomes


def test_any_method_on_any_path_with_any_header(site: api.Site, engine: DoubleEngine) -> None:
    tally = Tally("paths")
    api.fuzz_paths(site, tally, count=150)
    tally.check()
    assert {"404", "405"} <= tally.outcomes.keys(), tally.outcomes
    assert engine.requests == []


@pytest.mark.parametrize("path", api.GENERATING)
def test_table_of_bodies(site: api.Site, path: str) -> None:
    tally = Tally("bodies")
    api.send_bodies(site, tally, path, bodies.hostile_bodies(path))
    api.send_bodies(site, tally, path, bodies.mutated(path, random.Random(0).randrange, 50))
    tally.check()
    assert tally.outcomes.keys() <= {"200", "400", "404", "413", "415"}, tally.outcomes


def test_bytes_on_a_socket(site: api.Site) -> None:
    tally = tallied("socket", wire.inputs(site.url, wire.HOSTILE, random.Random(0).randrange, 50))
    tally.check()
    assert {"200", "400", "closed"} <= tally.outcomes.keys(), tally.outcomes
    key = {"authorization": f"Bearer {API_KEY}"}
    assert httpx.post(site.url + wire.PATH, json=bodies.fields(wire.PATH), headers=key).status_code == 200
