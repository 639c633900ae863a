"""Plan a round of the local engine: plain, suffix trees or the draft head's chains, and how many tokens.

SGLang has a planner of its own (speculator/proposals/length_planner.py): it fixes one length for all chains before it
drafts. The local engine can give each request its own tree or chain, and can end chains while the head drafts.

The plan with the most expected committed tokens a second wins; both are estimated from measurements while serving. With
b requests, R_ik the probability that proposal k of request i is reached and accepted, and V, D the times of
verification and drafting (speculator/proposals/estimates.py):

    nothing     b / V(b, 0)
    suffix      max over P of (b + Σ_i Σ_{k≤P} R_ik) / V(b, P)          R: suffix_drafter.py
    head        (b + Σ_i w_i g_i) / (V(b, P̄) + D(b, s̄, u))              g: what its chains earned lately, by domain

u are the pairs that the head has not read: after long suffix paths they cost more than its proposals. w is the worth of
a head token in rounds saved: if the next round's suffix tree would have brought the same token as the first of five, it
saves only a fifth of a round (SuffixRequest.rounds_saved). On partly copied text, counting such tokens fully makes a
head look twice as good as it is. The expected number of committed tokens uses w = 1.

The largest ratio is the rate λ of this round, and the price of time. The head's chains grow while one more token in all
of them, w Σ_i R_ik, earns more than its verification λ · ΔV, or before the head has computed it, λ · (ΔV + ΔD). That is
the stationarity condition of the maximised ratio (Dinkelbach, Management Science 13(7), 1967).

A head that does not pay is probed now and then, since it may have learned. A probe (`probe`) has the head propose one
token for one request. The round does not verify the token; the target's own token shows whether it was right. Probes
have a budget in seconds, a share of the rounds' time, since most of a probe's cost is reading unread pairs. Many
useless probes in a row halve the budget, until one is useful or another version comes. Only requests that would use
the head are probed: where a suffix tree is good, as most heads also are, a probe says nothing about the rounds that the
head could get. And only the time of rounds with such requests adds to the budget.

`HeadGains` holds what the head earns by domain, from verifications and probes, older ones fading.
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
"""Decay of the head's gains per verification: half after 34."""
_PRIOR_WEIGHT = 2.0
RENEWED_WEIGHT = 0.25
"""Weight that evidence about a version keeps for the next version, which is similar."""
_VAIN_LOOKS = 24
"""After so many useless probes in a row, probes get half their share: still enough to read text as fast as it grows."""
_MAX_DOMAINS = 64
_REST = "other"


class DecayingMean:
    """Exponentially decaying mean that starts at a guess."""

    def __init__(self, guess: float) -> None:
        self._sum, self._weight = _PRIOR_WEIGHT * guess, _PRIOR_WEIGHT

    def add(self, value: float) -> None:
        self._sum, self._weight = _MEMORY * self._sum + value, _MEMORY * self._weight + 1

    def decay(self) -> None:
        self._sum, self._weight = RENEWED_WEIGHT * self._sum, RENEWED_WEIGHT * self._weight

    @property
    def value(self) -> float:
        return self._sum / self._weight


@dataclass(frozen=True)
class HeadVerdict:
    """Result of the head's chain for one request in a round; empty chains and probes count, too."""

    domain: str
    probabilities: Sequence[float]
    """The head's own probability of each proposal."""
    num_accepted: int
    is_worth_it: bool = True
    """False for a probe whose token a round would not have verified."""
    rounds_saved: float | None = None
    """Rounds that the accepted proposals saved; None where only the head proposes: one each."""


class _Record:
    """The head's recent gains, in one domain or in all."""

    def __init__(self, gain: float, saved: float) -> None:
        """Starting values."""
        self._gain, self._saved = DecayingMean(gain), DecayingMean(saved)
        self._num_vain = 0

    @property
    def gain(self) -> float:
        """Accepted proposals per chain."""
        return self._gain.value

    @property
    def saved(self) -> float:
        """Rounds saved per chain."""
        return self._saved.value

    @property
    def probe_share(self) -> float:
        """Share of the full probe budget."""
        return 0.5 if self._num_vain >= _VAIN_LOOKS else 1.0

    def add(self, gain: int, saved: float, *, is_vain: bool) -> None:
        self._gain.add(gain)
        self._saved.add(saved)
        self._num_vain = self._num_vain + 1 if is_vain else 0

    def renew(self) -> None:
        self._gain.decay()
        self._saved.decay()
        self._num_vain = 0


