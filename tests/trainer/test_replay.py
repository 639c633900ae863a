"""New traces first, old ones evenly, and never more bytes than allowed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from tests.drafts import make_draft
from tests.trainer.examples import example_of
from tests.trainer.test_unroll import draftable_trace
from trainer.batch import Example
from trainer.replay import Replay


@pytest.fixture
def examples() -> list[Example]:
    draft = make_draft()
    example = example_of(draftable_trace(1), draft)
    return [dataclasses.replace(example, trace_id=str(index)) for index in range(10)]


def replay_of(max_bytes: int = 10**9, max_waiting: int = 4) -> Replay:
    return Replay(max_bytes=max_bytes, max_waiting=max_waiting, rng=random.Random(0))


def ids(examples: list[Example]) -> list[str]:
    return [example.trace_id for example in examples]


def test_each_batch_has_one_new_trace_and_different_old_ones(examples: list[Example]) -> None:
    replay = replay_of()
    for example in examples[:6]:
        replay.restore(example)
    replay.add(examples[6])
    replay.add(examples[7])
    per_trace = examples[0].num_bases
    first, second = replay.draw(3 * per_trace), replay.draw(3 * per_trace)
    assert [batch[0].trace_id for batch in (first, second)] == ["6", "7"]
    assert len(set(ids(first))) == 3
    assert replay.num_waiting == 0
    assert len(replay) == 8


def test_a_batch_is_never_padded_with_repetitions(examples: list[Example]) -> None:
    replay = replay_of()
    assert replay.draw(100) == []
    replay.add(examples[0])
    assert ids(replay.draw(10**6)) == ["0"]
    assert ids(replay.draw(10**6)) == ["0"]


def test_old_traces_are_drawn_evenly(examples: list[Example]) -> None:
    replay = replay_of()
    for example in examples:
        replay.restore(example)
    drawn = Counter(name for _ in range(500) for name in ids(replay.draw(examples[0].num_bases)))
    assert len(drawn) == 10
    assert max(drawn.values()) < 2 * min(drawn.values())


def test_behind_batches_are_made_of_new_traces_only(examples: list[Example]) -> None:
    replay = replay_of(max_waiting=4)
    for example in examples[:5]:
        replay.restore(example)
    for example in examples[5:9]:
        replay.add(example)
    assert replay.room == 0
    assert ids(replay.draw(4 * examples[0].num_bases)) == ["5", "6", "7", "8"]
    assert replay.room == 4


def test_the_oldest_trace_goes_first_and_new_ones_are_kept(examples: list[Example]) -> None:
    size = examples[0].num_bytes
    replay = replay_of(max_bytes=3 * size)
    for example in examples[:3]:
        replay.restore(example)
    replay.add(examples[3])
    assert replay.num_bytes == 3 * size
    assert replay.num_tokens == 3 * examples[0].num_bases
    assert set(ids(replay.draw(10**6))) == {"1", "2", "3"}


def test_discarded_traces_are_never_drawn_again(examples: list[Example]) -> None:
    replay = replay_of()
    for example in examples[:3]:
        replay.add(example)
    drawn = replay.draw(1)
    replay.discard(drawn)
    replay.discard(drawn)
    assert len(replay) == 2
    assert replay.num_bytes == 2 * examples[0].num_bytes
    assert "0" not in ids(replay.draw(10**6))
