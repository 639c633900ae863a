"""The loss of a batch by training-time test: unroll the draft's chains and compare them with labels and verdicts.

A batch's loss is a sum divided by the number of labelled positions. So several processes can compute one loss: each
divides its own sum by the number of all.

**Training-time test** (EAGLE-3, arXiv 2503.01840, section 3.2) unrolls the draft. A chain goes on only while its
proposals are the tokens that were committed. That is what happens in service: the target emits a fixed next token, and
the first proposal that differs ends the round. So a deeper step is trained on exactly the chains that reach it, and
costs only their share of the work. Chains of sampled requests follow the likeliest token, too: proposals drawn as in
service trained no better (benchmarks/results/losses.md). On request it also visits the states of recorded verdicts,
which an older draft reached. Rows behind rejections are learnt from in one pass beside the first step, and not
unrolled.

Every batch has other shapes, and oneDNN takes longer to compile a kernel for a new shape than to multiply matrices as
small as these. So rows are padded with zeros to one of a few sizes, and the results of the padding are cut off.

Shape letters: N base positions, K steps of a chain, S states of a step (chains still alive), P padded S, J judged
proposals, B rows behind rejections, M keys, R rows, H query heads, G key heads, h head size, d hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from speculator.draft.eagle3 import Eagle3Draft
from trainer.learning.batch import Batch, BranchPairs, Context
from trainer.learning.labels import Verdicts
from trainer.learning.losses.expected_length import ExpectedLength
from trainer.learning.losses.mix import LossMix


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of positions and proposals that a loss sums over."""

    num_bases: int = 0
    """Base positions of the batch."""
    num_labels: int = 0
    """Base positions with a label."""
    num_accepted: int = 0
    """Accepted proposals of the chains that start there, of at most `ttt_steps` each."""
    num_verdicts: int = 0
    """Judged proposals in a term of the loss."""
    num_rewarded: int = 0
    """Accepted ones among them."""
    num_branches: int = 0
    """Rows behind rejections in a term of the loss."""


@dataclass(frozen=True, kw_only=True)
class BatchLoss(Counts):
    """The parts of `ttt_loss` summed over a batch, discounted and weighted, with their counts."""

    on_text: Tensor
    reinforced: Tensor
    dropped: Tensor
    off_path: Tensor
    first_steps: tuple[tuple[int, int], ...] = ()
    """For each trace (bases where the draft's likeliest first proposal was the committed token, labelled bases)."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The fields of `Counts`, in their order."""
        return tuple(getattr(self, each.name) for each in fields(Counts))

    @property
    def loss(self) -> Tensor:
        """In nats a base position, ready for `backward`."""
        return self.mean_over(self)

    def mean_over(self, counts: Counts) -> Tensor:
        """This batch's part of the loss over all batches that `counts` covers."""
        return (self.on_text + self.reinforced + self.dropped + self.off_path) / max(counts.num_labels, 1)


