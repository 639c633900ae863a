"""What the learned head earns: by domain, as verifications and looks say, older ones fading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MEMORY = 0.98
"""What a verification still weighs after another: half after 34."""
_PRIOR_WEIGHT = 2.0
RENEWED_WEIGHT = 0.25
"""What evidence about the previous version is worth for the next, which is mostly like it."""
_VAIN_LOOKS = 24
"""After so many in a row that found nothing, looks get half their share: enough to read text as fast as it grows."""
_MAX_DOMAINS = 64
_REST = "other"


class FadingMean:
    """A fading mean that begins at a guess."""

    def __init__(self, guess: float) -> None:
        self._sum, self._weight = _PRIOR_WEIGHT * guess, _PRIOR_WEIGHT

    def add(self, value: float) -> None:
        self._sum, self._weight = _MEMORY * self._sum + value, _MEMORY * self._weight + 1

    def fade(self) -> None:
        self._sum, self._weight = RENEWED_WEIGHT * self._sum, RENEWED_WEIGHT * self._weight

    @property
    def value(self) -> float:
        return self._sum / self._weight


@dataclass(frozen=True)
class HeadVerdict:
    """What became of the head's chain for one request; an empty chain counts, too, and so does a look."""

    domain: str
    probabilities: Sequence[float]
    """The head's own, of each proposal."""
    num_accepted: int
    is_worth_it: bool = True
    """False for a look at a token that a round would not have verified."""
    rounds_saved: float | None = None
    """By the accepted ones; None where nothing but the head proposes: as many as those are."""


class _Record:
    """What the head has lately earned, in one domain or in all."""

    def __init__(self, gain: float, saved: float) -> None:
        """Guesses."""
        self._gain, self._saved = FadingMean(gain), FadingMean(saved)
        self._num_vain = 0

    @property
    def gain(self) -> float:
        """Accepted proposals of a chain."""
        return self._gain.value

    @property
    def saved(self) -> float:
        """Rounds that these take the place of."""
        return self._saved.value

    @property
    def look_share(self) -> float:
        """Of the full budget of looks."""
        return 0.5 if self._num_vain >= _VAIN_LOOKS else 1.0

    def add(self, gain: int, saved: float, *, is_vain: bool) -> None:
        self._gain.add(gain)
        self._saved.add(saved)
        self._num_vain = self._num_vain + 1 if is_vain else 0

    def renew(self) -> None:
        self._gain.fade()
        self._saved.fade()
        self._num_vain = 0


class Earnings:
    """By domain, and of all together."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._overall = _Record(0.0, 0.0)

    def gain(self, domain: str) -> float:
        """Accepted proposals of the head's chains, the empty ones included, in one verification."""
        return self._nearest_record(domain).gain

    def look_share(self, domain: str) -> float:
        """Of the full budget of looks."""
        return self._nearest_record(domain).look_share

    def worth(self, domains: Sequence[str]) -> float:
        """Of a token of the head, in requests of these domains."""
        records = [self._nearest_record(domain) for domain in domains]
        gain = sum(record.gain for record in records)
        return sum(record.saved for record in records) / gain if gain else 1.0

    def _nearest_record(self, domain: str) -> _Record:
        """The evidence about a domain: that of all where there is none of its own, nor of the rest."""
        return self._records.get(domain) or self._records.get(_REST) or self._overall

    def add(self, verdict: HeadVerdict) -> None:
        """What became of one more chain, or of a look."""
        gain = verdict.num_accepted if verdict.is_worth_it else 0
        saved = gain if verdict.rounds_saved is None or gain == 0 else verdict.rounds_saved
        for record in (self._own_record(verdict.domain), self._overall):
            record.add(gain, saved, is_vain=verdict.num_accepted == 0)

    def renew(self) -> None:
        """Another version is in service."""
        for record in (self._overall, *self._records.values()):
            record.renew()

    def _own_record(self, domain: str) -> _Record:
        """Where to write down what a domain earned; the rest's, where there are too many domains."""
        if domain not in self._records:
            domain = domain if len(self._records) < _MAX_DOMAINS else _REST
            self._records.setdefault(domain, _Record(self._overall.gain, self._overall.saved))
        return self._records[domain]
