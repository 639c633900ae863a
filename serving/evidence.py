"""What the decode thread tells of a round: a `WatchedRound`, with a `Verification` for each request with the head."""

from __future__ import annotations

from typing import NamedTuple

from speculator.draft.sampling_params import SamplingParams


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


def stratum_of(domain: str, sampling: SamplingParams) -> Stratum:
    """Greedy, or the temperature to a tenth, with the whole distribution or a part of it."""
    if sampling.temperature == 0:
        return Stratum(domain, "greedy")
    is_cut = sampling.top_p < 1 or sampling.top_k > 0
    return Stratum(domain, f"t{min(round(sampling.temperature, 1), 2.0)}{' cut' if is_cut else ''}")
