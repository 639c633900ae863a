"""Training examples and batches: what the draft learns from a trace, and how a few spans are packed into one row.

Spans differ in length, and padding would cost a third of the work; so a batch is one row of tokens without padding, and
an attention mask keeps the spans apart. Only base positions (see trainer/learning/labels.py) become queries. Positions
before the first base, most of the prompt, give only keys and values.

Shape letters: T tokens of the span, R rows from the first base to the span's end, N base positions of the batch,
J judged proposals, C context positions of the batch, M = C + N keys, B rows behind rejections, K kept target tokens,
w = 3d feature width, V target vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from speculator.draft.sampling_params import SamplingParams
from speculator.errors import TraceError
from speculator.trace import Trace, Verification
from trainer.learning.labels import (
    NEARLY_GREEDY,
    Branches,
    Labels,
    Verdicts,
    make_branches,
    make_labels,
    make_text_ahead,
    make_verdicts,
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One trace, ready to learn from. Row r belongs to span index `first_base` + r, and there are R = T − first_base.

    `token_ids` [T] int64, `aux` [T, w] bfloat16, `labels` of R rows, `draft_ids` [R] int64: the draft id of the row's
    own token, −1 outside the draft vocabulary. `verdicts` and `branches` count bases from `first_base`. `text_ahead`
    [R − 2] int64 is that of `make_text_ahead`. The chain of `answer_base` drafts the answer's second token; bases
    before it lie in the prompt.
    """

    trace_id: str
    domain: str
    sampling: SamplingParams
    verification: Verification
    first_position: int
    first_base: int
    answer_base: int
    token_ids: Tensor
    aux: Tensor
    labels: Labels
    draft_ids: Tensor
    verdicts: Verdicts
    text_ahead: Tensor
    branches: Branches | None = None

    @property
    def num_bases(self) -> int:
        # The last two rows start no chain: the token that they would predict lies outside the span.
        return len(self.draft_ids) - 2

    @property
    def num_bytes(self) -> int:
        tables = (*vars(self.labels).values(), *vars(self.verdicts).values())
        tensors = (self.token_ids, self.aux, self.draft_ids, self.text_ahead, *tables)
        num_bytes: int = sum(tensor.nbytes for tensor in tensors)
        return num_bytes if self.branches is None else num_bytes + self.branches.num_bytes


def make_example(trace: Trace, draft_ids_V: Tensor, *, feature_width: int, window: int | None = None) -> Example:
    """Make an example of a trace. Raises TraceError for one that this draft cannot learn from: other shapes, unknown
    tokens, no label, or positions beyond the draft's `window`.
    """
    if trace.header.sampling.temperature < NEARLY_GREEDY:
        greedy = msgspec.structs.replace(trace.header.sampling, temperature=0.0)
        trace = replace(trace, header=msgspec.structs.replace(trace.header, sampling=greedy))
    token_ids_T = torch.from_numpy(trace.token_ids).long()
    ids_TK = torch.from_numpy(trace.target_topk_ids)
    if trace.aux_hidden.shape[1] != feature_width:
        raise TraceError(f"features are {trace.aux_hidden.shape[1]} wide, the draft reads {feature_width}")
    end = trace.header.first_position + len(token_ids_T)
    if window is not None and end > window:
        raise TraceError(f"the trace ends at position {end}, beyond the draft's window of {window}")
    if max(int(token_ids_T.max()), int(ids_TK.max())) >= len(draft_ids_V):
        raise TraceError(f"a token id is outside the target's vocabulary of {len(draft_ids_V)}")
    # Base n learns from row n + 1: the first base is one before the first row that has a distribution.
    has_row_T = ids_TK[:, 0] >= 0
    first_base = max(int(has_row_T.int().argmax()) - 1, 0)
    labels = make_labels(
        ids_TK[first_base:],
        torch.from_numpy(trace.target_topk_logprobs)[first_base:],
        torch.from_numpy(trace.constrained)[first_base:],
        trace.header.sampling,
        draft_ids_V,
    )
    # Base n learns from row n + 1, and its token n + 2 must lie in the span.
    if not trace.has_label:
        raise TraceError("no position has both a target distribution and a following token")
    if not bool(torch.isfinite(labels.probs).all()):
        raise TraceError("a target distribution has no finite probability")
    header, rows = trace.header, trace.branches
    return Example(
        trace_id=header.trace_id,
        domain=header.domain,
        sampling=header.sampling,
        verification=header.verification,
        first_position=header.first_position,
        first_base=first_base,
        answer_base=max(header.num_prompt_tokens - 1 - header.first_position - first_base, 0),
        token_ids=token_ids_T,
        aux=trace.aux_hidden,
        labels=labels,
        draft_ids=draft_ids_V[token_ids_T[first_base:]],
        verdicts=make_verdicts(trace, draft_ids_V, first_base=first_base),
        text_ahead=make_text_ahead(trace, first_base=first_base, num_bases=len(token_ids_T) - first_base - 2),
        branches=None if rows is None else make_branches(trace, rows, draft_ids_V, first_base=first_base),
    )


