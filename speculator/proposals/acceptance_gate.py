"""How likely the target accepts a suffix proposal: a logistic model that learns from every verdict while serving.

`Calibration` says what was accepted over what was predicted, by source, length and rank. The gate begins with that
estimate c and corrects it by what else the host knows of the proposal:

    ln p / (1 − p) = ln c / (1 − c) + Σ w[feature]

Features are cells of one table: how sure c is, for first and for other choices apart; how long the longest match of
another text is that names the same token; how long ago the text was written; the token; and the token with the one
before it. Tokens share cells by their remainder. Weights begin at 0, where p = c, and each verdict moves those of its
features down the gradient of the log loss (AdaGrad: Duchi et al., JMLR 12, 2011). So a cell that is seen for the first
time moves far, and one that was seen often hardly.

Both estimates are scored by their log loss on every verdict before it is learned. Where the gate's recent loss is the
higher one, p = c until it is not. One table is one tenant's, since tokens are in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_RATE = 0.5
"""Of a weight's first step, against the error."""
_SCORE_MEMORY = 0.999
"""What a verdict still weighs in both losses after another: half after 700."""
_LEAST, _MOST = 0.002, 0.998
"""Probabilities that the gate tells apart from never and always."""

# Cells of the table, by the first of each feature.
_SURENESS, _SUPPORT, _AGE, _TOKEN, _PAIR, _END = 0, 32, 40, 104, 1128, 5224

Features = Sequence[int]
"""The cells of one proposal."""


def features_of(
    token: int, before: int, calibrated: float, *, is_first: bool, age: int, source: int, support: int
) -> Features:
    """The cells of a proposal of `token` behind the token `before`.

    `age` is how many tokens were written since, in text of a `source` of three; `support` is the match length of
    another text that names the same token, 0 where none does, −1 where nobody looked.
    """
    sureness = int(2 * _logit(calibrated)) + 7
    return (
        _SURENESS + 16 * is_first + (0 if sureness < 0 else min(sureness, 15)),
        _SUPPORT + (7 if support < 0 else min(support.bit_length(), 6)),
        _AGE + 20 * source + min(age.bit_length(), 19),
        _TOKEN + token % (_PAIR - _TOKEN),
        _PAIR + (31 * before + token) % (_END - _PAIR),
    )


class AcceptanceGate:
    """The table of one tenant; used by the thread that drafts. It takes 84 KB."""

    def __init__(self) -> None:
        self._weights = [0.0] * _END
        self._squares = [1.0] * _END
        """Of the errors that each weight has seen."""
        self._advantage = 0.0
        """Calibration's recent loss less the gate's."""

    @property
    def is_used(self) -> bool:
        """Whether it was no worse than calibration lately."""
        return self._advantage >= 0

    def probability(self, calibrated: float, features: Features) -> float:
        """That the proposal is accepted, once reached."""
        return self._learned(calibrated, features) if self._advantage >= 0 else calibrated

    def add(self, calibrated: float, features: Features, *, accepted: bool) -> None:
        """Verification reached the proposal."""
        learned = self._learned(calibrated, features)
        bounded = min(max(calibrated, _LEAST), _MOST)
        gained = math.log(learned / bounded if accepted else (1 - learned) / (1 - bounded))
        self._advantage = _SCORE_MEMORY * self._advantage + gained
        error = accepted - learned
        weights, squares, square = self._weights, self._squares, error * error
        for cell in features:
            squares[cell] += square
            weights[cell] += _RATE * error / math.sqrt(squares[cell])

    def _learned(self, calibrated: float, features: Features) -> float:
        score = _logit(calibrated)
        for cell in features:
            score += self._weights[cell]
        return min(max(1 / (1 + math.exp(-score)), _LEAST), _MOST)


def _logit(probability: float) -> float:
    bounded = min(max(probability, _LEAST), _MOST)
    return math.log(bounded / (1 - bounded))
