"""What to propose in a round: nothing, the suffixes' trees or the learned head's chains; and how many tokens of it.

Every choice is a forecast of committed tokens over seconds, both from what was measured while serving. With b requests,
R_ik the probability that proposal k of request i is reached and accepted, and V, D the times of
speculator/proposals/estimates.py:

    nothing     b / V(b, 0)
    suffix      max over P of (b + Σ_i Σ_{k≤P} R_ik) / V(b, P)          R: suffix_drafter.py
    head        (b + Σ_i w_i g_i) / (V(b, P̄) + D(b, s̄, u))              g: what its chains earned lately, by domain

u are the pairs that the head has not read: after long suffix paths they cost more than its proposals. w is what its
tokens are worth: one that the next round's suffix tree would have brought as the first of five saves a fifth of a
round (SuffixRequest.rounds_saved). Where text is copied here and there, counting such tokens as whole ones makes a head
look twice as good as it is. What is expected to be committed is with w = 1.

The largest of them is the rate λ of this round, and the price of time: the head's chains grow while one more token of
all of them, w Σ_i R_ik, earns more than the λ · ΔV that it takes, or λ · (ΔV + ΔD) before the head has computed it.
That is the stationarity condition of the ratio that is maximised (Dinkelbach, Management Science 13(7), 1967).

A head that does not pay is looked at all the same, since it may have learned: now and then it is asked for one token of
one request, which the round does not verify; what the target emits says whether it would have been accepted. Looks have
a budget of seconds, a share of the time that rounds take, since most of a look is reading what the head has not read.
It is halved where many looks in a row were in vain, until one is not or another version comes. Only requests are looked
at for which the head would be asked: what it would earn where a suffix tree is good, which is where most heads are,
says nothing of the rounds that it could have. And only the time of rounds that could be looked at counts.

SGLang fixes one length for all chains before it drafts: speculator/proposals/length_planner.py.

`Earnings` has what the head earns: by domain, as verifications and looks say, older ones fading.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from speculator.proposals.estimates import MOST_CERTAIN, Calibration, PositionAcceptance, RoundTimes

_MEMORY = 0.98
"""What a verification still weighs after another: half after 34."""
_PRIOR_WEIGHT = 2.0
RENEWED_WEIGHT = 0.25
"""What evidence about the previous version is worth for the next, which is mostly like it."""
_VAIN_LOOKS = 24
"""After so many in a row that found nothing, looks get half their share: enough to read text as fast as it grows."""
_MAX_DOMAINS = 64
_REST = "other"


class FadingMean:
    """A fading mean that begins at a guess."""

    def __init__(self, guess: float) -> None:
        self._sum, self._weight = _PRIOR_WEIGHT * guess, _PRIOR_WEIGHT

    def add(self, value: float) -> None:
        self._sum, self._weight = _MEMORY * self._sum + value, _MEMORY * self._weight + 1

    def fade(self) -> None:
        self._sum, self._weight = RENEWED_WEIGHT * self._sum, RENEWED_WEIGHT * self._weight

    @property
    def value(self) -> float:
        return self._sum / self._weight


@dataclass(frozen=True)
class HeadVerdict:
    """What became of the head's chain for one request; an empty chain counts, too, and so does a look."""

    domain: str
    probabilities: Sequence[float]
    """The head's own, of each proposal."""
    num_accepted: int
    is_worth_it: bool = True
    """False for a look at a token that a round would not have verified."""
    rounds_saved: float | None = None
    """By the accepted ones; None where nothing but the head proposes: as many as those are."""


class _Record:
    """What the head has lately earned, in one domain or in all."""

    def __init__(self, gain: float, saved: float) -> None:
        """Guesses."""
        self._gain, self._saved = FadingMean(gain), FadingMean(saved)
        self._num_vain = 0

    @property
    def gain(self) -> float:
        """Accepted proposals of a chain."""
        return self._gain.value

    @property
    def saved(self) -> float:
        """Rounds that these take the place of."""
        return self._saved.value

    @property
    def look_share(self) -> float:
        """Of the full budget of looks."""
        return 0.5 if self._num_vain >= _VAIN_LOOKS else 1.0

    def add(self, gain: int, saved: float, *, is_vain: bool) -> None:
        self._gain.add(gain)
        self._saved.add(saved)
        self._num_vain = self._num_vain + 1 if is_vain else 0

    def renew(self) -> None:
        self._gain.fade()
        self._saved.fade()
        self._num_vain = 0


