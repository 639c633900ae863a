"""State of one running request: tokens, positions in the caches, verification records.

Position bookkeeping, for a request with n committed tokens x₀ … xₙ₋₁:

* the target has read x₀ … xₙ₋₂, so its cache holds n − 1 positions and features exist for 0 … n−2;
* xₙ₋₁ is *pending*: the next round feeds it together with the proposals;
* the draft may have read pairs (xₜ₊₁, feature t) for t = 0 … n−2; `num_pairs_read` of them are done.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.answer_text import AnswerText
from serving.engine import Chunk, FinishReason, GenerateRequest, Source, Stratum, stratum_of
from serving.grammar import GrammarMatcher
from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import draws
from speculator.host import now_ms
from speculator.proposals.draft_tree import DraftTree
from speculator.proposals.suffix_drafter import SuffixRequest
from speculator.trace import BranchRows
from speculator.tracing import Parent


@dataclass(frozen=True)
class RoundRecord:
    """One verification: proposals made when `position` held the newest committed token."""

    position: int
    tree: DraftTree
    num_accepted: int
    draft_version: int
    """`speculator.trace.NO_DRAFT` for suffix proposals."""


@dataclass(frozen=True)
class TopK:
    """The target's K likeliest next tokens after consecutive positions from `position` on: arrays [rows, K]."""

    position: int
    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def unknown(cls, position: int, rows: int, num_kept: int) -> TopK:
        """Arrays to be filled in later; until then with a trace's values for unknown rows."""
        shape = rows, num_kept
        return cls(position, np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float16))

    def before(self, end: int) -> TopK:
        """The rows of positions before `end`, as views of the same arrays."""
        return TopK(self.position, self.ids[: end - self.position], self.logprobs[: end - self.position])


@dataclass(frozen=True)
class DraftSource:
    """How one request draws its proposals: its sampling parameters and the seed of its noise."""

    sampling: SamplingParams
    seed: int


@dataclass
class ActiveRequest:
    """State of a request from admission to its last chunk; only the engine's thread changes it, except `aborted`."""

    request: GenerateRequest
    text: AnswerText
    deliver: Callable[[Chunk], None]
    end_token_ids: frozenset[int]
    capture: bool
    grammar: GrammarMatcher | None = None
    """Grammar that the answer must follow."""
    parent: Parent | None = None
    """Parent of this answer's tracing spans."""
    created_ms: int = field(default_factory=now_ms)
    tokens: list[int] = field(init=False)
    source: DraftSource = field(init=False)
    stratum: Stratum = field(init=False)
    num_prefilled: int = 0
    num_pairs_read: int = 0
    suffix: SuffixRequest | None = None
    """Proposes from earlier text; set when the request is admitted."""
    num_rounds: int = 0
    num_suffix_rounds: int = 0
    """Rounds in which suffix drafts proposed."""
    rounds: list[RoundRecord] = field(default_factory=list)
    topk: list[TopK] = field(default_factory=list)
    rejected: list[BranchRows] = field(default_factory=list)
    """Rows behind rejections, of the rounds that were sampled for keeping them."""
    finish_reason: FinishReason | None = None
    can_share_prefix_kv: bool = True
    """False once its KV cache is of old target weights: siblings then prefill the prompt themselves."""
    can_share_draft_kv: bool = True
    """False once its draft KV cache is of old draft weights: siblings then let the draft read the pairs again."""
    aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.stratum = stratum_of(self.request.policy.domain, self.request.sampling)
        if self.grammar is not None:
            self.stratum = self.stratum._replace(sampling=f"{self.stratum.sampling} grammar")
        seed = self.request.seed
        self.source = DraftSource(self.request.sampling, int.from_bytes(os.urandom(8)) if seed is None else seed)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pairs_unread(self) -> int:
        return len(self.tokens) - 1 - self.num_pairs_read

    @property
    def tokens_left(self) -> int:
        return self.request.max_tokens - self.num_completion_tokens

    @property
    def _is_grammar_done(self) -> bool:
        return self.grammar is not None and self.num_completion_tokens == self.grammar.num_tokens

    def frozen(self) -> ActiveRequest:
        """A snapshot for another thread; later tokens do not change it."""
        frozen = copy.copy(self)
        frozen.tokens, frozen.rounds = list(self.tokens), list(self.rounds)
        frozen.topk, frozen.rejected = list(self.topk), list(self.rejected)
        return frozen

    def restart_prefill(self) -> None:
        """Restart the prefill of the prompt."""
        self.num_prefilled = self.num_pairs_read = 0
        self.can_share_draft_kv = True
        self.topk.clear()

    def abort(self) -> None:
        """End the answer unfinished, and tell its reader."""
        self.deliver(Chunk(text="", token_ids=(), finish_reason="abort"))

    def commit(
        self,
        emitted: list[int],
        num_accepted: int,
        proposer: Source = "target",
        *,
        num_proposed: int | None = None,
        logprobs: Sequence[float] = (),
    ) -> None:
        """Append the tokens that a round emitted, up to the answer's end, and deliver them as one chunk.

        The first `num_accepted` are accepted proposals of `proposer`, of `num_proposed`; `logprobs` are those of all
        tokens, if the request wants them.
        """
        taken: list[int] = []
        for index, token in enumerate(emitted):
            taken.append(token)
            self.tokens.append(token)
            if token in self.end_token_ids and (self.grammar is not None or not self.request.ignore_eos):
                self.finish_reason = "stop"
                break
            self.text.push(token, proposer if index < num_accepted else "target")
            if self.text.stopped or self._is_grammar_done:
                self.finish_reason = "stop"
                break
            if self.tokens_left == 0:
                self.finish_reason = "length"
                break
        if self.grammar is not None and self.grammar.fault:
            self.finish_reason = "abort"
        if self.suffix is not None:
            self.suffix.commit(taken)
        shown = self.text.take() if self.finish_reason is None else self.text.finish()
        if self.text.stopped:
            self.finish_reason = "stop"
        self.deliver(
            Chunk(
                text="".join(piece.text for piece in shown),
                pieces=tuple(shown),
                token_ids=tuple(taken),
                num_proposed=num_proposed,
                num_accepted=min(num_accepted, len(taken)),
                finish_reason=self.finish_reason,
                logprobs=tuple(logprobs[: len(taken)]),
            )
        )


@functools.lru_cache(maxsize=64)  # what eight requests need in a round with five proposals; 25 MB for 49,152 tokens
def shared_draws(seed: int, position: int, size: int) -> np.ndarray:
    """The uniform numbers for the noise of a position (`draws`), read-only. Cached, because draft and verification both
    need them: drawing takes 0.1 ms for 49,152 tokens. Each computes the logarithms, which take as long, only for the
    tokens that it needs.
    """
    found = draws(seed, position, size)
    found.flags.writeable = False
    return found
