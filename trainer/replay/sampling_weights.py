"""How often each trace of the replay is drawn: priority, tenant share and staleness.

The first two are bounded, so that nothing starves and nothing takes over:

* priority: badly accepted traces are drawn more often, between 1/B and B times the usual (`priority`);
* tenant share: where one tenant would fill the mix, the others are drawn more often instead, up to MAX_REPEAT times as
  often as they would be (`capped_shares`).

**Staleness** is how far old proposals still count. What the target committed never ages; what an old draft proposed
does.

Committed text has the target's distribution whoever drafted, so distillation uses it as long as it is kept. Terms about
proposals are off-policy, and their importance weights grow wild with the distance between then and now: a proposal at
most α versions old counts fully, and fades to nothing at 2α. (ROLL Flash, arXiv 2510.11345, drops whole samples older
than α; here only the proposals go.) The age is measured where the sample is used, against the version published then.

A target that moves is another matter: what an older one committed was drawn from a distribution that is no longer asked
for, labels included. There the whole trace ages, with an α of its own: it is drawn less often, by the same weight, and
forgotten where that is 0.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import torch

from trainer.learning.batch import Example

MAX_REPEAT = 16.0
"""Few traces are not repeated beyond this to dilute another tenant's, or the draft would learn them by heart."""
HALF_LIFE_TOKENS = 20_000
_FORGOTTEN_TOKENS = 1.0


def priority(acceptance: float | None, mean: float, deviation: float, *, bound: float) -> float:
    """In [1/bound, bound]: bound^z, with z how many standard deviations below the mean it was accepted, cut to ±1.

    The mean is that of its own domain and time: a hard domain is not a badly drafted one, and a young draft accepts
    little of everything. 1 where nothing was proposed or nothing is known yet.
    """
    if acceptance is None or deviation <= 0:
        return 1.0
    deviations_below = (mean - acceptance) / deviation
    return float(bound ** max(-1.0, min(1.0, deviations_below)))


def capped_shares(masses: Mapping[str, float], cap: float) -> dict[str, float]:
    """Each tenant's share of the mix: its natural share (of the masses), except that none is above `cap`.

    What the capped ones give up goes to the others in proportion, which are then drawn up to MAX_REPEAT times as often;
    what would go beyond that stays with the capped ones, so a tenant that is alone has everything. Where there are
    fewer than 1/cap tenants the cap is an equal share.
    """
    total = sum(masses.values())
    if total <= 0:
        return dict.fromkeys(masses, 0.0)
    natural = {tenant: mass / total for tenant, mass in masses.items()}
    cap = max(cap, 1.0 / sum(share > 0 for share in natural.values()))
    free, scale = dict(natural), 1.0
    while above := [tenant for tenant, share in free.items() if share * scale > cap]:
        for tenant in above:
            del free[tenant]
        left = 1.0 - cap * (len(natural) - len(free))
        scale = min(left / max(sum(free.values()), 1e-12), MAX_REPEAT)
    shares = {tenant: share * scale for tenant, share in free.items()}
    capped = natural.keys() - free.keys()
    excess = 1.0 - sum(shares.values()) - cap * len(capped)
    capped_mass = sum(natural[tenant] for tenant in capped)
    return shares | {tenant: cap + excess * natural[tenant] / capped_mass for tenant in capped}


class TenantMix:
    """What the last steps were made of: tokens by tenant, each halved after HALF_LIFE_TOKENS more."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def add(self, tenant: str, num_tokens: int) -> None:
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        kept = ((name, tokens * decay) for name, tokens in self._tokens.items())
        self._tokens = {name: tokens for name, tokens in kept if tokens >= _FORGOTTEN_TOKENS}
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + num_tokens

    def share_with(self, tenant: str, num_tokens: int) -> float:
        """The tenant's share after `num_tokens` more of its own."""
        total = sum(self._tokens.values()) + num_tokens
        return (self._tokens.get(tenant, 0.0) + num_tokens) / total if total else 0.0


def version_weight(lag: int, *, max_lag: int) -> float:
    """In [0, 1]: 1 up to `max_lag` (α) versions behind, 0 from 2α on, linear in between; for α = 0 only lag 0 counts.

    A negative lag is a version newer than the published one, after the pointer was set back: it counts fully.
    """
    if lag <= max_lag:
        return 1.0
    return max(0.0, 2.0 - lag / max_lag) if max_lag else 0.0


def proposal_weight(num_proposed_by_version: Sequence[tuple[int, int]], *, published: int, max_lag: int) -> float:
    """In [0, 1]: the mean over a trace's proposals of their versions' weights; 0 without any proposal."""
    num_proposed = sum(count for _, count in num_proposed_by_version)
    if not num_proposed:
        return 0.0
    counted = sum(
        count * version_weight(published - version, max_lag=max_lag) for version, count in num_proposed_by_version
    )
    return min(counted / num_proposed, 1.0)


def without_stale(example: Example, *, published: int, max_lag: int, rng: random.Random) -> Example:
    """The example with each verdict kept with its version's weight as the probability: right in expectation, and what
    is left out costs no work in the step.
    """
    versions = example.verdicts.versions.tolist()
    kept = [rng.random() < version_weight(published - version, max_lag=max_lag) for version in versions]
    if all(kept):
        return example
    return dataclasses.replace(example, verdicts=example.verdicts[torch.tensor(kept)])