class Earnings:
    """By domain, and of all together."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._overall = _Record(0.0, 0.0)

    def gain(self, domain: str) -> float:
        """Accepted proposals of the head's chains, the empty ones included, in one verification."""
        return self._nearest_record(domain).gain

    def look_share(self, domain: str) -> float:
        """Of the full budget of looks."""
        return self._nearest_record(domain).look_share

    def worth(self, domains: Sequence[str]) -> float:
        """Of a token of the head, in requests of these domains."""
        records = [self._nearest_record(domain) for domain in domains]
        gain = sum(record.gain for record in records)
        return sum(record.saved for record in records) / gain if gain else 1.0

    def _nearest_record(self, domain: str) -> _Record:
        """The evidence about a domain: that of all where there is none of its own, nor of the rest."""
        return self._records.get(domain) or self._records.get(_REST) or self._overall

    def add(self, verdict: HeadVerdict) -> None:
        """What became of one more chain, or of a look."""
        gain = verdict.num_accepted if verdict.is_worth_it else 0
        saved = gain if verdict.rounds_saved is None or gain == 0 else verdict.rounds_saved
        for record in (self._own_record(verdict.domain), self._overall):
            record.add(gain, saved, is_vain=verdict.num_accepted == 0)

    def renew(self) -> None:
        """Another version is in service."""
        for record in (self._overall, *self._records.values()):
            record.renew()

    def _own_record(self, domain: str) -> _Record:
        """Where to write down what a domain earned; the rest's, where there are too many domains."""
        if domain not in self._records:
            domain = domain if len(self._records) < _MAX_DOMAINS else _REST
            self._records.setdefault(domain, _Record(self._overall.gain, self._overall.saved))
        return self._records[domain]


FIRST_LOOKS = 3.0
"""Steps' worth of looks at a head that nobody has seen: cheaper than the chains that a useless one would have verified
in vain. A step here is one request's plain decoding.
"""
LOOKS_AFTER_RENEWAL = 12.0
"""The same at a new version, whatever the last one was worth: enough for the watch to see a useless one. And the most
that is put by.
"""
_LONGEST_LOOK = 12.0
"""Steps. A request whose prompt would take longer to read is not looked at."""
_AWAKE_ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a round of `batch` requests proposes: the head for those that have no better suffix, or suffixes alone."""

    batch: int
    num_keys: int
    expected_tokens: float = 0.0
    """Committed tokens that are expected of this round; 0 before anything was measured. So with `expected_s`, its
    seconds.
    """
    plain_s: float = 0.0
    """What the same requests' next tokens alone are expected to take."""
    expected_s: float = 0.0
    value: float = 0.0
    """Of the expected tokens: the head's at what they are worth."""
    worth: float = 1.0
    """Of a token of the head."""
    uses_head: bool = False
    look: int | None = None
    """The request in which a head that is not used is looked at."""
    num_proposals: int = 0
    """Of a suffix tree, where the head is not asked."""
    from_suffix: tuple[bool, ...] = ()
    """Which requests take their suffix tree where the head is asked."""

    @property
    def is_look(self) -> bool:
        """Whether something is drafted only to see how good the draft is, or what another length costs."""
        return self.look is not None

    @property
    def rate(self) -> float:
        """λ, in tokens' worth a second."""
        return self.value / self.expected_s if self.expected_s else 0.0


