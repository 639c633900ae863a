"""Counts of proposed and accepted tokens: of one answer, for its client, and of all answers, by length of the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

ProposalSource = Literal["head", "suffix"]
SOURCES: tuple[ProposalSource, ...] = ("head", "suffix")
LengthOf = Literal["context", "answer"]
LENGTHS: Mapping[LengthOf, tuple[int, ...]] = {
    "context": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "answer": (32, 128, 512, 2048, 8192),
}
"""Upper bounds of the length buckets, in tokens before a verification: of the whole text, and of the answer so far."""
BEYOND = "more"
"""Name of the bucket above the last bound."""
LengthKey = tuple[str, ...]
"""(source of the proposals, `LengthOf`, upper bound of the bucket)."""
_BOUNDS = {of: np.array(bounds) for of, bounds in LENGTHS.items()}


@dataclass
class Acceptance:
    """Acceptance counts of one answer, or of several; steps that proposed nothing are included."""

    num_proposed: int = 0
    histogram: list[int] = field(default_factory=list)
    """At index j, how many verifications accepted exactly j proposals."""

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        return sum(accepted * count for accepted, count in enumerate(self.histogram))

    def add(self, num_proposed: int, num_accepted: int, count: int = 1) -> None:
        """Count `count` verifications that accepted `num_accepted` proposals each; `num_proposed` is their total."""
        self.num_proposed += num_proposed
        self.histogram += [0] * (num_accepted + 1 - len(self.histogram))
        self.histogram[num_accepted] += count

    @classmethod
    def over(cls, many: Iterable[Acceptance]) -> Acceptance:
        total = cls()
        for one in many:
            total.num_proposed += one.num_proposed
            for num_accepted, count in enumerate(one.histogram):
                total.add(0, num_accepted, count)
        return total

    def metrics(self) -> dict[str, object]:
        """The `metrics` field of a response, in vLLM's format (vllm-project/vllm#48915), which AIPerf reads."""
        steps, accepted = self.num_steps, self.num_accepted
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
                "draft_acceptance_rate": accepted / self.num_proposed if self.num_proposed else 0.0,
                "acceptance_histogram": self.histogram,
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": self.num_proposed,
            }
        }

    def usage_details(self) -> dict[str, int]:
        """OpenAI's counts of predicted tokens, in `completion_tokens_details` of the usage."""
        accepted = self.num_accepted
        return {
            # OpenAI's details always have it, and some clients fail without.
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(self.num_proposed - accepted, 0),
        }


class AcceptanceByLength:
    """Verifications, and the tokens that they committed, by source of the proposals and length of the text before.

    One thread adds, others may read.
    """

    def __init__(self) -> None:
        self._counts = {
            (source, of): np.zeros((2, len(bounds) + 1), np.int64)
            for source in SOURCES
            for of, bounds in LENGTHS.items()
        }

    def add(self, source: ProposalSource, contexts: ArrayLike, answers: ArrayLike, committed: ArrayLike) -> None:
        """Count verifications of one source: for each, tokens of text and of answer before it, and tokens committed."""
        by_length: dict[LengthOf, ArrayLike] = {"context": contexts, "answer": answers}
        for of, lengths in by_length.items():
            counts = self._counts[source, of]
            places, size = np.searchsorted(_BOUNDS[of], lengths), counts.shape[1]
            counts[0] += np.bincount(places, minlength=size)
            counts[1] += np.bincount(places, committed, minlength=size).astype(np.int64)

    def verifications(self) -> dict[LengthKey, int]:
        return self._seen(0)

    def tokens(self) -> dict[LengthKey, int]:
        return self._seen(1)

    def _seen(self, row: int) -> dict[LengthKey, int]:
        return {
            (source, of, name): count
            for (source, of), counts in self._counts.items()
            for name, count, is_seen in zip(_names(of), counts[row].tolist(), counts[0].tolist(), strict=True)
            if is_seen
        }


def _names(of: LengthOf) -> list[str]:
    return [*map(str, LENGTHS[of]), BEYOND]
