"""When a chunk ends, and when to leave."""

from __future__ import annotations

import pytest

from serving.rollout.division import Division


class Linear:
    """A token takes as many seconds as there are requests, reading one a tenth of a second."""

    def token_s(self, batch: int) -> float:
        return float(batch)

    def read_s(self, num_tokens: int) -> float:
        return num_tokens / 10


def test_a_chunk_ends_at_the_limit_at_the_latest() -> None:
    division = Division(chunk_tokens=64)
    assert [division.end_of_chunk(0, 100), division.end_of_chunk(64, 100)] == [64, 100]


@pytest.mark.parametrize(
    ("remaining", "here", "there", "pays"),
    [
        (10, 4, 0, True),  # saves 10 · (4 − 1) = 30 s, reads 100 tokens in 10 s, twice that is 20 s
        (6, 4, 0, False),  # saves 18 s
        (1000, 4, 3, False),  # as many there, with it
        (1000, 4, 4, False),
    ],
)
def test_it_moves_when_it_saves_twice_the_reading(remaining: int, here: int, there: int, pays: bool) -> None:
    division = Division(chunk_tokens=64, costs=Linear())
    assert division.pays_to_move(remaining=remaining, context=100, here=here, there=there) is pays


def test_without_costs_it_never_moves_for_room() -> None:
    assert not Division(chunk_tokens=64).pays_to_move(remaining=1000, context=1, here=8, there=0)
