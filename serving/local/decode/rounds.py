"""One decode round of a batch: draft, verify, commit; and one chunk of a prompt, alone or in a round's pass.

Shape letters: B batch, T tokens of a request or of a chunk, M of all, P positions, d hidden size, V vocabulary, K kept
tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving.capture.sampling import BranchSampler
from serving.local.config import LocalEngineConfig
from serving.local.decode.proposer import DraftReader, Proposal, Proposals, Proposer, VerifiedProposal
from serving.local.draft import ServingDraft
from serving.local.request import ActiveRequest, RoundRecord, TopK, shared_draws
from serving.local.target.model import Target
from speculator.draft.verification import emit, served_logprobs
from speculator.proposals.draft_tree import NO_PROPOSALS, DraftTree
from speculator.proposals.planner import Plan, RoundPlanner
from speculator.trace import NO_DRAFT, BranchRows


@dataclass(frozen=True)
class RoundReport:
    """Cost and result of one round, with one of `rows` for each request.

    With `read_prompt` its pass also computed a chunk of a prompt, so its time says nothing about other rounds.
    """

    rows: tuple[VerifiedProposal, ...]
    depth: int
    """Most proposals of the head; 0 for a control round."""
    draft_version: int
    proposals: Proposals
    read_prompt: bool
    num_tokens: int
    """Tokens in its pass, without those of the prompt chunk."""
    seconds: float
    probe_was_right: bool
    """Whether the target emitted the probe's token."""

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def committed(self) -> int:
        return sum(row.num_committed for row in self.rows)


@dataclass(frozen=True)
class PrefillChunk:
    """A prefill chunk: tokens of a prompt that one pass reads, from position `start` on."""

    generation: ActiveRequest
    slot: int
    start: int
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.generation.num_prompt_tokens


