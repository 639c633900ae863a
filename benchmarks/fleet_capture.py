"""What capture sends and the trainer learns from: the real sampling policy, a simulated stream and trainer."""

from __future__ import annotations

from dataclasses import dataclass

from serving.capture_share import CaptureShare, StreamFigures


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Of a fleet, by the second, once it has settled."""

    share: float
    """Of the finished answers that are captured; the policy's own, the same on every engine."""
    bytes_per_s: float
    learnt_share: float
    """Of all answers, those that the trainer takes."""
    lost_share: float
    """Of the captured ones, those that the cap pushes out before the trainer has taken them."""
    unsettled_share: float
    """Of the captured ones, those that it pushes out between the trainer's taking them and its checkpoint: they are
    learnt from, unless it dies in between, and Redis counts them as lost."""


def settle(
    *,
    traces_per_s: float,
    trainer_traces_per_s: float,
    trace_bytes: float,
    stream_max_bytes: int,
    checkpoint_s: float,
    floor: float,
    seconds: int = 1800,
) -> Flow:
    """The last third of `seconds`; before it the share finds its place.

    Each second all engines append, the trainer takes what it can, and every `checkpoint_s` it settles what it took.
    What does not fit below the cap pushes the oldest out, and those are in the trainer's hand.
    """
    policy = CaptureShare(floor)
    waiting = in_hand = taken = 0.0
    sums = dict.fromkeys(("share", "captured", "learnt", "lost", "unsettled"), 0.0)
    room = stream_max_bytes / trace_bytes
    for second in range(seconds):
        captured = traces_per_s * policy.share
        waiting += captured
        moved = min(waiting, trainer_traces_per_s)
        waiting, in_hand, taken = waiting - moved, in_hand + moved, taken + moved
        excess = max(0.0, in_hand + waiting - room)
        unsettled = min(excess, in_hand)
        in_hand, waiting = in_hand - unsettled, waiting - (excess - unsettled)
        if second % checkpoint_s < 1:
            in_hand = 0.0
        figures = StreamFigures(
            unacked_bytes=(in_hand + waiting) * trace_bytes,
            max_bytes=stream_max_bytes,
            undelivered=round(waiting),
            taken=round(taken),
        )
        policy.look(figures, float(second))
        if second >= 2 * seconds / 3:
            sums["share"] += policy.share
            sums["captured"] += captured
            sums["learnt"] += moved
            sums["lost"] += excess - unsettled
            sums["unsettled"] += unsettled
    counted = seconds - 2 * seconds // 3
    return Flow(
        share=sums["share"] / counted,
        bytes_per_s=sums["captured"] / counted * trace_bytes,
        learnt_share=sums["learnt"] / counted / traces_per_s,
        lost_share=sums["lost"] / sums["captured"],
        unsettled_share=sums["unsettled"] / sums["captured"],
    )
