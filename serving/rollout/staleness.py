"""Bounded staleness: how old a sample may become while the target moves on.

With the asynchronous ratio α of ROLL Flash (arXiv 2510.11345) a sample may be used at target version n if it was begun
at version n − α or later. A sample under way that has fallen behind is given up at once: every further token of it
would be wasted.
"""

from __future__ import annotations

from serving.rollout.nouns import Sample


def is_stale(sample: Sample, newest_version: int) -> bool:
    """Whether a sample was begun more than α versions ago; one that was never begun is not old."""
    limit = sample.group.request.max_staleness
    return limit is not None and sample.target_version is not None and newest_version - sample.target_version > limit