def ttt_loss(draft: Eagle3Draft, batch: Batch, mix: LossMix, *, num_steps: int, baseline: float) -> BatchLoss:
    """The loss of a batch, with γ = `mix.step_discount`:

        (Σ_k γ^k (Σ_states (committed-text terms)  +  Σ_verdicts (proposal terms))  +  Σ_branches (branch terms)) / N

    N counts base positions with a label, so a verdict, or a row behind a rejection, weighs as much as a state. Under
    `chains=own` ended chains add nothing, so a deeper step weighs by how often it is reached, and states that only an
    older draft reached have no committed-text term.
    """
    on_text = reinforced = dropped = off_path = draft.fc.weight.new_zeros(())
    num_labels = num_accepted = num_verdicts = num_rewarded = num_branches = 0
    first_steps: tuple[tuple[int, int], ...] = ()
    verdicts = _recorded(mix, batch, num_steps)
    lengths = ExpectedLength(len(batch.rows), batch.rows.device) if mix.expected_length else None
    wanted_NK = None if verdicts is None else _states_of(verdicts, batch, num_steps)
    if mix.chains == "all":
        wanted_NK = torch.ones(len(batch.rows), num_steps, dtype=torch.bool, device=batch.rows.device)
    attention = ChainAttention.of(draft, batch)
    for proposals in unroll(draft, batch, num_steps=num_steps, wanted_NK=wanted_NK, attention=attention):
        labels = batch.labels[proposals.label_rows]
        logits_SD = labels.tempered(proposals.logits)
        weight = mix.step_discount**proposals.step
        chains_S, of_S, on_S = proposals.chains, logits_SD, labels
        if mix.chains == "own" and not bool(proposals.own.all()):
            chains_S, of_S, on_S = chains_S[proposals.own], of_S[proposals.own], on_S[proposals.own]
        on_text = on_text + weight * mix.on_states(of_S, on_S).sum()
        if lengths is not None:
            on_text = on_text - mix.expected_length * lengths.add(chains_S, mix.length_rate(of_S, on_S))
        num_accepted += int((proposals.hits & proposals.own).sum())
        if proposals.step == 0:
            num_labels = int(proposals.own.sum())
            first_steps = _by_trace(batch, proposals)
            if mix.uses_branches and batch.branches is not None:
                num_branches = len(batch.branches)
                logits_BD = branch_logits(draft, batch.branches, attention)
                off_path = mix.on_branches(batch.branches.labels.tempered(logits_BD), batch.branches.labels)
        if mix.uses_verdicts:
            states_J, judged = _judged_here(verdicts, proposals, len(batch.rows))
            terms = mix.on_proposals(logits_SD[states_J], labels[states_J], judged, baseline=baseline)
            reinforced, dropped = reinforced + weight * terms[0], dropped + weight * terms[1]
            num_verdicts += len(judged)
            num_rewarded += int(judged.accepted.sum())
    return BatchLoss(
        on_text=on_text,
        reinforced=reinforced,
        dropped=dropped,
        off_path=off_path,
        first_steps=first_steps,
        num_bases=len(batch.rows),
        num_labels=num_labels,
        num_accepted=num_accepted,
        num_verdicts=num_verdicts,
        num_rewarded=num_rewarded,
        num_branches=num_branches,
    )


def _by_trace(batch: Batch, proposals: UnrolledStep) -> tuple[tuple[int, int], ...]:
    """(chains whose likeliest proposal was committed, all chains) of each trace."""
    ends, traces_N = batch.last_rows.unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
    traces_S = traces_N[proposals.chains]
    hits, all_ = (traces.bincount(minlength=len(ends)).tolist() for traces in (traces_S[proposals.hits], traces_S))
    return tuple(zip(hits, all_, strict=True))


def _recorded(mix: LossMix, batch: Batch, num_steps: int) -> Verdicts | None:
    """The recorded verdicts that the loss uses; None where it uses none, or those of the draft's own proposals."""
    if not mix.uses_verdicts or mix.verdicts != "recorded":
        return None
    useful_J = batch.verdicts.steps < num_steps
    if not mix.policy_gradient:
        useful_J &= ~batch.verdicts.accepted
    return batch.verdicts[useful_J]


def _states_of(verdicts: Verdicts, batch: Batch, num_steps: int) -> Tensor:
    """[N, num_steps] bool: the states in which the verdicts' proposals were made."""
    states_NK = torch.zeros(len(batch.rows), num_steps, dtype=torch.bool, device=batch.rows.device)
    states_NK[verdicts.bases, verdicts.steps] = True
    return states_NK


def _judged_here(verdicts: Verdicts | None, proposals: UnrolledStep, num_bases: int) -> tuple[Tensor, Verdicts]:
    """([J] index into the step's states, verdicts on proposals made there): the recorded ones, or, where `verdicts` is
    None, those on the draft's likeliest proposals.
    """
    device = proposals.chains.device
    if verdicts is None:
        likeliest_S = proposals.logits.detach().argmax(-1)
        num_states = len(likeliest_S)
        fresh = Verdicts(
            bases=proposals.chains,
            steps=torch.full((num_states,), proposals.step, device=device),
            draft_ids=likeliest_S,
            logprobs=torch.zeros(num_states, device=device),
            accepted=proposals.hits,
            versions=torch.zeros(num_states, dtype=torch.int64, device=device),
            committed=proposals.committed,
        )
        return torch.arange(num_states, device=device), fresh
    state_N = torch.full((num_bases,), -1, device=device)
    state_N[proposals.chains] = torch.arange(len(proposals.chains), device=device)
    here = verdicts[verdicts.steps == proposals.step]
    states_J = state_N[here.bases]
    return states_J[states_J >= 0], here[states_J >= 0]


_CHAINS, _CONTEXT, _KEYS = 64, 128, 256
"""Numbers of chains, context positions and keys are padded to multiples of these: a few hundred kernels in all."""


