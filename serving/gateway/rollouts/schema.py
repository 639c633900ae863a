"""The bodies of `/v1/rollouts`, strictly typed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from serving.gateway.body import Strict, invalid
from serving.gateway.openai.schema import (
    INT32_MAX,
    INT64_MAX,
    CaptureChoice,
    Message,
    OnePrompt,
    SamplingBody,
)
from serving.rollout.samples import MAX_SAMPLES

MAX_GROUPS = 1024
"""Most groups of one rollout."""
_MAX_REWARD = 1e9
_MAX_DEADLINE_S = 7 * 24 * 3600.0

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Seed = Annotated[int, Field(ge=0, le=INT64_MAX)]


class GroupBody(SamplingBody):
    """One prompt and its samples. Each line of the file for `slipstream rollout` is one."""

    id: Name | None = None
    """Default: its number in the list, from 0."""
    prompt: OnePrompt | None = None
    """Text or token ids; or `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    """Samples that are needed; default: as many as there are seeds, without the `redundant` ones, or 1."""
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=MAX_SAMPLES)] | None = None
    """One a sample, redundant ones included; default: drawn at random, and each sample says its own."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher goes first."""
    deadline_s: Annotated[float, Field(gt=0, le=_MAX_DEADLINE_S)] | None = None
    """From now on; what has not ended by then is aborted."""
    max_staleness: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Target versions that may come out while a sample is under way; default: any number."""
    when_stale: Literal["return", "abort"] = "return"
    environment: Name | None = None
    """The client's name for the environment that answers each turn; the sample then waits for observations."""
    turn_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Most tokens of a turn; default: `max_tokens`, which counts all turns and observations."""
    redundant: Annotated[int, Field(ge=0, lt=MAX_SAMPLES)] = 0
    """Samples that are begun beside the `n` that are needed; once so many have finished, the others are aborted."""

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt_missing", "give either 'prompt' or 'messages'", "prompt")
        if self.seeds is not None and self.n is not None and self.n + self.redundant != len(self.seeds):
            message = f"{len(self.seeds)} seeds for {self.n} samples and {self.redundant} redundant ones: give one each"
            raise invalid("seeds_count", message, "seeds")
        if self.redundant >= self.num_samples:
            message = f"of {self.num_samples} samples {self.redundant} cannot be more than are needed"
            raise invalid("redundant", message, "redundant")
        if self.num_samples > MAX_SAMPLES:
            message = f"a group has at most {MAX_SAMPLES} samples, redundant ones included, not {self.num_samples}"
            raise invalid("redundant", message, "redundant")
        if self.turn_tokens is not None and self.environment is None:
            raise invalid("no_environment", "without an environment there is one turn", "turn_tokens")
        return self

    @property
    def num_samples(self) -> int:
        """Samples that are begun, redundant ones included."""
        return len(self.seeds) if self.seeds is not None else (self.n or 1) + self.redundant


class RolloutBody(Strict):
    model: str
    id: Name | None = None
    """Id of the rollout; default: generated. A known id is refused, so that nothing runs twice."""
    groups: Annotated[list[GroupBody], Field(min_length=1, max_length=MAX_GROUPS, fail_fast=True)]
    logprobs: bool = True
    job: Name | None = None
    """Name of the tenant's job; jobs share the engines by the tokens that they have had."""
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Weight of the job: twice the weight, twice the tokens, while both jobs have work."""
    slipstream: CaptureChoice = CaptureChoice()
    """Capture policy; a prompt group here is one of `groups`."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        seen: set[str] = set()
        for number, group in enumerate(self.groups):
            name = group.id or str(number)
            if name in seen:
                raise invalid("duplicate", f"there is a group {name!r} before it", "groups", number, "id")
            seen.add(name)
        return self


class ObservationBody(Strict):
    """An environment's answer to a turn: raw text, messages for the chat template, or the end of the sample."""

    group_id: Name
    sample: Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
    turn: Annotated[int, Field(ge=0, le=INT32_MAX)]
    text: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    done: bool = False
    failure: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Why the environment cannot go on: the sample is aborted."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if sum((self.text is not None, self.messages is not None, self.done, self.failure is not None)) != 1:
            raise invalid("observation", "give one of 'text', 'messages', 'done' and 'failure'", "text")
        return self


class ObservationsBody(Strict):
    observations: Annotated[list[ObservationBody], Field(min_length=1, max_length=16_384, fail_fast=True)]


class RewardBody(Strict):
    group_id: Name
    sample: Annotated[int, Field(ge=0, lt=MAX_SAMPLES)]
    reward: Annotated[float, Field(ge=-_MAX_REWARD, le=_MAX_REWARD)]


class RewardsBody(Strict):
    rewards: Annotated[list[RewardBody], Field(min_length=1, max_length=16_384, fail_fast=True)]
