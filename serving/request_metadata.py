"""Request metadata from the gateway to the SGLang plugin: in the body, and again in a header.

sglang-router parses a chat and forwards only the fields that it knows: `rid`, `cache_salt` and `custom_params` are
not among them. It forwards some headers by name, and all that begin with `x-request-id-`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

HEADER = "x-request-id-slipstream"
POLICY_KEY = "slipstream"
"""Key of the policy in `custom_params`; the gateway refuses a client that sets it."""
TARGET_KEY = "target"
"""Key in the policy: the fingerprint of the target that the gateway's drafts are for."""
TARGET_VERSION_KEY = "target_version"
"""Key in the policy, where the gateway knows it: the oldest target version that may answer."""
OTHER_TARGET = "This engine serves another target than its gateway's drafts are for."
"""Answer of the plugin, with status 503, if fingerprint or version do not fit: a router then tries another engine."""


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    rid: str
    cache_salt: str
    slipstream: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RequestMetadata:
    rid: str
    cache_salt: str
    """The tenant, or a text that begins with it: separates the prefix caches of tenants."""
    policy: dict[str, Any]
    """The capture policy, and the trace span under which the plugin puts its own."""

    def to_header(self) -> dict[str, str]:
        """JSON in ASCII: usually a few hundred characters, at most 8 KB."""
        written = {"rid": self.rid, "cache_salt": self.cache_salt, POLICY_KEY: self.policy}
        return {HEADER: json.dumps(written, separators=(",", ":"))}

    @classmethod
    def of_header(cls, value: str) -> RequestMetadata:
        """Parse a header that `to_header` wrote; raises ValueError for any other."""
        read = msgspec.json.decode(value, type=_Written)
        return cls(rid=read.rid, cache_salt=read.cache_salt, policy=read.slipstream)


def version_of_label(label: str | None) -> int | None:
    """The target version in SGLang's `weight_version`; None for others, such as "default" of the first weights."""
    return int(label) if label and len(label) < 10 and label.isascii() and label.isdecimal() else None
