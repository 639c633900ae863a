"""Plan a step of SGLang: all requests of a batch get chains of one length.

SGLang has prepared verifications of a few lengths, and the length is chosen before drafting. So it cannot use the local
engine's planner (speculator/proposals/planner.py), which sizes each request's proposals. As there, the plan with the
most expected committed tokens a second wins. With b requests, H_k the expected accepted tokens among the head's first k
proposals, and R_ik those of request i's suffix chain:

    nothing     b / V(b, 0)
    text        max over P of (b + Σ_i R_iP) / W(b, P)
    head        max over P of (b + Σ_i max(H_P, R_iP)) / V(b, P)

V are the times of whole rounds with the head's passes, W of rounds without them. In a round with the head each request
takes the better of its two chains. In one without it, requests without suffix text take the one proposal that the head
has already made, in the pass that read the new tokens.

A length of unknown cost is tried if it would pay at the cost of the next shorter one. A head that does not pay is
probed now and then with the shortest chains, in rounds in which suffix text does not pay either.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculator.proposals.estimates import PositionAcceptance, RoundTimes
from speculator.proposals.planner import FIRST_PROBES, LOOKS_AFTER_RENEWAL, RENEWED_WEIGHT

_LEAST_PROBE = 0.5
"""Least cost of a probe of the head, in plain rounds: keeps probes rare where chains cost little."""
_TRIAL_ROUNDS = 12.0
"""Rounds for which a length is tried: more than for single chains, since a length that seems too slow hardly runs
again.
"""
_BETTER = 1.02
"""Factor by which a longer plan must be better: times are noisy, and switching lengths costs time."""


class LengthPlan(NamedTuple):
    """Plan of a round: `batch` requests with `num_proposals` each."""

    batch: int
    num_proposals: int = 0
    uses_head: bool = False
    """Whether the head computes a chain."""
    from_text: tuple[bool, ...] = ()
    """For each request, whether it proposes suffix text; empty: none does."""
    expected_tokens: float = 0.0
    """Expected committed tokens; like the seconds, 0 before anything was measured."""
    expected_s: float = 0.0
    plain_s: float = 0.0
    """Expected seconds of a plain round of the same requests."""
    headless_s: float = 0.0
    """Expected seconds a token in the best round without the head's chains."""
    is_probe: bool = False
    """Whether the round is a probe of the draft's acceptance, or of another length's cost."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.expected_tokens / self.expected_s if self.expected_s else 0.0


def _first(head_gains: Sequence[float]) -> float:
    """Expected acceptance of the one proposal that the head makes without its own passes."""
    return head_gains[1] if len(head_gains) > 1 else 0.0


class LengthPlanner:
    """Plans the rounds of one engine; used by the thread that decodes.

    Deterministic: the same observations in the same order give the same plans.
    """

    def __init__(self, *, max_depth: int, probe_share: float = 0.01, seed: int = 0) -> None:
        """`max_depth`: longest chain of the head."""
        self.times, self.text_times = RoundTimes(), RoundTimes()
        self.positions = PositionAcceptance(max_depth)
        self._probe_share, self._random = probe_share, random.Random(seed)
        self._probes_left_s = 0.0
        self._granted = FIRST_PROBES
        """Budget for probes that is still to be added, in plain rounds."""

    def plan(
        self,
        batch: int,
        lengths: Sequence[int],
        *,
        head_lengths: Sequence[int],
        text_gains_BL: np.ndarray | None = None,
    ) -> LengthPlan:
        """Plan a round. `lengths`: available lengths, 0 first; `head_lengths`: those for the head's chains, 0 first.

        `text_gains_BL` [B, L]: expected accepted tokens of each request's suffix chain, cut at each of `lengths`.
        """
        plain_s = self.times.verify_s(batch, 0, 0)
        if not plain_s:
            return LengthPlan(batch=batch)  # nothing was measured yet
        reaches = itertools.accumulate(
            (self.positions.rate(position) for position in range(1, head_lengths[-1] + 1)), operator.mul
        )
        head_gains = list(itertools.accumulate(reaches, initial=0.0))
        best = without = self._without_head(batch, lengths, plain_s, head_gains, text_gains_BL)
        if len(head_lengths) > 1:
            columns = [list(lengths).index(length) for length in head_lengths[1:]]
            gains_L = batch * np.array(head_gains)[head_lengths[1:]]
            if text_gains_BL is not None:
                gains_L = np.maximum(text_gains_BL[:, columns], np.array(head_gains)[head_lengths[1:]]).sum(0)
            plans = [
                self._with_head(without, length, gain)
                for length, gain in zip(head_lengths[1:], gains_L.tolist(), strict=True)
            ]
            for plan in plans:
                if plan.rate > _BETTER * best.rate:
                    best = plan
            best = self._tried(best, plans)
        if text_gains_BL is None or not best.num_proposals:
            return best
        other = head_gains[best.num_proposals] if best.uses_head else _first(head_gains)
        chosen_B = text_gains_BL[:, list(lengths).index(best.num_proposals)] > other
        return best._replace(from_text=tuple(chosen_B.tolist()))

    def _tried(self, best: LengthPlan, plans: Sequence[LengthPlan]) -> LengthPlan:
        """The best plan, or instead a neighbouring length whose cost or acceptance is too little known."""
        if not best.uses_head and best.num_proposals:
            return best
        batch, longer = best.batch, [plan for plan in plans if plan.num_proposals > best.num_proposals]
        if (
            longer
            and not self.times.is_known(batch, longer[0].num_proposals, after=_TRIAL_ROUNDS)
            # Unknown cost: try the length if it would pay at the best plan's cost.
            and longer[0].expected_tokens > _BETTER * best.expected_tokens
        ):
            return longer[0]
        if best.uses_head:
            # Now and then run the next shorter or longer length to measure its cost.
            if self._random.random() < self._probe_share:
                shorter = [plan for plan in plans if plan.num_proposals < best.num_proposals]
                nearest = [*(shorter[-1:] or [self._plain(best)]), *longer[:1]]
                return self._random.choice(nearest)._replace(is_probe=True)
            return best
        if self._granted:
            self._probes_left_s, self._granted = self._granted * best.plain_s, 0.0
        if self._probes_left_s <= 0:
            self._probes_left_s += self._probe_share * best.plain_s
            return best
        self._probes_left_s -= max(longer[0].expected_s - best.plain_s, _LEAST_PROBE * best.plain_s)
        return longer[0]._replace(is_probe=True)

    @staticmethod
    def _plain(plan: LengthPlan) -> LengthPlan:
        """Plan of a plain round of the same requests."""
        return LengthPlan(
            batch=plan.batch,
            expected_tokens=float(plan.batch),
            expected_s=plan.plain_s,
            plain_s=plan.plain_s,
            headless_s=plan.headless_s,
        )

    def _without_head(
        self,
        batch: int,
        lengths: Sequence[int],
        plain_s: float,
        head_gains: Sequence[float],
        text_gains_BL: np.ndarray | None,
    ) -> LengthPlan:
        """The best plan without the head's passes; without suffix text, plain decoding."""
        plain = LengthPlan(batch=batch, expected_tokens=float(batch), expected_s=plain_s, plain_s=plain_s)
        best = plain
        if text_gains_BL is not None and text_gains_BL.any():
            totals = (batch + np.maximum(text_gains_BL, _first(head_gains)).sum(0)).tolist()
            for length, tokens in zip(lengths[1:], totals[1:], strict=True):
                seconds = self.text_times.verify_s(batch, length, 0)
                if tokens * best.expected_s > _BETTER * best.expected_tokens * seconds:
                    best = LengthPlan(
                        batch=batch, num_proposals=length, expected_tokens=tokens, expected_s=seconds, plain_s=plain_s
                    )
        return best._replace(headless_s=best.expected_s / best.expected_tokens)

    def _with_head(self, without: LengthPlan, length: int, gain: float) -> LengthPlan:
        """Plan with chains of the head, except where suffix text is better; `gain`: expected accepted tokens."""
        return LengthPlan(
            batch=without.batch,
            num_proposals=length,
            uses_head=True,
            expected_tokens=without.batch + gain,
            expected_s=self.times.verify_s(without.batch, length, 0),
            plain_s=without.plain_s,
            headless_s=without.headless_s,
        )

    def observe(self, batch: int, num_proposals: int, seconds: float, *, uses_head: bool) -> None:
        """Learn the time of a whole round; without proposals, that of a plain round."""
        if uses_head or not num_proposals:
            self.times.add_verification(batch, num_proposals, 0, seconds)
        if not uses_head:
            self.text_times.add_verification(batch, num_proposals, 0, seconds)

    def seconds(self, batch: int, num_proposals: int, *, uses_head: bool) -> float:
        """Expected seconds of a round."""
        times = self.times if uses_head or not num_proposals else self.text_times
        return times.verify_s(batch, num_proposals, 0)

    def probe_again(self) -> None:
        """Probe the draft again after it was not used for a while."""
        self._granted = LOOKS_AFTER_RENEWAL

    def renew(self) -> None:
        """Probe a new draft version, even if the last one did not pay."""
        self.positions.decay(RENEWED_WEIGHT)
        self.probe_again()
