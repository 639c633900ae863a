"""One decode round of a batch: draft, verify, commit; and one piece of a prompt, alone or in a round's pass.

Shape letters: B batch, T tokens of a request or of a piece, M of all, P positions, d hidden size, V vocabulary, K kept
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from serving.local.decode.proposer import DraftReader, Proposal, Proposals, Proposer
from serving.local.draft import ServingDraft
from serving.local.request import Generation, RoundRecord, TopK, shared_draws
from serving.local.target.model import Ranking, Target
from speculator.draft.verification import emit, served_logprobs
from speculator.proposals.draft_tree import NO_PROPOSALS, DraftTree
from speculator.proposals.planner import Plan, RoundPlanner
from speculator.trace import NO_DRAFT


@dataclass(frozen=True)
class RoundReport:
    """What one round cost and earned. Per request are `accepted`, `earned`, the committed tokens, `proposed`, `depths`
    of these trees, and `from_head`: whether the learned draft was asked, which may have found none worth verifying.
    It first read `num_pairs` of the requests' tokens.

    `drafted` is false for rounds that were told to decode plainly. Where a round `read_prompt`, its pass computed a
    piece of a prompt, too, and what it took says nothing of other rounds.
    """

    batch: int
    drafted: bool
    read_prompt: bool
    num_tokens: int
    """That its pass computed, but for the piece's."""
    seconds: float
    accepted: tuple[int, ...]
    earned: tuple[int, ...]
    proposed: tuple[int, ...]
    depths: tuple[int, ...]
    from_head: tuple[bool, ...]
    num_pairs: int
    look: LookReport | None
    plan: Plan

    @property
    def committed(self) -> int:
        return sum(self.earned)


@dataclass(frozen=True)
class LookReport:
    """A look at a head that is not used, in the request of one row."""

    row: int
    is_right: bool
    """Whether the target emitted the token that the head would have proposed."""
    accepted: int
    """1 where a round that asked the head would have verified that token, and accepted it."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that one pass reads, from position `start` on."""

    generation: Generation
    slot: int
    start: int
    tokens: list[int]

    @classmethod
    def next_of(cls, generation: Generation, slot: int, num_tokens: int) -> Piece:
        """Up to so many, from where its prompt has been read to."""
        start = generation.num_prefilled
        end = min(start + num_tokens, generation.num_prompt_tokens)
        return cls(generation, slot, start, generation.tokens[start:end])

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.generation.num_prompt_tokens


