"""The way of traces out of SGLang: captured on the scheduler's thread, assembled and written to Redis on two others."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from serving.capture.filter import CaptureFilter
from serving.capture.recorder import TraceRecorder
from serving.capture.sampling import BRANCH_OUTCOMES, CaptureSampler
from serving.sglang.capture.assembler import TraceAssembler
from serving.sglang.capture.capture import ByteBudget, StepCapture
from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.capture.request import Origin
from serving.sglang.device import Device
from serving.sglang.settings import PluginSettings, buffer_bytes
from speculator.redis.client import open_client
from speculator.redis.trace_stream import TraceStream, cap_for

_CLOSE_TIMEOUT_S = 5.0
_SWITCH_INTERVAL_S = 0.0005


class TracePipeline:
    """One server's way to Redis.

    `capture` is for the scheduler's thread, `target_updated` for any, the rest for the follower's.
    """

    def __init__(
        self,
        settings: PluginSettings,
        *,
        origin: Origin,
        model_key: str,
        model_dir: Path,
        device: Device,
        probe: DraftLogprobRecorder,
    ) -> None:
        ttl_s = 3600 * settings.trace_ttl_hours
        max_bytes = settings.stream_max_bytes or cap_for(model_dir)
        stream = TraceStream(open_client(settings.redis_url), model_key, max_bytes=max_bytes, ttl_s=ttl_s)
        # The assembler's thread must not hold the GIL against the scheduler's, by default for up to 5 ms.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        budget = ByteBudget(settings.capture_bytes_per_s)
        self._assembler = assembler = TraceAssembler(
            settings,
            origin=origin,
            device=device,
            on_trace=lambda trace: self._recorder.submit(trace),
        )
        sampler = None
        if settings.capture_floor < 1:
            sampler = CaptureSampler(
                stream,
                floor=settings.capture_floor,
                at_start=True,
                buffer_share=lambda: assembler.held_share,
            )
        keep = CaptureFilter.load(settings.capture_filter, model_dir)
        self._recorder = TraceRecorder(
            stream,
            max_buffer_bytes=buffer_bytes(settings),
            features=settings.capture_features,
            on_append=budget.spend,
            reason_to_drop=None if keep is None else keep.reason_to_drop,
            ttl_s=ttl_s,
            sampler=sampler,
        )
        self.capture = StepCapture(settings, assembler, device=device, probe=probe, budget=budget, sampler=sampler)

    def target_updated(self, version: int) -> None:
        """Note a new target version: requests that began under another are not recorded."""
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
            "branch_rows": ",".join(f"{outcome}={self._assembler.branch_rows[outcome]}" for outcome in BRANCH_OUTCOMES),
            "trace_bytes": stats.bytes_appended,
            "trace_tokens": stats.tokens_appended,
            "capture_share": round(stats.share, 4),
            **({} if stats.acked is None else {"acked": stats.acked}),
        }
