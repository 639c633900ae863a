"""Sample in verifications where SGLang's EAGLE only takes the argmax, as on a CPU.

`eagle_sample` walks down the tree of proposals along the token that the target chose at each node. Where SGLang has no
kernel for sampling, that choice is the argmax, whatever temperature a request asks for. The hooks here draw it from the
served distribution. A proposal is accepted when it is the token that was drawn, so the text is distributed as without a
draft. Where SGLang heeds seeds, its own functions draw, and a draw depends on seed and position alone, so a seed gives
the same text, too.

With `--speculative-use-rejection-sampling` the draft draws its chain. The choice at a node is then the next proposal if
it is accepted. Otherwise it is drawn from max(p − q, 0), where p is the served distribution and q the draft's. A
rejected token has q > p, so it is never drawn, and the same walk ends there.

On any device that verification reads the draft's distribution, even where nothing was proposed, and fails without one.

Shape letters: B requests, N nodes of a tree, P = N − 1 proposals of a chain, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 64
"""Tokens of the vocabulary that `drawn_tokens` adds up at once."""


class SampledVerify:
    """Hooks of SGLang's `eagle_sample`; used by the scheduler's thread."""

    def __init__(self) -> None:
        self._under_way: tuple[Any, Any, Any] | None = None
        """(tree, batch, logits) of the verification that is under way."""

    def around_sampling(
        self, run: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook of SGLang's `eagle_sample`."""
        if verify_input.draft_token_num == 1 and is_rejecting():
            # SGLang requires the tensor but reads no value of it: nothing was proposed.
            any_V = logits_output.next_token_logits.new_empty(1, 1, logits_output.next_token_logits.shape[-1])
            verify_input.draft_probs = any_V.expand(verify_input.draft_token.shape[0], -1, -1)
        self._under_way = verify_input, batch, logits_output
        try:
            return run(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            self._under_way = None

    def around_walk(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Hook of SGLang's `verify_tree_greedy_func`; the logits already include penalties, biases and grammars."""
        if self._under_way is not None:
            verify_input, batch, logits_output = self._under_way
            if not batch.sampling_info.is_all_greedy and commits_argmax(logits_output.next_token_logits):
                logits, num_nodes = logits_output.next_token_logits, verify_input.draft_token_num
                if num_nodes > 1 and verify_input.draft_probs is not None:
                    served = served_probs(logits, batch.sampling_info, num_nodes)
                    proposals = verify_input.draft_token.view(-1, num_nodes)[:, 1:]
                    targets = rejecting_targets(served, verify_input.draft_probs, proposals)
                else:
                    targets = sampled_targets(logits, batch.sampling_info, verify_input.positions, num_nodes)
                kwargs["target_predict"] = targets
        return run(*args, **kwargs)


def is_rejecting() -> bool:
    """Whether this server verifies by rejection sampling."""
    from sglang.srt.speculative import eagle_utils

    asked: bool = eagle_utils.get_spec().speculative_use_rejection_sampling
    return asked


def commits_argmax(logits: Tensor) -> bool:
    """Whether SGLang's verification takes the argmax on the device of these logits."""
    return not logits.is_cuda or torch.version.hip is not None


def sampled_targets(logits: Tensor, sampling_info: Any, positions: Tensor, num_nodes: int) -> Tensor:
    """[B, N] int64: a token drawn at every node from the served distribution after it.

    `logits` [B · N, V] are not changed; `positions` [B · N] are those of the nodes' own tokens. With a request's seed
    they determine SGLang's noise.
    """
    from sglang.srt.layers import sampler

    if sampling_info.sampling_seed is None:
        return drawn_tokens(served_probs(logits, sampling_info, num_nodes))

    def of_nodes(of_requests: Tensor) -> Tensor:
        return of_requests.repeat_interleave(num_nodes, dim=0)

    probs = torch.softmax(logits / of_nodes(sampling_info.temperatures), dim=-1)
    seeds = of_nodes(sampling_info.sampling_seed)
    needs = (sampling_info.need_top_k_sampling, sampling_info.need_top_p_sampling, sampling_info.need_min_p_sampling)
    if any(needs):
        drawn: Tensor = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            of_nodes(sampling_info.top_ks),
            of_nodes(sampling_info.top_ps),
            of_nodes(sampling_info.min_ps),
            sampling_info.need_min_p_sampling,
            seeds,
            positions,
        )
    else:
        drawn = sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    return drawn.long().view(-1, num_nodes)


def served_probs(logits: Tensor, sampling_info: Any, num_nodes: int) -> Tensor:
    """[B, N, V] the distribution after every node at each request's sampling parameters; `logits` [B · N, V] stay
    unchanged.
    """
    probs = torch.softmax(logits.view(-1, num_nodes, logits.shape[-1]) / sampling_info.temperatures[:, None], dim=-1)
    if sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling:
        ordered, order = probs.sort(dim=-1, descending=True)
        top_ks, top_ps, min_ps = (
            getattr(sampling_info, name)[:, None, None] for name in ("top_ks", "top_ps", "min_ps")
        )
        dropped = (torch.arange(ordered.shape[-1]) >= top_ks) | (ordered.cumsum(-1) - ordered > top_ps)
        if sampling_info.need_min_p_sampling:
            dropped |= ordered < min_ps * ordered[..., :1]
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(dropped, 0.0))
        probs /= probs.sum(-1, keepdim=True)
    return probs


