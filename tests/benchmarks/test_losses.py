"""What the comparison of losses rests on: recorded verdicts of whole chains, and gains by trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.engines import engine_with, greedy
from benchmarks.common.paired import Runs, by_trace
from speculator.draft.initialization import fresh_draft
from speculator.trace import Trace
from tests.fixtures.decoding import FixedPlanner

PROPOSALS, VERSION = 3, 7


def test_a_draft_at_whole_chains_is_judged_in_every_round(model_dir: Path) -> None:
    traces: list[Trace] = []
    settings = {"depth": PROPOSALS, "suffix_depth": 0, "control_share": 0.0}
    with engine_with(
        model_dir,
        fresh_draft(model_dir, seed=0, draft_vocab_size=40),
        1,
        draft_version=VERSION,
        settings=settings,
        on_trace=traces.append,
        planner=FixedPlanner(),
    ) as engine:
        greedy(engine, [[1, 2, 3], [4, 5, 6, 7]], max_tokens=24)
    assert len(traces) == 2
    for trace in traces:
        rounds = trace.rounds
        assert set(rounds.draft_version.tolist()) == {VERSION}
        # The last ones have no room for more.
        assert ((rounds.draft_tokens >= 0).sum(axis=1)[:-PROPOSALS] == PROPOSALS).all()
        assert (rounds.num_accepted < PROPOSALS).any(), "a fresh draft is rejected"


def test_a_gain_by_trace_counts_a_trace_of_two_seeds_once() -> None:
    base = {"a": [30.0, 20.0], "b": [28.0, 20.0], "c": [33.0, 20.0]}
    better = {name: [1.1 * committed, rounds] for name, (committed, rounds) in base.items()}
    runs: Runs = {}
    for seed in (0, 1):
        runs["default", seed], runs["new", seed] = {"held_out": base}, {"held_out": better}
    found = by_trace("new", "default", runs, (0, 1))
    assert found.num_traces == 3
    assert found.change == pytest.approx(0.1)
    assert found.lower == pytest.approx(0.1)
    assert by_trace("default", "new", runs, (0,)).change == pytest.approx(1 / 1.1 - 1)