@dataclass(frozen=True, kw_only=True)
class Window:
    """`num_bases` consecutive bases of an example from its base `start` on."""

    example: Example
    start: int
    num_bases: int


def cut(example: Example, *, max_bases: int, rng: random.Random) -> Window:
    """The whole example, or a random window where it is longer than `max_bases`: attention cost is quadratic."""
    num_bases = min(example.num_bases, max_bases)
    return Window(example=example, start=rng.randint(0, example.num_bases - num_bases), num_bases=num_bases)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The C positions that only serve as keys: `next_tokens` [C] (the token after each, as the draft reads it),
    `aux` [C, w], absolute `positions` [C].
    """

    next_tokens: Tensor
    aux: Tensor
    positions: Tensor


@dataclass(frozen=True, kw_only=True)
class BranchPairs:
    """Inputs of the draft after rejected proposals (**Branches** in labels.py): `token_ids` [B], `aux` [B, w], absolute
    `positions` [B]; `mask` [B, M + B] bool: the keys (context, bases, then these pairs) that each attends to, those of
    the text before its path and of its path; `labels` of B rows.
    """

    token_ids: Tensor
    aux: Tensor
    positions: Tensor
    mask: Tensor
    labels: Labels

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A few spans in one row.

    Bases: features `aux` [N, w], absolute `positions` [N], the row `rows` [N] of each and the last row of its span
    `last_rows` [N]; `mask` [N, M] bool says which keys (context, then bases) a base sees. Rows: `token_ids` [R],
    `draft_ids` [R], `labels` of R rows; those of a span are consecutive. `verdicts` [J] counts bases of the batch.

    In step k the chain of base n reads token row `rows[n]` + 1 + k, learns from the same row's label, and predicts the
    token of the row after it, as long as that is at most `last_rows[n]`.
    """

    context: Context
    aux: Tensor
    positions: Tensor
    rows: Tensor
    last_rows: Tensor
    mask: Tensor
    token_ids: Tensor
    draft_ids: Tensor
    labels: Labels
    verdicts: Verdicts
    branches: BranchPairs | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on the device of the draft that reads it. Examples stay in the CPU's memory."""
        return self if self.rows.device == device else _moved(self, device)


_Tensors = TypeVar("_Tensors", Batch, Context, Labels, Verdicts, BranchPairs)


def _moved(tensors: _Tensors, device: torch.device) -> _Tensors:
    """A copy with all tensors, those of nested fields too, on the device."""
    held = {name: value for name, value in vars(tensors).items() if value is not None}
    moved: dict[str, Any] = {
        name: v.to(device) if isinstance(v, Tensor) else _moved(v, device) for name, v in held.items()
    }
    return replace(tensors, **moved)


