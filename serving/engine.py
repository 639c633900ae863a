"""The engine protocol: what the gateway and the hot swap ask of whatever generates.

The local engine and the test double implement all of it; the SGLang client is a `DraftHost`, since SGLang speaks the
OpenAI protocol itself. Everything here is plain data, so the gateway can use it without torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from speculator.draft.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
Source = Literal["head", "suffix", "target"]
"""Where a committed token comes from: accepted proposals of the draft head or of earlier text, or the target itself."""


@dataclass(frozen=True, kw_only=True)
class CapturePolicy:
    """Whether and for whom a request's trace is recorded."""

    capture: bool = True
    tenant: str = "default"
    group_id: str = ""
    domain: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sample to generate. `prompt_token_ids` is the whole prompt, chat template applied.

    An answer that was begun elsewhere goes on where the last `num_answered` tokens of the prompt are its own: its text
    and stop strings go on from theirs, and `max_tokens` counts what is still to come.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    num_answered: int = 0
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    """Whether its chunks say how likely their tokens were."""
    policy: CapturePolicy = field(default_factory=CapturePolicy)


@dataclass(frozen=True)
class Piece:
    """The text that one token completed; of a character that several tokens spell, the last one has it all."""

    text: str
    source: Source


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one decode step added to one request.

    `text` is what may be shown now (incomplete characters and possible stop strings are held back), and `pieces` are
    the same text by tokens, where the engine can tell; `token_ids` are the committed tokens; `num_accepted` of them
    were proposals of the draft. The last chunk has a finish reason.

    `logprobs`, where the request wants them, are of the tokens under the distribution that they were sampled from: of
    the target after temperature, top-k and top-p, whatever the draft proposed. That is the behaviour policy, which the
    importance weights of reinforcement learning have in their denominator. Greedy tokens have 0: nothing else could be.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] = ()
    target_version: int = 0
    """Of the weights that these tokens are from (`MovesTarget`)."""


@dataclass(frozen=True, kw_only=True)
class SwapReport:
    """How a draft version came into service."""

    version: int
    previous: int
    stall_ms: float
    """Time that the decode loop spent copying: the whole cost that a user can see."""
    step: int
    """The decode step before which the new weights were in place."""


@dataclass(frozen=True, kw_only=True)
class TargetReport:
    """How a new version of the target came into service."""

    version: int
    previous: int
    stall_ms: float
    """Time that the decode loop spent on it; 0 where the engine moves its target by itself."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    alive: bool
    ready: bool
    num_running: int
    num_waiting: int
    is_full: bool = False
    """The next request would be refused, as far as is known: the gateway then need not read it."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What the gateway must know to validate a request."""

    model: str
    context_length: int
    """Prompt and completion tokens together."""
    max_depth: int
    num_slots: int = 1
    """Requests that decode together."""
    heeds_seed: bool = True
    """Whether a request's seed has an effect."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the gateway needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens of the template included where the model wants them."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        Raises RequestError when the model's template refuses the conversation.
        """


class DraftHost(Protocol):
    """Runs a draft that can be exchanged while it serves, whoever turns its tokens into answers."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def draft_version(self) -> int: ...

    def install_draft(self, version: int) -> SwapReport:
        """Load, verify and swap in a stored draft version; blocks the calling thread, never the decode loop.

        Raises DraftError or StoreError; the version in service then stays.
        """

    def set_depth(self, depth: int) -> None:
        """Draft at most `depth` proposals a round from the next round on; 0 turns drafting off."""

    def health(self) -> EngineHealth: ...


class MovesTarget(Protocol):
    """Serves a target whose weights change while it serves, as in RL. Version 0 is the one that it started with."""

    @property
    def target_version(self) -> int: ...

    def move_target(self, version: int, folder: Path | None) -> TargetReport:
        """From now on the target is of this version: that of the weights in `folder`, or, where somebody else moves the
        weights, of those that are in place already. Blocks the calling thread, never the decode loop.

        Raises RequestError where this engine needs a folder or cannot use one, TargetError for weights that it cannot
        serve, and EngineError; the target in service then stays.
        """


class Engine(DraftHost, Protocol):
    """Generates from token ids: the gateway validates, tokenises and formats for it."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def drop(self, tenant: str, group_id: str) -> None:
        """A prompt group has ended: its text is of no more use to drafts. Does not wait."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream one answer; closing the iterator early aborts the request and frees what it held.

        Raises RequestError, EngineBusyError or EngineDeadError, also before the first chunk.
        """
