"""`/v1/rollouts`: begin, follow, cancel, reward. A tenant reaches only its own rollouts.

A stream's first object describes the rollout, and each further one is a sample that has ended. The last one has the
rollout's state, and the cursor from which another stream would continue. A stream without a last object has broken
off; one that ends with an error can be continued later, for instance once an engine runs again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from serving.engine import EngineInfo, Tokenizer
from serving.gateway.body import read_body, request_body
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, reply, unavailable
from serving.gateway.openai.generation import check_model, completion_tokens
from serving.gateway.openai.schema import INT32_MAX, INT64_MAX
from serving.gateway.openai.stream import DONE, EVENTS, LINES, Emit, EventStream
from serving.gateway.rollouts.registry import Rollout, RolloutRegistry
from serving.gateway.rollouts.schema import GroupBody, ObservationBody, ObservationsBody, RewardsBody, RolloutBody
from serving.gateway.telemetry import Exchange, exchange_of
from serving.rollout.driver import Driver
from serving.rollout.samples import GroupRequest, GroupWork, SampleId, SampleState
from speculator.errors import RequestError, StreamError
from speculator.redis.trace_stream import GroupRewards

ROUTE = "/v1/rollouts"
_CURSOR = {
    "parameters": [
        {
            "name": "after",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 0, "default": 0},
            "description": "How many samples the client has: the `next` of a stream that ended.",
        }
    ]
}
_GROUPS = {
    "parameters": [
        {
            "name": "group_id",
            "in": "query",
            "required": False,
            "schema": {"type": "array", "items": {"type": "string"}},
            "description": "Groups to cancel; without one the whole rollout is.",
        }
    ]
}
SendRewards = Callable[[Sequence[GroupRewards]], object]
"""Sends rewards to the trainer; blocks, and raises StreamError."""


def rollout_routes(
    rollout_registry: RolloutRegistry,
    *,
    info: EngineInfo,
    tokenizer: Tokenizer,
    settings: GatewaySettings,
    send_rewards: SendRewards | None,
) -> APIRouter:
    """`info` describes the engines' model. Without `send_rewards` no trainer listens, and rewards are refused."""
    router = APIRouter(prefix=ROUTE)

    def find(request: Request, rollout_id: str) -> Rollout:
        return rollout_registry.find(exchange_of(request).tenant, rollout_id)

    def stream(request: Request, rollout: Rollout, after: int) -> Response:
        return streamed(request, rollout_registry, rollout, after=after, limit_s=settings.max_request_s)

    @router.post("", openapi_extra=request_body(RolloutBody, served=info.model))
    async def create_rollout(request: Request) -> Response:
        """Samples are streamed as they end: lines of JSON, or events if `Accept` is `text/event-stream`."""
        body = await read_body(request, RolloutBody, max_bytes=settings.max_body_bytes)
        check_model(info, body.model)
        # Before work is done for each sample.
        rollout_registry.check_size(sum(group.num_samples for group in body.groups))
        prompts = await asyncio.to_thread(_token_ids, tokenizer, body.groups)
        exchange, key, now_s = exchange_of(request), uuid4().hex, rollout_registry.clock()
        groups = {}
        for number, (group, prompt) in enumerate(zip(body.groups, prompts, strict=True)):
            max_tokens = completion_tokens(
                len(prompt), group.max_tokens, info, settings, prompt_param=f"groups[{number}].prompt"
            )
            group_id = f"{key}/{group.id or number}"
            groups[group.id or str(number)] = _work(body, group, prompt, exchange, group_id, max_tokens, now_s)
        asked = hashlib.sha256(repr(body).encode(errors="surrogatepass")).hexdigest()
        return stream(request, rollout_registry.submit(exchange.tenant, body.id or key, key, groups, asked), 0)

    @router.get("/{rollout_id}")
    async def show_rollout(request: Request, rollout_id: str) -> Response:
        return reply(described(rollout_registry, find(request, rollout_id)))

    @router.get("/{rollout_id}/samples", openapi_extra=_CURSOR)
    async def follow_rollout(request: Request, rollout_id: str) -> Response:
        """Stream the samples from number `after` on, future ones included."""
        rollout = find(request, rollout_id)
        return stream(request, rollout, _cursor(request.query_params.get("after", "0"), len(rollout.lines)))

    @router.delete("/{rollout_id}", openapi_extra=_GROUPS)
    async def cancel_rollout(request: Request, rollout_id: str) -> Response:
        """Cancel the rollout, or some groups; ended samples can still be read for a while."""
        rollout, names = find(request, rollout_id), set(request.query_params.getlist("group_id"))
        if unknown := names - rollout.groups.keys():
            message = f"This rollout has no group {min(unknown)}."
            raise ApiError(404, message, code="group_not_found", param="group_id")
        rollout_registry.cancel(rollout, names)
        return reply(described(rollout_registry, rollout))

    @router.post("/{rollout_id}/observations", openapi_extra=request_body(ObservationsBody))
    async def observe(request: Request, rollout_id: str) -> Response:
        """Take observations of environments. A repeated one, or one for an ended sample, changes nothing."""
        rollout = find(request, rollout_id)
        body = await read_body(request, ObservationsBody, max_bytes=settings.max_body_bytes)
        awaited = [(_awaiting(rollout, at, one), one) for at, one in enumerate(body.observations)]
        taken = await _take(awaited, rollout_registry.driver, tokenizer)
        return reply({"object": "rollout.observations", "id": rollout_id, "num_taken": taken})

    @router.post("/{rollout_id}/rewards", openapi_extra=request_body(RewardsBody))
    async def reward_rollout(request: Request, rollout_id: str) -> Response:
        """Take rewards: all, or none if one is invalid. A later reward replaces an earlier one."""
        rollout = find(request, rollout_id)
        body = await read_body(request, RewardsBody, max_bytes=settings.max_body_bytes)
        rewards = rewards_of(rollout, body)
        if send_rewards is None:
            raise ApiError(409, "This server records no traces, so rewards have no effect.", code="nothing_recorded")
        try:
            await run_in_threadpool(send_rewards, rewards)
        except StreamError as error:
            raise unavailable(str(error), code="rewards_unavailable") from error
        return reply({"object": "rollout.rewards", "id": rollout_id, "num_rewards": len(body.rewards)})

    return router


