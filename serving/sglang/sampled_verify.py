"""Sampled verification where SGLang has none: on a CPU its EAGLE commits the target's likeliest token instead.

`eagle_sample` walks down the tree of proposals along what the target chose at each node. Where SGLang has no kernel for
sampling, the choice is the argmax, whatever temperature a request asks for. Here it becomes a draw from the served
distribution, by the functions with which SGLang samples when it decodes plainly. A proposal is accepted when it is the
token that was drawn, so the text is distributed as without a draft. Where SGLang heeds seeds, a draw depends on seed
and position alone, so the text of a seed is the same, too.

Shape letters: B requests, N nodes of a tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SampledVerify:
    """Used by the scheduler's thread, in the midst of SGLang's `eagle_sample`."""

    def __init__(self) -> None:
        self._asked: tuple[Any, Any, Any] | None = None
        """(tree, batch, logits) of the verification that is under way."""

    def around_sampling(
        self, run: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """SGLang's `eagle_sample`."""
        self._asked = verify_input, batch, logits_output
        try:
            return run(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            self._asked = None

    def around_walk(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """SGLang's `verify_tree_greedy_func`, where penalties, biases and grammars are in the logits already."""
        if self._asked is not None:
            verify_input, batch, logits_output = self._asked
            if not batch.sampling_info.is_all_greedy and commits_argmax(logits_output.next_token_logits):
                kwargs["target_predict"] = sampled_targets(
                    logits_output.next_token_logits,
                    batch.sampling_info,
                    verify_input.positions,
                    verify_input.draft_token_num,
                )
        return run(*args, **kwargs)


def commits_argmax(logits: Tensor) -> bool:
    """Whether SGLang has no sampled verification where these logits are."""
    return not logits.is_cuda or torch.version.hip is not None


def sampled_targets(logits: Tensor, sampling_info: Any, positions: Tensor, num_nodes: int) -> Tensor:
    """[B, N] int64: a token drawn at every node from the served distribution after it.

    `logits` [B · N, V] are left as they are; `positions` [B · N] are those of the nodes' own tokens, by which SGLang
    makes its noise where a request has a seed.
    """
    from sglang.srt.layers import sampler

    def of_nodes(of_requests: Tensor) -> Tensor:
        return of_requests.repeat_interleave(num_nodes, dim=0)

    probs = torch.softmax(logits / of_nodes(sampling_info.temperatures), dim=-1)
    seeds = None if sampling_info.sampling_seed is None else of_nodes(sampling_info.sampling_seed)
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
