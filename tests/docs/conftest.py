"""The workshop: what somebody has who followed the pages up to any of their commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.demo.servers import Sample
from speculator.draft.checkpoint import target_fingerprint
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.bootstrap import admit
from speculator.versions.lifecycle import State
from speculator.versions.store import DraftStore
from tests.docs.commands import fenced
from tests.docs.workshop import Workshop, start
from tests.serving.gateway.keyfile import KeyFile
from tests.toy import make_toy_model
from tests.waiting import url_in, wait_until

NUM_ANSWERS = 6


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A gateway that has answered, its traces in Redis and in a recording, a store of three versions."""
    folder = tmp_path_factory.mktemp("workshop")
    model = make_toy_model(folder / "toy")
    for name in ("texts.jsonl", "my.jsonl"):
        (folder / name).write_text('{"domain": "toy", "prompt": "question 0123456789"}\n')
    (folder / "deploy" / "secrets").mkdir(parents=True)
    KeyFile(folder / "keys.json").add("bob")
    with ExitStack() as running:
        redis = running.enter_context(EmbeddedRedis(tmp_path_factory.mktemp("redis")))
        served = next(each for each in fenced() if each.words[:2] == ("slipstream", "serve"))
        made = Workshop(folder, model, redis.url, served)
        log = folder / "gateway.log"
        words = [*made.meant(served)[1:], "--port", "0"]
        start(folder, log, words, {**os.environ, **made.environment}, running)
        made.gateway_url = url_in(log)
        _answer(made.gateway_url)
        _roll_out(made)
        _write_versions(DraftStore(folder / "drafts"), target_fingerprint(model))
        _record(made, folder / "traffic.rec")
        yield made


def _answer(url: str) -> None:
    for number in range(NUM_ANSWERS):
        # To the last token: an answer that ends with its first one leaves no trace.
        body = {"model": "toy", "prompt": f"question {number}", "max_tokens": 40, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    def recorded() -> bool:
        sample = Sample.parse(0, httpx.get(f"{url}/metrics").text)
        return sample.total("slipstream_traces_captured_total") == NUM_ANSWERS and not sample.total(
            "slipstream_traces_pending"
        )

    wait_until(recorded)


def _roll_out(workshop: Workshop) -> None:
    # One token leaves no trace.
    group = {"id": "sum", "prompt": "2 2", "n": 4, "max_tokens": 1}
    (workshop.folder / "groups.jsonl").write_text(json.dumps(group) + "\n")
    body = {"id": "step-1", "model": workshop.model.name, "groups": [group]}
    httpx.post(f"{workshop.gateway_url}/v1/rollouts", json=body, timeout=60).raise_for_status()


def _write_versions(store: DraftStore, fingerprint: str) -> None:
    """Two more, as if a trainer had published them."""
    for parent in (1, 2):
        weights = store.load(parent)
        weights["fc.weight"] = weights["fc.weight"] + 0.01
        manifest = store.write(weights, store.config(parent), parent=parent, target_fingerprint=fingerprint, info={})
        admit(store, manifest.version, target_fingerprint=fingerprint, actor="trainer", reason="better")
    for state in (State.LIVE, State.PROMOTED):
        store.lifecycle.move(2, state, actor="engine", reason="as good")


def _record(workshop: Workshop, out: Path) -> None:
    words = ["traces", "record", "--model", workshop.model, "--redis-url", workshop.redis_url, "--out", out]
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
