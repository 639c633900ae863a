"""Which sample goes first: in the order of submission, or by expected length.

Samples of one prompt resemble each other in length, so Seer (arXiv 2511.14617, context-aware scheduling) takes the
longest finished sample L_g of a group as the estimate for its others, and the limit while none has finished. To
underestimate a long sample delays the end of the rollout; the opposite mistake costs little.

    expected = limit    while nothing has finished, or the sample is already longer than L_g
             = L_g      otherwise

The first sample of each group is its probe. Probes go before all others, those with the fewest tokens so far first, so
that short groups are known soon. The others go by expected remaining length, the longest first: with known lengths such
a schedule ends at most 4/3 − 1/(3m) times as late as the best one on m machines (Graham, SIAM J. Appl. Math. 17(2),
1969), and short samples fill the gaps at the end.

A higher priority goes before a lower one whatever the order, and an earlier deadline before a later one.
"""

from __future__ import annotations

import math
from typing import Protocol

from serving.rollout.samples import Sample

Rank = tuple[float, ...]


class Order(Protocol):
    def rank(self, sample: Sample) -> Rank:
        """The lowest goes first. It may change when a sample of the same group has ended, and at no other time while
        the sample waits.
        """

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        """Whether a running sample, at the end of a chunk, makes room for a waiting one."""

    def remaining(self, sample: Sample) -> int:
        """Tokens that the sample is expected to need yet."""


class Fifo:
    """Groups in the order of submission, their samples in turn."""

    def rank(self, sample: Sample) -> Rank:
        return (*urgency(sample), sample.group.number, sample.index)

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        return urgency(waiting) < urgency(running)

    def remaining(self, sample: Sample) -> int:
        """Nothing is known of lengths but the limit."""
        return sample.group.request.max_tokens - len(sample.tokens)


class ContextAware:
    """One probe of each group, shortest first; then the longest expected first."""

    def rank(self, sample: Sample) -> Rank:
        key = (0, len(sample.tokens)) if sample.is_probe else (1, -expected_remaining(sample))
        return (*urgency(sample), *key, sample.group.number, sample.index)

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        """A more urgent sample displaces a less urgent one; of equal urgency, a probe displaces a sample that is no
        probe.

        Otherwise the waiting sample must need more tokens than the running one, by more than the running one's context,
        which has to be read again.
        """
        if urgency(waiting) != urgency(running):
            return urgency(waiting) < urgency(running)
        if waiting.is_probe or running.is_probe:
            return waiting.is_probe and not running.is_probe
        return expected_remaining(waiting) > expected_remaining(running) + running.context

    def remaining(self, sample: Sample) -> int:
        return expected_remaining(sample)


def urgency(sample: Sample) -> Rank:
    """By priority and deadline of the group's request: lower is more urgent."""
    request = sample.group.request
    return (-request.priority, math.inf if request.deadline_s is None else request.deadline_s)


def expected_length(sample: Sample) -> int:
    """Expected tokens of the whole answer."""
    longest = sample.group.longest_finished
    if longest is None or len(sample.tokens) >= longest:
        return sample.group.request.max_tokens
    return longest


def expected_remaining(sample: Sample) -> int:
    return expected_length(sample) - len(sample.tokens)
