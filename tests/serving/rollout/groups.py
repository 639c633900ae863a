"""Small groups for the tests of the rollout policy."""

from __future__ import annotations

from typing import Any

from serving.rollout.samples import GroupRequest, Lease, Sample, SampleId
from serving.rollout.scheduler import Scheduler


def request(group_id: str = "a", *, samples: int = 2, max_tokens: int = 100, **more: Any) -> GroupRequest:
    """A prompt of 10 tokens, seeds from 0."""
    prompt = more.pop("prompt_token_ids", tuple(range(10)))
    return GroupRequest(
        group_id=group_id, prompt_token_ids=prompt, seeds=tuple(range(samples)), max_tokens=max_tokens, **more
    )


def names(leases: list[Lease]) -> list[str]:
    """a0 is the first sample of group a."""
    return [f"{lease.sample_id.group_id}{lease.sample_id.number}" for lease in leases]


def sample(scheduler: Scheduler, name: str) -> Sample:
    return scheduler.sample(SampleId(name[0], int(name[1:])))
