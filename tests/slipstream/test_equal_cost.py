"""Rounds at equal cost: what machine noise does to one way's clock does not show."""

from __future__ import annotations

import pytest

from benchmarks.equal_cost import Round, at_equal_cost


def test_the_same_rounds_take_the_same_however_slow_the_machine_was() -> None:
    fast = [Round(1, 2, 1, 1, 0.010, 0.001)] * 10
    slow = [Round(1, 2, 1, 1, 0.015, 0.002)] * 11
    first, second = at_equal_cost([fast, slow])
    assert first / len(fast) == pytest.approx(second / len(slow)) == pytest.approx(0.017)


def test_rounds_of_other_shapes_keep_their_own_cost() -> None:
    plain = [Round(1, 0, 0, 0, 0.010, 0.0)] * 10
    wide = [Round(1, 4, 0, 0, 0.012, 0.0)] * 10
    assert at_equal_cost([plain, wide]) == [pytest.approx(0.10), pytest.approx(0.12)]


def test_a_round_that_read_a_prompt_is_charged_as_others_of_its_shape() -> None:
    usual = [Round(1, 2, 1, 1, 0.010, 0.001)] * 3
    unknown = [Round(1, 2, 1, 1, None, 0.002)]
    assert at_equal_cost([usual, unknown])[1] == pytest.approx(0.012)
    # Where there are none, as others of its size, or as all.
    assert at_equal_cost([usual, [Round(1, 4, 1, 1, None, 0.002)]])[1] == pytest.approx(0.012)
    assert at_equal_cost([usual, [Round(2, 4, 1, 1, None, 0.002)]])[1] == pytest.approx(0.012)


def test_a_rare_round_is_charged_what_it_took() -> None:
    usual = [Round(1, 0, 0, 0, 0.010, 0.0)] * 10
    rare = [Round(1, 0, 1, 500, 0.010, 0.090)]
    assert at_equal_cost([usual, rare]) == [pytest.approx(0.10), pytest.approx(0.10)]
