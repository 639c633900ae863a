"""Types of rollouts: a group of samples of one prompt, a sample, its lease to an engine, its result.

A sample's text depends on its seed and on nothing else: the noise of every position is keyed by (seed, position)
(speculator/draft/verification.py). So a sample that was stopped can resume on any engine, as a request for prompt +
tokens so far, and its text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from serving.engine import CapturePolicy, Chunk
from speculator.draft.sampling_params import SamplingParams

MAX_SAMPLES = 1024
"""Most samples of one group."""
WhenStale = Literal["return", "abort"]
EndReason = Literal["stop", "length", "done", "stale", "deadline", "cancelled", "refused", "redundant", "environment"]
"""`done`: its environment has ended it; `environment`: its environment has failed."""


class SampleId(NamedTuple):
    group_id: str
    number: int


class SampleState(StrEnum):
    WAITING = "waiting"
    """Nothing was generated yet."""
    RUNNING = "running"
    PAUSED = "paused"
    """Waits with the tokens that it has."""
    AWAITING = "awaiting"
    """Waits for its environment's answer; it holds no slot."""
    FINISHED = "finished"
    STALE = "stale"
    """Too old for the newest target; its tokens are handed back, marked as such."""
    ABORTED = "aborted"
    """Cancelled, past its deadline, refused by an engine, or too old where the caller wants no old samples."""

    @property
    def has_ended(self) -> bool:
        return self in (SampleState.FINISHED, SampleState.STALE, SampleState.ABORTED)


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Samples of one prompt, one for each seed."""

    group_id: str
    prompt_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    """Higher goes first."""
    job: str = ""
    """Jobs share the engines (serving/rollout/job_fairness.py)."""
    weight: float = 1.0
    """The job's weight: twice as much gets twice as many tokens, as long as it has work."""
    deadline_s: float | None = None
    """On the clock of `Scheduler.expire`."""
    max_staleness: int | None = None
    """α: most target versions that may come out while a sample is under way; None for any number."""
    when_stale: WhenStale = "return"
    turn_tokens: int | None = None
    """Where a sample is a conversation with an environment: most tokens of a turn. What the environment says counts
    among `max_tokens`, too."""
    num_needed: int | None = None
    """Finished samples after which the others are redundant; None: all are needed."""


@dataclass(kw_only=True)
class Sample:
    """One answer under way. The scheduler alone changes it."""

    group: Group
    index: int
    seed: int
    state: SampleState = SampleState.WAITING
    tokens: list[int] = field(default_factory=list)
    """Tokens that engines reported. Those that a dead engine had not reported are generated again."""
    engine: str | None = None
    """Where it runs; None elsewhere."""
    last_engine: str | None = None
    """The engine that read it last: if any, it still has its keys and values."""
    failed_at: str | None = None
    """The last engine that has failed on it since its newest tokens."""
    num_seen: int = 0
    """Tokens that it had when it left that engine; its environment may have added others."""
    unread: int | None = None
    """Tokens that its engine reads before the first token of this lease; None once that has come."""
    chunk_end: int = 0
    """Number of tokens at which the scheduler decides again where it runs."""
    lease: int = 0
    """The number of its newest lease: no other may report."""
    read_mark: int = 0
    """`EngineCapacity.num_read` when its last tokens came."""
    target_version: int | None = None
    """The target's version at its first tokens; until they come, that of its lease."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """(begin, end) of each finished turn of the model among its tokens; its environment has said the rest."""
    turn_start: int = 0
    """Where the present turn begins."""

    @property
    def sample_id(self) -> SampleId:
        return SampleId(self.group.request.group_id, self.index)

    @property
    def job(self) -> str:
        return self.group.request.job

    @property
    def context(self) -> int:
        """Tokens that an engine has to read before it can go on."""
        return len(self.group.request.prompt_token_ids) + len(self.tokens)

    def unread_at(self, engine: str) -> int:
        """Tokens that an engine has to read before it can go on, as far as is known of its cache."""
        if self.last_engine == engine:
            return len(self.tokens) - self.num_seen
        return len(self.tokens) if engine in self.group.engines else self.context

    def unread_elsewhere(self, engine: str) -> int:
        """The same for that of the other engines which has the most of it in its cache."""
        if self.last_engine is not None and self.last_engine != engine:
            return self.unread_at(self.last_engine)
        return len(self.tokens) if self.group.engines - {engine} else self.context

    @property
    def tokens_left(self) -> int:
        """Tokens that this turn may still add."""
        request = self.group.request
        end = request.max_tokens
        if request.turn_tokens is not None:
            end = min(end, self.turn_start + request.turn_tokens)
        return end - len(self.tokens)

    @property
    def is_probe(self) -> bool:
        """Whether it is the sample that shows how long the others will be: the first one, until any has finished."""
        return self.index == 0 and self.group.longest_finished is None


@dataclass(kw_only=True)
class Group:
    """A group under way, and what its finished samples say about the others."""

    request: GroupRequest
    number: int
    """In the order of submission."""
    samples: list[Sample] = field(default_factory=list)
    longest_finished: int | None = None
    num_finished: int = 0
    engines: set[str] = field(default_factory=set)
    """Engines that have read its prompt."""
    num_said: int = 0
    num_decoded: int = 0
    """Tokens of environments, and of the model, in all finished turns."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A sample on an engine: `max_tokens` more may follow the `prompt_token_ids`, which hold its tokens so far."""

    sample_id: SampleId
    engine: str
    number: int
    prompt_token_ids: tuple[int, ...]
    num_generated: int
    """How many of the prompt's last tokens belong to the turn that goes on."""
    seed: int
    max_tokens: int
    target_version: int
    """The least that its tokens may have: announced for its engine, or seen of it, when it began."""


