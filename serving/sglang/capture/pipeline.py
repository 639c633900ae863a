"""The way of a trace out of an SGLang server: captured on the scheduler's thread, assembled on a second, written to
Redis on a third. One rank of a group has it, where it captures at all.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch

from serving.capture.privacy import CaptureFilter
from serving.capture.recorder import TraceRecorder
from serving.capture.sampling import CaptureSampler
from serving.sglang.capture.assembler import TraceAssembler
from serving.sglang.capture.capture import ByteBudget, Capture
from serving.sglang.capture.draft_logprobs import DraftProbe
from serving.sglang.settings import PluginSettings
from speculator.redis.client import connect
from speculator.redis.trace_stream import TraceStream

_CLOSE_TIMEOUT_S = 5.0
_SWITCH_INTERVAL_S = 0.0005


class TracePipeline:
    """`capture` is for the scheduler's thread, what tells of the target for any, the rest is for the follower's."""

    def __init__(
        self,
        settings: PluginSettings,
        *,
        engine_id: str,
        model_key: str,
        model_dir: Path,
        target_fingerprint: str,
        device: torch.device,
        probe: DraftProbe,
    ) -> None:
        ttl_s = 3600 * settings.trace_ttl_hours

        def open_stream() -> TraceStream:
            client = connect(settings.redis_url)
            return TraceStream(client, model_key, max_bytes=settings.stream_max_bytes, ttl_s=ttl_s)

        # The assembler's thread must not keep the scheduler's waiting for the interpreter, by default up to 5 ms.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        budget = ByteBudget(settings.capture_bytes_per_s)
        sampler = None
        if settings.capture_floor < 1:
            sampler = CaptureSampler(open_stream, floor=settings.capture_floor, at_start=True)
        keep = CaptureFilter.load(settings.capture_filter, model_dir)
        self._recorder = TraceRecorder(
            open_stream,
            max_buffer_bytes=settings.buffer_bytes,
            features=settings.capture_features,
            on_append=budget.spend,
            reason_to_drop=None if keep is None else keep.reason_to_drop,
            ttl_s=ttl_s,
            sampler=sampler,
        )
        self._assembler = TraceAssembler(
            settings,
            engine_id=engine_id,
            target_fingerprint=target_fingerprint,
            device=device,
            on_trace=self._recorder.submit,
        )
        self.capture = Capture(settings, self._assembler, device=device, probe=probe, budget=budget, sampler=sampler)

    def target_renewed(self, version: int) -> None:
        """A new target is announced: what was begun under another is not recorded."""
        self._assembler.target_version = version

    def forget(self, tenants: Collection[str]) -> None:
        self._recorder.forget(tenants)

    def close(self) -> None:
        """Assemble and write what is queued."""
        self._assembler.close(_CLOSE_TIMEOUT_S)
        self._recorder.close(_CLOSE_TIMEOUT_S)

    def status(self) -> dict[str, str | int | float]:
        """Fields of the engine's report."""
        # Copies: their threads go on counting.
        stats, lost = self._recorder.stats(), Counter(self.capture.refused) + Counter(self._assembler.dropped)
        dropped = Counter(stats.dropped_by_reason) + lost
        return {
            "captured": stats.captured,
            "appended": stats.appended,
            "pending": stats.pending,
            "dropped": stats.dropped + sum(lost.values()),
            "dropped_by_reason": ",".join(f"{reason}={count}" for reason, count in sorted(dropped.items())),
            "trace_bytes": stats.bytes_appended,
            "trace_tokens": stats.tokens_appended,
            "capture_share": round(stats.share, 4),
        }