@dataclass(frozen=True, kw_only=True)
class UnrolledStep:
    """Proposals of S chains in one step: `chains` [S] indexes the batch's bases, `label_rows` [S] its rows; `logits`
    [S, D]; `committed` [S] draft ids of the committed tokens, −1 outside the draft vocabulary; `hits` [S] bool, the
    likeliest proposal is that token; `own` [S] bool, all proposals of the chain before this step were hits.
    """

    step: int
    chains: Tensor
    label_rows: Tensor
    logits: Tensor
    committed: Tensor
    hits: Tensor
    own: Tensor


def unroll(
    draft: Eagle3Draft,
    batch: Batch,
    *,
    num_steps: int,
    wanted_NK: Tensor | None = None,
    attention: ChainAttention | None = None,
) -> Iterator[UnrolledStep]:
    """Yield one `UnrolledStep` a step, until `num_steps` or until no chain is alive.

    `wanted_NK` [N, num_steps] bool asks for states besides those that the draft's own chains reach: the chain of base n
    then follows the committed text until the last of them. Logits are computed only for states that are own or wanted;
    a chain ends at a position without a label. Pass `attention` to use its keys afterwards.
    """
    attention = attention or ChainAttention.of(draft, batch)
    feature_Sd = _fuse(draft, _filled(batch.aux))[: len(batch.rows)]
    chains_S = torch.arange(len(batch.rows), device=batch.rows.device)
    own_S = torch.ones_like(chains_S, dtype=torch.bool)
    for step in range(num_steps):
        feature_1Pd = draft(
            _filled(batch.token_ids[batch.rows[chains_S] + 1 + step])[None],
            _filled(feature_Sd)[None],
            _filled(batch.positions[chains_S] + step)[None],
            attention,
        )
        label_rows_S = batch.rows[chains_S] + 1 + step
        alive_S = (label_rows_S < batch.last_rows[chains_S]) & batch.labels.labelled[label_rows_S]
        chains_S, own_S, feature_Sd = _keep(alive_S, attention, chains_S, own_S, feature_1Pd[0, : len(chains_S)])
        shown_S = own_S if wanted_NK is None else own_S | wanted_NK[chains_S, step]
        proposals = _propose(draft, batch, step, chains_S[shown_S], own_S[shown_S], feature_Sd[shown_S])
        if len(proposals.chains):
            yield proposals
        own_S = own_S.masked_scatter(shown_S, proposals.own & proposals.hits)
        goes_on_S = own_S if wanted_NK is None else own_S | wanted_NK[chains_S, step + 1 :].any(-1)
        chains_S, own_S, feature_Sd = _keep(goes_on_S, attention, chains_S, own_S, feature_Sd)
        if not len(chains_S):
            return


def _propose(
    draft: Eagle3Draft, batch: Batch, step: int, chains_S: Tensor, own_S: Tensor, feature_Sd: Tensor
) -> UnrolledStep:
    label_rows_S = batch.rows[chains_S] + 1 + step
    logits_SD = draft.logits(_filled(feature_Sd))[: len(chains_S)]
    # A row's label is about the token of the next row.
    # In bfloat16 on a CPU `max` takes a sixth of `argmax`'s time.
    committed_S = batch.draft_ids[label_rows_S + 1]
    hits_S = logits_SD.detach().max(-1).indices == committed_S
    return UnrolledStep(
        step=step,
        chains=chains_S,
        label_rows=label_rows_S,
        logits=logits_SD,
        committed=committed_S,
        hits=hits_S,
        own=own_S,
    )


def branch_logits(draft: Eagle3Draft, pairs: BranchPairs, attention: ChainAttention) -> Tensor:
    """[B, D] logits of the draft after rejected proposals; call after `attention` took the batch's first step."""
    feature_1Pd = draft(
        _filled(pairs.token_ids)[None],
        _fuse(draft, _filled(pairs.aux))[None],
        _filled(pairs.positions)[None],
        attention.for_rows(pairs.mask),
    )
    logits_PD: Tensor = draft.logits(feature_1Pd[0])
    return logits_PD[: len(pairs)]


