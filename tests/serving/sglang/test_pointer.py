"""The version of an SGLang server's target: what its label says, or one more."""

from __future__ import annotations

import pytest

from serving.sglang.pointer import RankTarget


@pytest.mark.parametrize(
    ("updates", "told"),
    [
        ([("1", 10), ("2", 20)], [1, 2]),
        ([("7", 10), ("7", 20)], [7]),
        ([(None, 10), (None, 20)], [1, 2]),
        ([("step-a", 10), ("default", 20)], [1, 2]),
        ([(None, 10), (None, 10), (None, 10)], [1]),
        ([(None, 10), (None, 10), ("7", 10)], [1, 7]),
        ([("5", 10), (None, 20), ("6", 30)], [5, 6]),
        ([("5", 10), ("4", 20), (None, 30)], [5, 6]),
        ([("1234567890", 10), ("²", 20)], [1, 2]),
    ],
)
def test_versions(updates: list[tuple[str | None, int]], told: list[int]) -> None:
    """Parts of one update, between which no step ran, are of one version; versions never fall."""
    heard: list[int] = []
    target = RankTarget(heard.append)
    for label, step in updates:
        target.updated(label, step)
    assert heard == told
    assert target.status()["target_version"] == told[-1]


def test_only_labels_say_which_weights_other_engines_must_have() -> None:
    target = RankTarget(lambda version: None)
    target.updated(None, 1)
    assert (target.version, target.status()["target_label"]) == (1, 0)
    target.updated("4", 2)
    assert (target.version, target.status()["target_label"]) == (4, 4)


def test_a_label_that_comes_after_the_weights_counts_no_second_version() -> None:
    heard: list[int] = []
    target = RankTarget(heard.append)
    for step, label in enumerate(("11", "12", "12", "default", "9"), 1):
        target.updated(None, step)
        target.updated(None, step)
        target.labelled(label)
    assert heard == [1, 11, 12, 13, 14, 15]
    assert (target.version, target.status()["target_label"]) == (15, 12)
