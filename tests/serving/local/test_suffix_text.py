"""The text that suffix drafts come from: errands of other threads."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from prometheus_client import CollectorRegistry

from serving.local.suffix_text import RecentTexts
from serving.metrics import EngineMetrics
from speculator.proposals.suffix_drafter import SuffixDrafter


def test_an_errand_that_fails_leaves_nobody_waiting() -> None:
    texts = RecentTexts(SuffixDrafter(), None, EngineMetrics(CollectorRegistry()))
    done: list[Future[None]] = [Future(), Future(), Future()]

    def fails(_: SuffixDrafter) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        texts.run([(lambda _: None, done[0]), (fails, done[1]), (lambda _: None, done[2])])
    assert all(one.done() for one in done)
