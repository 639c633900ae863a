"""Recorded answers by the table of costs, against schedules that were worked out by hand."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from benchmarks.rollout_bounds import Setup, read_groups, spent
from benchmarks.rollout_model import Costs
from benchmarks.rollout_ways import ways
from benchmarks.suffix import Answer
from serving.rollout.work import SampleId
from tests.slipstream.test_rollout_sim import table

WAYS = ways(1000, Costs(table()))


def setup_of(groups: list[list[Answer]], costs: Costs, *, slots: int, engines: int = 1, sample_s: float = 0.0) -> Setup:
    texts = {SampleId(group[0].group, row): answer.tokens for group in groups for row, answer in enumerate(group)}
    return Setup(num_engines=engines, slots=slots, costs=costs, sample_s=sample_s, texts=texts)


def answers(group: str, *lengths: int, alike: bool = False) -> list[Answer]:
    """To a prompt of 10 tokens."""
    rng = random.Random(group)
    words = rng.sample(range(100_000), sum(lengths))
    texts = [words[:length] if alike else words[sum(lengths[:row]) :][:length] for row, length in enumerate(lengths)]
    prompt = rng.sample(range(100_000, 200_000), 10)
    return [Answer(workload="group", prompt=prompt, tokens=text, limit=100, group=group) for text in texts]


@pytest.mark.parametrize(
    ("way", "total_s", "reading_s"),
    [
        # 10 s to read each prompt; the batches are as long as their longest samples.
        ("plain", 40 + 8 + 7, 40),
        # 8 and 2, then 7 beside the first, then 3 in its place.
        ("queue", 40 + 8 + 3, 40),
        ("prompt_once", 20 + 8 + 3, 20),
    ],
)
def test_seconds_are_those_of_the_schedule(way: str, total_s: float, reading_s: float) -> None:
    groups = [answers("a", 8, 2), answers("b", 7, 3)]
    costs = Costs(table(read_ms=1000))
    found = spent(groups, WAYS[way], setup_of(groups, costs, slots=2))
    assert (found.total_s, found.reading_s) == (pytest.approx(total_s), pytest.approx(reading_s))
    assert len(found.ends_s) == 4
    assert found.num_accepted == 0, "no word comes twice"
    sampled = spent(groups, WAYS[way], setup_of(groups, costs, slots=2, sample_s=0.5))
    assert sampled.total_s == pytest.approx(total_s + 0.5 * 20)


@pytest.mark.parametrize(
    ("way", "total_s", "reading_s"),
    [
        # One engine has a and c: 8 s, then 4. The other has b, and rests for the other 9.
        ("plain", 40 + 8 + 4, 60),
        # a's and b's, then c's where b's end.
        ("queue", 20 + 3 + 20 + 4, 60),
    ],
)
def test_engines_have_a_clock_each(way: str, total_s: float, reading_s: float) -> None:
    groups = [answers("a", 8, 8), answers("b", 3, 3), answers("c", 4, 4)]
    costs = Costs(table(read_ms=1000))
    found = spent(groups, WAYS[way], setup_of(groups, costs, slots=2, engines=2))
    assert (found.total_s, found.reading_s) == (pytest.approx(total_s), pytest.approx(reading_s))


def test_siblings_that_say_the_same_draft_for_each_other() -> None:
    groups, costs = [answers("a", 40, 40, 40, alike=True)], Costs(table())
    setup = setup_of(groups, costs, slots=1)
    alone, together = (spent(groups, WAYS[way], setup) for way in ("context_aware", "grouped"))
    assert (alone.num_rounds, alone.num_accepted) == (120, 0)
    assert together.num_rounds < 70
    assert together.num_accepted == 120 - together.num_rounds


def test_copies_have_nothing_in_common(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, answers("a", 5, 3))))
    groups = read_groups(path, copies=3)
    assert len(groups) == 3
    tokens = [{token for answer in group for token in answer.prompt + answer.tokens} for group in groups]
    assert len(set.union(*tokens)) == sum(map(len, tokens)) == 3 * 18
