"""Which lineage a request goes to that names none: by what answers to requests like it have committed a verification.

No model looks at the text. Requests are alike that have the same tenant and the same `domain`, a label that clients
choose. For these, every lineage a has an estimate L_a, tokens over verifications of its answers, and their number n_a;
with each answer all of them fade by γ, since drafts change while they are served. A request goes to the lineage with
the largest draw

    L_a · (1 + (σ / √n_a) · z),   z ~ N(0, 1)

which is Thompson sampling with discounted counts (Raj and Kalyani, "Taming non-stationary bandits: a Bayesian
approach", arXiv 1707.09727), for normal rewards of known relative spread: over recorded answers the accept length of
one draft has σ = 20% (docs/versions.md). A lineage that is clearly worse is asked seldom, and often enough to notice
when it is not. The others are tried when the base has an answer; while nothing is measured, everything goes to the
base.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from speculator.lineages import BASE

MAX_KINDS = 4096
"""Tenants times domains whose estimates are kept. Of more, the tenant with the most domains loses the one that was not
asked for longest: the labels that one tenant makes up push out no other's."""
MEMORY = 500
"""Answers after which one counts 1/e."""
SPREAD = 0.2


@dataclass
class _Estimate:
    num_answers: float = 0.0
    num_tokens: float = 0.0
    num_verifications: float = 0.0

    def fade(self, share: float) -> None:
        self.num_answers *= share
        self.num_tokens *= share
        self.num_verifications *= share

    def draw(self, rng: random.Random) -> float:
        if not self.num_verifications:
            return math.inf
        length = self.num_tokens / self.num_verifications
        return length * (1 + SPREAD / math.sqrt(self.num_answers) * rng.gauss(0, 1))


class Choice:
    """Estimates of `lineages`, the base not among them; for one thread."""

    def __init__(self, lineages: Sequence[str], *, rng: random.Random | None = None) -> None:
        self._names = (BASE, *lineages)
        self._rng = rng or random.Random()
        self._domains: OrderedDict[str, OrderedDict[str, dict[str, _Estimate]]] = OrderedDict()
        """By tenant; who was not asked for longest comes first, among tenants and among the domains of each."""
        self._num_kinds = 0

    def pick(self, tenant: str, domain: str) -> str:
        if domain not in self._domains.get(tenant, ()):
            return BASE
        estimates = self._kind(tenant, domain)
        draws = {name: estimate.draw(self._rng) for name, estimate in estimates.items()}
        best = max(draws.values())
        return self._rng.choice([name for name, drawn in draws.items() if drawn == best])

    def learn(self, tenant: str, domain: str, lineage: str, *, num_tokens: float, num_verifications: float) -> None:
        """An answer of `lineage` committed so many tokens in so many verifications; without any it says nothing."""
        if not num_verifications > 0:
            return
        estimates = self._kind(tenant, domain)
        for estimate in estimates.values():
            estimate.fade(1 - 1 / MEMORY)
        mine = estimates[lineage]
        mine.num_answers += 1
        mine.num_tokens += num_tokens
        mine.num_verifications += num_verifications

    def _kind(self, tenant: str, domain: str) -> dict[str, _Estimate]:
        """The estimates of a kind, which is the latest now."""
        domains = self._domains.setdefault(tenant, OrderedDict())
        self._domains.move_to_end(tenant)
        if domain not in domains:
            domains[domain] = {name: _Estimate() for name in self._names}
            self._num_kinds += 1
            if self._num_kinds > MAX_KINDS:
                self._forget_one()
        domains.move_to_end(domain)
        return domains[domain]

    def _forget_one(self) -> None:
        crowded = max(self._domains, key=lambda tenant: len(self._domains[tenant]))
        self._domains[crowded].popitem(last=False)
        if not self._domains[crowded]:
            del self._domains[crowded]
        self._num_kinds -= 1
