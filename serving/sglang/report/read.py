"""What the plugin says to Redis about its engine, read on the other side; serving/sglang/report/write.py writes
most."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What the plugin last said; None for what it did not say."""

    version: int | None
    refused: frozenset[int]
    """Versions that can never be installed there."""
    swaps: int | None
    swap_failures: int | None
    last_stall_ms: float | None
    steps: int | None
    depth: int | None
    verifications: int | None
    verified_tokens: int | None
    """Over verifications: the acceptance length."""
    rounds: Mapping[str, int]
    """Decode steps by mode, speculative or control; so are their time and the tokens that they committed."""
    decode_ms: Mapping[str, int]
    round_tokens: Mapping[str, int]
    proposals: Mapping[str, int]
    """Verified proposals by position, and the accepted ones."""
    accepted: Mapping[str, int]
    captured: int | None
    appended: int | None
    pending: int | None
    dropped_by_reason: Mapping[str, int]
    trace_bytes: int | None
    trace_tokens: int | None
    capture_share: float | None
    """Of finished traces, that sampling keeps."""
    speedup: float | None
    speedup_lower: float | None
    speedup_upper: float | None
    """Ends of the 95% interval of the measured speedup."""
    speedup_estimated: float | None
    baseline_ms_per_token: float | None
    watched: int | None
    """The version on trial; 0 where none is."""
    verdicts: Mapping[str, int]
    """How trials of versions ended."""
    last_verdict: str
    failures: Mapping[str, int]
    """Parts of the plugin that are off, as "part:type of the error"."""
    role: str
    """Its part in the trial of a version: canary, waiting, settled."""
    draft_accept_length: float | None
    """Of the version in service, lately."""
    target_version: int | None
    process: str
    """"host:pid" of the scheduler."""
    running: int | None
    """Requests of its last step; 0 where that was long ago."""
    model: str
    context_length: int | None
    max_depth: int | None
    """What it serves, which behind a router nobody else says."""
    heeds_seed: bool | None

    @classmethod
    def parse(cls, said: Mapping[str, str]) -> EngineReport:
        """Leave out what cannot be read: the plugin may be another version than this gateway."""
        return cls(
            **{field.name: _READERS[str(field.type)](said.get(field.name, "")) for field in dataclasses.fields(cls)}
        )


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _yes(text: str) -> bool | None:
    return text == "1" if text else None


def _versions(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(",") if part.isdecimal())


def _counts(text: str) -> dict[str, int]:
    parts = (part.partition("=") for part in text.split(","))
    return {key: int(count) for key, _, count in parts if count.isdecimal()}


_READERS: dict[str, Callable[[str], Any]] = {
    "int | None": _whole,
    "float | None": _number,
    "bool | None": _yes,
    "str": str,
    "frozenset[int]": _versions,
    "Mapping[str, int]": _counts,
}
"""By the type of a field, as it is written above."""
