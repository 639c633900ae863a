"""Rejection sampling in real SGLang: a draft of the whole vocabulary draws its proposals, asleep and awake."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from speculator.draft.checkpoint import draft_state, target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.versions.lineage import admit, ensure_lineage
from speculator.versions.store import DraftStore
from tests.sglang.plugged import Plugged, plugged_server
from tests.sglang.test_capture import QUESTIONS

VOCAB_SIZE = 49_152
TEMPERATURE = 1.5
"""Where a random draft is like the target often enough."""


@pytest.fixture(scope="module")
def store(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    store = DraftStore(tmp_path_factory.mktemp("whole"))
    ensure_lineage(store, model_dir, target_fingerprint(model_dir), draft_vocab_size=VOCAB_SIZE)
    return store


@pytest.fixture(scope="module")
def plugged(model_dir: Path, store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    folder = tmp_path_factory.mktemp("rejecting")
    config = folder / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    flags = (
        *("--speculative-use-rejection-sampling", "--speculative-adaptive"),
        *("--speculative-adaptive-config", str(config)),
        # In bfloat16 the likeliest token of a batch may be another than that of a batch of other size.
        *("--dtype", "float32"),
    )
    with plugged_server(folder, model_dir, store, flags=flags) as server:
        yield server


def _ask(plugged: Plugged, temperature: float, count: int = 4) -> dict[str, list[int]]:
    """Answers by request id, four at a time; every other one of temperature 0."""

    def ask(number: int) -> tuple[str, list[int]]:
        ids = plugged.ids(QUESTIONS[number])
        answer = plugged.server.generate(ids, temperature=temperature * (number % 2), max_new_tokens=24)
        return answer["meta_info"]["id"], answer["output_ids"]

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(ask, range(count)))


def _publish_another(plugged: Plugged, store: DraftStore, model_dir: Path) -> None:
    manifest = store.manifest(1)
    state = draft_state(fresh_draft(model_dir, draft_vocab_size=VOCAB_SIZE, seed=1))
    written = store.write(state, store.config(1), parent=1, target_fingerprint=manifest.target_fingerprint, info={})
    admit(store, written.version, target_fingerprint=manifest.target_fingerprint, actor="test", reason="another")
    plugged.pointer.publish(written.version)
    plugged.wait_for(lambda report: report["version"] == str(written.version))


def test_answers_asleep_and_awake(plugged: Plugged, store: DraftStore, model_dir: Path) -> None:
    asleep = _ask(plugged, TEMPERATURE)
    traces = plugged.traces(len(asleep))
    assert all(len(trace.rounds.position) == 0 for trace in traces.values())
    with ThreadPoolExecutor(1) as pool:
        # It goes on into the time when others are drafted for, and no draft has read what it has.
        cold = pool.submit(
            plugged.server.generate, plugged.ids(QUESTIONS[9]), temperature=1.0, max_new_tokens=60, ignore_eos=True
        )
        _publish_another(plugged, store, model_dir)
        awake = _ask(plugged, TEMPERATURE)
        assert len(cold.result()["output_ids"]) == 60
    assert list(asleep.values())[::2] == list(awake.values())[::2], "greedy text does not depend on the draft"
    assert not set(map(tuple, list(asleep.values())[1::2])) & set(map(tuple, list(awake.values())[1::2]))
    traces = plugged.traces(len(awake) + 1)
    assert {trace.header.verification for trace in traces.values()} == {"rejection"}
    rounds = [trace.rounds for trace in traces.values() if trace.header.sampling.temperature == TEMPERATURE]
    logprobs = np.concatenate([round_.draft_logprobs[round_.draft_tokens >= 0] for round_ in rounds])
    # Draws are seldom what the draft likes best, and all but those of an unread prompt are possible.
    assert len(logprobs) > 10
    assert -16 < np.median(logprobs) < -0.5
