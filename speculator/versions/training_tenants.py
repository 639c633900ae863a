"""Whose traffic a draft version was trained on, as its manifest says it.

The counts are of the whole lineage up to the version, so older versions may be removed. They are bounded: of more
than MAX_TENANTS tenants the later ones share one number, and such a version may have learnt from any that it does not
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

MAX_TENANTS = 2000
MANIFEST_KEY = "tenants"


class TenantCounts(msgspec.Struct, kw_only=True):
    """Answer tokens in all steps by tenant, repetitions included."""

    tokens: dict[str, int] = {}
    others: int = 0
    """Of the tenants that found no place."""
    complete: bool = True
    """False where the weights descend from something that nothing is known of."""

    def add(self, tenant: str, num_tokens: int) -> None:
        if tenant in self.tokens or len(self.tokens) < MAX_TENANTS:
            self.tokens[tenant] = self.tokens.get(tenant, 0) + num_tokens
        else:
            self.others += num_tokens

    def learnt_from(self, tenant: str) -> int | None:
        """Tokens of a tenant; None where that is not known."""
        if tenant in self.tokens:
            return self.tokens[tenant]
        return 0 if self.complete and not self.others else None


def joined_counts(parts: Iterable[TenantCounts]) -> TenantCounts:
    """Of several processes that train together."""
    whole = TenantCounts()
    for part in parts:
        for tenant, num_tokens in part.tokens.items():
            whole.add(tenant, num_tokens)
        whole.others += part.others
        whole.complete &= part.complete
    return whole


def counts_of(info: Mapping[str, Any]) -> TenantCounts:
    """From a manifest's `info`; one that does not say was trained on nothing if it is fresh, else on who knows what."""
    try:
        return msgspec.convert(info[MANIFEST_KEY], type=TenantCounts)
    except (KeyError, msgspec.ValidationError):
        return TenantCounts(complete=info.get("origin") == "fresh")