class HeadGains:
    """The head's recent gains by domain, and in all domains together."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._overall = _Record(0.0, 0.0)

    def gain(self, domain: str) -> float:
        """Expected accepted proposals of a head's chain in one verification, empty chains included."""
        return self._nearest_record(domain).gain

    def probe_share(self, domain: str) -> float:
        """Share of the full probe budget."""
        return self._nearest_record(domain).probe_share

    def saved_per_token(self, domains: Sequence[str]) -> float:
        """Rounds that a token of the head saves, in requests of these domains."""
        records = [self._nearest_record(domain) for domain in domains]
        gain = sum(record.gain for record in records)
        return sum(record.saved for record in records) / gain if gain else 1.0

    def _nearest_record(self, domain: str) -> _Record:
        """The record of a domain; without one that of the rest, else of all domains."""
        return self._records.get(domain) or self._records.get(_REST) or self._overall

    def add(self, verdict: HeadVerdict) -> None:
        """Count one more chain, or a probe."""
        gain = verdict.num_accepted if verdict.is_worth_it else 0
        saved = gain if verdict.rounds_saved is None or gain == 0 else verdict.rounds_saved
        for record in (self._own_record(verdict.domain), self._overall):
            record.add(gain, saved, is_vain=verdict.num_accepted == 0)

    def renew(self) -> None:
        """Reduce the weight of all records, for a new draft version."""
        for record in (self._overall, *self._records.values()):
            record.renew()

    def _own_record(self, domain: str) -> _Record:
        """The record to update for a domain; beyond the limit on domains that of the rest."""
        if domain not in self._records:
            domain = domain if len(self._records) < _MAX_DOMAINS else _REST
            self._records.setdefault(domain, _Record(self._overall.gain, self._overall.saved))
        return self._records[domain]


FIRST_PROBES = 3.0
"""Initial probe budget, in plain decode steps of one request: cheaper than verifying a useless head's chains."""
LOOKS_AFTER_RENEWAL = 12.0
"""Probe budget at a new version, in such steps: enough to detect a useless version in its trial. Also the most that the
budget accumulates.
"""
_LONGEST_LOOK = 12.0
"""A request whose unread pairs take longer to read, in such steps, is not probed."""
_AWAKE_ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a round: the head for requests without a better suffix tree, or suffix trees alone, or nothing."""

    batch: int
    num_keys: int
    expected_tokens: float = 0.0
    """Expected committed tokens; like `expected_s`, the expected seconds, 0 before anything was measured."""
    plain_s: float = 0.0
    """Expected seconds of a plain round of the same requests."""
    expected_s: float = 0.0
    value: float = 0.0
    """The expected tokens, with those of the head weighted by `saved_per_token`."""
    worth: float = 1.0
    """Rounds that a token of the head saves."""
    uses_head: bool = False
    probe: int | None = None
    """Index of the request in which to probe the unused head."""
    num_proposals: int = 0
    """Nodes of the suffix trees, in a round without the head."""
    from_suffix: tuple[bool, ...] = ()
    """For each request, whether it uses its suffix tree, in a round with the head."""

    @property
    def is_probe(self) -> bool:
        """Whether the round probes the unused head."""
        return self.probe is not None

    @property
    def rate(self) -> float:
        """λ: expected `value` a second."""
        return self.value / self.expected_s if self.expected_s else 0.0


class DraftStep(NamedTuple):
    """One draft step: a proposal for each request, and the head's log-probability of it."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ChainRule:
    """Stopping rule for the head's chains, fixed before the first step, so that one kernel call computes all steps.

    A request's reach is the probability that all its proposals so far are accepted. It begins at 1, or at 0 where the
    request uses its suffix tree. A step multiplies it by the head's probability times the step's factor.
    """

    factors: Sequence[float]
    least: Sequence[float]
    """By step: the head computes another step while the sum of reaches after it exceeds this."""

    @property
    def num_steps(self) -> int:
        """Most steps."""
        return len(self.factors)

    def after(self, num_steps: int) -> ChainRule:
        """The rule for the steps after the first `num_steps`."""
        return ChainRule(self.factors[num_steps:], self.least[num_steps:]) if num_steps else self

    @property
    def first_step(self) -> ChainRule:
        return ChainRule(self.factors[:1], self.least[:1])

    def reached(self, step: int, reaches: Sequence[float], logprobs: Sequence[float]) -> list[float]:
        """The reaches after step `step` (from 0)."""
        factor = self.factors[step]
        return [
            reach * min(MOST_CERTAIN, factor * math.exp(logprob))
            for reach, logprob in zip(reaches, logprobs, strict=True)
        ]

    def continues_after(self, step: int, reaches: Sequence[float]) -> bool:
        """Whether to compute another step after this one."""
        return step + 1 < self.num_steps and sum(reaches) > self.least[step]


