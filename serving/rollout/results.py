"""What the driver of rollouts takes and gives back: a group with how it is sampled, and a sample that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine import CapturePolicy, Chunk
from serving.rollout.nouns import EndReason, GroupRequest, SampleId, State
from speculator.draft.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """A group, and what engines have to know of it that the scheduler need not."""

    request: GroupRequest
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    policy: CapturePolicy = field(default_factory=CapturePolicy)

    def request_id(self, number: int) -> str:
        """Of the sample's requests, one after the other, and so of its trace."""
        return f"{self.request.group_id}/{number}"


@dataclass(kw_only=True)
class Answer:
    """What the engines have said of a sample so far, as far as it was reported to the scheduler."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    engine: str = ""
    """The newest that gave it tokens."""
    num_leases: int = 0
    num_failures: int = 0
    """Of engines that lived and were not busy, without a token between them."""

    def add(self, chunk: Chunk, engine: str) -> None:
        self.tokens.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.parts.append(chunk.text)
        self.engine = engine
        self.num_failures = 0


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """A sample that has ended. Aborted ones have the tokens that they had, but those that are too old have none."""

    sample_id: SampleId
    state: State
    reason: EndReason
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One a token where the group asked for them; else none."""
    text: str
    target_version: int | None
    """None: it was never begun."""
    engine: str
    """The last that gave it tokens; empty where none did."""
    num_leases: int
    """On how many engines it was begun or went on, the same one counted again where it came back."""
    detail: str = ""
    """Why an engine refused it."""
