"""What verifications and rounds say about a draft version, by the kind of request they served.

The decode thread makes one `WatchedRound` a round; everything else here belongs to the thread that judges.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from serving.sequential import intraclass_correlation
from serving.speedup import Sums
from speculator.sampling import SamplingParams

_KEPT_VERIFICATIONS = 15_000
"""Where requests differ a lot, ten verifications say as much as an independent one: then this many are not too many."""
_ROUNDS_A_BLOCK = 32
_KEPT_BLOCKS = 128
_RECENT_ROUNDS = 500
_FEWEST_KNOWN = 30
"""Verifications of a stratum below which its mean is not taken for known."""
_MAX_DOMAINS = 64
_REST = "other"


class Stratum(NamedTuple):
    """Requests whose accept lengths may be compared: the mix of them can change while a new version is watched."""

    domain: str
    sampling: str
    of_looks: bool = False
    """Looks at a head that is not used come in other rounds than its chains: they are compared with looks only."""
    remembered: int = 0
    """Quarters, rounded up, of the request's rounds so far in which earlier text proposed: it takes what is easy, and
    leaves the draft the rest.
    """


class Verification(NamedTuple):
    """One request's part in a drafting round; 0 accepted also where nothing was worth proposing. A look at a head that
    is not used counts as a round of depth 1, in a stratum of looks.
    """

    request_id: str
    stratum: Stratum
    accepted: int
    depth: int
    """Most proposals that it could have had."""


class Proposed(NamedTuple):
    """How many tokens a round verified beside the newest ones. With as many of each, rounds of one size are alike."""

    by_draft: int
    by_text: int = 0
    """By earlier text; what fills a pass up to a rectangle counts as such."""


class WatchedRound(NamedTuple):
    """One decode round: what it cost and what its verifications accepted.

    In a control round, and for requests whose draft is not up to date, there are none.
    """

    version: int
    batch: int
    drafted: bool
    """False for a control round, which proposes nothing."""
    seconds: float
    committed: int
    verifications: tuple[Verification, ...]
    proposed: Proposed | None = None
    """None where the draft took no part, or first caught up with what it had not read: the time says nothing of it."""
    read_prompt: bool = False
    """Whether a piece of a prompt was read in the same pass, which then says nothing of time either."""
    target_version: int = 0

    @property
    def kind(self) -> tuple[int, ...] | None:
        """Of rounds whose times may be compared; None where this one's says nothing of draft or machine."""
        if self.read_prompt or (self.drafted and self.proposed is None):
            return None
        return self.batch, *(self.proposed or ())


class Moments(NamedTuple):
    """Accepted tokens of a stratum's verifications, as if none had drafted deeper than `depth`."""

    depth: int
    num: int
    mean: float
    variance: float


def stratum_of(domain: str, sampling: SamplingParams) -> Stratum:
    """Greedy, or the temperature to a tenth, with the whole distribution or a part of it."""
    if sampling.temperature == 0:
        return Stratum(domain, "greedy")
    is_cut = sampling.top_p < 1 or sampling.top_k > 0
    return Stratum(domain, f"t{min(round(sampling.temperature, 1), 2.0)}{' cut' if is_cut else ''}")


