"""One decode round of a batch: draft → verify → commit; and one chunk of a prefill.

Shape letters: B batch, M pairs to read, P proposals (the depth), d hidden size, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.local.draft import ServingDraft
from serving.local.generation import Generation, RoundRecord, TopK
from serving.local.target import Target
from speculator.verify import count_accepted, emit, gumbel_noise

_MAX_PAIRS_A_PASS = 64  # after a long time at depth 0 the draft catches up in passes of this many pairs


@dataclass(frozen=True)
class RoundReport:
    """What one round cost and earned. `accepted` and `earned`, the committed tokens, are per request.

    `drafted` is false for rounds at depth 0; a drafting round may still have found no proposal worth verifying.
    """

    batch: int
    drafted: bool
    num_proposals: int
    seconds: float
    accepted: tuple[int, ...]
    earned: tuple[int, ...]

    @property
    def committed(self) -> int:
        return sum(self.earned)


class RoundRunner:
    """Runs prefill chunks and rounds over slots 0…B−1; owns the features that draft and capture read."""

    def __init__(
        self, target: Target, draft: ServingDraft, *, min_confidence: float, capture_topk: int, prompt_labels: int
    ) -> None:
        self._target, self._draft = target, draft
        self._min_confidence = min_confidence
        self._capture_topk, self._prompt_labels = capture_topk, prompt_labels
        slots, length = target.cache.keys.shape[1], target.cache.keys.shape[3]
        width = 3 * target.embed.shape[1]
        self._features = torch.zeros(slots, length, width, dtype=target.embed.dtype, device=target.device)

    def features(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of the features [end − start, 3d] of positions start … end − 1, in the bfloat16 of traces."""
        return self._features[slot, start:end].to("cpu", torch.bfloat16, copy=True)

    def move_slot(self, source: int, destination: int, generation: Generation) -> None:
        length = len(generation.tokens)
        self._target.cache.move(source, destination, length)
        self._draft.cache.move(source, destination, length)
        self._features[destination, :length] = self._features[source, :length]

    @torch.inference_mode()
    def prefill(self, generation: Generation, slot: int, chunk: int, *, drafting: bool) -> None:
        """Read up to `chunk` more prompt tokens; after the last one, commit the answer's first token.

        With `drafting` the draft reads the same chunk, so that the first round is not the one that pays for it.
        """
        start = generation.num_prefilled
        end = min(start + chunk, generation.num_prompt_tokens)
        tokens = torch.tensor([generation.tokens[start:end]], device=self._target.device)
        hidden_1Td, aux_1Tw = self._target.forward(tokens, first_slot=slot, starts=[start])
        self._features[slot, start:end] = aux_1Tw[0]
        generation.num_prefilled = end
        if drafting:
            self._read(slot, [generation], end - generation.num_pairs_read)
        # A prompt position costs a tenth of a decoded one and teaches the draft as well: its distribution is kept too.
        first_kept = max(start, generation.num_prompt_tokens - self._prompt_labels)
        if generation.capture and first_kept < end:
            self._keep_topk(generation, first_kept, self._target.logits(hidden_1Td[0, first_kept - start :]))
        if end == generation.num_prompt_tokens:
            generation.commit(self._emit(generation, self._target.logits(hidden_1Td[0, -1:])), 0)

    @torch.inference_mode()
    def run(self, generations: Sequence[Generation], depth: int) -> RoundReport:
        """Draft up to `depth` proposals a request, verify all of them in one pass, commit what the target emits."""
        started = time.perf_counter()
        lengths = [len(generation.tokens) for generation in generations]
        pending_B1 = torch.tensor([[generation.tokens[-1]] for generation in generations], device=self._target.device)
        proposals, logprobs = self._propose(generations, lengths, depth)
        num_proposals = proposals.shape[1]
        tokens_BP1 = torch.cat([pending_B1, proposals], 1)
        starts = [length - 1 for length in lengths]
        hidden_BP1d, aux_BP1w = self._target.forward(tokens_BP1, first_slot=0, starts=starts)
        logits_BP1V = self._target.logits(hidden_BP1d)
        accepted, earned = [], []
        drafted = zip(proposals.tolist(), logprobs.tolist(), strict=True)
        emitted_B = self._emit_batch(generations, logits_BP1V)
        for slot, (generation, (tokens, scores)) in enumerate(zip(generations, drafted, strict=True)):
            start, emitted = starts[slot], emitted_B[slot]
            self._features[slot, start : start + num_proposals + 1] = aux_BP1w[slot]
            count = count_accepted(tokens, emitted)
            if generation.capture:
                self._keep_topk(generation, start, logits_BP1V[slot, : count + 1])
            if num_proposals:
                generation.rounds.append(RoundRecord(start, tokens, scores, count, self._draft.version))
            generation.commit(emitted[: count + 1], count)
            accepted.append(count)
            earned.append(len(generation.tokens) - lengths[slot])
        return RoundReport(
            batch=len(lengths),
            drafted=depth > 0,
            num_proposals=num_proposals,
            seconds=time.perf_counter() - started,
            accepted=tuple(accepted),
            earned=tuple(earned),
        )

    def _propose(self, generations: Sequence[Generation], lengths: Sequence[int], depth: int) -> tuple[Tensor, Tensor]:
        if depth == 0:
            empty = torch.empty(len(generations), 0, device=self._target.device)
            return empty.long(), empty
        feature_Bd = self._read_pairs(generations, lengths)
        sources = [generation.source for generation in generations]
        return self._draft.propose(
            feature_Bd, depth=depth, min_confidence=self._min_confidence, lengths=lengths, sources=sources
        )

    def _read_pairs(self, generations: Sequence[Generation], lengths: Sequence[int]) -> Tensor:
        """Let the draft read every pair it has not seen; returns its output [B, d] at each request's newest pair."""
        for slot, generation in enumerate(generations):
            while len(generation.tokens) - 1 - generation.num_pairs_read > _MAX_PAIRS_A_PASS:
                self._read(slot, [generation], _MAX_PAIRS_A_PASS)
        unread = [length - 1 - g.num_pairs_read for g, length in zip(generations, lengths, strict=True)]
        out_BMd = self._read(0, generations, max(unread))
        rows = torch.arange(len(unread), device=out_BMd.device)
        return out_BMd[rows, torch.tensor(unread, device=out_BMd.device) - 1]

    def _read(self, first_slot: int, generations: Sequence[Generation], width: int) -> Tensor:
        """Read up to `width` pairs of each request, shorter ones padded on the right; returns [B, width, d]."""
        tokens, features, starts = [], [], []
        for slot, generation in enumerate(generations, first_slot):
            start = generation.num_pairs_read
            ids = generation.tokens[start + 1 : start + 1 + width]
            tokens.append(ids + [0] * (width - len(ids)))
            features.append(self._features[slot, start : start + width])
            starts.append(start)
            generation.num_pairs_read += len(ids)
        tokens_BM = torch.tensor(tokens, device=self._target.device)
        return self._draft.read(tokens_BM, torch.stack(features), first_slot=first_slot, starts=starts)

    def _emit_batch(self, generations: Sequence[Generation], logits_BPV: Tensor) -> list[list[int]]:
        # Not argmax: on CPU it is six times slower in bfloat16.
        greedy: list[list[int]] = logits_BPV.max(-1).indices.tolist()
        return [
            greedy[row] if generation.source.sampling.temperature == 0 else self._emit(generation, logits_BPV[row])
            for row, generation in enumerate(generations)
        ]

    def _emit(self, generation: Generation, logits_PV: Tensor) -> list[int]:
        """What the target emits after each of the last P tokens fed to it, as if all before were committed."""
        sampling, seed = generation.source.sampling, generation.source.seed
        if sampling.temperature == 0:
            return logits_PV.max(-1).indices.tolist()
        length, size = len(generation.tokens), logits_PV.shape[-1]
        noise = [gumbel_noise(seed, length + row, size, device=logits_PV.device) for row in range(len(logits_PV))]
        return emit(logits_PV, sampling, torch.stack(noise)).tolist()

    def _keep_topk(self, generation: Generation, position: int, logits: Tensor) -> None:
        """Remember the target's distribution after `position` and the following rows, for the trace."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        top = logits.log_softmax(-1, dtype=wide).topk(min(self._capture_topk, logits.shape[-1]), -1)
        generation.topk.append(TopK(position, top.indices.int().cpu().numpy(), top.values.half().cpu().numpy()))
