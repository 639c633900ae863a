"""Domain labels come from clients and are unbounded; what is kept and exported for each of them must not be."""

from __future__ import annotations

from collections.abc import Iterable

ALL = "all"
"""Not a domain: the whole traffic, where it is watched beside the domains."""
DEFAULT = "default"
"""Traces without a label."""
OTHER = "other"
"""Shared by the labels that came after `max_domains` others."""
_MAX_LENGTH = 64


class DomainNames:
    """The first labels seen keep their own name; `known` lists them in that order and survives a restart."""

    def __init__(self, max_domains: int, known: Iterable[str] = ()) -> None:
        self._max_domains = max_domains
        self._names = dict.fromkeys(known)

    @property
    def known(self) -> list[str]:
        return list(self._names)

    def name(self, label: str) -> str:
        """The bounded name of a label; at most `max_domains` besides DEFAULT and OTHER."""
        label = label[:_MAX_LENGTH]
        if label in ("", DEFAULT):
            return DEFAULT
        if label in (ALL, OTHER):
            return OTHER
        if label not in self._names:
            if len(self._names) >= self._max_domains:
                return OTHER
            self._names[label] = None
        return label
