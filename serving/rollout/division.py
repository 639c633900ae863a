"""Divided rollout: a sample runs in chunks, and at the end of each it is decided anew where it goes on.

Seer (arXiv 2511.14617) splits samples into chunks and keeps their keys and values in a pool that all engines share.
Here an engine's cache is its own, so to go on elsewhere costs reading the prompt and all tokens again; a sample
therefore stays where it is unless going pays:

* Memory is promised by the chunk, not by the limit: many samples can start, and none has to be thrown out in the
  middle of one. A sample whose next chunk does not fit waits, and is read again later; so that this is rare, a sample
  starts beside others only if all of them would fit with half of what each is expected to add. (They end at different
  times: half is what they have added on average.)
* It makes room for one that is more urgent (`Order.displaces`).
* Where nothing else waits, it goes to an emptier engine when its tokens, at what a round takes there and here, save
  more than it costs to read its context again:

      r · (T(b) − T(b' + 1)) > 2 · read(context)      r expected remaining tokens, b and b' requests here and there

  The factor is for r, which is a guess. T is a time per token and request: with drafts it is smaller in both places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_DOUBT = 2.0
_GROWTH = 0.5


class EngineCosts(Protocol):
    """What an engine takes; measured, or forecast by speculator/costs.py."""

    def token_s(self, batch: int) -> float:
        """Seconds until each of `batch` requests has its next token."""

    def read_s(self, num_tokens: int) -> float:
        """Seconds to read a context of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Division:
    chunk_tokens: int
    costs: EngineCosts | None = None
    """None: samples never move only because another engine is emptier."""

    def end_of_chunk(self, num_tokens: int, max_tokens: int) -> int:
        """Number of tokens at which the chunk ends that begins after `num_tokens`."""
        return min(num_tokens + self.chunk_tokens, max_tokens)

    def outlook(self, context: int, remaining: int) -> int:
        """Tokens of memory that a sample will hold on average until it ends."""
        return context + round(_GROWTH * remaining)

    def pays_to_move(self, *, remaining: int, context: int, here: int, there: int) -> bool:
        """Whether a sample should leave an engine of `here` requests, itself included, for one of `there`."""
        if self.costs is None or there + 1 >= here:
            return False
        saved_s = remaining * (self.costs.token_s(here) - self.costs.token_s(there + 1))
        return saved_s > _DOUBT * self.costs.read_s(context)