def _work(
    body: RolloutBody,
    group: GroupBody,
    prompt: Sequence[int],
    exchange: Exchange,
    group_id: str,
    max_tokens: int,
    now_s: float,
) -> GroupWork:
    request = GroupRequest(
        group_id=group_id,
        prompt_token_ids=tuple(prompt),
        seeds=tuple(group.seeds or (secrets.randbelow(INT64_MAX) for _ in range(group.num_samples))),
        max_tokens=max_tokens,
        priority=group.priority,
        job=f"{exchange.tenant}/{body.job or ''}",
        weight=body.weight,
        deadline_s=None if group.deadline_s is None else now_s + group.deadline_s,
        max_staleness=group.max_staleness,
        when_stale=group.when_stale,
        turn_tokens=None if group.environment is None else group.turn_tokens or INT32_MAX,
        num_needed=group.num_samples - group.redundant if group.redundant else None,
    )
    return GroupWork(
        request=request,
        sampling=group.sampling,
        stop=group.stop,
        ignore_eos=group.ignore_eos,
        logprobs=body.logprobs,
        policy=body.slipstream.policy(exchange, group_id),
    )


async def _take(observations: Sequence[tuple[SampleId, ObservationBody]], driver: Driver, tokenizer: Tokenizer) -> int:
    """Give the driver the observations that samples wait for; returns how many."""
    awaited = [(sample_id, one) for sample_id, one in observations if driver.awaited_turn(sample_id) == one.turn]
    observed = [(one, driver.last_token(sample_id)) for sample_id, one in awaited]
    texts = await asyncio.to_thread(_observed, tokenizer, observed)
    taken = 0
    for (sample_id, one), tokens in zip(awaited, texts, strict=True):
        # Meanwhile the same observation may have come from another request.
        if driver.awaited_turn(sample_id) == one.turn:
            taken += 1
            if tokens is not None:
                driver.observe(sample_id, tokens)
            else:
                driver.end_conversation(sample_id, failure=one.failure)
    return taken


def _cursor(text: str, num_ended: int) -> int:
    """The `after` of a request. Raises RequestError if it is no number, or beyond the ended samples."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError("after must be a whole number", param="after")
    if int(text) > num_ended:
        raise RequestError(f"only {num_ended} samples have ended: ask for those after at most that", param="after")
    return int(text)


def _token_ids(tokenizer: Tokenizer, groups: Sequence[GroupBody]) -> list[Sequence[int]]:
    """Token ids of each group's prompt. For a thread: a rollout may have a whole body of text."""

    def of(group: GroupBody) -> Sequence[int]:
        if group.messages is not None:
            return tokenizer.encode_chat([message.for_template() for message in group.messages])
        assert group.prompt is not None
        return tokenizer.encode(group.prompt) if isinstance(group.prompt, str) else group.prompt

    return [of(group) for group in groups]


