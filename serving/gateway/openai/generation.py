"""Run the samples of one request on the engine: check limits, generate concurrently, count tokens.

Samples of a request run concurrently and succeed or fail together. Each waits for its own engine stream and then for
`on_chunk`, so a slow client slows only its own request; cancelling `run` closes every engine stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import structlog
from starlette.requests import Request

from serving.acceptance import Acceptance
from serving.engine import Chunk, Engine, EngineInfo, FinishReason, GenerateRequest
from serving.gateway.body import Ignored, read_body
from serving.gateway.config import ENV_PREFIX, GatewaySettings
from serving.gateway.errors import ApiError, deadline
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai.schema import GenerationBody
from serving.gateway.telemetry import Exchange
from speculator.draft.sampling_params import sample_seed
from speculator.errors import EngineError, RequestError
from speculator.tracing import prefixed

B = TypeVar("B", bound=GenerationBody)
T = TypeVar("T")
log = structlog.get_logger(__name__)
_MOST_IGNORED_NAMES = 200

INLINE_CHARS = 4096
"""Up to so many characters (1 ms) text is tokenised on the event loop: a thread would cost more than it saves."""

OnChunk = Callable[[int, Chunk], Awaitable[None]]
"""Called with the sample's index and its next chunk."""


@dataclass(kw_only=True)
class Gateway:
    """State that the endpoints of an engine in this process share. For the event loop."""

    engine: Engine
    settings: GatewaySettings
    metrics: GatewayMetrics
    num_samples: int = 0
    """Running samples of requests other than rollouts; rollouts get the slots that these leave free."""
    on_change: Callable[[], object] = lambda: None
    """Called when that number changes."""
    ignored: set[str] = field(default_factory=set)
    """Names of unsupported fields in requests so far; each is logged once."""

    async def read(self, request: Request, model: type[B]) -> B:
        """The body of a request; logs each ignored field's name once. Raises as `read_body`."""
        ignored: Ignored | None = None if self.settings.strict_fields else set()
        body = await read_body(request, model, max_bytes=self.settings.max_body_bytes, ignored=ignored)
        new = (ignored or set()) - self.ignored
        if new and len(self.ignored) < _MOST_IGNORED_NAMES:
            self.ignored |= new
            log.info("fields ignored", fields=sorted(new), hint=f"{ENV_PREFIX}STRICT_FIELDS=1 refuses them")
        return body

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Count one sample as running, from before it is submitted to its end."""
        self.num_samples += 1
        self.on_change()
        try:
            yield
        finally:
            self.num_samples -= 1
            self.on_change()


async def _ignore(index: int, chunk: Chunk) -> None:
    """For an answer that is not streamed: the sample collects the text."""


@dataclass
class StreamedChoice:
    """The text and counts of one engine stream so far."""

    parts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_first: int = 0
    """Tokens of the first chunk that has any."""
    first_s: float = 0.0
    last_s: float = 0.0
    """Times (monotonic clock) of that chunk and of the last chunk with tokens."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, chunk: Chunk) -> None:
        self.parts.append(chunk.text)
        if chunk.token_ids:
            self.last_s = time.perf_counter()
            if not self.num_tokens:
                self.first_s, self.num_first = self.last_s, len(chunk.token_ids)
            self.num_tokens += len(chunk.token_ids)
        if chunk.num_proposed is not None:
            self.acceptance.add(chunk.num_proposed, chunk.num_accepted)
        self.finish_reason = chunk.finish_reason


