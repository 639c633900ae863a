"""`/v1/chat/completions` and `/v1/completions`: from a body to a planned generation, and to its response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from serving.engine import Chunk, Piece, Tokenizer
from serving.gateway.body import read_body, request_body
from serving.gateway.errors import reply
from serving.gateway.openai.generation import Gateway, Generation, Sample, check_limits, encode, plan
from serving.gateway.openai.schema import ChatBody, CompletionBody, GenerationBody, Prompt
from serving.gateway.openai.stream import DONE, Emit, EventStream, event, until_disconnect
from serving.gateway.telemetry import Exchange, exchange_of

CHAT = "/v1/chat/completions"


class ChatDialect:
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, sample: Sample) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": sample.finish_reason}

    def pieces(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        pieces = []
        if is_first:
            pieces.append(_piece(index, {"role": "assistant", "content": ""}))
        if chunk.text:
            pieces.append({**_piece(index, {"content": chunk.text}), **extension})
        if chunk.finish_reason is not None:
            pieces.append(_piece(index, {}, chunk.finish_reason))
        return pieces


def _piece(index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def chat_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    dialect = ChatDialect()

    @router.post(CHAT, openapi_extra=request_body(ChatBody, served=gateway.engine.info.model))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody, max_bytes=gateway.settings.max_body_bytes)
        check_limits(gateway.engine.info, gateway.settings, model=body.model, num_samples=body.n)
        messages = [message.for_template() for message in body.messages]
        num_chars = sum(len(message.content) for message in body.messages)
        prompt = await encode(gateway.engine.tokenizer.encode_chat, messages, num_chars=num_chars)
        generation = plan(
            gateway,
            exchange_of(request),
            body,
            [prompt],
            prompt_param="messages",
            route=CHAT,
        )
        return await respond(request, body, generation, dialect)

    return router


COMPLETIONS = "/v1/completions"


class CompletionDialect:
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, index: int, sample: Sample) -> dict[str, Any]:
        return _text_choice(index, sample.text, sample.finish_reason)

    def pieces(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        # The first event goes out even without text: it tells the client that its request is being served.
        if not is_first and not chunk.text and chunk.finish_reason is None:
            return []
        return [{**_text_choice(index, chunk.text, chunk.finish_reason), **(extension if chunk.text else {})}]


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        return await encode(tokenizer.encode, prompt, num_chars=len(prompt))
    return prompt


def completion_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    dialect = CompletionDialect()

    @router.post(COMPLETIONS, openapi_extra=request_body(CompletionBody, served=gateway.engine.info.model))
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionBody, max_bytes=gateway.settings.max_body_bytes)
        num_samples = len(body.prompt) * body.n
        check_limits(gateway.engine.info, gateway.settings, model=body.model, num_samples=num_samples)
        prompts = [await _prompt_ids(gateway.engine.tokenizer, prompt) for prompt in body.prompt]
        generation = plan(
            gateway,
            exchange_of(request),
            body,
            prompts,
            prompt_param="prompt",
            route=COMPLETIONS,
        )
        return await respond(request, body, generation, dialect)

    return router


class Dialect(Protocol):
    """Where the chat endpoint and the completions endpoint differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, sample: Sample) -> dict[str, Any]:
        """The finished choice."""

    def pieces(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of the events that one chunk becomes; none where there is nothing to show.

        `extension` is added to the choice that has the chunk's text.
        """


@dataclass
class Answer:
    """Wraps choices into the objects of one response, which share an id and a time."""

    generation: Generation
    dialect: Dialect
    exchange: Exchange
    model: str
    include_usage: bool
    counts_usage_on: bool
    """Each event has the usage so far."""
    show_tokens: bool
    """Each choice with text says by pieces where that text comes from; together they are the text."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)

    def whole(self) -> dict[str, Any]:
        choices = [self.dialect.whole(index, sample) for index, sample in enumerate(self.generation.samples)]
        return {**self._head(self.dialect.whole_object), "choices": choices, "usage": self.generation.usage()}

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        is_first = index not in self._opened
        self._opened.add(index)
        extension = (
            {"slipstream": {"pieces": chunk.pieces or (Piece(chunk.text, "target"),)}} if self.show_tokens else {}
        )
        pieces = self.dialect.pieces(index, chunk, is_first=is_first, extension=extension)
        # With usage asked for, every event but the last says so with a null, as OpenAI's do.
        usage = {"usage": self.generation.usage() if self.counts_usage_on else None} if self.include_usage else {}
        return [{**self._head(self.dialect.chunk_object), "choices": [piece], **usage} for piece in pieces]

    def closing_events(self) -> list[dict[str, Any]]:
        if not self.include_usage:
            return []
        return [{**self._head(self.dialect.chunk_object), "choices": [], "usage": self.generation.usage()}]

    def _head(self, kind: str) -> dict[str, Any]:
        identity = f"{self.dialect.id_prefix}-{self.exchange.request_id}"
        return {"id": identity, "object": kind, "created": self.created_s, "model": self.model}


async def respond(request: Request, body: GenerationBody, generation: Generation, dialect: Dialect) -> Response:
    """Run the generation and return its response; for a stream, return the response that will run it."""
    answer = Answer(
        generation,
        dialect,
        exchange_of(request),
        body.model,
        include_usage=body.stream_options.include_usage,
        counts_usage_on=body.counts_usage_on,
        show_tokens=body.slipstream.tokens,
    )
    if body.stream:
        return _streamed(answer)
    await until_disconnect(request.receive, generation.run())
    return reply(answer.whole())


def _streamed(answer: Answer) -> EventStream:
    async def produce(emit: Emit) -> bytes:
        async def send(index: int, chunk: Chunk) -> None:
            await emit(b"".join(map(event, answer.events(index, chunk))))

        await answer.generation.run(send)
        return b"".join(map(event, answer.closing_events())) + DONE

    return EventStream(answer.exchange, produce)
