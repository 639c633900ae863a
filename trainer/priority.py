"""How often each trace of the replay is drawn. Both rules are bounded, so that nothing starves and nothing takes over:

* priority: badly accepted traces are drawn more often, between 1/B and B times the usual (`priority`);
* tenant share: where one tenant would fill the mix, the others are drawn more often instead, up to MAX_REPEAT times as
  often as they would be (`capped_shares`).
"""

from __future__ import annotations

from collections.abc import Mapping

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