class AnswerStreams:
    """`requests` of one HTTP request; `num_prompt_tokens` counts each prompt once, however many samples it has."""

    def __init__(
        self, gateway: Gateway, exchange: Exchange, requests: Sequence[GenerateRequest], *, num_prompt_tokens: int
    ) -> None:
        self.samples = [StreamedChoice() for _ in requests]
        self._gateway, self._exchange, self._requests = gateway, exchange, requests
        self._num_prompt_tokens = num_prompt_tokens
        self._has_token = False

    async def run(self, on_chunk: OnChunk = _ignore) -> None:
        """Run every sample to its end; raises the first failure after the other samples were aborted.

        Raises ApiError (504) where that takes too long.
        """
        failures: Sequence[Exception] = ()
        with self._gateway.metrics.in_flight.track_inprogress():
            try:
                async with deadline(self._gateway.settings.max_request_s), asyncio.TaskGroup() as group:
                    for index, request in enumerate(self._requests):
                        group.create_task(self._run_sample(index, request, on_chunk))
            except ExceptionGroup as group_failure:
                failures = cast(Sequence[Exception], group_failure.exceptions)
            finally:
                prompt, completion, accepted = self._num_prompt_tokens, self._num_tokens, self.acceptance.num_accepted
                counted = prefixed(prompt_tokens=prompt, completion_tokens=completion, accepted_tokens=accepted)
                self._exchange.span.set_attributes(counted)
                # A request that the engine refused has computed nothing.
                computed = prompt if any(sample.parts for sample in self.samples) else 0
                self._gateway.metrics.count_tokens(self._exchange.tenant, prompt=computed, generated=completion)
        if failures:
            raise failures[0]

    async def _run_sample(self, index: int, request: GenerateRequest, on_chunk: OnChunk) -> None:
        sample = self.samples[index]
        # Closing the iterator aborts the request, as the engine protocol says.
        chunks = cast(AsyncGenerator[Chunk, None], self._gateway.engine.generate(request))
        with self._gateway.sample():
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.finish_reason == "abort":
                        raise EngineError("the engine aborted the request")
                    if chunk.token_ids and not self._has_token:
                        self._has_token = True
                        self._exchange.note_first_token(self._gateway.metrics)
                    before_s = sample.last_s
                    sample.add(chunk)
                    if before_s and sample.last_s > before_s:
                        self._gateway.metrics.observe_between_chunks(sample.last_s - before_s)
                    await on_chunk(index, chunk)
        if sample.finish_reason is None:
            raise EngineError("the engine's stream ended without a finish reason")
        num_after_first = sample.num_tokens - sample.num_first
        self._gateway.metrics.observe_pace(self._exchange.route, sample.last_s - sample.first_s, num_after_first)

    @property
    def _num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all samples so far."""
        return Acceptance.over(sample.acceptance for sample in self.samples)

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
            "completion_tokens_details": self.acceptance.usage_details(),
        }


def plan(
    gateway: Gateway,
    exchange: Exchange,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_param: str,
    grammar: str = "",
) -> AnswerStreams:
    """Turn token ids of the prompts into the requests of a generation, prompt by prompt, sample by sample.

    `prompt_param` names the body's field that holds the prompts, for errors. Raises RequestError where a prompt is
    empty or does not fit.
    """
    policy = body.slipstream.policy(exchange, body.slipstream.group_id)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        room = completion_tokens(len(prompt), body.limit, gateway.engine.info, gateway.settings, prompt_param)
        requests += [
            GenerateRequest(
                request_id=f"{exchange.request_id}-{len(requests) + sample}",
                prompt_token_ids=tuple(prompt),
                max_tokens=room,
                sampling=body.sampling,
                stop=body.stop,
                # By sample number alone: a prompt's samples do not depend on its place in the batch.
                seed=None if body.seed is None else sample_seed(body.seed, sample),
                ignore_eos=body.ignore_eos,
                grammar=grammar,
                drafts=body.slipstream.draft,
                policy=policy,
            )
            for sample in range(body.n)
        ]
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    return AnswerStreams(gateway, exchange, requests, num_prompt_tokens=num_prompt_tokens)


def completion_tokens(
    num_prompt_tokens: int, asked: int | None, info: EngineInfo, settings: GatewaySettings, prompt_param: str
) -> int:
    """The limit on completion tokens for a prompt. Raises RequestError where prompt or limit do not fit."""
    if num_prompt_tokens == 0:
        raise RequestError("The prompt has no tokens: send some text.", param=prompt_param)
    room = info.context_length - num_prompt_tokens
    # OpenAI's words: agents look for them, and then shorten the conversation.
    context = f"This model's maximum context length is {info.context_length} tokens."
    if room < 1:
        message = (
            f"{context} The prompt has {num_prompt_tokens}, and the completion needs at least one: shorten the prompt "
            f"by {1 - room}."
        )
        raise RequestError(message, param=prompt_param, code="context_length_exceeded")
    most = settings.max_prompt_tokens
    if most is not None and num_prompt_tokens > most:
        excess = num_prompt_tokens - most
        message = f"The prompt is too long: {num_prompt_tokens} tokens, at most {most} here; shorten it by {excess}."
        raise RequestError(message, param=prompt_param, code="prompt_too_long")
    if asked is None:
        return min(settings.default_max_tokens, settings.max_completion_tokens or room, room)
    check_completion_tokens(settings, asked)
    if asked > room:
        message = (
            f"{context} The prompt has {num_prompt_tokens} and the request asks for {asked} more: ask for at most "
            f"{room}, or shorten the prompt by {asked - room}."
        )
        raise RequestError(message, param=prompt_param, code="context_length_exceeded")
    return asked


async def encode(encoder: Callable[[T], list[int]], value: T, *, num_chars: int) -> list[int]:
    """`encoder(value)`, in a thread where `value` holds many characters."""
    if num_chars <= INLINE_CHARS:
        return encoder(value)
    return await asyncio.to_thread(encoder, value)


def check_limits(info: EngineInfo, settings: GatewaySettings, *, model: str, num_samples: int) -> None:
    """`num_samples` counts prompts times `n`. Raises ApiError (404) or RequestError."""
    check_model(info, model)
    limit = settings.max_samples
    if num_samples > limit:
        message = f"The request has {num_samples} samples (prompts times 'n'), at most {limit} here: split it."
        raise RequestError(message, param="n")


def check_model(info: EngineInfo, model: str) -> None:
    """Raises ApiError (404)."""
    if model != info.model:
        message = f"This server does not serve the model {model[:100]!r}: ask for {info.model!r}."
        raise ApiError(404, message, code="model_not_found", param="model")


def check_completion_tokens(settings: GatewaySettings, asked: int) -> None:
    """Raises RequestError."""
    limit = settings.max_completion_tokens
    if limit is not None and asked > limit:
        message = f"The request asks for {asked} tokens, at most {limit} here: ask for fewer."
        raise RequestError(message, param="max_tokens", code="too_many_tokens")
