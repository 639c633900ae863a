"""Measure how fast an SGLang server decodes for a few clients that each stream one answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tests.sglang.server import SglangServer


class NeverTogetherError(Exception):
    """One client's answer had ended before another's began."""


class Decoded(NamedTuple):
    rate: float
    """Tokens a second, while all of them decode."""
    accept_length: float
    """Committed tokens a decode step and request."""


def decode(server: SglangServer, prompts: Sequence[list[int]], **sampling: Any) -> Decoded:
    """Answer all prompts at the same time. Raises NeverTogetherError."""

    def answer(ids: list[int]) -> tuple[list[tuple[float, int]], int]:
        """(when, tokens so far), and decode steps."""
        events, steps = [], 0
        for event in server.stream(ids, **sampling):
            meta = event["meta_info"]
            events.append((time.perf_counter(), int(meta["completion_tokens"])))
            steps = int(meta.get("spec_verify_ct", meta["completion_tokens"] - 1))
        return events, steps

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(answer, prompts))
    streams = [events for events, _ in answers]
    began_s, ended_s = max(events[0][0] for events in streams), min(events[-1][0] for events in streams)
    if ended_s <= began_s:
        raise NeverTogetherError
    tokens = sum(_tokens_at(events, ended_s) - _tokens_at(events, began_s) for events in streams)
    committed, steps = sum(events[-1][1] - 1 for events in streams), sum(count for _, count in answers)
    return Decoded(tokens / (ended_s - began_s), committed / max(steps, 1))


def _tokens_at(events: Sequence[tuple[float, int]], at_s: float) -> float:
    """Tokens received at a time, interpolated linearly between events."""
    for (before_s, before), (after_s, after) in itertools.pairwise(events):
        if before_s <= at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / (after_s - before_s)
    return float(events[0][1] if at_s < events[0][0] else events[-1][1])
