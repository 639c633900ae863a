"""`/v1/completions`: plain prompts, several at once, as text or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.engine import Chunk, Tokenizer
from serving.gateway.context import Gateway
from serving.gateway.openai.body import read_body
from serving.gateway.openai.encoding import encode
from serving.gateway.openai.generation import Sample, plan
from serving.gateway.openai.limits import check_limits
from serving.gateway.openai.respond import respond
from serving.gateway.openai.schema import CompletionBody, Prompt, request_body
from serving.gateway.telemetry import exchange_of

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
