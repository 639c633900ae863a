"""Give a request with penalties the text that SGLang gives it without a draft.

Penalties of frequency, presence and repetition depend on the tokens of the answer so far, and `min_tokens` on their
number. SGLang's verification applies those of one moment at all nodes of a tree of proposals, and counts one token a
step. Here each node gets the penalties of its own path: of what was committed, and of the proposals that lead to it.
All of it is computed on the device, so that nothing waits for what the last step has committed.

Where SGLang overlaps steps, what a plain server counts depends on the prefills of other requests; here it is what it
counts for a request alone. After a retraction SGLang forgets what it had counted; here only the first token then gets
no penalties, as SGLang itself samples it, and all tokens count for the next. SGLang 0.5.17 forbids the end below
`min_tokens` by fewer of its tokens than later versions, and than here.

Shape letters: B requests, N nodes of a tree, D nodes of a path, V vocabulary, S stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serving.sglang.device import Device

_FEWEST_ROWS = 8
_NEUTRAL = (0.0, 0.0, 1.0, 0.0, 0.0)
_NOBODY = 0
"""The row of requests without penalties: it stays empty."""


@dataclass
class _Answer:
    row: int
    """Where its tokens are counted."""
    earlier: tuple[int, ...] | None
    """Tokens before the first step, until that has counted them."""
    numbers: tuple[float, ...]
    """Its row of `_Asked.numbers`."""
    stops: tuple[int, ...]
    """Tokens that end it, where it asks for a least number of tokens."""


class _Asked(NamedTuple):
    """What the requests of a step ask for, on the device."""

    rows: Tensor
    """int64 [B]: where their tokens are counted."""
    numbers: Tensor
    """float32 [B, 5]: penalties of frequency, presence and repetition, least tokens of the answer, tokens of the
    prompt.
    """
    stops: Tensor | None
    """int64 [B, S], repeated where a request has fewer; None where no request has a least number of tokens."""


class _Paths(NamedTuple):
    """The proposals that lead to each node, the node itself first."""

    tokens: Tensor
    """int64 [B, N, D]; any token where the path is shorter."""
    is_counted: Tensor
    """bool [B, N, D]"""


class TreePenalties:
    """Hooks of SGLang's verification; used by the scheduler's thread."""

    def __init__(self, device: Device, *, lags: bool) -> None:
        """`lags` where SGLang overlaps steps. It then penalises without knowing the newest token, and counts the
        prompt's last one instead.
        """
        self._device, self._lags = device, lags
        self._answers: dict[str, _Answer] = {}
        self._free: list[int] = []
        self._present: list[_Answer | None] = []
        self._asked: _Asked | None = None
        """Of the requests of the last step, which are mostly those of the next."""
        self._counts: Tensor | None = None
        """int32 [rows, V]: how often each token is committed, but for the newest one, which is the root of the next
        tree.
        """

    def prefilled(self, request: Any) -> None:
        """Note a request whose prompt is read, or a chunk of it, with what it had answered if it was retracted."""
        params = request.sampling_params
        asked = params.frequency_penalty, params.presence_penalty, params.repetition_penalty, params.min_new_tokens
        if asked == (0, 0, 1, 0):
            return
        known = self._answers.get(request.rid)
        row = known.row if known is not None else self._free.pop() if self._free else len(self._answers) + 1
        prompt = request.origin_input_ids
        self._answers[request.rid] = _Answer(
            row=row,
            earlier=(*request.output_ids, *(prompt[-1:] if self._lags else ())),
            numbers=(*asked, len(prompt)),
            stops=_stops(request) if params.min_new_tokens else (),
        )

    def released(self, request: Any) -> None:
        """Forget a request that has ended or was retracted."""
        if (answer := self._answers.pop(request.rid, None)) is not None:
            self._free.append(answer.row)

    def around_sampling(
        self, run: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook of SGLang's `eagle_sample`, which adds the penalties to the logits and walks down the tree."""
        info = batch.sampling_info
        # SGLang sets it where a request has penalties. Other batches cost nothing here.
        if batch.forward_mode.is_idle() or info.acc_additive_penalties is None:
            return run(verify_input, batch, logits_output, *args, **kwargs)
        answers = [self._answers.get(request.rid) for request in batch.reqs]
        if self._asked is None or answers != self._present:
            self._present, self._asked = answers, self._uploaded(answers)
        asked, num_nodes = self._asked, verify_input.draft_token_num
        counts = self._counted(answers, logits_output.next_token_logits)
        _penalise(
            logits_output.next_token_logits.view(len(answers), num_nodes, -1),
            counts.index_select(0, asked.rows),
            self._paths(verify_input),
            asked,
            verify_input.positions.view(-1, num_nodes),
        )
        # Of this step's own copy: SGLang adds nothing more.
        info.acc_additive_penalties = info.acc_scaling_penalties = None
        result = run(verify_input, batch, logits_output, *args, **kwargs)
        _count(counts, asked.rows, verify_input.draft_token, result[2])
        return result

    def _counted(self, answers: list[_Answer | None], logits: Tensor) -> Tensor:
        """`_counts`, with room for these answers and what they had committed before their first step."""
        num_rows = 1 + max((answer.row for answer in answers if answer is not None), default=0)
        if self._counts is None or len(self._counts) < num_rows:
            grown = logits.new_zeros(max(_FEWEST_ROWS, 2 * num_rows), logits.shape[-1], dtype=torch.int32)
            if self._counts is not None:
                grown[: len(self._counts)] = self._counts
            self._counts = grown
        for answer in answers:
            if answer is not None and answer.earlier is not None:
                self._counts[answer.row].zero_()
                if answer.earlier:
                    tokens = self._device.upload(answer.earlier)
                    self._counts[answer.row].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
                answer.earlier = None
        return self._counts

    def _uploaded(self, answers: list[_Answer | None]) -> _Asked:
        rows = self._device.index(tuple(_NOBODY if answer is None else answer.row for answer in answers))
        numbers = np.array([_NEUTRAL if answer is None else answer.numbers for answer in answers], np.float32)
        stops = [answer.stops if answer is not None else () for answer in answers]
        most = max(map(len, stops))
        table = np.array([np.resize(one or (0,), most) for one in stops], np.int64)
        upload = self._device.upload_table
        return _Asked(rows, upload(numbers), upload(table) if most else None)

    def _paths(self, verify_input: Any) -> _Paths:
        num_nodes = verify_input.draft_token_num
        tokens_BN = verify_input.draft_token.view(-1, num_nodes).long()
        nodes_BND = paths(
            verify_input.retrieve_next_token,
            verify_input.retrieve_next_sibling,
            num_children=verify_input.topk,
            depth=verify_input.spec_steps + 1,
        )
        is_counted_BND = nodes_BND < num_nodes
        if self._lags:
            is_counted_BND[..., 0] = False
        tokens = tokens_BN.gather(1, nodes_BND.clamp_max(num_nodes - 1).flatten(1)).view(nodes_BND.shape)
        return _Paths(tokens, is_counted_BND)


