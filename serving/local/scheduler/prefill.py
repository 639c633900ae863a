"""Prompts, which the target reads piece by piece: what a piece leaves behind, and the answer's first token.

Shape letters: T tokens of a piece, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serving.local.decode.draft_reading import DraftReader
from serving.local.decode.emit import emitted_after, logprobs_of
from serving.local.request import Generation, TopK
from serving.local.target.ranking import Ranking
from speculator.proposals.draft_tree import NO_PROPOSALS
from speculator.proposals.planner import RoundPlanner


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
