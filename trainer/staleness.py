"""How far old proposals still count. What the target committed never ages; what an old draft proposed does.

Committed text has the target's distribution whoever drafted, so distillation uses it as long as it is kept. Terms about
proposals are off-policy, and their importance weights grow wild with the distance between then and now: a proposal at
most α versions old counts fully, and fades to nothing at 2α. (ROLL Flash, arXiv 2510.11345, drops whole samples older
than α; here only the proposals go.) The age is measured where the sample is used, against the version published then.

A target that moves is another matter: what an older one committed was drawn from a distribution that is no longer asked
for, labels included. There the whole trace ages, with an α of its own: it is drawn less often, by the same weight, and
forgotten where that is 0.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch

from trainer.batch import Example


def version_weight(lag: int, *, max_lag: int) -> float:
    """In [0, 1]: 1 up to `max_lag` (α) versions behind, 0 from 2α on, linear in between; for α = 0 only lag 0 counts.

    A negative lag is a version newer than the published one, after the pointer was set back: it counts fully.
    """
    if lag <= max_lag:
        return 1.0
    return max(0.0, 2.0 - lag / max_lag) if max_lag else 0.0


def proposal_weight(num_proposed_by_version: Sequence[tuple[int, int]], *, published: int, max_lag: int) -> float:
    """In [0, 1]: the mean over a trace's proposals of their versions' weights; 0 without any proposal."""
    num_proposed = sum(count for _, count in num_proposed_by_version)
    if not num_proposed:
        return 0.0
    counted = sum(
        count * version_weight(published - version, max_lag=max_lag) for version, count in num_proposed_by_version
    )
    return min(counted / num_proposed, 1.0)


def without_stale(example: Example, *, published: int, max_lag: int, rng: random.Random) -> Example:
    """The example with each verdict kept with its version's weight as the probability: right in expectation, and what
    is left out costs no work in the step.
    """
    versions = example.verdicts.versions.tolist()
    kept = [rng.random() < version_weight(published - version, max_lag=max_lag) for version in versions]
    if all(kept):
        return example
    return dataclasses.replace(example, verdicts=example.verdicts[torch.tensor(kept)])
