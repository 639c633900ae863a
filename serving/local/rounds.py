"""One decode round of a batch: draft → verify → commit; and one chunk of a prefill.

Shape letters: B batch, P proposals, d hidden size, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.local.assembler import top_of
from serving.local.draft import ServingDraft
from serving.local.generation import Generation, RoundRecord, TopK
from serving.local.noise import shared_noise
from serving.local.proposer import Chain, Planner, Proposals, Proposer
from serving.local.reading import DraftReader
from serving.local.target import Target
from speculator.planner import Plan
from speculator.trace import NO_DRAFT
from speculator.verify import count_accepted, emit, served_logprobs


@dataclass(frozen=True)
class LookReport:
    """A look at a head that is not used, in the request of one row."""

    row: int
    is_right: bool
    """Whether the target emitted the token that the head would have proposed."""
    accepted: int
    """1 where a round that asked the head would have verified that token, and accepted it."""


@dataclass(frozen=True)
class RoundReport:
    """What one round cost and earned. `accepted` and `earned`, the committed tokens, are per request, and so is
    `from_head`: whether the learned draft was asked, which may have found no proposal worth verifying.

    `drafted` is false for rounds that were told to decode plainly.
    """

    batch: int
    drafted: bool
    num_proposals: int
    seconds: float
    accepted: tuple[int, ...]
    earned: tuple[int, ...]
    proposed: tuple[int, ...]
    from_head: tuple[bool, ...]
    look: LookReport | None
    plan: Plan

    @property
    def committed(self) -> int:
        return sum(self.earned)


class RoundRunner:
    """Runs prefill chunks and rounds over slots 0…B−1."""

    def __init__(
        self,
        target: Target,
        draft: ServingDraft,
        planner: Planner,
        *,
        suffix_depth: int,
        capture_topk: int,
        prompt_labels: int,
        label: Callable[[TopK, Tensor], object],
    ) -> None:
        """`label` is to fill in what is unknown of a prompt's positions, from their final hidden states; not here."""
        self._target, self._draft, self._planner = target, draft, planner
        self._capture_topk = min(capture_topk, target.embed.shape[0])
        self._prompt_labels, self._label = prompt_labels, label
        self._reader = DraftReader(target, draft)
        self._proposer = Proposer(draft, self._reader, planner, suffix_depth=suffix_depth)
        self.features = self._reader.features

    def move_slot(self, source: int, destination: int, generation: Generation) -> None:
        length = len(generation.tokens)
        self._target.cache.move(source, destination, length)
        self._reader.move_slot(source, destination, length)

    @torch.inference_mode()
    def prefill(self, generation: Generation, slot: int, chunk: int, *, drafting: bool) -> None:
        """Read up to `chunk` more prompt tokens; after the last one, commit the answer's first token.

        With `drafting` the draft reads the same chunk, so that the first round is not the one that pays for it.
        """
        start = generation.num_prefilled
        end = min(start + chunk, generation.num_prompt_tokens)
        tokens = torch.tensor([generation.tokens[start:end]], device=self._target.device)
        hidden_1Td, aux_1Tw = self._target.forward(tokens, first_slot=slot, starts=[start])
        self._reader.keep(slot, start, aux_1Tw[0])
        generation.num_prefilled = end
        if drafting and self._planner.is_awake:
            self._reader.read(slot, generation, end - generation.num_pairs_read)
        # A prompt position costs a tenth of a decoded one and teaches the draft as well: its distribution is kept too.
        first_kept = max(start, generation.num_prompt_tokens - self._prompt_labels)
        if generation.capture and first_kept < end:
            generation.topk.append(TopK.unknown(first_kept, end - first_kept, self._capture_topk))
            self._label(generation.topk[-1], hidden_1Td[0, first_kept - start :])
        if end == generation.num_prompt_tokens:
            logits_1V = self._target.logits(hidden_1Td[0, -1:])
            first = self._emit(generation, logits_1V, logits_1V.max(-1).indices.tolist(), ())
            generation.commit(first, 0, logprobs=_logprobs(generation, logits_1V, first))

    @torch.inference_mode()
    def run(self, generations: Sequence[Generation], depth: int) -> RoundReport:
        """Propose, verify all proposals in one pass, commit what the target emits.

        The learned draft proposes at most `depth` tokens a request; at depth 0 nobody proposes anything.
        """
        started_s = time.perf_counter()
        if depth == 0:
            num_keys = sum(len(generation.tokens) for generation in generations)
            plan = Plan(batch=len(generations), num_keys=num_keys)
            proposals = Proposals(plan, (Chain(),) * len(generations))
        else:
            proposals = self._proposer.propose(generations, head_depth=depth)
        lengths = [len(generation.tokens) for generation in generations]
        accepted = self._verify(generations, proposals)
        seconds = time.perf_counter() - started_s
        look = None
        if (seen := proposals.look) is not None:
            is_right = generations[seen.row].tokens[lengths[seen.row]] == seen.token
            look = LookReport(seen.row, is_right, int(is_right and seen.is_worth_it))
        was_right = look is not None and look.is_right
        self._proposer.observe(proposals, generations, accepted, seconds - proposals.seconds, look_was_right=was_right)
        return RoundReport(
            batch=len(lengths),
            drafted=depth > 0,
            num_proposals=proposals.width,
            seconds=seconds,
            accepted=tuple(accepted),
            earned=tuple(len(one.tokens) - length for one, length in zip(generations, lengths, strict=True)),
            proposed=tuple(len(chain.tokens) for chain in proposals.chains),
            from_head=proposals.from_head,
            look=look,
            plan=proposals.plan,
        )

    def _verify(self, generations: Sequence[Generation], proposals: Proposals) -> list[int]:
        """Feed the pending tokens and the chains, padded to the longest, and commit; accepted proposals by request."""
        rows = [
            [generation.tokens[-1], *chain.tokens, *[0] * (proposals.width - len(chain.tokens))]
            for generation, chain in zip(generations, proposals.chains, strict=True)
        ]
        starts = [len(generation.tokens) - 1 for generation in generations]
        tokens_BP1 = torch.tensor(rows, device=self._target.device)
        hidden_BP1d, aux_BP1w = self._target.forward(tokens_BP1, first_slot=0, starts=starts)
        logits_BP1V = self._target.logits(hidden_BP1d)
        # Not argmax: on CPU it is six times slower in bfloat16.
        likeliest_BP1: list[list[int]] = logits_BP1V.max(-1).indices.tolist()
        accepted = []
        for slot, (generation, chain) in enumerate(zip(generations, proposals.chains, strict=True)):
            start = starts[slot]
            self._reader.keep(slot, start, aux_BP1w[slot])
            taken = self._emit(generation, logits_BP1V[slot], likeliest_BP1[slot], chain.tokens)
            count = len(taken) - 1
            if generation.capture:
                generation.topk.append(top_of(start, logits_BP1V[slot, : count + 1], self._capture_topk))
            if chain.tokens:
                generation.rounds.append(self._record(chain, start, count))
            logprobs = _logprobs(generation, logits_BP1V[slot, : count + 1], taken)
            generation.commit(taken, count, "head" if chain.suffix is None else "suffix", logprobs=logprobs)
            accepted.append(count)
        return accepted

    def _record(self, chain: Chain, position: int, num_accepted: int) -> RoundRecord:
        version = self._draft.version if chain.suffix is None else NO_DRAFT
        logprobs = [math.log(max(probability, 1e-30)) for probability in chain.probabilities]
        return RoundRecord(position, list(chain.tokens), logprobs, num_accepted, version)

    def _emit(
        self, generation: Generation, logits_PV: Tensor, likeliest_P: list[int], proposed: Sequence[int]
    ) -> list[int]:
        """What the target emits after the last P tokens fed to it, up to the first that was not `proposed`.

        A sampled row costs a vector of noise: none is sampled that is not committed.
        """
        sampling, seed = generation.source.sampling, generation.source.seed
        if sampling.temperature == 0:
            return likeliest_P[: count_accepted(proposed, likeliest_P) + 1]
        length, size = len(generation.tokens), logits_PV.shape[-1]
        emitted: list[int] = []
        for row, wanted in enumerate([*proposed, None]):
            noise_V = shared_noise(seed, length + row, size, logits_PV.device)
            emitted.append(int(emit(logits_PV[row], sampling, noise_V)))
            if emitted[-1] != wanted:
                break
        return emitted


def _logprobs(generation: Generation, logits_PV: Tensor, tokens: list[int]) -> list[float]:
    """Of P tokens that the target emitted, for a request that wants to know."""
    if not generation.request.logprobs:
        return []
    return served_logprobs(logits_PV, generation.source.sampling, torch.tensor(tokens, device=logits_PV.device))