def _awaiting(rollout: Rollout, at: int, one: ObservationBody) -> SampleId:
    """The sample of an observation. Raises ApiError (404, 409) for an unknown one, or one without environment."""
    work, param = rollout.groups.get(one.group_id), f"observations[{at}]"
    if work is None or one.sample >= len(work.request.seeds):
        message = f"This rollout has no sample {one.sample} of a group {one.group_id}."
        raise ApiError(404, message, code="sample_not_found", param=param)
    if work.request.turn_tokens is None:
        raise ApiError(409, f"Group {one.group_id} has no environment.", code="no_environment", param=param)
    return SampleId(work.request.group_id, one.sample)


def _observed(tokenizer: Tokenizer, observations: Sequence[tuple[ObservationBody, int]]) -> list[Sequence[int] | None]:
    """Token ids of each observation, after a turn with this last token; None if it ends the sample. For a thread."""

    def of(one: ObservationBody, last: int) -> Sequence[int] | None:
        if one.messages is not None:
            return tokenizer.encode_next([message.for_template() for message in one.messages], last=last)
        return None if one.text is None else tokenizer.encode_more(one.text)

    return [of(*one) for one in observations]


_BLOCK = 64
"""Most samples in one write."""
SILENCE_S = 10.0
"""After so long without a sample an empty line or event is sent, which shows whether the other side still lives."""


def streamed(
    request: Request, rollout_registry: RolloutRegistry, rollout: Rollout, *, after: int, limit_s: float
) -> EventStream:
    """A stream of the samples from number `after` on, future ones included, for `limit_s` at most."""
    wants_events = EVENTS.media_type in request.headers.get("accept", "")
    framing = EVENTS if wants_events else LINES

    async def produce(emit: Emit) -> bytes:
        number = after
        with rollout_registry.reading(rollout), suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await emit(framing.frame(described(rollout_registry, rollout)))
                while number < len(rollout.lines) or rollout.ended_s is None:
                    if number == len(rollout.lines):
                        if rollout_registry.has_no_engine:
                            raise unavailable("No engine runs: ask for the other samples later.")
                        # Not `wait_for`: until Python 3.12 it loses a cancellation that comes with the change.
                        with suppress(TimeoutError):
                            async with asyncio.timeout(SILENCE_S):
                                await rollout.changed.wait()
                    lines = rollout.lines[number : number + _BLOCK]
                    await emit(b"".join(framing.frame(msgspec.Raw(line)) for line in lines) or framing.silence)
                    number += len(lines)
        if number < len(rollout.lines):
            # `rollout.end` could say that all samples have ended, and a client that reads slowly would miss the rest.
            message = f"The stream took longer than {limit_s:g} s: ask for the samples after those that you have."
            raise ApiError(504, message, code="deadline_exceeded")
        return framing.frame({**described(rollout_registry, rollout), "object": "rollout.end", "next": number}) + (
            DONE if wants_events else b""
        )

    return EventStream(exchange_of(request), produce, framing)


def described(rollout_registry: RolloutRegistry, rollout: Rollout) -> dict[str, Any]:
    """The state of a rollout, as JSON."""
    return {
        "object": "rollout",
        "id": rollout.rollout_id,
        "state": rollout.state,
        "created": rollout.created_s,
        "num_groups": len(rollout.groups),
        "num_samples": rollout.num_samples,
        "num_ended": len(rollout.ends),
        "samples": rollout_registry.counts_of(rollout),
    }


def rewards_of(rollout: Rollout, body: RewardsBody) -> list[GroupRewards]:
    """The rewards by group. Raises ApiError (404, 409) or RequestError for an invalid one."""
    rewards: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for at, one in enumerate(body.rewards):
        param = f"rewards[{at}]"
        work = rollout.groups.get(one.group_id)
        if work is None or one.sample >= len(work.request.seeds):
            message = f"This rollout has no sample {one.sample} of a group {one.group_id}."
            raise ApiError(404, message, code="sample_not_found", param=param)
        if not work.policy.capture:
            message = "Nothing was recorded of this rollout, so rewards have no effect."
            raise ApiError(409, message, code="nothing_recorded", param=param)
        state = rollout.ends.get((one.group_id, one.sample))
        if state not in (SampleState.FINISHED, SampleState.STALE):
            message = f"Sample {one.sample} of group {one.group_id} has not finished."
            raise ApiError(409, message, code="sample_not_finished", param=param)
        if one.sample in rewards[one.group_id]:
            message = f"two rewards for sample {one.sample} of group {one.group_id}"
            raise RequestError(message, param=param, code="duplicate")
        rewards[one.group_id][one.sample] = one.reward
    return [
        GroupRewards(tenant=rollout.tenant, group_id=rollout.groups[name].request.group_id, rewards=of_group)
        for name, of_group in rewards.items()
    ]
