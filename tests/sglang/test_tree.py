"""Trees (topk 2) and retraction in real SGLang: a trace that comes out is consistent, or it is dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from speculator.versions.store import DraftStore
from tests.sglang.plugged import Plugged, plugged_server
from tests.sglang.test_capture import QUESTIONS


@pytest.fixture(scope="module")
def plugged(model_dir: Path, draft_store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    """SGLang's own switch for tests takes running requests back every 15 steps, as if memory were short."""
    with plugged_server(
        tmp_path_factory.mktemp("tree"),
        model_dir,
        draft_store,
        topk=2,
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"},
    ) as server:
        yield server


def test_trees_through_retractions(plugged: Plugged) -> None:
    def ask(question: str) -> dict[str, object]:
        return plugged.server.generate(plugged.ids(question), max_new_tokens=40)

    with ThreadPoolExecutor(4) as pool:
        answers = {answer["meta_info"]["id"]: answer for answer in pool.map(ask, QUESTIONS[:8])}  # type: ignore[index]
    traces = plugged.traces(len(answers))
    report = plugged.report()
    assert "retracted=" in report["dropped_by_reason"], report
    assert "inconsistent=" not in report["dropped_by_reason"], report
    assert "failed=" not in report["dropped_by_reason"], report
    for request_id, trace in traces.items():
        answer = answers[request_id]
        full = np.array(answer["output_ids"])
        # A trace may begin inside the answer: where the request was prefilled last.
        offset = trace.header.first_position - trace.header.num_prompt_tokens
        completion = trace.token_ids[max(-offset, 0) :]
        assert completion.tolist() == full[max(offset, 0) : -1].tolist()
        # The distribution after each committed token is of the token served next.
        labelled = np.nonzero(trace.target_topk_ids[:, 0] >= 0)[0]
        served = np.append(trace.token_ids, full[-1])[labelled + 1]
        assert trace.target_topk_ids[labelled, 0].tolist() == served.tolist()
        parents = trace.rounds.draft_parents
        assert parents.shape[1] == 6
        assert (parents[:, 0] == -1).all()
        at_first_level = (parents == -1).sum(1)
        assert ((at_first_level >= 1) & (at_first_level <= 2)).all()
        assert (at_first_level == 2).any()
        own = trace.rounds.draft_logprobs.astype(np.float32)
        assert (own <= 0).all()
        # Siblings share one distribution.
        first_level = np.where(parents == -1, np.exp(own), 0).sum(1)
        assert (first_level <= 1.01).all()
        assert (first_level > 0.01).all()


def test_sampled_answers_differ_behind_their_first_token(plugged: Plugged) -> None:
    """SGLang samples that one when it reads the prompt. On a CPU its verification would take the likeliest after it."""
    count, ids = 24, plugged.ids("Tell me a story.")

    def ask(_: int) -> list[int]:
        answer = plugged.server.generate(ids, max_new_tokens=6, temperature=1.0, ignore_eos=True)
        return list(answer["output_ids"])

    behind: dict[int, set[tuple[int, ...]]] = {}
    with ThreadPoolExecutor(8) as pool:
        for first, *rest in pool.map(ask, range(count)):
            behind.setdefault(first, set()).add(tuple(rest))
    assert sum(map(len, behind.values())) > count // 2
    for trace in plugged.traces(count).values():
        assert trace.header.sampling.temperature == 1.0
