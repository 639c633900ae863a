"""Probability that the target accepts a suffix proposal: a logistic model that learns from every verification.

`Calibration` corrects predictions by accepted over predicted, by source, length and rank. This model starts from that
estimate c and corrects it by further features of the proposal:

    ln p / (1 − p) = ln c / (1 − c) + Σ w[feature]

A feature is a cell of one table: how sure c is, for first and for other choices apart; how long the longest match of
another text is that names the same token; how long ago the text was written; the token; and the token with the one
before it. Tokens share cells by their remainder. Weights begin at 0, where p = c, and each verdict moves those of its
features down the gradient of the log loss (AdaGrad: Duchi et al., JMLR 12, 2011). So the weight of a new cell moves
far, and that of a frequent one hardly.

Both estimates are scored by their log loss on each verdict before it is learned. Where the model's recent loss is the
higher one, p = c until it is not. One table is one tenant's, since tokens are in it. Figures, and what more a model
could gain, are in benchmarks/results/suffix_acceptance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

_RATE = 0.5
"""Learning rate: size of a weight's first step, relative to the error."""
_SCORE_MEMORY = 0.999
"""Decay of both losses per verdict: half after 700."""
_LEAST, _MOST = 0.002, 0.998
"""Bounds to which the model clips probabilities."""

# The first cell of each feature.
_SURENESS, _SUPPORT, _AGE, _TOKEN, _PAIR, _END = 0, 32, 40, 104, 1128, 5224
NOBODY_ASKED = -1
"""Instead of a match length: other texts were not searched."""

Features = Sequence[int]
"""The cells of one proposal."""


class SuffixAcceptance:
    """The model of one tenant, 84 KB; used by the thread that drafts."""

    def __init__(self) -> None:
        self._weights = [0.0] * _END
        self._squares = [1.0] * _END
        """AdaGrad's sum of squared errors for each weight."""
        self._advantage = 0.0
        """Recent loss of calibration minus that of the model."""

    @property
    def is_used(self) -> bool:
        """Whether the model was lately no worse than calibration."""
        return self._advantage >= 0

    def predict(
        self, token: int, before: int, calibrated: float, *, is_first: bool, age: int, source: int, support: int
    ) -> tuple[float, Features]:
        """(probability that `token` is accepted after the token `before`, its features for `add`).

        `age` is how many tokens ago its text was written, `source` which of the three texts; `support` is the match
        length of another text that names the same token, 0 where none does, or `NOBODY_ASKED`.
        """
        bounded = calibrated if calibrated > _LEAST else _LEAST
        score = log(bounded / (1 - bounded))
        sureness = int(2 * score) + 7
        if not 0 <= sureness < 16:
            sureness = 0 if sureness < 0 else 15
        age_bits = age.bit_length()
        features = (
            _SURENESS + 16 * is_first + sureness,
            _SUPPORT + (7 if support < 0 else support.bit_length()),
            _AGE + 20 * source + (age_bits if age_bits < 20 else 19),
            _TOKEN + token % (_PAIR - _TOKEN),
            _PAIR + (31 * before + token) % (_END - _PAIR),
        )
        weights = self._weights
        for cell in features:
            score += weights[cell]
        learned = 1 / (1 + exp(-score)) if score > -700 else 0.0  # exp(710) overflows
        return (_LEAST if learned < _LEAST else learned if learned < _MOST else _MOST), features

    def add(self, calibrated: float, learned: float, features: Features, *, accepted: bool) -> None:
        """Learn from a proposal that verification reached; arguments as `predict` got and returned them."""
        bounded = calibrated if calibrated > _LEAST else _LEAST
        gained = log(learned / bounded if accepted else (1 - learned) / (1 - bounded))
        self._advantage = _SCORE_MEMORY * self._advantage + gained
        weights, squares, error = self._weights, self._squares, accepted - learned
        for cell in features:
            squares[cell] = square = squares[cell] + error * error
            weights[cell] += _RATE * error / sqrt(square)