def rejecting_targets(served: Tensor, drafted: Tensor, proposals: Tensor) -> Tensor:
    """[B, N] int64: at each node of a chain the next proposal if it is accepted, else a token drawn in its place.

    `served` p [B, N, V], `drafted` q [B, P, V], `proposals` [B, P] drawn from q. A proposal x is accepted with
    probability min(1, p(x) / q(x)), else the token is drawn from max(p − q, 0); after the last one from p (Leviathan et
    al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192).
    """
    p_BP, q_BP = (probs[:, : proposals.shape[1]].gather(2, proposals[..., None])[..., 0] for probs in (served, drafted))
    # A token with q = 0 is filler that the draft did not draw.
    accepted = (torch.rand_like(p_BP) * q_BP < p_BP) & (q_BP > 0)
    left = torch.cat([(served[:, :-1] - drafted).clamp_min(0), served[:, -1:]], dim=1)
    # Where p equals q the difference is zero everywhere, and no proposal is rejected.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, served)
    drawn = drawn_tokens(left)
    drawn[:, :-1] = torch.where(accepted, proposals, drawn[:, :-1])
    return drawn


def drawn_tokens(weights: Tensor) -> Tensor:
    """[B, N] int64: a token drawn at every node, with a probability in proportion to its weight in `weights` [B, N, V].

    First a block of the vocabulary is drawn, then a token in it, each by its cumulated weights. `torch.multinomial`
    draws a random number for every token of the vocabulary: a millisecond a node on a CPU.
    """
    size, num_nodes, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % _BLOCK)).view(size * num_nodes, -1, _BLOCK)
    block = _drawn_index(blocks.sum(-1))
    token = _drawn_index(blocks[torch.arange(len(blocks), device=blocks.device), block])
    # Without any weight, or with NaN, the index could be one of the padding.
    return (block * _BLOCK + token).clamp_max_(vocab - 1).view(size, num_nodes)


def _drawn_index(weights: Tensor) -> Tensor:
    """[R] of `weights` [R, K]."""
    below = weights.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(below), 1, dtype=below.dtype, device=below.device) * below[:, -1:]
    # `right`: never an index without weight. The product can round up to the sum, which no index exceeds.
    return torch.searchsorted(below, drawn, right=True)[:, 0].clamp_max_(below.shape[-1] - 1)
