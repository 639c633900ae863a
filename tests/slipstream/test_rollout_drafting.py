"""Depths with known answers."""

from __future__ import annotations

import pytest

from benchmarks.rollout_drafting import MAX_DEPTH, Claim, best_depth, committed_tokens


def test_committed_tokens_are_a_geometric_sum() -> None:
    assert committed_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert committed_tokens(1.0, 3) == 4
    assert committed_tokens(0.0, 8) == 1


def test_free_proposals_are_all_taken_and_dear_ones_are_not() -> None:
    claims = [Claim(acceptance=0.5)]
    assert best_depth(claims, lambda depth: 1.0) == MAX_DEPTH
    assert best_depth(claims, lambda depth: 1.0 + depth) == 0
    # 1.5 / 1.2 = 1.25 tokens a second, then 1.75 / 1.4 = 1.25 and less: the shallower of equals.
    assert best_depth(claims, lambda depth: 1.0 + 0.2 * depth) == 1


def test_the_depth_is_seers_argmin() -> None:
    acceptance, draft_s, round_s = 0.7, 0.03, 1.0
    cost = [
        (depth * draft_s + round_s + 0.05 * depth) * (1 - acceptance) / (1 - acceptance ** (depth + 1))
        for depth in range(MAX_DEPTH + 1)
    ]
    claims = [Claim(acceptance=acceptance)] * 4
    assert best_depth(claims, lambda depth: depth * draft_s + round_s + 0.05 * depth) == cost.index(min(cost))


def test_nobody_who_may_draft_means_depth_0() -> None:
    assert best_depth([], lambda depth: 1.0) == 0
    assert best_depth([Claim(acceptance=0.9, most=0)], lambda depth: 1.0) == 0
