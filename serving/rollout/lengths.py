"""How long a sample is expected to become, from its finished siblings.

Samples of one prompt resemble each other in length, so Seer (arXiv 2511.14617, context-aware scheduling) takes the
longest finished sample L_g of a group as the estimate for its others, and the limit while none has finished: to take a
long sample for a short one costs the tail of the rollout, the other mistake costs little.

    expected = limit    while nothing has finished, or the sample is already longer than L_g
             = L_g      otherwise
"""

from __future__ import annotations

from serving.rollout.nouns import Sample


def expected_length(sample: Sample) -> int:
    """Tokens of the whole answer."""
    longest = sample.group.longest_finished
    if longest is None or len(sample.tokens) >= longest:
        return sample.group.request.max_tokens
    return longest


def expected_remaining(sample: Sample) -> int:
    return expected_length(sample) - len(sample.tokens)
