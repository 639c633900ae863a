"""What the gateway tells the plugin about a request: in the body, and once more in a header.

sglang-router reads a chat into the fields that it knows and writes those down again: `rid`, `cache_salt` and
`custom_params` are not among them. Of headers it passes some names, and whatever begins with `x-request-id-`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

HEADER = "x-request-id-slipstream"
POLICY_KEY = "slipstream"
"""Where the policy stands in `custom_params`; no client can write there."""
TARGET_KEY = "target"
"""In the policy: the fingerprint of the target that the gateway's drafts are for."""
TARGET_VERSION_KEY = "target_version"
"""In the policy, where the gateway knows of versions: no older one may answer."""
OTHER_TARGET = "This engine serves another target than its gateway's drafts are for."
"""What the plugin answers then, with status 503: a router tries another engine."""


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    rid: str
    cache_salt: str
    slipstream: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Marks:
    rid: str
    cache_salt: str
    """The tenant, or what begins with it: it keeps the prefix cache of one tenant out of another's reach."""
    policy: dict[str, Any]
    """The capture policy, and the span that the plugin's own spans join."""

    def to_header(self) -> dict[str, str]:
        """JSON in ASCII: a few hundred characters, 8 KB where a client makes the most of its fields."""
        written = {"rid": self.rid, "cache_salt": self.cache_salt, POLICY_KEY: self.policy}
        return {HEADER: json.dumps(written, separators=(",", ":"))}

    @classmethod
    def of_header(cls, value: str) -> Marks:
        """Raises ValueError for what `to_header` cannot have written."""
        read = msgspec.json.decode(value, type=_Written)
        return cls(rid=read.rid, cache_salt=read.cache_salt, policy=read.slipstream)


def version_of_label(label: str | None) -> int | None:
    """The target's version, where SGLang's `weight_version` is one: its first weights are called "default"."""
    return int(label) if label and len(label) < 10 and label.isascii() and label.isdecimal() else None
