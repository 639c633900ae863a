"""One rollout: its groups, and what its samples have said so far, ready to be sent."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field

import msgspec

from serving.rollout.samples import GroupWork, SampleResult, State

_LOGPROB_DIGITS = 6


@dataclass(kw_only=True)
class Rollout:
    tenant: str
    rollout_id: str
    key: str
    """In the names of its groups and requests: no client has chosen it, and no other rollout has it."""
    groups: dict[str, GroupWork]
    created_s: int
    """Unix time."""
    seen_s: float
    """When a client last asked about it, on the book's clock."""
    lines: list[bytes] = field(default_factory=list)
    """Of the samples that have ended, encoded; the cursor of a client counts them."""
    ends: dict[tuple[str, int], State] = field(default_factory=dict)
    """How each of them ended, by group and number."""
    num_readers: int = 0
    is_cancelled: bool = False
    ended_s: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, at every change."""

    @functools.cached_property
    def num_samples(self) -> int:
        return sum(len(work.request.seeds) for work in self.groups.values())

    @functools.cached_property
    def num_tokens(self) -> int:
        """That it may come to hold."""
        return sum(
            len(work.request.prompt_token_ids) + len(work.request.seeds) * work.request.max_tokens
            for work in self.groups.values()
        )

    @property
    def state(self) -> str:
        if self.ended_s is None:
            return "running"
        return "cancelled" if self.is_cancelled else "ended"

    def add(self, name: str, result: SampleResult) -> None:
        number = result.sample_id.number
        self.lines.append(msgspec.json.encode(self._document(name, result)))
        self.ends[name, number] = result.state
        self.tell()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _document(self, name: str, result: SampleResult) -> dict[str, object]:
        number, work = result.sample_id.number, self.groups[name]
        logprobs = [round(logprob, _LOGPROB_DIGITS) for logprob in result.logprobs] if work.logprobs else None
        return {
            "object": "rollout.sample",
            "number": len(self.lines),
            "group_id": name,
            "sample": number,
            "seed": work.request.seeds[number],
            "state": result.state,
            "finish_reason": result.reason,
            "tokens": result.tokens,
            "text": result.text,
            "logprobs": logprobs,
            "target_version": result.target_version,
            "engine": result.engine or None,
            "num_leases": result.num_leases,
            "detail": result.detail or None,
        }