class RoundRunner:
    """Runs rounds over slots 0…B−1, and chunks of the prompt in slot B."""

    def __init__(
        self,
        config: LocalEngineConfig,
        target: Target,
        draft: ServingDraft,
        planner: RoundPlanner,
        *,
        label: Callable[[TopK, Tensor], object],
        send: Callable[[], None],
        branches: BranchSampler,
    ) -> None:
        """`label` computes a prompt's missing distributions later, from final hidden states; `send` sends committed
        tokens to their readers; `branches` samples the rounds that keep rejected rows.
        """
        self._target, self._draft, self._planner, self._label, self._send = target, draft, planner, label, send
        self._capture_topk = min(config.capture_topk, target.embed.shape[0])
        self._prompt_labels = config.prompt_labels
        self._branches = branches
        self._reader = DraftReader(target, draft)
        self._proposer = Proposer(draft, self._reader, planner, suffix_depth=config.suffix_depth)
        self.features = self._reader.features

    def move_slot(self, source: int, destination: int, generation: ActiveRequest) -> None:
        length = len(generation.tokens)
        self._target.cache.move(source, destination, length)
        self._reader.move_slot(source, destination, length)

    @torch.inference_mode()
    def prefill(self, piece: PrefillChunk, *, drafting: bool) -> None:
        """Read a chunk in a pass of its own; after the prompt's last token, commit the answer's first."""
        hidden_Td, aux_Tw = self._target.forward([piece.tokens], first_slot=piece.slot, starts=[piece.start])
        logits_1V = self._target.logits(hidden_Td[-1:]) if piece.ends_prompt else None
        self._commit_chunk(piece, hidden_Td, aux_Tw, logits_1V, drafting=drafting)

    @torch.inference_mode()
    def run(
        self,
        generations: Sequence[ActiveRequest],
        depth: int,
        piece: PrefillChunk | None = None,
        *,
        may_ask_head: bool = True,
    ) -> RoundReport:
        """Propose, verify all proposals in one pass, commit what the target emits.

        The draft head proposes at most `depth` tokens a request, none without `may_ask_head`; at depth 0 suffix drafts
        propose nothing either. A prompt chunk, in the slot after these requests', is read in the same pass.
        """
        started_s = time.perf_counter()
        if depth == 0:
            num_keys = sum(len(generation.tokens) for generation in generations)
            plan = Plan(batch=len(generations), num_keys=num_keys)
            proposals = Proposals(plan, (Proposal(),) * len(generations))
        else:
            proposals = self._proposer.propose(generations, head_depth=depth if may_ask_head else 0)
        probe, probed_at = proposals.probe, 0
        if probe is not None:
            probed_at = len(generations[probe.row].tokens)
        rows, num_tokens = self._verify(generations, proposals, piece, drafting=depth > 0)
        seconds = time.perf_counter() - started_s
        probe_was_right = probe is not None and generations[probe.row].tokens[probed_at] == probe.token
        verify_s = None if piece is not None else seconds - proposals.seconds
        self._proposer.observe(proposals, rows, verify_s, probe_was_right=probe_was_right)
        return RoundReport(
            rows=rows,
            depth=depth,
            draft_version=self._draft.version,
            proposals=proposals,
            read_prompt=piece is not None,
            num_tokens=num_tokens,
            seconds=seconds,
            probe_was_right=probe_was_right,
        )

    def _verify(
        self, generations: Sequence[ActiveRequest], proposals: Proposals, piece: PrefillChunk | None, *, drafting: bool
    ) -> tuple[tuple[VerifiedProposal, ...], int]:
        """Run the pass over pending tokens, proposals and chunk, and commit; returns results and `num_tokens`."""
        trees = [proposal.tree for proposal in proposals.by_request]
        rows = [[one.tokens[-1], *tree.tokens] for one, tree in zip(generations, trees, strict=True)]
        starts = [len(generation.tokens) - 1 for generation in generations]
        parents = [None if tree.is_chain else [-1, *(node + 1 for node in tree.parents)] for tree in trees]
        if not self._target.takes_windows:
            _pad(rows, parents)
        of_piece = [] if piece is None else [piece]
        hidden_Md, aux_Mw = self._target.forward(
            [*rows, *(one.tokens for one in of_piece)],
            first_slot=0,
            starts=[*starts, *(one.start for one in of_piece)],
            parents=[*parents, *(None for _ in of_piece)],
        )
        num_verified = sum(map(len, rows))
        wanted_Md = hidden_Md[:num_verified]
        if piece is not None and piece.ends_prompt:
            wanted_Md = torch.cat([wanted_Md, hidden_Md[-1:]])  # one product for all: it reads a large matrix
        logits_MV = self._target.logits(wanted_Md)
        likeliest_M = self._target.ranking.likeliest(logits_MV[:num_verified])
        verified: list[VerifiedProposal] = []
        end = 0
        by_request = zip(generations, proposals.by_request, rows, strict=True)
        for slot, (generation, proposal, row) in enumerate(by_request):
            own, length = slice(end, end := end + len(row)), len(generation.tokens)
            emitted, path = emitted_after(generation, logits_MV[own], likeliest_M[own], proposal.tree)
            is_head = not proposal.is_suffix
            saved = self._proposer.rounds_saved(generation, emitted[:-1]) if path and is_head else 0.0
            self._commit(slot, generation, proposal, emitted, path, aux_Mw[own], logits_MV[own])
            verified.append(
                VerifiedProposal(
                    generation,
                    proposal,
                    from_head=proposals.plan.uses_head and is_head,
                    accepted_nodes=tuple(path),
                    num_committed=len(generation.tokens) - length,
                    rounds_saved=saved,
                )
            )
        # Stream decoded tokens before finishing the prefill.
        self._send()
        if piece is not None:
            logits_1V = logits_MV[-1:] if piece.ends_prompt else None
            self._commit_chunk(piece, hidden_Md[num_verified:], aux_Mw[num_verified:], logits_1V, drafting=drafting)
        return tuple(verified), num_verified

    def _commit(
        self,
        slot: int,
        generation: ActiveRequest,
        proposal: Proposal,
        emitted: list[int],
        path: list[int],
        aux_Tw: Tensor,
        logits_TV: Tensor,
    ) -> None:
        """Keep features and distributions of the newest token and the accepted path; deliver the emitted tokens."""
        start, rows = len(generation.tokens) - 1, [0, *(node + 1 for node in path)]
        kept: slice | list[int] = rows
        if rows[-1] == len(path):
            kept = slice(len(rows))  # a chain's accepted rows are the first ones: no copy
        else:
            self._target.cache.keep_path(slot, start, rows)
        self._reader.keep(slot, start, aux_Tw[kept])
        logits_PV = logits_TV[kept]
        if generation.capture:
            generation.topk.append(TopK(start, *self._target.ranking.top(logits_PV, self._capture_topk)))
        generation.num_rounds += 1
        if generation.capture:
            self._keep_rejected(generation, proposal.tree, path, aux_Tw, logits_TV)
        if proposal.tree.tokens:
            generation.num_suffix_rounds += proposal.is_suffix
            version = NO_DRAFT if proposal.is_suffix else self._draft.version
            generation.rounds.append(RoundRecord(start, proposal.tree, len(path), version))
        logprobs = logprobs_of(generation, logits_PV, emitted)
        generation.commit(
            emitted,
            len(path),
            "suffix" if proposal.is_suffix else "head",
            num_proposed=len(proposal.tree.tokens),
            logprobs=logprobs,
        )

    def _keep_rejected(
        self, generation: ActiveRequest, tree: DraftTree, path: list[int], aux_Tw: Tensor, logits_TV: Tensor
    ) -> None:
        """Keep features and distributions of rejected proposals, if this verification is sampled for that."""
        nodes = [node for node in range(len(tree.tokens)) if node not in path]
        if generation.grammar is not None:  # a rejection may come from the grammar, not from the target
            return
        if not self._branches.drawn([1 + len(path)], [len(nodes)]):
            return
        rows = [node + 1 for node in nodes]
        topk_ids, topk_logprobs = self._target.ranking.top(logits_TV[rows], self._capture_topk)
        generation.rejected.append(
            BranchRows(
                round=np.full(len(nodes), len(generation.rounds), np.int32),
                node=np.array(nodes, np.int8),
                topk_ids=topk_ids,
                topk_logprobs=topk_logprobs,
                hidden=aux_Tw[rows].to("cpu", torch.bfloat16),
            )
        )

    def _commit_chunk(
        self, piece: PrefillChunk, hidden_Td: Tensor, aux_Tw: Tensor, logits_1V: Tensor | None, *, drafting: bool
    ) -> None:
        """Keep features of a chunk; if it ends the prompt, commit the answer's first token, from the logits of the
        prompt's last one.

        With `drafting` the draft reads the chunk as well, so that the first round need not.
        """
        generation, start = piece.generation, piece.start
        self._reader.keep(piece.slot, start, aux_Tw)
        generation.num_prefilled = piece.end
        if drafting and self._planner.is_awake:
            self._reader.read(piece.slot, generation, piece.end - generation.num_pairs_read)
        # A prompt position costs a tenth of a decoded one and also trains the draft: keep its distribution, too.
        first_kept = max(start, generation.num_prompt_tokens - self._prompt_labels)
        if generation.capture and first_kept < piece.end:
            generation.topk.append(TopK.unknown(first_kept, piece.end - first_kept, self._capture_topk))
            self._label(generation.topk[-1], hidden_Td[first_kept - start :])
        if logits_1V is not None:
            first, _ = emitted_after(generation, logits_1V, self._target.ranking.likeliest(logits_1V), NO_PROPOSALS)
            generation.commit(first, 0, logprobs=logprobs_of(generation, logits_1V, first))
        self._send()


