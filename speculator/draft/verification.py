"""Lossless verification: the token that the target emits. A proposal is accepted if it is that token.

Every position of every request owns one vector of Gumbel noise, keyed by (seed, position). The target emits
argmax(log p + noise), which has exactly the served distribution p (Gumbel-max). The draft proposes argmax(log q +
*the same* noise): equal distributions propose the emitted token, near ones nearly always (the coupling of Daliri,
Musco and Musco, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978, with
acceptance at least (1 − TV) / (1 + TV)).

So the text of a seed does not depend on the draft at all — not on its depth, its quality or a swap in the middle of the
answer — and `seed` stays reproducible while the draft learns. Greedy is the case without noise.

Shape letters: P proposals, V target vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speculator.draft.sampling_params import SamplingParams

_NO_TOKEN = float("-inf")


def served_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits [..., V] of the served distribution: temperature, then top-k, then top-p; dropped tokens are −inf.

    At temperature 0 the logits come back unchanged: only their argmax matters. Ties at the top-k boundary are kept.
    Top-p keeps the smallest set of likeliest tokens whose probability reaches `top_p` (nucleus sampling, Holtzman
    et al., arXiv 1904.09751).
    """
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, _NO_TOKEN)
    if params.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probability = ordered.softmax(-1)
        # A token stays while the mass *before* it is below top_p, so the likeliest always stays.
        dropped = probability.cumsum(-1) - probability >= params.top_p
        logits = logits.masked_fill(torch.empty_like(dropped).scatter_(-1, order, dropped), _NO_TOKEN)
    return logits


def served_logprobs(logits: Tensor, params: SamplingParams, tokens: Tensor) -> list[float]:
    """Log-probabilities [P] of `tokens` [P] under the served distributions of logits [P, V]; 0 where it is greedy."""
    if params.temperature == 0:
        return [0.0] * len(tokens)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = served_logits(logits.to(wide), params).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0].tolist()


def draws(seed: int, position: int, size: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for the noise of one position of one request: [size] float64, equal on every machine.
    Draft and target can draw any position at any time, in any order.
    """
    # Always four words, or seeds of different length could collide; the last word is the sample's number.
    sequence = np.random.SeedSequence([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position, seed >> 64])
    return np.random.Generator(np.random.SFC64(sequence)).random(size)


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise [...] float64 of draws [...]: the smaller the draw, the larger the noise."""
    # 1 − u is in (0, 1], and the inner logarithm is kept off zero.
    noise: np.ndarray = -np.log(np.maximum(-np.log(1.0 - uniform), 1e-300))
    return noise


def emit(logits_V: Tensor, params: SamplingParams, uniform_V: np.ndarray) -> int:
    """The emitted token, for logits [V] and draws [V]: argmax of logits plus noise, or if greedy of logits.

    Noise is computed only for tokens that can win: the likeliest token's sum is a lower bound, which few others reach
    even with the largest noise of all. Sums are at least float32: in bfloat16 they would tie and favour low ids.
    """
    if params.temperature == 0:
        return int(logits_V.argmax())
    wide = torch.float64 if logits_V.dtype == torch.float64 else torch.float32
    served_V = served_logits(logits_V.to(wide), params).cpu().numpy()
    likeliest = int(served_V.argmax())
    noise, most = gumbel(uniform_V[[likeliest, int(uniform_V.argmin())]])
    # 0.01 covers rounding of the sums; NaN stays a candidate.
    candidates = np.flatnonzero(~(served_V < float(served_V[likeliest] + noise - most - 0.01)))
    sums = served_V[candidates] + gumbel(uniform_V[candidates]).astype(served_V.dtype)
    return int(candidates[sums.argmax()])