class Step(NamedTuple):
    """One proposal for each request, and the head's log-probability of it."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ChainRule:
    """How far the head's chains go, known before its first step: so that it computes all of them in one call.

    A request's reach is the probability that its proposals so far are accepted. It begins at 1, or at 0 where the
    request takes its suffix tree. A step multiplies it with the head's probability, corrected by the step's factor.
    """

    factors: Sequence[float]
    least: Sequence[float]
    """By step: while the reaches sum up to more behind it, the head computes another one."""

    @property
    def num_steps(self) -> int:
        """The most."""
        return len(self.factors)

    def behind(self, num_steps: int) -> ChainRule:
        """What is left of it after so many."""
        return ChainRule(self.factors[num_steps:], self.least[num_steps:]) if num_steps else self

    @property
    def first_step(self) -> ChainRule:
        return ChainRule(self.factors[:1], self.least[:1])

    def reached(self, step: int, reaches: Sequence[float], logprobs: Sequence[float]) -> list[float]:
        """Behind a step, from 0."""
        factor = self.factors[step]
        return [
            reach * min(MOST_CERTAIN, factor * math.exp(logprob))
            for reach, logprob in zip(reaches, logprobs, strict=True)
        ]

    def goes_on(self, step: int, reaches: Sequence[float]) -> bool:
        """Whether there is a step behind this one."""
        return step + 1 < self.num_steps and sum(reaches) > self.least[step]


ONE_STEP = ChainRule((1.0,), (math.inf,))


class RoundPlanner:
    """Plans the rounds of one engine; used by the thread that decodes."""

    def __init__(self, *, max_depth: int, look_share: float = 0.01, seed: int = 0) -> None:
        self.times = RoundTimes()
        self.confidence = Calibration()
        self.positions = PositionAcceptance(max_depth)
        self.earnings = Earnings()
        self._proposals: defaultdict[int, FadingMean] = defaultdict(lambda: FadingMean(float(max_depth)))
        self._steps: defaultdict[int, FadingMean] = defaultdict(lambda: FadingMean(float(max_depth)))
        self._look_share, self._random = look_share, random.Random(seed)
        self._look_budget = look_share
        self._step_s = self._looks_left_s = 0.0
        self._granted = FIRST_LOOKS
        """Steps' worth of looks that are still to be added."""
        self._dismissed: tuple[str, ...] = ()
        """Those of requests for which a head that sleeps did not pay, until something is heard of it."""
        self._num_plans = self._last_use = 0

    # -- choosing ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        """The plan for requests of these domains. `suffixes` are R_ik of their suffix trees, k from the first
        proposal on; `head_depth` is the most that the head may propose, and `unread` the pairs that it has not read.
        """
        self._look_budget = 0.0
        batch = len(domains)
        without = self._without_head(batch, num_keys, suffixes)
        if not without.plain_s:
            return Plan(batch=batch, num_keys=num_keys)  # nothing was measured yet
        if not head_depth:
            return without
        self._num_plans += 1
        self._step_s = self.times.verify_s(1, 0, num_keys // batch)
        if self._granted:
            self._looks_left_s, self._granted = self._granted * self._step_s, 0.0
        has_better = self._have_better(domains, suffixes)
        if self._dismissed != tuple(domains):
            plan = self._with_head(domains, num_keys, suffixes, has_better, head_depth, num_pairs=sum(unread))
            if plan.rate > without.rate:
                self._last_use = self._num_plans
                return replace(plan, plain_s=without.plain_s)
            if not self.is_awake and not self._beats_plain(domains, num_keys, head_depth, without.plain_s):
                self._dismissed = tuple(domains)
        rows = [row for row, is_better in enumerate(has_better) if not is_better]
        if not rows:
            return without
        shares = [self.earnings.look_share(domains[row]) for row in rows]
        self._look_budget = self._look_share * max(shares) * len(rows) / batch
        look = self._look(rows, unread)
        if look is None:
            return without
        return replace(
            without,
            look=look,
            worth=self.earnings.worth(domains[look : look + 1]),
            expected_s=without.expected_s + self.times.draft_s(1, 1, unread[look]),
        )

    @property
    def is_awake(self) -> bool:
        """Whether the head has paid lately: then it reads prompts as they come."""
        return self._num_plans - self._last_use < _AWAKE_ROUNDS

    def head_probability(self, step: int, probability: float) -> float:
        """Of a proposal at `step`, from 0, that the head gives `probability`: that it is accepted, once reached."""
        return self.confidence.probability(step, probability)

    def is_worth_verifying(self, plan: Plan, num_proposals: int, reach: float, of_suffixes: float = 0.0) -> bool:
        """Whether one more token than `num_proposals` pays, which is reached and accepted `reach` times in all requests
        that have the head's chain, and so often in those that have a suffix tree.
        """
        price = plan.rate * self._more_s(plan, num_proposals)
        return reach > self._least_reach(plan, num_proposals, price, of_suffixes=of_suffixes)

    def chain_rule(self, plan: Plan, of_suffixes: Sequence[float]) -> ChainRule:
        """How far the head's chains go in this round. By step: how often proposals of suffix trees at its place are
        expected to be accepted.

        Another step is computed where this one's proposals are worth verifying, and the next one's are expected to be
        worth that and their own computation.
        """
        batch, times, depth = plan.batch, self.times, len(of_suffixes)
        verify_s = [times.verify_s(batch, num_proposals, plan.num_keys) for num_proposals in range(depth + 2)]
        draft_s = [times.draft_s(batch, num_steps, batch) for num_steps in range(1, depth + 2)]
        verify_more_s, draft_more_s = ([max(b - a, 0.0) for a, b in itertools.pairwise(s)] for s in (verify_s, draft_s))
        least = []
        for step, of_suffix in enumerate(of_suffixes):
            verified = self._least_reach(plan, step, plan.rate * verify_more_s[step], of_suffixes=of_suffix)
            price = plan.rate * (verify_more_s[step + 1] + draft_more_s[step])
            least.append(max(verified, self._least_reach(plan, step + 1, price, rate=self.positions.rate(step + 2))))
        return ChainRule([self.confidence.factor(step) for step in range(depth)], least)

    def _without_head(self, batch: int, num_keys: int, suffixes: Sequence[Sequence[float]]) -> Plan:
        """The best round of suffix trees; with none of them it is plain decoding."""
        gains = [sum(column) for column in itertools.zip_longest(*suffixes, fillvalue=0.0)]
        plain_s = self.times.verify_s(batch, 0, num_keys)
        num_proposals, tokens, seconds = 0, float(batch), plain_s
        for more, more_tokens in enumerate(itertools.accumulate(gains, initial=float(batch))):
            more_s = self.times.verify_s(batch, more, num_keys) if more else plain_s
            if more_tokens * seconds > tokens * more_s:
                num_proposals, tokens, seconds = more, more_tokens, more_s
        return Plan(
            batch=batch,
            num_keys=num_keys,
            num_proposals=num_proposals,
            expected_tokens=tokens,
            value=tokens,
            expected_s=seconds,
            plain_s=plain_s,
        )

    def _have_better(self, domains: Sequence[str], suffixes: Sequence[Sequence[float]]) -> tuple[bool, ...]:
        """Which requests have a suffix tree that promises more than the head earns."""
        return tuple(
            sum(reaches) > self.earnings.gain(domain) for domain, reaches in zip(domains, suffixes, strict=True)
        )

    def _with_head(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        from_suffix: tuple[bool, ...],
        head_depth: int,
        *,
        num_pairs: int,
    ) -> Plan:
        """A round that asks the head, if it goes like its last ones but for the pairs that it has to read: after suffix
        proposals that were accepted they are many.
        """
        batch = len(domains)
        depth = min(round(self._proposals[batch].value), head_depth)
        steps = min(max(round(self._steps[batch].value), 1), head_depth)
        asked = [domain for domain, is_suffix in zip(domains, from_suffix, strict=True) if not is_suffix]
        worth, gain = self.earnings.worth(asked), sum(map(self.earnings.gain, asked))
        tokens = batch + sum(
            sum(reaches[:depth]) for reaches, is_suffix in zip(suffixes, from_suffix, strict=True) if is_suffix
        )
        seconds = self.times.verify_s(batch, depth, num_keys) + self.times.draft_s(batch, steps, num_pairs)
        return Plan(
            batch=batch,
            num_keys=num_keys,
            uses_head=True,
            from_suffix=from_suffix,
            expected_tokens=tokens + gain,
            value=tokens + worth * gain,
            worth=worth,
            expected_s=seconds,
        )

    def _least_reach(
        self, plan: Plan, num_proposals: int, price: float, *, rate: float = 1.0, of_suffixes: float = 0.0
    ) -> float:
        """Above which chains, whose next token is accepted at this rate, earn a price together with suffix trees.

        What is likelier than not to be accepted is tried until it is known what one more token costs.
        """
        missing, worth = price - of_suffixes, plan.worth * rate
        least = missing / worth if worth else math.copysign(math.inf, missing)
        if plan.uses_head and not self.times.is_known(plan.batch, num_proposals + 1):
            least = min(least, (plan.batch / 2 - of_suffixes) / rate)
        return least

    def _beats_plain(self, domains: Sequence[str], num_keys: int, head_depth: int, plain_s: float) -> bool:
        """Whether the head would pay where there are no suffixes: there it is compared with least."""
        batch = len(domains)
        usual = self._with_head(domains, num_keys, [()] * batch, (False,) * batch, head_depth, num_pairs=2 * batch)
        return usual.rate * plain_s > batch

    def _more_s(self, plan: Plan, num_proposals: int) -> float:
        more_s = self.times.verify_s(plan.batch, num_proposals + 1, plan.num_keys) - self.times.verify_s(
            plan.batch, num_proposals, plan.num_keys
        )
        return max(more_s, 0.0)

    def _look(self, rows: Sequence[int], unread: Sequence[int]) -> int | None:
        """Any of these requests that is not too long, whatever it costs, while the budget is not overdrawn."""
        if self._looks_left_s <= 0:
            return None
        row = self._random.choice(rows)
        return row if self.times.draft_s(1, 1, unread[row]) < _LONGEST_LOOK * self._step_s else None

    # -- learning ---------------------------------------------------------------------------------------------------

    def observe(
        self, plan: Plan, *, num_proposals: int, num_steps: int, num_pairs: int, draft_s: float, verify_s: float | None
    ) -> None:
        """What a round took: its verification of so many proposals, and the head's part where it was asked. No
        `verify_s` where something else was computed in the same pass.
        """
        if verify_s is None:
            verify_s = self.times.verify_s(plan.batch, num_proposals, plan.num_keys)
        else:
            self.times.add_verification(plan.batch, num_proposals, plan.num_keys, verify_s)
        if plan.expected_s:
            most_s = LOOKS_AFTER_RENEWAL * self._step_s
            self._looks_left_s = min(self._looks_left_s + self._look_budget * verify_s, most_s)
        if plan.look is not None:
            self._looks_left_s -= draft_s
            self.times.add_drafting(1, num_steps, num_pairs, draft_s)
            num_proposals = num_steps  # as if what was seen had been verified: gains and costs are of the same chain
        elif num_steps:
            self.times.add_drafting(plan.batch, num_steps, num_pairs, draft_s)
        if num_steps:
            self._proposals[plan.batch].add(num_proposals)
            self._steps[plan.batch].add(num_steps)

    def observe_head(self, verdicts: Iterable[HeadVerdict]) -> None:
        """What a round earned with the head's chains."""
        for verdict in verdicts:
            self._dismissed = ()
            self.positions.add(len(verdict.probabilities), verdict.num_accepted)
            self.earnings.add(verdict)
            for step, probability in enumerate(verdict.probabilities[: verdict.num_accepted + 1]):
                self.confidence.add(step, probability, accepted=step < verdict.num_accepted)

    def renew(self) -> None:
        """Another draft version is in service: look at it even where the last one did not pay."""
        self.positions.fade(RENEWED_WEIGHT)
        self.earnings.renew()
        self._dismissed = ()
        self._granted = LOOKS_AFTER_RENEWAL
        # Awake for a while: prompts are read as they come, or a head that sleeps could not be looked at in long ones.
        self._last_use = self._num_plans