def _pad(rows: Sequence[list[int]], parents: Sequence[list[int] | None]) -> None:
    """Pad all rows to the longest, for a rectangular pass."""
    longest = max(map(len, rows))
    for row, of_row in zip(rows, parents, strict=True):
        if of_row is not None:
            of_row.extend(range(len(row) - 1, longest - 1))
        row.extend([0] * (longest - len(row)))


def emitted_after(
    generation: ActiveRequest, logits_TV: Tensor, likeliest_T: list[int], tree: DraftTree
) -> tuple[list[int], list[int]]:
    """(tokens that the target emits, nodes that proposed all but the last), from the logits of the newest token and the
    proposals (`DraftTree.walk`).

    A sampled row costs a vector of noise, so only rows on the committed path are sampled.
    """
    sampling, seed = generation.source.sampling, generation.source.seed
    if sampling.temperature == 0 and generation.grammar is None:
        return tree.walk(lambda row, _: likeliest_T[row])
    length, size = len(generation.tokens), logits_TV.shape[-1]

    def emitted(row: int, depth: int) -> int:
        logits_V, grammar = logits_TV[row], generation.grammar
        if grammar is not None:
            logits_V = logits_V.masked_fill(torch.from_numpy(grammar.forbidden(size)).to(logits_V.device), -math.inf)
        greedy = sampling.temperature == 0
        token = int(logits_V.argmax()) if greedy else emit(logits_V, sampling, shared_draws(seed, length + depth, size))
        if grammar is not None:
            grammar.take(token)
        return token

    return tree.walk(emitted)


def logprobs_of(generation: ActiveRequest, logits_PV: Tensor, tokens: list[int]) -> list[float]:
    """Logprobs of P emitted tokens; empty unless the request wants them."""
    if not generation.request.logprobs:
        return []
    return served_logprobs(logits_PV, generation.source.sampling, torch.tensor(tokens, device=logits_PV.device))
