"""Routes `/v1/chat/completions` and `/v1/completions`: parse the body, generate, write the response."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from serving.engine import Chunk, FinishReason, Message, Piece
from serving.gateway.body import request_body
from serving.gateway.errors import reply
from serving.gateway.openai.generation import (
    INLINE_CHARS,
    AnswerStreams,
    Gateway,
    StreamedChoice,
    check_limits,
    encode,
    plan,
)
from serving.gateway.openai.schema import ChatBody, CompletionBody, GenerationBody
from serving.gateway.openai.stream import DONE, Emit, EventStream, event, until_disconnect
from serving.gateway.telemetry import Exchange, exchange_of
from serving.tool_calls import ToolCall, ToolCallReader

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    info, settings, tokenizer = gateway.engine.info, gateway.settings, gateway.engine.tokenizer
    is_strict = settings.strict_fields

    @router.post(CHAT, openapi_extra=request_body(ChatBody, served=info.model, is_strict=is_strict))
    async def create_chat_completion(request: Request) -> Response:
        body = await gateway.read(request, ChatBody)
        check_limits(info, settings, model=body.model, num_samples=body.n)
        messages = [message.for_template() for message in body.messages]
        # All of the body: arguments of earlier calls and descriptions of tools may be longer than the messages.
        num_chars = int(request.headers.get("content-length", INLINE_CHARS + 1))
        tools = [tool.for_template() for tool in body.called]
        grammar = await grammar_of(body)

        def encode_chat(messages: list[Message]) -> list[int]:
            return tokenizer.encode_chat(messages, tools, body.chat_template_kwargs)

        prompt = await encode(encode_chat, messages, num_chars=num_chars)
        generation = plan(gateway, exchange_of(request), body, [prompt], prompt_param="messages", grammar=grammar)
        return await _respond(request, body, generation, ChatWriter(generation, exchange_of(request), body))

    @router.post(COMPLETIONS, openapi_extra=request_body(CompletionBody, served=info.model, is_strict=is_strict))
    async def create_completion(request: Request) -> Response:
        """Plain prompts, several at once, as text or as token ids."""
        body = await gateway.read(request, CompletionBody)
        check_limits(info, settings, model=body.model, num_samples=len(body.prompt) * body.n)
        prompts = [
            await encode(tokenizer.encode, prompt, num_chars=len(prompt)) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        grammar = await grammar_of(body)
        generation = plan(gateway, exchange_of(request), body, prompts, prompt_param="prompt", grammar=grammar)
        return await _respond(request, body, generation, TextWriter(generation, exchange_of(request), body))

    async def grammar_of(body: GenerationBody) -> str:
        return await asyncio.to_thread(body.grammar, tokenizer) if body.wants_grammar else ""

    return router


async def _respond(
    request: Request, body: GenerationBody, generation: AnswerStreams, writer: ResponseWriter
) -> Response:
    """Run the generation and return its response; for a stream, return a response that runs it when sent."""
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
            # If the client asked for usage, every event but the last has a null there, as OpenAI's.
            usage["usage"] = self._generation.usage() if self._body.stream_options.continuous_usage_stats else None
        return [{"object": self.chunk_object, **self._identity, "choices": [delta], **usage} for delta in deltas]

    def closing_events(self) -> list[dict[str, Any]]:
        if not self._body.stream_options.include_usage:
            return []
        return [{"object": self.chunk_object, **self._identity, "choices": [], **self._ending()}]

    def _ending(self) -> dict[str, Any]:
        """Fields that are known only at the end of the answer: usage and metrics."""
        return {"usage": self._generation.usage(), "metrics": self._generation.acceptance.metrics()}


class ChatWriter(ResponseWriter):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: AnswerStreams, exchange: Exchange, body: ChatBody) -> None:
        super().__init__(generation, exchange, body)
        self._has_tools = bool(body.called)
        self._readers = defaultdict[int, ToolCallReader](ToolCallReader)

    def choice(self, index: int, sample: StreamedChoice) -> dict[str, Any]:
        parts = self._parts(index, sample.text, is_last=True)
        text = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := [_tool_call(part) for part in parts if isinstance(part, ToolCall)]:
            message |= {"content": text or None, "tool_calls": calls}
        reason = self._finish_reason(index, sample.finish_reason)
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def deltas(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        def choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
            return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

        deltas = []
        if is_first:
            deltas.append(choice({"role": "assistant", "content": ""}))
        num_calls = self._readers[index].num_calls
        for part in self._parts(index, chunk.text, is_last=chunk.finish_reason is not None):
            if isinstance(part, str):
                deltas.append({**choice({"content": part}), **extension})
            else:
                deltas.append(choice({"tool_calls": [{"index": num_calls, **_tool_call(part)}]}))
                num_calls += 1
        if chunk.finish_reason is not None:
            deltas.append(choice({}, self._finish_reason(index, chunk.finish_reason)))
        return deltas

    def _parts(self, index: int, text: str, *, is_last: bool) -> list[str | ToolCall]:
        """The text and tool calls that new text of an answer completes."""
        if not self._has_tools:
            return [text] if text else []
        reader = self._readers[index]
        return reader.push(text) + (reader.finish() if is_last else [])

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._readers[index].num_calls else reason


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": call._asdict()}


class TextWriter(ResponseWriter):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, sample: StreamedChoice | Chunk) -> dict[str, Any]:
        return {"index": index, "text": sample.text, "logprobs": None, "finish_reason": sample.finish_reason}

    def deltas(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        # The first event is sent even without text: it shows the client that its request runs.
        if not is_first and not chunk.text and chunk.finish_reason is None:
            return []
        return [{**self.choice(index, chunk), **(extension if chunk.text else {})}]
