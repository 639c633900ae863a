"""The engine protocol: what the gateway and the hot swap ask of whatever generates.

The local engine and the test double implement all of it; the SGLang client is a `DraftHost`, since SGLang speaks the
OpenAI protocol itself. Everything here is plain data, so the gateway can use it without torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

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
    grammar: str = ""
    """What the answer's text follows, as llguidance has it (`serving.grammar`); the answer ends where that does."""
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
    were proposals, of the `num_proposed` that the step verified: None where it verified nothing, as with an answer's
    first token. The last chunk has a finish reason.

    `logprobs`, where the request wants them, are of the tokens under the distribution that they were sampled from: of
    the target after temperature, top-k and top-p, whatever the draft proposed. That is the behaviour policy, which the
    importance weights of reinforcement learning have in their denominator. Greedy tokens have 0: nothing else could be.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    num_proposed: int | None = None
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] = ()
    target_version: int = 0
    """Of the weights that these tokens are from (`MovesTarget`)."""


class Stratum(NamedTuple):
    """Requests whose accept lengths may be compared: the mix of them can change while a new version is watched."""

    domain: str
    sampling: str
    of_looks: bool = False
    """Looks at a head that is not used come in other rounds than its chains: they are compared with looks only."""
    remembered: int = 0
    """Quarters, rounded up, of the request's rounds so far in which earlier text proposed: it takes what is easy, and
    leaves the draft the rest.
    """


class Verification(NamedTuple):
    """One request's part in a drafting round; 0 accepted also where nothing was worth proposing. A look at a head that
    is not used counts as a round of depth 1, in a stratum of looks.
    """

    request_id: str
    stratum: Stratum
    accepted: int
    depth: int
    """Most proposals that it could have had."""


class Proposed(NamedTuple):
    """How many tokens a round verified beside the newest ones. With as many of each, rounds of one size are alike."""

    by_draft: int
    by_text: int = 0
    """By earlier text; what fills a pass up to a rectangle counts as such."""


class WatchedRound(NamedTuple):
    """One decode round: what it cost and what its verifications accepted.

    In a control round, and for requests whose draft is not up to date, there are none.
    """

    version: int
    batch: int
    drafted: bool
    """False for a control round, which proposes nothing."""
    seconds: float
    committed: int
    verifications: tuple[Verification, ...]
    proposed: Proposed | None = None
    """None where the draft took no part, or first caught up with what it had not read: the time says nothing of it."""
    read_prompt: bool = False
    """Whether a piece of a prompt was read in the same pass, which then says nothing of time either."""
    target_version: int = 0

    @property
    def kind(self) -> tuple[int, ...] | None:
        """Of rounds whose times may be compared; None where this one's says nothing of draft or machine."""
        if self.read_prompt or (self.drafted and self.proposed is None):
            return None
        return self.batch, *(self.proposed or ())


def stratum_of(domain: str, sampling: SamplingParams) -> Stratum:
    """Greedy, or the temperature to a tenth, with the whole distribution or a part of it."""
    if sampling.temperature == 0:
        return Stratum(domain, "greedy")
    is_cut = sampling.top_p < 1 or sampling.top_k > 0
    return Stratum(domain, f"t{min(round(sampling.temperature, 1), 2.0)}{' cut' if is_cut else ''}")


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


Message = dict[str, Any]
"""Of a conversation: `role` and `content`, with `tool_calls` and `tool_call_id` where functions are called."""
Tool = dict[str, Any]
"""As OpenAI has it: {"type": "function", "function": {"name": …, "description": …, "parameters": …}}."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the gateway needs."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, special tokens of the template included where the model wants them."""

    def encode_chat(
        self, messages: list[Message], tools: Sequence[Tool] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer. The model is told of the
        functions that it may call; `template_kwargs` are values that the template knows, such as `enable_thinking`.

        Raises RequestError when the model's template refuses the conversation.
        """

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that goes on behind other text."""

    def has_token(self, text: str) -> bool:
        """Whether one token is this text."""

    def encode_next(self, messages: list[Message], *, last: int) -> list[int]:
        """Token ids of these messages behind an answer with this last token, ready for the next answer. Where that is
        no end token, since the answer was cut, they begin with one.

        Raises RequestError as `encode_chat`, and where the template writes earlier messages anew.
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
