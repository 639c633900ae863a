"""Fields of an engine's report, from what its parts have measured; `serving/sglang/report/read.py` reads them."""

from __future__ import annotations

from serving.hotswap.follower import SwapLog
from serving.sglang.depth.depth import DepthControl
from serving.speedup import Speedup

Fields = dict[str, str | int | float]


def of_swaps(swaps: SwapLog) -> Fields:
    fields: Fields = {"swaps": swaps.num_installed, "swap_failures": swaps.num_failed}
    if swaps.installed:
        fields["last_stall_ms"] = round(swaps.installed[-1][1].stall_ms, 3)
    return fields


def of_depth(depth: DepthControl) -> Fields:
    fields: Fields = {
        "depth": depth.depth,
        "asleep": int(depth.is_asleep),
        "verifications": depth.num_verifications,
        "verified_tokens": depth.num_verified_tokens,
        **depth.explanation(),
        **depth.tally.report(),
    }
    if depth.num_verifications:
        fields["accept_length"] = round(depth.num_verified_tokens / depth.num_verifications, 4)
    if (estimate := depth.estimated_speedup.ratio()) is not None:
        fields["speedup_estimated"] = round(estimate, 4)
    return fields


def of_speedup(speedup: Speedup) -> Fields:
    """What has not been measured yet is left out."""
    fields: Fields = {}
    if speedup.ratio is not None and speedup.baseline_ms_per_token is not None:
        fields["speedup"] = round(speedup.ratio, 4)
        fields["baseline_ms_per_token"] = round(speedup.baseline_ms_per_token, 4)
    if speedup.lower is not None and speedup.upper is not None:
        fields |= {"speedup_lower": round(speedup.lower, 4), "speedup_upper": round(speedup.upper, 4)}
    return fields