class RoundRunner:
    """Runs rounds over slots 0…B−1, and pieces of the prompt in slot B."""

    def __init__(
        self,
        target: Target,
        draft: ServingDraft,
        planner: RoundPlanner,
        *,
        suffix_depth: int,
        capture_topk: int,
        prompt_labels: int,
        label: Callable[[TopK, Tensor], object],
        send: Callable[[], None],
    ) -> None:
        """`send` sends what was committed to those that wait for it."""
        self._target, self._draft, self._send = target, draft, send
        self._capture_topk = min(capture_topk, target.embed.shape[0])
        self._reader = DraftReader(target, draft)
        self._proposer = Proposer(draft, self._reader, planner, suffix_depth=suffix_depth)
        self._prompts = PromptReader(
            self._reader,
            planner,
            target.ranking,
            capture_topk=self._capture_topk,
            prompt_labels=prompt_labels,
            label=label,
        )
        self.features = self._reader.features

    def move_slot(self, source: int, destination: int, generation: Generation) -> None:
        length = len(generation.tokens)
        self._target.cache.move(source, destination, length)
        self._reader.move_slot(source, destination, length)

    @torch.inference_mode()
    def prefill(self, piece: Piece, *, drafting: bool) -> None:
        """Read it in a pass of its own; after the prompt's last token, commit the answer's first."""
        tokens_1T = torch.tensor([piece.tokens], device=self._target.device)
        hidden_1Td, aux_1Tw = self._target.forward(tokens_1T, first_slot=piece.slot, starts=[piece.start])
        logits_V = self._target.logits(hidden_1Td[0, -1:])[0] if piece.ends_prompt else None
        self._prompts.take(piece, hidden_1Td[0], aux_1Tw[0], logits_V, drafting=drafting)
        self._send()

    @torch.inference_mode()
    def run(
        self, generations: Sequence[Generation], depth: int, piece: Piece | None = None, *, may_ask_head: bool = True
    ) -> RoundReport:
        """Propose, verify all proposals in one pass, commit what the target emits.

        The learned draft proposes at most `depth` tokens a request, none where the planner may not ask it; at depth 0
        nobody proposes anything. A piece of a prompt, in the slot behind these requests', is read in the same pass.
        """
        started_s = time.perf_counter()
        if depth == 0:
            num_keys = sum(len(generation.tokens) for generation in generations)
            plan = Plan(batch=len(generations), num_keys=num_keys)
            proposals = Proposals(plan, (Proposal(),) * len(generations))
        else:
            proposals = self._proposer.propose(generations, head_depth=depth if may_ask_head else 0)
        lengths = [len(generation.tokens) for generation in generations]
        accepted, saved, num_tokens = self._verify(generations, proposals, piece, drafting=depth > 0)
        seconds = time.perf_counter() - started_s
        look = None
        if (seen := proposals.look) is not None:
            is_right = generations[seen.row].tokens[lengths[seen.row]] == seen.token
            look = LookReport(seen.row, is_right, int(is_right and seen.is_worth_it))
        was_right = look is not None and look.is_right
        verify_s = None if piece is not None else seconds - proposals.seconds
        self._proposer.observe(proposals, generations, accepted, saved, verify_s, look_was_right=was_right)
        return RoundReport(
            batch=len(lengths),
            drafted=depth > 0,
            read_prompt=piece is not None,
            num_tokens=num_tokens,
            seconds=seconds,
            accepted=tuple(accepted),
            earned=tuple(len(one.tokens) - length for one, length in zip(generations, lengths, strict=True)),
            proposed=tuple(len(proposal.tree.tokens) for proposal in proposals.by_request),
            depths=tuple(proposal.tree.depth for proposal in proposals.by_request),
            from_head=proposals.from_head,
            num_pairs=proposals.num_pairs,
            look=look,
            plan=proposals.plan,
        )

    def _verify(
        self, generations: Sequence[Generation], proposals: Proposals, piece: Piece | None, *, drafting: bool
    ) -> tuple[list[int], list[float], int]:
        """Feed the pending tokens and the proposals, and commit: by request the accepted ones and the rounds that those
        of the head saved; and tokens computed.
        """
        windows = [
            _Window(len(generation.tokens) - 1, [generation.tokens[-1], *proposal.tree.tokens], _parents(proposal.tree))
            for generation, proposal in zip(generations, proposals.by_request, strict=True)
        ]
        if not self._target.takes_windows:
            windows = [window.padded(1 + proposals.width) for window in windows]
        aux_Mw, logits_MV, read = self._pass(windows, piece)
        likeliest_M = self._target.ranking.likeliest(logits_MV)
        accepted: list[int] = []
        saved: list[float] = []
        end = 0
        by_request = zip(generations, proposals.by_request, windows, strict=True)
        for slot, (generation, proposal, window) in enumerate(by_request):
            rows = slice(end, end := end + len(window.tokens))
            emitted, path = emitted_after(generation, logits_MV[rows], likeliest_M[rows], proposal.tree)
            is_from_head = bool(path) and not proposal.is_suffix
            saved.append(self._proposer.rounds_saved(generation, emitted[:-1]) if is_from_head else 0.0)
            self._commit(slot, generation, proposal, emitted, path, aux_Mw[rows], logits_MV[rows])
            accepted.append(len(path))
        self._send()
        # Behind the tokens that others wait for.
        if piece is not None and read is not None:
            self._prompts.take(piece, *read, drafting=drafting)
            self._send()
        return accepted, saved, len(likeliest_M)

    def _commit(
        self,
        slot: int,
        generation: Generation,
        proposal: Proposal,
        emitted: list[int],
        path: list[int],
        aux_Tw: Tensor,
        logits_TV: Tensor,
    ) -> None:
        """Keep what the rows of the newest token and of an accepted path hold, and deliver what the target emitted."""
        start, rows = len(generation.tokens) - 1, [0, *(node + 1 for node in path)]
        kept: slice | list[int] = rows
        if rows[-1] == len(path):
            kept = slice(len(rows))  # they are the first ones: no copy
        else:
            self._target.cache.keep_path(slot, start, rows)
        self._reader.keep(slot, start, aux_Tw[kept])
        logits_PV = logits_TV[kept]
        if generation.capture:
            generation.topk.append(TopK(start, *self._target.ranking.top(logits_PV, self._capture_topk)))
        generation.num_rounds += 1
        if proposal.tree.tokens:
            generation.num_suffix_rounds += proposal.is_suffix
            version = NO_DRAFT if proposal.is_suffix else self._draft.version
            generation.rounds.append(RoundRecord(start, proposal.tree, len(path), version))
        logprobs = logprobs_of(generation, logits_PV, emitted)
        generation.commit(emitted, len(path), "suffix" if proposal.is_suffix else "head", logprobs=logprobs)

    def _pass(
        self, windows: Sequence[_Window], piece: Piece | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor | None] | None]:
        """Features [M, 3d] and logits [M, V] of the requests' M tokens, and what `PromptReader.take` wants of a piece
        that the same pass computes.
        """
        starts, rows, parents = (list(part) for part in zip(*windows, strict=True))
        if not self._target.takes_windows:
            assert piece is None
            tokens_BT = torch.tensor(rows, device=self._target.device)
            hidden_BTd, aux_BTw = self._target.forward(tokens_BT, first_slot=0, starts=starts, parents=parents)
            return aux_BTw.flatten(0, 1), self._target.logits(hidden_BTd.flatten(0, 1)), None
        if piece is None:
            hidden_Md, aux_Mw = self._target.forward_windows(rows, starts=starts, parents=parents)
            return aux_Mw, self._target.logits(hidden_Md), None
        assert piece.slot == len(rows)
        hidden_Md, aux_Mw = self._target.forward_windows(
            [*rows, piece.tokens], starts=[*starts, piece.start], parents=[*parents, None]
        )
        num_verified = len(hidden_Md) - len(piece.tokens)
        verified_Md = hidden_Md[:num_verified]
        # One product for all: it reads a large matrix.
        wanted_Md = torch.cat([verified_Md, hidden_Md[-1:]]) if piece.ends_prompt else verified_Md
        logits_MV = self._target.logits(wanted_Md)
        first_V = logits_MV[-1] if piece.ends_prompt else None
        return (
            aux_Mw[:num_verified],
            logits_MV[:num_verified],
            (hidden_Md[num_verified:], aux_Mw[num_verified:], first_V),
        )


