"""Settings of the local engine, with the reason for each default."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from serving.capture.sampling import DEFAULT_BRANCH_SHARE
from speculator.host import num_cores

DtypeName = Literal["bfloat16", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    model_dir: Path
    model_name: str
    dtype: DtypeName = "bfloat16"
    device: str = "cpu"
    num_slots: int = 8
    """Requests that decode together."""
    context_length: int = 2048
    max_waiting: int = 256
    """Requests queued beyond the running ones; the next is refused as busy."""
    depth: int = 4
    """Most proposals of the draft head in a round; 0 never runs it."""
    suffix_depth: int = 16
    """Most suffix proposals in a round; 0 keeps no text to propose from."""
    max_depth: int = 5
    control_share: float = 0.02
    """Share of rounds at depth 0 that gives the measured baseline."""
    plain_share: float = 0.0
    """Share of rounds, in stretches, without any drafting: the A/B test of the end-to-end speedup."""
    head_off_share: float = 0.0
    """Share of drafting rounds, in stretches, without the draft head: the A/B test of what the head adds."""
    prefill_chunk: int = 32
    """Prompt tokens read in or before a round: bounds the pause that a new request causes in running streams."""
    capture: bool = True
    capture_topk: int = 64
    context_window: int = 512
    """Prompt positions kept in a trace."""
    prompt_labels: int = 128
    """How many of those, the last ones, keep the target's distribution: each costs a tenth of a decoded token."""
    branch_share: float = DEFAULT_BRANCH_SHARE
    """Share of the rejected proposals whose features and target distribution are kept in traces, too."""
    num_threads: int | None = None
    """None: all cores but one."""

    @property
    def cache_margin(self) -> int:
        """Cache positions that a round may need past a request's limit."""
        return max(self.max_depth, self.suffix_depth) + 1

    engine_id: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")


def spare_cores() -> int:
    """All cores that this process may use, but one."""
    return max(1, num_cores() - 1)
