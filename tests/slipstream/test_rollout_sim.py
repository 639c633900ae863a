"""The simulator against schedules that were worked out by hand, and its workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout_model import Chain, Costs, Drafting, Outcome, Setup, simulate
from benchmarks.rollout_sim import TABLE, Oracle, Way, Workload, main, options, ways
from serving.rollout.order import Fifo
from serving.rollout.samples import GroupRequest, SampleId
from serving.rollout.scheduler import Policy

PLENTY = 10_000
WHOLE = Policy(order=Fifo(), chunk_tokens=100)


def table(*, read_ms: float = 0.0, slope: float = 0.0, acceptance: float = 0.0) -> dict[str, Any]:
    """A round takes a second for one request and `slope` more for each other one, whatever it verifies."""
    rows = {str(batch): [1000 * (1 + slope * (batch - 1))] * 3 for batch in (1, 2, 4)}
    chain = {"share": 1.0, "length": 3.0 if acceptance else 0.0, "acceptance": acceptance}
    return {
        "widths": [1, 2, 5],
        "round_ms": {"100": rows, "1000": rows},
        "prefill_ms_a_token": {"100": read_ms, "1000": read_ms},
        "suffixes": {"0": {"classes": [chain]}, "4": {"classes": [chain]}},
        "propose_us": 0,
    }


def run(
    lengths: list[list[int]],
    policy: Policy,
    *,
    engines: int = 1,
    slots: int = 2,
    memory: int = PLENTY,
    drafting: Drafting | None = None,
    limit: int = 100,
    **costs: float,
) -> Outcome:
    """Groups of samples of these lengths, each with a prompt of 10 tokens."""
    groups = [
        GroupRequest(group_id=str(number), prompt_token_ids=(0,) * 10, seeds=tuple(range(len(group))), max_tokens=limit)
        for number, group in enumerate(lengths)
    ]
    known = {SampleId(str(g), i): length for g, group in enumerate(lengths) for i, length in enumerate(group)}
    setup = Setup(
        costs=Costs(table(**costs)), num_engines=engines, slots=slots, memory_tokens=memory, drafting=drafting
    )
    return simulate(groups, known, policy, setup)


def test_a_slot_is_filled_as_soon_as_it_is_free() -> None:
    outcome = run([[3, 1, 2, 1]], WHOLE)
    # Two slots: 3 until t = 3; 1 until 1, then 2 until 3; then 1 until 4.
    assert outcome.ends_s == [1, 3, 3, 4]
    assert (outcome.num_tokens, outcome.tokens_a_second, outcome.tokens_read) == (7, 7 / 4, 40)


def test_samples_of_a_group_run_on_any_engine() -> None:
    assert run([[6, 6, 6, 6], [1, 1, 1, 1]], WHOLE, engines=2).makespan_s == 7


def test_groups_that_are_dealt_leave_an_engine_idle() -> None:
    lengths = [[6, 6, 6, 6], [1, 1, 1, 1]]
    groups = [
        GroupRequest(group_id=str(number), prompt_token_ids=(0,) * 10, seeds=(0, 1, 2, 3), max_tokens=100)
        for number in range(2)
    ]
    known = {SampleId(str(g), i): length for g, group in enumerate(lengths) for i, length in enumerate(group)}
    setup = Setup(costs=Costs(table()), num_engines=2, slots=2, memory_tokens=PLENTY)
    outcome = Way(policy=WHOLE, is_dealt=True).run(Workload(groups=groups, lengths=known), setup)
    assert outcome.ends_s == [1, 1, 2, 2, 6, 6, 12, 12]
    assert (outcome.num_tokens, outcome.tokens_read) == (28, 80)


def test_reading_a_context_stalls_the_engine() -> None:
    outcome = run([[2]], WHOLE, read_ms=100)
    assert outcome.ends_s == [pytest.approx(10 * 0.1 + 2)]


def test_more_requests_make_a_round_longer() -> None:
    # Two together: 2 rounds of 1.5 s, then 2 rounds of 1 s for the longer one.
    assert run([[4, 2]], WHOLE, slope=0.5).ends_s == [3, 5]


def test_drafts_commit_more_in_a_round() -> None:
    # Every proposal is accepted, so verifying 3 costs nothing and commits 4 tokens a round.
    assert run([[8]], WHOLE, acceptance=1.0, drafting=Drafting()).ends_s == [2]
    assert run([[8]], WHOLE, acceptance=1.0).ends_s == [8]


def test_a_promised_chunk_is_never_thrown_out() -> None:
    outcome = run([[6, 6]], Policy(order=Fifo(), chunk_tokens=6), memory=24)
    assert (outcome.ends_s, outcome.tokens_read) == ([6, 12], 20)


def test_the_tail_is_what_the_last_tenth_takes() -> None:
    assert Outcome(ends_s=[float(end) for end in range(1, 21)]).tail_s == 2
    assert Outcome(ends_s=[1.0, 2.0, 7.0]).tail_s == 0


def test_costs_between_and_beyond_the_points_of_the_table() -> None:
    rows = {"1": [10.0, 20.0], "3": [30.0, 40.0]}
    more = {batch: [2 * ms for ms in row] for batch, row in rows.items()}
    costs = Costs(
        {**table(), "widths": [1, 3], "round_ms": {"0": rows, "100": more}, "prefill_ms_a_token": {"0": 1, "100": 3}}
    )
    assert costs.round_s(1, 1, 0) == 0.010
    assert costs.round_s(2, 2, 0) == pytest.approx(0.025)
    assert costs.round_s(2, 2, 50) == pytest.approx(0.0375)
    assert costs.round_s(1, 1, 200) == pytest.approx(0.030)
    assert costs.read_s(100) == pytest.approx(100 * 0.002)


def test_the_stored_table_is_whole() -> None:
    costs = Costs.read(TABLE)
    assert costs.max_batch >= 8
    for batch in range(1, costs.max_batch):
        assert 0 < costs.round_s(batch, 1, 500) <= costs.round_s(batch + 1, 1, 500)
    kinds = json.loads(TABLE.read_text())["suffixes"].values()
    for kind in kinds:
        chains = [Chain(**each) for each in kind["classes"]]
        assert sum(chain.share for chain in chains) == pytest.approx(1, abs=0.001)
        assert all(0 <= chain.acceptance <= 1 for chain in chains)


def test_lengths_are_alike_within_a_group_and_cut_at_the_limit() -> None:
    arguments = options().parse_args(["--correlation", "1", "--limit", "300"])
    work = Workload.draw(arguments, 4, seed=0)
    assert len(work.lengths) == 400
    by_group = {group.group_id: {work.lengths[SampleId(group.group_id, i)] for i in range(8)} for group in work.groups}
    assert all(len(lengths) == 1 for lengths in by_group.values())
    assert max(work.lengths.values()) == 300
    assert Workload.draw(arguments, 4, seed=0).lengths == work.lengths != Workload.draw(arguments, 4, seed=1).lengths


def test_every_policy_ends_every_sample_and_the_oracle_is_the_longest_first() -> None:
    work = Workload.draw(options().parse_args(["--limit", "200", "--median", "40"]), 2, seed=0)
    setup = Setup(costs=Costs(table(slope=0.2, read_ms=1.0)), num_engines=2, slots=4, memory_tokens=1000)
    makespans = {}
    for name, way in ways(work, 32).items():
        outcome = way.run(work, setup)
        assert outcome.num_tokens == sum(work.lengths.values())
        makespans[name] = outcome.makespan_s
    assert makespans["context-aware"] < makespans["fifo"]
    assert makespans["oracle"] < makespans["fifo"]
    assert isinstance(ways(work, 32)["oracle"].policy.order, Oracle)


def test_the_command_prints_that_it_is_simulated_and_exits_1_where_a_target_falls_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(table(slope=0.2)))
    words = ["--engines", "1", "--seeds", "1", "--samples-per-engine", "16", "--limit", "50", "--median", "20"]
    out = tmp_path / "out.json"
    arguments = ["rollout_sim", "--costs", str(tmp_path / "costs.json"), *words, "--slots", "4", "--json", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1  # one engine and no gain from drafts: a throughput of + 44% is out of reach
    assert capsys.readouterr().out.startswith("SIMULATED")
    document = json.loads(out.read_text())
    assert document["simulated"] is True
    assert document["targets"]["throughput_over_fifo"] is False
    assert document["1_engines"]["fifo"]["throughput_over_fifo"]["median"] == 1