class Evidence:
    """The last 15,000 verifications and 4,096 rounds that a version earned."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.verifications: deque[Verification] = deque(maxlen=_KEPT_VERIFICATIONS)
        self.blocks: deque[Sums] = deque(maxlen=_KEPT_BLOCKS)
        """Rounds, thirty-two a block."""
        self._accepted: Counter[int] = Counter()
        """How many of them accepted how much."""
        self.num_rounds = 0
        self._recent: deque[int] = deque(maxlen=_RECENT_ROUNDS)
        """Verifications of the last rounds."""

    def add(self, round_: WatchedRound) -> None:
        if self.num_rounds % _ROUNDS_A_BLOCK == 0:
            self.blocks.append(Sums())
        self.num_rounds += 1
        if round_.kind is not None:
            self.blocks[-1].add(round_.kind, round_.drafted, round_.seconds, round_.committed)
        for verification in round_.verifications:
            if len(self.verifications) == _KEPT_VERIFICATIONS:
                self._accepted[self.verifications[0].accepted] -= 1
            self.verifications.append(verification)
            self._accepted[verification.accepted] += 1
        self._recent.append(len(round_.verifications))

    @property
    def recent_share(self) -> float | None:
        """Verifications a round, over the last 500 rounds; None before there were so many."""
        return sum(self._recent) / _RECENT_ROUNDS if len(self._recent) == _RECENT_ROUNDS else None

    def error(self) -> float:
        """Relative standard error of the accept length, as if all verifications were independent; needs some."""
        num = len(self.verifications)
        mean = sum(accepted * times for accepted, times in self._accepted.items()) / num
        variance = sum(accepted * accepted * times for accepted, times in self._accepted.items()) / num - mean * mean
        return math.sqrt(max(variance, 0.0) / num) / (1 + mean)

    def accept_length(self) -> float | None:
        """Tokens a verification, bonus included; None before the first."""
        num = len(self.verifications)
        return 1 + sum(accepted * times for accepted, times in self._accepted.items()) / num if num else None

    def pool(self, older: Evidence) -> None:
        """Put another version's verifications before these. Times are not pooled: they are those of another hour."""
        both = [*older.verifications, *self.verifications]
        self.verifications = deque(both, maxlen=_KEPT_VERIFICATIONS)
        self._accepted = Counter(verification.accepted for verification in self.verifications)


class Strata:
    """Bounds the number of strata: requests of a domain that comes late are among the rest."""

    def __init__(self) -> None:
        self._domains: set[str] = set()

    def place(self, stratum: Stratum) -> Stratum:
        if stratum.domain not in self._domains:
            if len(self._domains) >= _MAX_DOMAINS:
                return stratum._replace(domain=_REST)
            self._domains.add(stratum.domain)
        return stratum


class Reference:
    """The incumbent's accepted tokens by stratum, and how alike the verifications of one request are; frozen.

    A version may be drafted for at another depth than the one before it. The first d proposals of a deeper chain are
    the chain of depth d, so a verification at depth d is compared with min(accepted, d) of those at depth ≥ d; where
    the incumbent never went so deep, both are cut at the largest depth it is known at.
    """

    def __init__(self, verifications: Iterable[Verification]) -> None:
        self._accepted: dict[Stratum, Counter[tuple[int, int]]] = {}
        """By stratum: how often (depth, accepted) came."""
        self._moments: dict[tuple[Stratum, int], Moments | None] = {}
        rows = list(verifications)
        for verification in rows:
            counter = self._accepted.setdefault(verification.stratum, Counter())
            counter[verification.depth, verification.accepted] += 1
        clusters = self._clusters(rows)
        self.correlation = intraclass_correlation(clusters)
        total = sum(count for count, _, _ in clusters)
        typical = sum(count * count for count, _, _ in clusters) / total if total else 1.0
        self.inflation = 1 + (typical - 1) * self.correlation
        """Design effect: what correlation inside a request adds to the variance of the incumbent's means."""

    def moments(self, stratum: Stratum, depth: int) -> Moments | None:
        """None where the incumbent is not known well enough."""
        key = stratum, depth
        if key not in self._moments:
            self._moments[key] = self._compute(stratum, depth)
        return self._moments[key]

    def _compute(self, stratum: Stratum, depth: int) -> Moments | None:
        counter = self._accepted.get(stratum, Counter())
        for cut in sorted({min(depth, known) for known, _ in counter}, reverse=True):
            rows = [(min(accepted, cut), times) for (known, accepted), times in counter.items() if known >= cut]
            count = sum(times for _, times in rows)
            if count >= _FEWEST_KNOWN:
                mean = sum(accepted * times for accepted, times in rows) / count
                variance = sum((accepted - mean) ** 2 * times for accepted, times in rows) / (count - 1)
                return Moments(cut, count, mean, variance)
        return None

    def _clusters(self, rows: Iterable[Verification]) -> list[tuple[int, float, float]]:
        clusters: dict[str, tuple[int, float, float]] = {}
        for verification in rows:
            known = self.moments(verification.stratum, verification.depth)
            if known is not None:
                residual = min(verification.accepted, known.depth) - known.mean
                count, total, squares = clusters.get(verification.request_id, (0, 0.0, 0.0))
                clusters[verification.request_id] = count + 1, total + residual, squares + residual * residual
        return list(clusters.values())