class _Window(NamedTuple):
    """What a round feeds of one request: the newest token, at position `start`, and the proposals behind it."""

    start: int
    tokens: list[int]
    parents: list[int] | None

    def padded(self, num_tokens: int) -> _Window:
        """With as many tokens as others have, for passes over a rectangle."""
        more = range(len(self.tokens), num_tokens)
        parents = None if self.parents is None else [*self.parents, *(place - 1 for place in more)]
        return _Window(self.start, [*self.tokens, *[0] * len(more)], parents)


def _parents(tree: DraftTree) -> list[int] | None:
    """By row of the window, where there is more than a chain."""
    return None if tree.is_chain else [-1, *(parent + 1 for parent in tree.parents)]


class PromptReader:
    """Used by the engine's thread. `label` is to fill in what is unknown of a prompt's positions, from their final
    hidden states; not here.
    """

    def __init__(
        self,
        reader: DraftReader,
        planner: RoundPlanner,
        ranking: Ranking,
        *,
        capture_topk: int,
        prompt_labels: int,
        label: Callable[[TopK, Tensor], object],
    ) -> None:
        self._reader, self._planner, self._ranking, self._label = reader, planner, ranking, label
        self._capture_topk, self._prompt_labels = capture_topk, prompt_labels

    def take(self, piece: Piece, hidden_Td: Tensor, aux_Tw: Tensor, logits_V: Tensor | None, *, drafting: bool) -> None:
        """What the target computed of a piece; the logits of its last token where that ends the prompt.

        With `drafting` the draft reads the piece, too, so that the first round is not the one that pays for it.
        """
        generation, start = piece.generation, piece.start
        self._reader.keep(piece.slot, start, aux_Tw)
        generation.num_prefilled = piece.end
        if drafting and self._planner.is_awake:
            self._reader.read(piece.slot, generation, piece.end - generation.num_pairs_read)
        # A prompt position costs a tenth of a decoded one and teaches the draft as well: its distribution is kept too.
        first_kept = max(start, generation.num_prompt_tokens - self._prompt_labels)
        if generation.capture and first_kept < piece.end:
            generation.topk.append(TopK.unknown(first_kept, piece.end - first_kept, self._capture_topk))
            self._label(generation.topk[-1], hidden_Td[first_kept - start :])
        if logits_V is not None:
            logits_1V = logits_V[None]
            first, _ = emitted_after(generation, logits_1V, self._ranking.likeliest(logits_1V), NO_PROPOSALS)
            generation.commit(first, 0, logprobs=logprobs_of(generation, logits_1V, first))


def emitted_after(
    generation: Generation, logits_TV: Tensor, likeliest_T: list[int], tree: DraftTree
) -> tuple[list[int], list[int]]:
    """What the target emits after the newest token and the proposals that it accepts, from the logits of their rows:
    as `DraftTree.walk` has it, the tokens and the nodes that proposed all but the last.

    A sampled row costs a vector of noise: none is sampled that is not committed.
    """
    sampling, seed = generation.source.sampling, generation.source.seed
    if sampling.temperature == 0:
        return tree.walk(lambda row, _: likeliest_T[row])
    length, size = len(generation.tokens), logits_TV.shape[-1]
    return tree.walk(lambda row, depth: emit(logits_TV[row], sampling, shared_draws(seed, length + depth, size)))


def logprobs_of(generation: Generation, logits_PV: Tensor, tokens: list[int]) -> list[float]:
    """Of P tokens that the target emitted, for a request that wants to know."""
    if not generation.request.logprobs:
        return []
    return served_logprobs(logits_PV, generation.source.sampling, torch.tensor(tokens, device=logits_PV.device))
