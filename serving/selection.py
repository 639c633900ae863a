"""Which of the finished traces are kept, where only a share of them can be.

A trace says more where the target refused what the draft proposed, and where there is little of its tenant and domain.
But a draft that learns from its failures alone forgets what it was good at, and acceptance that is counted on them says
nothing about the traffic. So of a share s, s(1 + s)/2 are drawn without a look at the trace: all where everything is
kept, half where little is. The others are the most informative ones of the rest, which is a share s/(2 + s) of it:

    s(1 + s)/2 + (1 − s(1 + s)/2) · s/(2 + s) = s

They carry a mark (`TraceHeader.preferred`): the trainer learns from them, and neither judges drafts nor watches for
drift by them. No weight is needed for learning: what a trace teaches is the target's own distribution at its positions,
whichever traces there are; the mix of contexts is the trainer's replay's to set (trainer/priority.py), within bounds.

Tenants and domains are named by clients. One that gives every request a domain of its own gains one point of two in
one half of a share, and no more than its part of the trainer's mix.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Literal

from speculator.trace import NO_DRAFT, Trace

_WINDOW = 512

Choice = Literal["drawn", "preferred"]


class Selection:
    """Ranks each trace among the last `_WINDOW`. Used by one thread."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._window: deque[tuple[float, tuple[str, str]]] = deque()
        self._counts: Counter[tuple[str, str]] = Counter()

    def choose(self, trace: Trace, share: float) -> Choice | None:
        """None for a trace that is left out."""
        score = self._enter(trace)
        if self._rng.random() < share * (1 + share) / 2:
            return "drawn"
        scores = [known for known, _ in self._window]
        rank = sum(known > score for known in scores) + self._rng.random() * scores.count(score)
        return "preferred" if rank < len(scores) * share / (2 + share) else None

    def _enter(self, trace: Trace) -> float:
        """The trace's score, 0 to 2, after it has been put into the window."""
        kind = trace.header.tenant, trace.header.domain
        self._counts[kind] += 1
        score = refused_share(trace) + 1 - self._counts[kind] / (len(self._window) + 1)
        self._window.append((score, kind))
        if len(self._window) > _WINDOW:
            _, oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        return score


def refused_share(trace: Trace) -> float:
    """Of the target's verdicts on the draft's proposals, the refusals: a round has one for each accepted proposal, and
    one more where it refused the next. ½ where the draft proposed nothing.
    """
    rounds = trace.rounds
    is_draft = rounds.draft_version != NO_DRAFT
    accepted = rounds.num_accepted[is_draft].astype(int)
    refusals = int((accepted < (rounds.draft_tokens[is_draft] >= 0).sum(1)).sum())
    verdicts = int(accepted.sum()) + refusals
    return refusals / verdicts if verdicts else 0.5