def paths(next_token_BN: Tensor, next_sibling_BN: Tensor, *, num_children: int, depth: int) -> Tensor:
    """int64 [B, N, D = `depth`]: each node, its parent, and so on up to the root; N behind the root.

    `next_token_BN` is a node's first child and `next_sibling_BN` its parent's next one, −1 where there is none. No node
    has more than `num_children`.
    """
    size, num_nodes = next_token_BN.shape
    nodes_BN = torch.arange(num_nodes, device=next_token_BN.device).expand(size, -1)
    # One column more for links to nowhere.
    children_BN, siblings_BN = (
        links.long().masked_fill(links < 0, num_nodes) for links in (next_token_BN, next_sibling_BN)
    )
    parents = nodes_BN.new_full((size, num_nodes + 1), num_nodes).scatter_(1, children_BN, nodes_BN)
    for _ in range(num_children - 1):
        parents.scatter_(1, siblings_BN, parents[:, :num_nodes].clone())
    parents[:, num_nodes:].fill_(num_nodes)
    path = [nodes_BN]
    for _ in range(depth - 1):
        path.append(parents.gather(1, path[-1]))
    return torch.stack(path, dim=-1)


def _penalise(logits_BNV: Tensor, counts_BV: Tensor, paths_: _Paths, asked: _Asked, positions_BN: Tensor) -> None:
    """Change the logits as SGLang's penalties do in plain decoding (sglang/srt/sampling/penaltylib), at each node by
    `counts_BV` and the tokens of its path.
    """
    frequency_B11, presence_B11, repetition_B11, *_ = asked.numbers[..., None, None].unbind(1)
    if asked.stops is not None:
        is_early_BN = positions_BN + 1 < asked.numbers[:, 3:].sum(1, keepdim=True)
        forbidden_BN1 = torch.zeros_like(is_early_BN, dtype=logits_BNV.dtype).masked_fill_(is_early_BN, -torch.inf)
        stops_BNS = asked.stops[:, None].expand(-1, logits_BNV.shape[1], -1)
        logits_BNV.scatter_add_(2, stops_BNS, forbidden_BN1[..., None].expand_as(stops_BNS))
    # Only tokens on a node's own path are counted otherwise than for all nodes: these are computed apart.
    tokens_BND, is_counted_BND = paths_
    own_BND = logits_BNV.gather(2, tokens_BND)
    on_path_BND = ((tokens_BND[..., None] == tokens_BND[..., None, :]) & is_counted_BND[..., None, :]).sum(-1)
    before_BND = counts_BV.gather(1, tokens_BND.flatten(1)).view(tokens_BND.shape)
    for logits, counts in ((logits_BNV, counts_BV[:, None]), (own_BND, before_BND + on_path_BND)):
        is_seen = counts > 0
        logits.sub_(counts * frequency_B11 + is_seen * presence_B11)
        scale = torch.where(is_seen, repetition_B11, 1.0)
        logits.div_(torch.where(logits < 0, 1.0, scale))
        logits.mul_(torch.where(logits < 0, scale, 1.0))
    logits_BNV.scatter_(2, tokens_BND, own_BND)


def _count(counts: Tensor, rows_B: Tensor, tokens: Tensor, accepted_BA: Tensor) -> None:
    """Count the accepted path, the tree's root with it; `tokens` [B · N], and `accepted_BA` their indices, −1 behind
    the path's end.
    """
    tokens_BA = tokens[accepted_BA.clamp_min(0).long()].long()
    is_counted_BA = (accepted_BA >= 0) & (rows_B != _NOBODY)[:, None]
    places_BA = rows_B[:, None] * counts.shape[1] + tokens_BA
    counts.view(-1).scatter_add_(0, places_BA.flatten(), is_counted_BA.flatten().int())


def _stops(request: Any) -> tuple[int, ...]:
    """The tokens that SGLang forbids until a request has its least number of tokens."""
    tokenizer = request.tokenizer
    ids = {
        *(request.sampling_params.stop_token_ids or ()),
        *(request.eos_token_ids or ()),
        *(tokenizer.additional_stop_token_ids or ()),
        tokenizer.eos_token_id,
    }
    return tuple(sorted(ids - {None}))
