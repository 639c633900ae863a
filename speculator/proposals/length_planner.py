"""What a round proposes where all requests of a batch get chains of one length: in SGLang.

SGLang has prepared a verification for each of a few lengths, and which one it runs is decided before anything is
drafted. The forecast is that of speculator/proposals/planner.py, committed tokens over seconds: of b requests, H_k the
share of the head's first k proposals that are expected to be accepted, R_ik that of request i's chain from earlier
text,

    nothing     b / V(b, 0)
    text        max over P of (b + Σ_i R_iP) / W(b, P)
    head        max over P of (b + Σ_i max(H_P, R_iP)) / V(b, P)

V are the times of whole rounds with the head's passes, W of those in which they are left out. In a round with the head
each request takes the better of its two chains. Without it, those that have no text take the one proposal that the
head has made already, in the pass that brought it up to date.

What a length costs is tried where it would pay if it cost no more than the next shorter one; and a head that does not
pay is looked at now and then with the shortest chains, in rounds in which text does not pay either.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculator.proposals.estimates import PositionAcceptance, RoundTimes
from speculator.proposals.planner import FIRST_LOOKS, LOOKS_AFTER_RENEWAL, RENEWED_WEIGHT

_LEAST_LOOK = 0.5
"""Plain rounds that a look at short chains counts as at least: so such looks are few where chains cost little."""
_TRIAL_ROUNDS = 12.0
"""Of a length for a whole round: more than for single chains, since it is hardly run again where it seems too dear."""
_BETTER = 1.02
"""What more proposals must at least promise where all requests get them: times are noisy, and switching has a price."""


class LengthPlan(NamedTuple):
    """A round of `batch` requests with `num_proposals` each."""

    batch: int
    num_proposals: int = 0
    uses_head: bool = False
    """Whether the head computes a chain."""
    from_text: tuple[bool, ...] = ()
    """Which requests propose earlier text; all that are not listed do not."""
    expected_tokens: float = 0.0
    """Committed ones; 0 before anything was measured, and so are the seconds."""
    expected_s: float = 0.0
    plain_s: float = 0.0
    """What the same requests' next tokens alone are expected to take."""
    headless_s: float = 0.0
    """For one token, in the best round without the head's chains."""
    is_look: bool = False
    """Whether it is there only to see how good the draft is, or what another length costs."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.expected_tokens / self.expected_s if self.expected_s else 0.0


def _first(head_gains: Sequence[float]) -> float:
    """What the one proposal is worth that the head has made without its passes."""
    return head_gains[1] if len(head_gains) > 1 else 0.0


class LengthPlanner:
    """Plans the rounds of one engine; used by the thread that decodes.

    Engines that were told the same rounds in the same order plan the same.
    """

    def __init__(self, *, max_depth: int, look_share: float = 0.01, seed: int = 0) -> None:
        """`max_depth` is that of the head's chains."""
        self.times, self.text_times = RoundTimes(), RoundTimes()
        self.positions = PositionAcceptance(max_depth)
        self._look_share, self._random = look_share, random.Random(seed)
        self._looks_left_s = 0.0
        self._granted = FIRST_LOOKS
        """Plain rounds' worth of looks that are still to be added."""

    def plan(
        self,
        batch: int,
        lengths: Sequence[int],
        *,
        head_lengths: Sequence[int],
        text_gains_BL: np.ndarray | None = None,
    ) -> LengthPlan:
        """`lengths` can be chosen, 0 first, and `head_lengths` of them, 0 first, where the head computes the chains.

        `text_gains_BL` is how many proposals of each request's text are expected to be accepted, of as many as
        `lengths` has in column l.
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
        """The best plan, or one of its neighbours of which too little is known."""
        if not best.uses_head and best.num_proposals:
            return best
        batch, longer = best.batch, [plan for plan in plans if plan.num_proposals > best.num_proposals]
        if (
            longer
            and not self.times.is_known(batch, longer[0].num_proposals, after=_TRIAL_ROUNDS)
            # What it costs is unknown: it is tried where it would pay if it cost no more.
            and longer[0].expected_tokens > _BETTER * best.expected_tokens
        ):
            return longer[0]
        if best.uses_head:
            # Now and then the next shorter or longer one is run to see what it costs.
            if self._random.random() < self._look_share:
                shorter = [plan for plan in plans if plan.num_proposals < best.num_proposals]
                nearest = [*(shorter[-1:] or [self._plain(best)]), *longer[:1]]
                return self._random.choice(nearest)._replace(is_look=True)
            return best
        if self._granted:
            self._looks_left_s, self._granted = self._granted * best.plain_s, 0.0
        if self._looks_left_s <= 0:
            self._looks_left_s += self._look_share * best.plain_s
            return best
        self._looks_left_s -= max(longer[0].expected_s - best.plain_s, _LEAST_LOOK * best.plain_s)
        return longer[0]._replace(is_look=True)

    @staticmethod
    def _plain(plan: LengthPlan) -> LengthPlan:
        """The same requests without proposals."""
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
        """The best round without the head's passes; where no text is there it is plain decoding."""
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
        """Chains of the head, but for requests that have better text; `gain` proposals are expected to be accepted."""
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
        """What a whole round took; without proposals, what it would take without a draft."""
        if uses_head or not num_proposals:
            self.times.add_verification(batch, num_proposals, 0, seconds)
        if not uses_head:
            self.text_times.add_verification(batch, num_proposals, 0, seconds)

    def seconds(self, batch: int, num_proposals: int, *, uses_head: bool) -> float:
        """What a round is expected to take."""
        times = self.times if uses_head or not num_proposals else self.text_times
        return times.verify_s(batch, num_proposals, 0)

    def look_again(self) -> None:
        """Look at a draft that was not used for a while."""
        self._granted = LOOKS_AFTER_RENEWAL

    def renew(self) -> None:
        """Another draft version is in service: look at it even where the last one did not pay."""
        self.positions.fade(RENEWED_WEIGHT)
        self.look_again()
