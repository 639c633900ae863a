"""Put earlier text in the place of the head's proposals, on the device.

SGLang's input of a verification has one row a request: the newest token, then a chain. In the rows that propose earlier
text the chain is overwritten before the verification is launched. Where no row needs the head's chain, its passes are
skipped. Its first proposal stays, since the catch-up pass has already made it.

With overlap scheduling the host has found the text before it knows the newest tokens, and does not wait for them. It
uploads the text with its position. `CommittedTokens` keeps the last tokens of each request on the device, where they
are compared with the text. Where they agree, the text after them is proposed, else nothing. That costs one small copy a
step.

Rejection sampling needs the probability with which a proposal was drawn. That of text is 1, so the target accepts it as
often as it would have drawn it.

Shape letters: B requests, N tokens that are verified of each, P = N − 1 proposals, W tokens of text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serving.sglang.capture.device_reads import TextRows
from serving.sglang.device import Device
from serving.sglang.proposals.remembered_text import Continuations
from speculator.proposals.length_planner import LengthPlan


class CommittedTokens:
    """The last tokens of each request by their position, on the device."""

    def __init__(self, num_slots: int, num_kept: int, device: torch.device) -> None:
        self._kept = num_kept
        self._tokens = torch.full((num_slots, num_kept), -1, dtype=torch.int64, device=device)
        self._ahead = torch.arange(num_kept, device=device)

    def add(self, slots_B: Tensor, seq_lens_B: Tensor, tokens_BN: Tensor, *, ahead: int) -> None:
        """Store tokens from `ahead` of these lengths on. Uncommitted ones are overwritten before they are read."""
        places_BN = (seq_lens_B[:, None] + self._ahead[ahead : ahead + tokens_BN.shape[1]]) % self._kept
        self._tokens[slots_B.long()[:, None], places_BN] = tokens_BN.long()

    def at(self, slots_B: Tensor, places_BW: Tensor) -> Tensor:
        """int64 [B, W]"""
        return self._tokens.index_select(0, slots_B).gather(1, places_BW)


class _NoPasses:
    """Stands in for the attention backend of the head's passes where they are skipped."""

    def init_forward_metadata(self, _: Any) -> None:
        pass