ONE_STEP = ChainRule((1.0,), (math.inf,))


class RoundPlanner:
    """Plans the rounds of one engine; used by the thread that decodes."""

    def __init__(self, *, max_depth: int, probe_share: float = 0.01, seed: int = 0) -> None:
        self.times = RoundTimes()
        self.confidence = Calibration()
        self.positions = PositionAcceptance(max_depth)
        self.head_gains = HeadGains()
        self._proposals: defaultdict[int, DecayingMean] = defaultdict(lambda: DecayingMean(float(max_depth)))
        self._steps: defaultdict[int, DecayingMean] = defaultdict(lambda: DecayingMean(float(max_depth)))
        self._probe_share, self._random = probe_share, random.Random(seed)
        self._probe_budget = probe_share
        self._step_s = self._probes_left_s = 0.0
        self._granted = FIRST_PROBES
        """Probe budget that is still to be added, in plain decode steps of one request."""
        self._dismissed: tuple[str, ...] = ()
        """Domains for which the unused head was found not to pay; cleared by the next probe or version."""
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
        """Plan a round for requests of these domains. `suffixes`: R_ik of each request's suffix tree; `head_depth`:
        longest chain of the head; `unread`: pairs of each request that the head has not read.
        """
        self._probe_budget = 0.0
        batch = len(domains)
        without = self._without_head(batch, num_keys, suffixes)
        if not without.plain_s:
            return Plan(batch=batch, num_keys=num_keys)  # nothing was measured yet
        if not head_depth:
            return without
        self._num_plans += 1
        self._step_s = self.times.verify_s(1, 0, num_keys // batch)
        if self._granted:
            self._probes_left_s, self._granted = self._granted * self._step_s, 0.0
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
        shares = [self.head_gains.probe_share(domains[row]) for row in rows]
        self._probe_budget = self._probe_share * max(shares) * len(rows) / batch
        probe = self._probe(rows, unread)
        if probe is None:
            return without
        return replace(
            without,
            probe=probe,
            worth=self.head_gains.saved_per_token(domains[probe : probe + 1]),
            expected_s=without.expected_s + self.times.draft_s(1, 1, unread[probe]),
        )

    @property
    def is_awake(self) -> bool:
        """Whether the head was used lately: only then it reads prompts during their prefill."""
        return self._num_plans - self._last_use < _AWAKE_ROUNDS

    def head_probability(self, step: int, probability: float) -> float:
        """Calibrated acceptance probability of a head's proposal at `step` (from 0) with the head's `probability`."""
        return self.confidence.probability(step, probability)

    def is_worth_verifying(self, plan: Plan, num_proposals: int, reach: float, of_suffixes: float = 0.0) -> bool:
        """Whether verifying one more token than `num_proposals` pays. `reach` is its expected number of acceptances,
        summed over requests with the head's chain, `of_suffixes` the same over requests with a suffix tree.
        """
        price = plan.rate * self._more_s(plan, num_proposals)
        return reach > self._least_reach(plan, num_proposals, price, of_suffixes=of_suffixes)

    def chain_rule(self, plan: Plan, of_suffixes: Sequence[float]) -> ChainRule:
        """The stopping rule for the head's chains in this round. `of_suffixes`: by step, the expected acceptances of
        suffix trees at that position.

        Another step is computed if this one's proposals are worth verifying, and the next one's are expected to be
        worth verification and drafting.
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
        """The best plan with suffix trees alone; without any, plain decoding."""
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
        """For each request, whether its suffix tree's expected acceptances exceed the head's."""
        return tuple(
            sum(reaches) > self.head_gains.gain(domain) for domain, reaches in zip(domains, suffixes, strict=True)
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
        """Plan with the head: depth and steps as in its last rounds, but with the `num_pairs` that it must read now,
        which are many after accepted suffix proposals.
        """
        batch = len(domains)
        depth = min(round(self._proposals[batch].value), head_depth)
        steps = min(max(round(self._steps[batch].value), 1), head_depth)
        asked = [domain for domain, is_suffix in zip(domains, from_suffix, strict=True) if not is_suffix]
        worth, gain = self.head_gains.saved_per_token(asked), sum(map(self.head_gains.gain, asked))
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
        """The sum of reaches above which the chains' next token, accepted at `rate`, earns `price` together with suffix
        trees. While the cost of one more token is unknown, tokens with a probability above one half are tried.
        """
        missing, worth = price - of_suffixes, plan.worth * rate
        least = missing / worth if worth else math.copysign(math.inf, missing)
        if plan.uses_head and not self.times.is_known(plan.batch, num_proposals + 1):
            least = min(least, (plan.batch / 2 - of_suffixes) / rate)
        return least

    def _beats_plain(self, domains: Sequence[str], num_keys: int, head_depth: int, plain_s: float) -> bool:
        """Whether the head would pay without suffix trees, compared with plain decoding."""
        batch = len(domains)
        usual = self._with_head(domains, num_keys, [()] * batch, (False,) * batch, head_depth, num_pairs=2 * batch)
        return usual.rate * plain_s > batch

    def _more_s(self, plan: Plan, num_proposals: int) -> float:
        more_s = self.times.verify_s(plan.batch, num_proposals + 1, plan.num_keys) - self.times.verify_s(
            plan.batch, num_proposals, plan.num_keys
        )
        return max(more_s, 0.0)

    def _probe(self, rows: Sequence[int], unread: Sequence[int]) -> int | None:
        """Choose a random request to probe; None if the budget is used up, or the request has too many unread pairs."""
        if self._probes_left_s <= 0:
            return None
        row = self._random.choice(rows)
        return row if self.times.draft_s(1, 1, unread[row]) < _LONGEST_LOOK * self._step_s else None

    # -- learning ---------------------------------------------------------------------------------------------------

    def observe(
        self, plan: Plan, *, num_proposals: int, num_steps: int, num_pairs: int, draft_s: float, verify_s: float | None
    ) -> None:
        """Learn the times of a round: verification of `num_proposals`, and drafting if the head ran. `verify_s` is None
        if the pass also computed something else.
        """
        if verify_s is None:
            verify_s = self.times.verify_s(plan.batch, num_proposals, plan.num_keys)
        else:
            self.times.add_verification(plan.batch, num_proposals, plan.num_keys, verify_s)
        if plan.expected_s:
            most_s = LOOKS_AFTER_RENEWAL * self._step_s
            self._probes_left_s = min(self._probes_left_s + self._probe_budget * verify_s, most_s)
        if plan.probe is not None:
            self._probes_left_s -= draft_s
            self.times.add_drafting(1, num_steps, num_pairs, draft_s)
            num_proposals = num_steps  # count the probe's token as verified, so that gain and cost fit together
        elif num_steps:
            self.times.add_drafting(plan.batch, num_steps, num_pairs, draft_s)
        if num_steps:
            self._proposals[plan.batch].add(num_proposals)
            self._steps[plan.batch].add(num_steps)

    def observe_head(self, verdicts: Iterable[HeadVerdict]) -> None:
        """Learn from the results of the head's chains in a round."""
        for verdict in verdicts:
            self._dismissed = ()
            self.positions.add(len(verdict.probabilities), verdict.num_accepted)
            self.head_gains.add(verdict)
            for step, probability in enumerate(verdict.probabilities[: verdict.num_accepted + 1]):
                self.confidence.add(step, probability, accepted=step < verdict.num_accepted)

    def renew(self) -> None:
        """Probe a new draft version, even if the last one did not pay."""
        self.positions.decay(RENEWED_WEIGHT)
        self.head_gains.renew()
        self._dismissed = ()
        self._granted = LOOKS_AFTER_RENEWAL
        # Awake for a while, so that the head reads prompts during prefill: a probe could not read a long one.
        self._last_use = self._num_plans