def _keep(
    keep_S: Tensor, attention: ChainAttention, chains_S: Tensor, own_S: Tensor, feature_Sd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if bool(keep_S.all()):
        return chains_S, own_S, feature_Sd
    kept = keep_S.nonzero()[:, 0]
    attention.keep(kept)
    return chains_S[kept], own_S[kept], feature_Sd[kept]


def _filled(rows: Tensor, unit: int = _CHAINS) -> Tensor:
    """`rows` [n, …], padded with zeros to a multiple of `unit`."""
    missing = -len(rows) % unit
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _fuse(draft: Eagle3Draft, aux: Tensor) -> Tensor:
    # Back from autocast's bfloat16: the residual stream and its norms keep full precision.
    return draft.fuse(aux).to(draft.fc.weight.dtype)


def _context_keys(draft: Eagle3Draft, context: Context) -> tuple[Tensor, Tensor]:
    """Keys and values [1, G, C, h] of the context, which needs no query, MLP or logits."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    feature_1Cd = _fuse(draft, _filled(context.aux, _CONTEXT))[None]
    embed_1Cd = F.embedding(_filled(context.next_tokens, _CONTEXT), draft.embed)[None].to(feature_1Cd.dtype)
    x_1Cw = torch.cat([layer.input_layernorm(embed_1Cd), layer.hidden_norm(feature_1Cd)], -1)

    def heads(y: Tensor) -> Tensor:
        return y.view(1, y.shape[1], draft.config.num_key_value_heads, attention.head_dim).transpose(1, 2)

    num_keys = len(context.positions)
    key = draft.rotary(heads(attention.k_proj(x_1Cw)), _filled(context.positions, _CONTEXT)[None])
    return key[:, :, :num_keys], heads(attention.v_proj(x_1Cw))[:, :, :num_keys]


class ChainAttention:
    """Attention of the chains. In step 0 a base attends to context and bases through the mask; a deeper step attends to
    the same keys as its base did, and to its own chain's keys.
    """

    @classmethod
    def of(cls, draft: Eagle3Draft, batch: Batch) -> ChainAttention:
        """For a batch's chains, before their first step."""
        return cls(_context_keys(draft, batch.context), batch.mask)

    def __init__(self, context: tuple[Tensor, Tensor], mask_NM: Tensor) -> None:
        self._context = context
        self._num_bases, num_keys = mask_NM.shape
        # No query attends to padded keys. Padded rows attend to the same keys as the first row, so softmax has some.
        self._num_missing = -num_keys % _KEYS
        self._mask_PM = F.pad(mask_NM, (0, self._num_missing))
        self._shared: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []
        self.keep(torch.arange(self._num_bases, device=mask_NM.device))

    def keep(self, chains: Tensor) -> None:
        """Drop all current chains but these."""
        rows_P = _filled(chains)
        self._mask_PM = self._mask_PM[rows_P]
        self._chain = [(key[:, :, rows_P], value[:, :, rows_P]) for key, value in self._chain]

    def for_rows(self, mask_BM: Tensor) -> ChainAttention:
        """For other rows, which attend to the same keys and their own by this mask; call after the first step."""
        assert self._shared is not None
        num_keys = self._shared[0].shape[2] - self._num_missing
        key, value = (shared[:, :, :num_keys] for shared in self._shared)
        return ChainAttention((key, value), mask_BM)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._shared is None:
            self._shared = (self._padded(self._context[0], key), self._padded(self._context[1], value))
        else:
            self._chain.append((key, value))
        keys_GMh, values_GMh = self._shared[0][0], self._shared[1][0]
        num_groups, M, head_dim = keys_GMh.shape
        num_chains = query.shape[2]
        # Query heads that share a key head are grouped: [G, H/G, P, h].
        query_GqPh = query[0].reshape(num_groups, -1, num_chains, head_dim) * head_dim**-0.5
        scores = (query_GqPh.flatten(1, 2) @ keys_GMh.transpose(1, 2)).view(num_groups, -1, num_chains, M)
        scores = scores.float().masked_fill(~self._mask_PM, float("-inf"))
        own = [(query_GqPh * key[0][:, None]).sum(-1, keepdim=True).float() for key, _ in self._chain]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(values_GMh.dtype)
        out = (weights[..., :M].flatten(1, 2) @ values_GMh).view_as(query_GqPh)
        for index, (_, value) in enumerate(self._chain):
            out = out + weights[..., M + index, None] * value[0][:, None]
        return out.flatten(0, 1)[None]

    def _padded(self, context: Tensor, bases: Tensor) -> Tensor:
        """[1, G, M, h] context, bases and padding."""
        return F.pad(torch.cat([context, bases[:, :, : self._num_bases]], 2), (0, 0, 0, self._num_missing))