class TextSplice:
    """Used by the scheduler's thread, around one worker's drafting."""

    def __init__(self, device: Device, *, width: int, committed: CommittedTokens | None) -> None:
        """`width` is that of the text, at least the most proposals of a step. `committed` is needed where the host is a
        step behind.
        """
        self._device, self.width, self._committed = device, width, committed
        self._staged: Tensor | None = None
        """`Continuations.table` on the device."""
        self._places = device.index(tuple(range(width)))
        self.leaves_out_passes = False
        """Whether the next step skips the head's passes."""
        self.rows: TextRows | None = None
        """Which proposals are text, in the step that was drafted last."""

    def stage(self, plan: LengthPlan, text: Continuations | None) -> None:
        """Upload the text that the next step proposes."""
        self.drop()
        if text is not None and plan.num_proposals and any(plan.from_text):
            table = text.table.copy()
            table[:, 0] *= plan.from_text
            self._staged = self._device.upload_table(table)

    def drop(self) -> None:
        self.rows = self._staged = None

    def around_draft(self, run: Callable[[], Any], draft: Any) -> Any:
        """Hook of SGLang's drafting of a step."""
        if not self.leaves_out_passes:
            return run()
        kept = draft.cuda_graph_runner, draft.draft_attn_backend
        draft.cuda_graph_runner, draft.draft_attn_backend = None, _NoPasses()
        try:
            return run()
        finally:
            draft.cuda_graph_runner, draft.draft_attn_backend = kept

    def around_passes(self, run: Callable[[], Any], draft: Any, forward_batch: Any) -> Any:
        """Hook of SGLang's `draft_forward`.

        Returns the parents of a chain, its nodes in order, its tokens [B, P], and the distributions [B, P, V] that they
        were drawn from, where the verification asks for them.
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
            # Filler has no probability, and is rejected.
            probs = spec.draft_probs.new_zeros(num_requests, num_steps, spec.draft_probs.shape[-1])
            probs[:, 0] = spec.draft_probs
        nodes = torch.arange(num_steps, device=first_B1.device).repeat(num_requests, 1)
        return nodes[:, : num_steps if num_steps > 1 else 0] - 1, nodes, tokens_BP, probs

    def committed(self, slots_B: Tensor, seq_lens_B: Tensor, tokens: Tensor, *, ahead: int = 0) -> None:
        """Store what a step has sampled for requests in these slots, equally many tokens each; `ahead` as for `add`."""
        if self._committed is not None:
            self._committed.add(slots_B, seq_lens_B, tokens.view(len(slots_B), -1), ahead=ahead)

    def splice(self, verify_input: Any, batch: Any) -> None:
        """Put text into the rows of SGLang's input of a verification."""
        num_tokens = verify_input.draft_token_num
        tokens_BN = verify_input.draft_token.view(-1, num_tokens)
        if (staged := self._staged) is None:
            if self.leaves_out_passes and num_tokens > 2:
                # No row has text, and all but the first proposal of each is filler.
                nowhere_BP = torch.zeros_like(tokens_BN[:, 1:], dtype=torch.bool)
                self.rows = TextRows(nowhere_BP, nowhere_BP.float(), num_of_head=1)
            return
        text_BP, logprobs_BP, is_text_BP = self._aligned(batch, staged, num_tokens - 1)
        tokens_BP = torch.where(is_text_BP, text_BP, tokens_BN[:, 1:])
        verify_input.draft_token = torch.cat([tokens_BN[:, :1], tokens_BP], 1).flatten()
        if verify_input.draft_probs is not None:
            verify_input.draft_probs = _made_certain(verify_input.draft_probs, tokens_BP, is_text_BP)
        of_head = 1 if self.leaves_out_passes else num_tokens - 1
        self.rows = TextRows(is_text_BP, logprobs_BP, of_head)

    def _aligned(self, batch: Any, staged: Tensor, num_proposals: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, P] the text's tokens behind each newest token, their log-probabilities, and where there are any."""
        places_P = self._places[:num_proposals]
        counts_B1, found_B3W = staged[:, :1], staged[:, 2:].view(len(staged), 3, self.width)
        if self._committed is None:
            is_text_BP = places_P < counts_B1
            found_B2P = found_B3W[:, :2, :num_proposals]
        else:
            # The newest token is at the position that `seq_lens` says.
            passed_B1 = batch.seq_lens[:, None] + staged[:, 1:2]
            came_BW = self._committed.at(batch.req_pool_indices, found_B3W[:, 2])
            differ_BW = (came_BW != found_B3W[:, 0]) & (self._places < passed_B1)
            at_BP = passed_B1 + places_P
            is_text_BP = at_BP < counts_B1.masked_fill(differ_BW.any(1, keepdim=True), 0)
            at_B2P = at_BP.clamp(0, self.width - 1)[:, None].expand(-1, 2, -1)
            found_B2P = found_B3W[:, :2].gather(2, at_B2P)
        logprobs_BP = found_B2P[:, 1].view(torch.float32)[:, ::2]
        return found_B2P[:, 0], logprobs_BP, is_text_BP


def _made_certain(probs_BPV: Tensor, tokens_BP: Tensor, is_text_BP: Tensor) -> Tensor:
    """Distributions of proposals, those of text with all probability on their token."""
    own_BP1 = probs_BPV.gather(2, tokens_BP[..., None])
    certain = probs_BPV.masked_fill(is_text_BP[..., None], 0.0)
    return certain.scatter_(2, tokens_BP[..., None], own_BP1.masked_fill(is_text_BP[..., None], 1.0))
