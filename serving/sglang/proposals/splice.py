"""Earlier text in the place of the head's proposals, on the device.

What a step proposes lies in SGLang's input of its verification, one row a request: the newest token, then a chain. In
the rows that propose earlier text the chain is overwritten, before the verification is launched. Where no row needs the
head's chain, its passes are left out; the one proposal that it has made already, when it was brought up to date, stays.

With overlap scheduling the host has found the text before it knows the newest tokens, and does not wait for them: it
uploads the text with the position that it belongs to. `CommittedTokens` keeps the last tokens of each request on the
device, where they are compared with the text: it is proposed from behind them where they agree, and not at all where
they differ. One small copy a step, and no waiting.

With rejection sampling a proposal's probability is that of the distribution that it was drawn from, and text is
certain: probability 1, so the target takes it as often as it would have drawn it.

Shape letters: B requests, N tokens that are verified of each, P = N − 1 proposals, W tokens of text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving.sglang.capture.device_reads import LEAST_PROBABILITY, TextRows
from serving.sglang.device import Device
from serving.sglang.proposals.remembered_text import Continuations
from speculator.proposals.length_planner import LengthPlan


@dataclass(frozen=True)
class _Staged:
    """What the host has found, on the device: rows of one int32 matrix, uploaded in one piece."""

    tokens: Tensor
    """[B, W]"""
    probabilities: Tensor
    """[B, W] float32"""
    first: Tensor
    """[B, 1] The position of the first of them."""
    count: Tensor
    """[B, 1] How many there are; 0 where the row proposes no text."""

    @classmethod
    def of(cls, text: Continuations, chosen: tuple[bool, ...], width: int, device: Device) -> _Staged:
        table = np.zeros((len(chosen), 2 + 2 * width), np.int32)
        found = min(width, text.tokens.shape[1])
        table[:, 0], table[:, 1] = text.first, np.where(chosen, np.minimum(text.counts, width), 0)
        table[:, 2 : 2 + found] = text.tokens[:, :found]
        table[:, 2 + width :].view(np.float32)[:, :found] = text.probabilities[:, :found]
        on_device = device.upload_table(table)
        return cls(
            on_device[:, 2 : 2 + width],
            on_device[:, 2 + width :].view(torch.float32),
            on_device[:, :1],
            on_device[:, 1:2],
        )


class CommittedTokens:
    """The last tokens of each request by their position, on the device."""

    def __init__(self, num_slots: int, num_kept: int, device: torch.device) -> None:
        self._kept = num_kept
        self._tokens = torch.full((num_slots, num_kept), -1, dtype=torch.int32, device=device)

    def add(self, slots_B: Tensor, first_B: Tensor, tokens_BN: Tensor) -> None:
        """From position `first_B` on. What was not committed is overwritten by what is, before anybody reads it."""
        places_BN = (first_B[:, None] + torch.arange(tokens_BN.shape[1], device=first_B.device)) % self._kept
        self._tokens[slots_B.long()[:, None], places_BN.long()] = tokens_BN.int()

    def at(self, slots_B: Tensor, positions_BW: Tensor) -> Tensor:
        """int32, of any of the newest `num_kept` positions."""
        return self._tokens[slots_B.long()[:, None], (positions_BW % self._kept).long()]


class _NoPasses:
    """In the place of the attention of passes that are left out."""

    def init_forward_metadata(self, _: Any) -> None:
        pass


class TextSplice:
    """Used by the scheduler's thread, around one worker's drafting."""

    def __init__(self, device: Device, *, width: int, committed: CommittedTokens | None) -> None:
        """`width` is the most tokens of text that are found; `committed` is needed where the host is a step behind."""
        self._device, self._width, self._committed = device, width, committed
        self._staged: _Staged | None = None
        self.leaves_out_passes = False
        """Of the head, in the step that comes now."""
        self.rows: TextRows | None = None
        """Of the step that was drafted last."""

    def stage(self, plan: LengthPlan, text: Continuations | None) -> None:
        """What the step that comes now proposes."""
        self.drop()
        if text is not None and plan.num_proposals and any(plan.from_text):
            width = self._width if self._committed is not None else plan.num_proposals
            self._staged = _Staged.of(text, plan.from_text, width, self._device)

    def drop(self) -> None:
        self.rows = self._staged = None

    def around_draft(self, run: Callable[[], Any], draft: Any) -> Any:
        """SGLang's drafting of a step."""
        if not self.leaves_out_passes:
            return run()
        kept = draft.cuda_graph_runner, draft.draft_attn_backend
        draft.cuda_graph_runner, draft.draft_attn_backend = None, _NoPasses()
        try:
            return run()
        finally:
            draft.cuda_graph_runner, draft.draft_attn_backend = kept

    def around_passes(self, run: Callable[[], Any], draft: Any, forward_batch: Any) -> Any:
        """What SGLang's `draft_forward` returns: the parents of a chain, its nodes in order, its tokens [B, P], and
        the distributions [B, P, V] that they were drawn from, where the verification asks for them.
        """
        if not self.leaves_out_passes or forward_batch.forward_mode.is_idle():
            return run()
        spec, num_steps = forward_batch.spec_info, draft.speculative_num_steps
        first_B1 = spec.topk_index if draft.hot_token_id is None else draft.hot_token_id[spec.topk_index]
        num_requests = len(first_B1)
        tokens_BP = first_B1.new_zeros(num_requests, num_steps)
        tokens_BP[:, :1] = first_B1
        probs = None
        if spec.draft_probs is not None and not forward_batch.sampling_info.is_all_greedy:
            # What nobody has proposed has no probability, and is rejected.
            probs = spec.draft_probs.new_zeros(num_requests, num_steps, spec.draft_probs.shape[-1])
            probs[:, 0] = spec.draft_probs
        nodes = torch.arange(num_steps, device=first_B1.device).repeat(num_requests, 1)
        return nodes[:, : num_steps if num_steps > 1 else 0] - 1, nodes, tokens_BP, probs

    def committed(self, slots_B: Tensor, seq_lens_B: Tensor, tokens: Tensor, *, ahead: int = 0) -> None:
        """What a step of requests in these slots has sampled, from `ahead` of their length on: as many of each."""
        if self._committed is not None:
            self._committed.add(slots_B, seq_lens_B + ahead, tokens.view(len(slots_B), -1))

    def splice(self, verify_input: Any, batch: Any) -> None:
        """Put text into the rows of SGLang's input of a verification."""
        if (staged := self._staged) is None:
            return
        num_tokens = verify_input.draft_token_num
        tokens_BN = verify_input.draft_token.view(-1, num_tokens)
        text_BP, logprobs_BP, is_text_BP = self._aligned(batch, staged, num_tokens - 1)
        tokens_BP = torch.where(is_text_BP, text_BP, tokens_BN[:, 1:])
        verify_input.draft_token = torch.cat([tokens_BN[:, :1], tokens_BP], 1).flatten()
        if verify_input.draft_probs is not None:
            verify_input.draft_probs = _made_certain(verify_input.draft_probs, tokens_BP, is_text_BP)
        is_text_B = is_text_BP[:, 0]
        of_head = 1 if self.leaves_out_passes else num_tokens - 1
        num_proposals_B = torch.where(is_text_B, is_text_BP.sum(1), of_head)
        self.rows = TextRows(is_text_B, is_text_BP, logprobs_BP, num_proposals_B)

    def _aligned(self, batch: Any, staged: _Staged, num_proposals: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, P] tokens, their log-probabilities, and where there are any, from behind the newest token of each."""
        places_P = torch.arange(num_proposals, device=staged.tokens.device)
        logprobs_BW = staged.probabilities.clamp_min(LEAST_PROBABILITY).log()
        if self._committed is None:
            return staged.tokens.long(), logprobs_BW, places_P < staged.count
        # The newest token is at the position that `seq_lens` says.
        passed_B1 = batch.seq_lens[:, None] + 1 - staged.first
        places_W = torch.arange(self._width, device=places_P.device)
        came_BW = self._committed.at(batch.req_pool_indices, staged.first + places_W)
        agree_B1 = ((came_BW == staged.tokens) | (places_W >= passed_B1)).all(1, keepdim=True)
        at_BP = passed_B1 + places_P
        is_text_BP = (at_BP < staged.count) & agree_B1 & (passed_B1 >= 0)
        at_BP = at_BP.clamp(0, self._width - 1).long()
        return staged.tokens.gather(1, at_BP).long(), logprobs_BW.gather(1, at_BP), is_text_BP


def _made_certain(probs_BPV: Tensor, tokens_BP: Tensor, is_text_BP: Tensor) -> Tensor:
    """Distributions of proposals, those of text with all probability on their token."""
    own_BP1 = probs_BPV.gather(2, tokens_BP[..., None])
    certain = probs_BPV.masked_fill(is_text_BP[..., None], 0.0)
    return certain.scatter_(2, tokens_BP[..., None], own_BP1.masked_fill(is_text_BP[..., None], 1.0))