def pack(windows: Sequence[Window], *, max_context: int) -> Batch:
    """Pack windows, each with up to `max_context` positions before its first base as context."""
    pieces = []
    num_rows = num_bases = 0
    for span, window in enumerate(windows):
        places = {"span": span, "first_row": num_rows, "first_base": num_bases}
        pieces.append(_span_tensors(window, **places, max_context=max_context))
        num_rows += len(pieces[-1]["token_ids"])
        num_bases += window.num_bases

    def joined(name: str) -> Tensor:
        return torch.cat([piece[name] for piece in pieces])

    def joined_fields(kind: type[Labels] | type[Verdicts]) -> dict[str, Tensor]:
        return {each.name: joined(f"{kind.__name__}.{each.name}") for each in fields(kind)}

    context = Context(
        next_tokens=joined("context_next_tokens"), aux=joined("context_aux"), positions=joined("context_positions")
    )
    positions_N, spans_N = joined("positions"), joined("spans")
    key_spans_M = torch.cat([joined("context_spans"), spans_N])
    key_positions_M = torch.cat([context.positions, positions_N])
    return Batch(
        context=context,
        aux=joined("aux"),
        positions=positions_N,
        rows=joined("rows"),
        last_rows=joined("last_rows"),
        mask=(spans_N[:, None] == key_spans_M) & (key_positions_M <= positions_N[:, None]),
        token_ids=joined("token_ids"),
        draft_ids=joined("draft_ids"),
        labels=Labels(**joined_fields(Labels)),
        verdicts=Verdicts(**joined_fields(Verdicts)),
        branches=_pairs(windows, key_spans_M, key_positions_M),
    )


def _pairs(windows: Sequence[Window], key_spans_M: Tensor, key_positions_M: Tensor) -> BranchPairs | None:
    """The branches whose bases lie in the windows; None where there are none."""
    found, starts, spans = [], [], []
    for span, window in enumerate(windows):
        example, branches = window.example, window.example.branches
        if branches is not None:
            found.append(branches.within(window.start, window.start + window.num_bases))
            starts.append(found[-1].bases + example.first_position + example.first_base)
            spans.append(torch.full_like(starts[-1], span))
    if not sum(map(len, found)):
        return None
    starts_B, spans_B = torch.cat(starts), torch.cat(spans)
    before_BM = (spans_B[:, None] == key_spans_M) & (key_positions_M < starts_B[:, None])
    paths_BB = torch.block_diag(*(one.paths for one in found))  # type: ignore[no-untyped-call]
    labels = {each.name: torch.cat([getattr(one.labels, each.name) for one in found]) for each in fields(Labels)}
    return BranchPairs(
        token_ids=torch.cat([one.token_ids for one in found]),
        aux=torch.cat([one.aux for one in found]),
        positions=starts_B + torch.cat([one.paths.sum(1) - 1 for one in found]),
        mask=torch.cat([before_BM, paths_BB.bool()], 1),
        labels=Labels(**labels),
    )


def _span_tensors(window: Window, *, span: int, first_row: int, first_base: int, max_context: int) -> dict[str, Tensor]:
    example, start, num_bases = window.example, window.start, window.num_bases
    first = example.first_base + start
    context, bases = slice(max(first - max_context, 0), first), slice(first, first + num_bases)
    positions_T = torch.arange(len(example.token_ids)) + example.first_position
    num_rows = len(example.token_ids) - first
    labels, verdicts = example.labels[slice(start, None)], example.verdicts
    verdicts = verdicts[(verdicts.bases >= start) & (verdicts.bases < start + num_bases)]
    verdicts = replace(verdicts, bases=verdicts.bases - start + first_base)
    return {
        "context_next_tokens": example.token_ids[context.start + 1 : first + 1],
        "context_aux": example.aux[context],
        "context_positions": positions_T[context],
        "context_spans": torch.full((first - context.start,), span),
        "aux": example.aux[bases],
        "positions": positions_T[bases],
        "spans": torch.full((num_bases,), span),
        "rows": first_row + torch.arange(num_bases),
        "last_rows": torch.full((num_bases,), first_row + num_rows - 1),
        "token_ids": example.token_ids[first:],
        "draft_ids": example.draft_ids[start:],
        **{f"Labels.{name}": tensor for name, tensor in vars(labels).items()},
        **{f"Verdicts.{name}": tensor for name, tensor in vars(verdicts).items()},
    }