@dataclass(frozen=True, kw_only=True)
class SampleEnd:
    """A sample that has ended. `stop`: the number of its lease, if an engine still works on it."""

    sample_id: SampleId
    state: SampleState
    reason: EndReason
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """A group, and the parameters that only its engines need."""

    request: GroupRequest
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    policy: CapturePolicy = field(default_factory=CapturePolicy)

    def request_id(self, number: int) -> str:
        """The id of all requests of a sample, and so of its trace."""
        return f"{self.request.group_id}/{number}"


@dataclass(kw_only=True)
class Answer:
    """What a sample's engines have sent so far, without its tokens, which the scheduler has."""

    logprobs: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    engine: str = ""
    """The last engine that gave it tokens."""
    num_leases: int = 0
    num_failures: int = 0
    """Failures in a row of engines that were alive and not busy."""
    said: tuple[int, int] = (0, 0)
    """Numbers of parts and logprobs before the present turn."""

    def add(self, chunk: Chunk, engine: str) -> None:
        self.logprobs.extend(chunk.logprobs)
        self.parts.append(chunk.text)
        self.engine = engine
        self.num_failures = 0

    def next_turn(self) -> tuple[str, tuple[float, ...]]:
        """Text and logprobs of the turn that has ended; begins the next one."""
        parts, logprobs = self.said
        self.said = len(self.parts), len(self.logprobs)
        return "".join(self.parts[parts:]), tuple(self.logprobs[logprobs:])

    def observe(self, num_tokens: int, *, logprobs: bool) -> None:
        """Add the tokens of the environment's answer, with logprobs of 0."""
        self.logprobs.extend([0.0] * num_tokens if logprobs else [])
        self.said = len(self.parts), len(self.logprobs)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a sample, for its environment to answer."""

    sample_id: SampleId
    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """A sample that has ended. An aborted one has the tokens so far, or none if it was aborted as stale."""

    sample_id: SampleId
    state: SampleState
    reason: EndReason
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One a token where the group asked for them; else none."""
    text: str
    target_version: int | None
    """None for a sample that was never begun."""
    engine: str
    """The last engine that gave it tokens; empty where none did."""
    num_leases: int
    """How often an engine began or resumed it."""
    turns: tuple[tuple[int, int], ...] = ()
    """As `Sample.turns`. `logprobs` has 0 for what its environment said."""
    detail: str = ""
    """Why an engine refused it, or how its environment failed."""
