"""Weights for losses on proposals that an older draft made: importance ratios, cut to bounds.

Shape letters: J proposals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from speculator.errors import ConfigError

CorrectionName = Literal["none", "tis", "cispo", "topr", "weighted_topr"]

_DEFAULT_CLIPS: dict[CorrectionName, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "cispo": (0.0, 1.2),
    "topr": (0.0, 1.0),
    "weighted_topr": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights for terms on proposals, which an older draft made: q the draft in training, μ the draft that proposed.

    A committed position is visited with the target's own distribution whatever the draft was, so terms on committed
    text need no weight. A proposal is the draft's own action; its weight is a function of ρ = q(x) / μ(x), never
    differentiated:

        none           1
        tis            min(ρ, high)                                    truncated importance sampling (Ionides, 2008)
        cispo          min(ρ, high)                                    MiniMax-M1, arXiv 2506.13585: no lower bound
        topr           1 where A ≥ 0, clip(ρ, low, high) where A < 0   tapered off-policy REINFORCE, 2503.14286
        weighted_topr  topr, its two cases times `positive` and `negative`

    (The set that ROLL Flash, arXiv 2510.11345, offers for asynchronous training.) A is the advantage; a rejected
    proposal without one counts as A < 0. tis and cispo differ in their usual `high` alone. `low`, 0 unless it is set,
    is a floor: with it a token that has become unlikely under the draft still counts.

    **What μ means here.** A trace records the proposing draft's own log-probability of the token, at the request's
    temperature T. For T > 0 the proposal is argmax(log q_T + noise), which has exactly the distribution q_T: ρ is a
    true ratio for functions of the proposal alone. Target and draft share the noise
    (speculator/draft/verification.py), so whether a proposal is accepted depends on more, which ρ does not correct. At
    T = 0, and in trees, the draft proposes its likeliest tokens: ρ then is the ratio of two *soft* policies. It says
    how much the draft's probability of this token has changed: near 1 the verdict is fresh, far below 1 the draft has
    become unlikely to propose the token. It is a measure of staleness, not an unbiased correction.

    `low` and `high` bound ρ, by default as usual for the name. Raises ConfigError for values that make no sense.
    """

    name: CorrectionName = "none"
    low: float | None = None
    high: float | None = None
    positive: float = 1.0
    negative: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(CorrectionName):
            raise ConfigError(f"unknown correction {self.name!r}: choose one of {', '.join(get_args(CorrectionName))}")
        low, high = self.clip
        if not 0 <= low <= high:
            raise ConfigError(f"the clip bounds {low} and {high} of {self.name} are not 0 ≤ low ≤ high")

    @property
    def clip(self) -> tuple[float, float]:
        low, high = _DEFAULT_CLIPS[self.name]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def weights(self, log_ratio_J: Tensor, positive_J: Tensor) -> Tensor:
        """[J] float32 weights from log ρ; `positive_J` [J] bool is the advantage's sign, zero counting as positive."""
        low, high = self.clip
        clipped_J = log_ratio_J.detach().float().exp().clamp(low, high)
        if self.name == "none":
            return clipped_J.new_ones(clipped_J.shape)
        if self.name in ("tis", "cispo"):
            return clipped_J
        weights_J = clipped_J.masked_fill(positive_J, 1.0)
        if self.name == "topr":
            return weights_J
        return weights_J * positive_J.float().mul(self.positive - self.negative).add(self.negative)
