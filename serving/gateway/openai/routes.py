"""`/v1/chat/completions` and `/v1/completions`: from a body to a generation, and from its chunks to a response."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.engine import Chunk, Piece
from serving.gateway.body import read_body, request_body
from serving.gateway.errors import reply
from serving.gateway.openai.generation import AnswerStreams, Gateway, StreamedChoice, check_limits, encode, plan
from serving.gateway.openai.schema import ChatBody, CompletionBody, GenerationBody
from serving.gateway.openai.stream import DONE, Emit, EventStream, event, until_disconnect
from serving.gateway.telemetry import Exchange, exchange_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    info, settings, tokenizer = gateway.engine.info, gateway.settings, gateway.engine.tokenizer

    @router.post(CHAT, openapi_extra=request_body(ChatBody, served=info.model))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody, max_bytes=settings.max_body_bytes)
        check_limits(info, settings, model=body.model, num_samples=body.n)
        messages = [message.for_template() for message in body.messages]
        num_chars = sum(len(message.content) for message in body.messages)
        prompt = await encode(tokenizer.encode_chat, messages, num_chars=num_chars)
        generation = plan(gateway, exchange_of(request), body, [prompt], prompt_param="messages")
        return await _respond(request, body, generation, ChatWriter(generation, exchange_of(request), body))

    @router.post(COMPLETIONS, openapi_extra=request_body(CompletionBody, served=info.model))
    async def create_completion(request: Request) -> Response:
        """Plain prompts, several at once, as text or as token ids."""
        body = await read_body(request, CompletionBody, max_bytes=settings.max_body_bytes)
        check_limits(info, settings, model=body.model, num_samples=len(body.prompt) * body.n)
        prompts = [
            await encode(tokenizer.encode, prompt, num_chars=len(prompt)) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        generation = plan(gateway, exchange_of(request), body, prompts, prompt_param="prompt")
        return await _respond(request, body, generation, TextWriter(generation, exchange_of(request), body))

    return router


async def _respond(
    request: Request, body: GenerationBody, generation: AnswerStreams, writer: ResponseWriter
) -> Response:
    """Run the generation and return its response; for a stream, return the response that will run it."""
    if not body.stream:
        await until_disconnect(request.receive, generation.run())
        return reply(writer.whole())

    async def produce(emit: Emit) -> bytes:
        async def send(index: int, chunk: Chunk) -> None:
            await emit(b"".join(map(event, writer.events(index, chunk))))

        await generation.run(send)
        return b"".join(map(event, writer.closing_events())) + DONE

    return EventStream(exchange_of(request), produce)


class ResponseWriter(ABC):
    """Writes the objects of one response, which share an id and a time. Each endpoint has its own kind of choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, generation: AnswerStreams, exchange: Exchange, body: GenerationBody) -> None:
        self._generation, self._body = generation, body
        self._identity = {
            "id": f"{self.id_prefix}-{exchange.request_id}",
            "created": int(time.time()),
            "model": body.model,
        }
        self._opened: set[int] = set()

    @abstractmethod
    def choice(self, index: int, sample: StreamedChoice) -> dict[str, Any]:
        """A finished sample."""

    @abstractmethod
    def deltas(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of the events that one chunk becomes; none where there is nothing to show.

        `extension` is added to the choice that has the chunk's text.
        """

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(index, sample) for index, sample in enumerate(self._generation.samples)]
        return {"object": self.whole_object, **self._identity, "choices": choices, **self._ending()}

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        is_first = index not in self._opened
        self._opened.add(index)
        extension: dict[str, Any] = {}
        if self._body.slipstream.tokens:
            extension["slipstream"] = {"pieces": chunk.pieces or (Piece(chunk.text, "target"),)}
        deltas = self.deltas(index, chunk, is_first=is_first, extension=extension)
        usage: dict[str, Any] = {}
        if self._body.stream_options.include_usage:
            # With usage asked for, every event but the last says so with a null, as OpenAI's do.
            usage["usage"] = self._generation.usage() if self._body.stream_options.continuous_usage_stats else None
        return [{"object": self.chunk_object, **self._identity, "choices": [delta], **usage} for delta in deltas]

    def closing_events(self) -> list[dict[str, Any]]:
        if not self._body.stream_options.include_usage:
            return []
        return [{"object": self.chunk_object, **self._identity, "choices": [], **self._ending()}]

    def _ending(self) -> dict[str, Any]:
        """What can be said of the answer once it is whole."""
        return {"usage": self._generation.usage(), "metrics": self._generation.acceptance.metrics()}


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, sample: StreamedChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": sample.finish_reason}

    def deltas(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        def choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

        deltas = []
        if is_first:
            deltas.append(choice({"role": "assistant", "content": ""}))
        if chunk.text:
            deltas.append({**choice({"content": chunk.text}), **extension})
        if chunk.finish_reason is not None:
            deltas.append(choice({}, chunk.finish_reason))
        return deltas


class TextWriter(ResponseWriter):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, sample: StreamedChoice | Chunk) -> dict[str, Any]:
        return {"index": index, "text": sample.text, "logprobs": None, "finish_reason": sample.finish_reason}

    def deltas(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        # The first event goes out even without text: it tells the client that its request is being served.
        if not is_first and not chunk.text and chunk.finish_reason is None:
            return []
        return [{**self.choice(index, chunk), **(extension if chunk.text else {})}]
