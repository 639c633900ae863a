"""How likely the target accepts a suffix proposal: a logistic model that learns from every verdict while serving.

`Calibration` says what was accepted over what was predicted, by source, length and rank. The gate begins with that
estimate c and corrects it by what else the host knows of the proposal:

    ln p / (1 − p) = ln c / (1 − c) + Σ w[feature]

A feature is a cell of one table: how sure c is, for first and for other choices apart; how long the longest match of
another text is that names the same token; how long ago the text was written; the token; and the token with the one
before it. Tokens share cells by their remainder. Weights begin at 0, where p = c, and each verdict moves those of its
features down the gradient of the log loss (AdaGrad: Duchi et al., JMLR 12, 2011). So the weight of a new cell moves
far, and that of a frequent one hardly.

Both estimates are scored by their log loss on each verdict before it is learned. Where the gate's recent loss is the
higher one, p = c until it is not. One table is one tenant's, since tokens are in it. Figures, and what more a gate
could gain, are in benchmarks/results/acceptance_gate.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt

_RATE = 0.5
"""Of a weight's first step, against the error."""
_SCORE_MEMORY = 0.999
"""What a verdict still weighs in both losses after another: half after 700."""
_LEAST, _MOST = 0.002, 0.998
"""Probabilities that the gate tells apart from never and always."""

# The first cell of each feature.
_SURENESS, _SUPPORT, _AGE, _TOKEN, _PAIR, _END = 0, 32, 40, 104, 1128, 5224
NOBODY_ASKED = -1
"""In the place of a match length: other texts were not looked at."""

Features = Sequence[int]
"""The cells of one proposal."""


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

    def judge(
        self, token: int, before: int, calibrated: float, *, is_first: bool, age: int, source: int, support: int
    ) -> tuple[float, Features]:
        """The probability that `token` is accepted behind the token `before`, and its features, for `add`.

        `age` is how many tokens were written since, in text of a `source` of three; `support` is the match length of
        another text that names the same token, 0 where none does, or `NOBODY_ASKED`.
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
        learned = 1 / (1 + exp(-score))
        return (_LEAST if learned < _LEAST else learned if learned < _MOST else _MOST), features

    def add(self, calibrated: float, learned: float, features: Features, *, accepted: bool) -> None:
        """Verification reached a proposal of which `judge` has said so."""
        bounded = calibrated if calibrated > _LEAST else _LEAST
        gained = log(learned / bounded if accepted else (1 - learned) / (1 - bounded))
        self._advantage = _SCORE_MEMORY * self._advantage + gained
        weights, squares, error = self._weights, self._squares, accepted - learned
        for cell in features:
            squares[cell] = square = squares[cell] + error * error
            weights[cell] += _RATE * error / sqrt(square)
