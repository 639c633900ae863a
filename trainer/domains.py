"""Domain labels come from clients and are unbounded; what is kept and exported for each of them must not be.

A tenant takes no more names than it leaves free: 32 of 64, the next one 16 of the other 32. So none can take them all
by being the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

ALL = "all"
"""Not a domain: the whole traffic, where it is watched beside the domains."""
DEFAULT = "default"
"""Traces without a label."""
OTHER = "other"
"""Shared by the labels that found no name free."""
_MAX_LENGTH = 64


class DomainNames:
    """The first labels seen keep their own name; `known` has them with the tenants that brought them, and survives a
    restart.
    """

    def __init__(self, max_domains: int, known: Mapping[str, str] | None = None) -> None:
        self._max_domains = max_domains
        self._tenants = dict(known or {})
        self._num_of = Counter(self._tenants.values())

    @property
    def known(self) -> dict[str, str]:
        return self._tenants

    def name(self, label: str, tenant: str) -> str:
        """The bounded name of a label in a tenant's trace; at most `max_domains` besides DEFAULT and OTHER."""
        label = label[:_MAX_LENGTH]
        if label in ("", DEFAULT):
            return DEFAULT
        if label in (ALL, OTHER):
            return OTHER
        if label not in self._tenants:
            if self._num_of[tenant] >= self._max_domains - len(self._tenants):
                return OTHER
            self._tenants[label] = tenant
            self._num_of[tenant] += 1
        return label
