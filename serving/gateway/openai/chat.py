"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from serving.engine import Chunk
from serving.gateway.context import Gateway
from serving.gateway.openai.body import read_body
from serving.gateway.openai.encoding import encode
from serving.gateway.openai.generation import Sample, plan
from serving.gateway.openai.limits import check_limits
from serving.gateway.openai.respond import respond
from serving.gateway.openai.schema import ChatBody, request_body
from serving.gateway.telemetry import exchange_of

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
