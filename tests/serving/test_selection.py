"""Which traces are kept: as many as asked for, a part of them as they come, the rest the most informative ones."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import numpy as np
import pytest

from serving.selection import Selection, refused_share
from speculator.trace import NO_DRAFT, Trace
from tests.traces import make_trace, with_rounds


def trace_with(accepted: list[int], *, proposed: int = 3, version: int = 1, **header: str) -> Trace:
    R = len(accepted)
    return with_rounds(
        make_trace(T=12, R=R, P=proposed, **header),
        num_accepted=np.array(accepted, np.int8),
        draft_tokens=np.zeros((R, proposed), np.int32),
        draft_version=np.full(R, version, np.int32),
    )


POOL = [trace_with(rounds) for rounds in ([3, 3, 3], [3, 3, 2], [2, 3, 1], [1, 1, 0], [0, 0, 0])]
RARE = [trace_with([3, 3, 3], domain=f"rare-{n}", tenant="t") for n in range(2)]


def test_a_verdict_is_an_accepted_proposal_or_the_refusal_behind_them() -> None:
    assert [refused_share(trace) for trace in POOL] == pytest.approx([0, 1 / 9, 2 / 8, 3 / 5, 1])
    assert refused_share(trace_with([0, 0], version=NO_DRAFT)) == 0.5


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_the_share_is_kept_and_half_of_a_small_one_is_drawn_from_all(share: float) -> None:
    rng = random.Random(1)
    selection = Selection(random.Random(2))
    kept: dict[str | None, list[float]] = {"drawn": [], "preferred": [], None: []}
    all_refused = []
    for _ in range(6_000):
        trace = rng.choice(POOL)
        all_refused.append(refused_share(trace))
        kept[selection.choose(trace, share)].append(all_refused[-1])
    num_drawn, num_preferred = len(kept["drawn"]), len(kept["preferred"])
    assert num_drawn + num_preferred == pytest.approx(6_000 * share, rel=0.15)
    assert num_drawn == pytest.approx(3_000 * share * (1 + share), rel=0.35)
    # What is drawn is like the traffic; what is preferred was refused more.
    assert mean(kept["drawn"]) == pytest.approx(mean(all_refused), abs=0.12)
    assert mean(kept["preferred"]) > mean(all_refused) + 0.2


def test_everything_is_drawn_where_everything_is_kept() -> None:
    selection = Selection(random.Random(0))
    assert {selection.choose(trace, 1.0) for trace in POOL * 20} == {"drawn"}


def test_a_rare_domain_comes_before_one_that_repeats() -> None:
    rng, selection = random.Random(3), Selection(random.Random(4))
    seen: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for _ in range(6_000):
        trace = rng.choice(RARE) if rng.random() < 0.05 else POOL[0]
        domain = trace.header.domain
        seen[domain] += 1
        kept[domain] += selection.choose(trace, 0.1) is not None
    rates = {domain: kept[domain] / seen[domain] for domain in seen}
    assert min(rates["rare-0"], rates["rare-1"]) > 4 * rates[""]
    # And the usual is not forgotten for it.
    assert kept[""] > 200
