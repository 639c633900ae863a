"""A stand-in for an engine and its tokenizer: the same protocols, no model, no clock.

What it answers depends only on the prompt and the seed, so a test can say beforehand what a client must see. One token
is one byte of UTF-8.
"""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from serving.engine import Chunk, EngineHealth, EngineInfo, FinishReason, GenerateRequest, Piece, SwapReport
from speculator.errors import RequestError

WORDS = ("river", "stone", "cloud", "über", "lamp", "日本", "seven", "quiet")


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise RequestError("the conversation starts with the assistant", param="messages", code="invalid_messages")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(f"{turns}<assistant>")


def words_for(request: GenerateRequest) -> str:
    """Enough words to reach any `max_tokens`, drawn from the prompt and the seed."""
    state = zlib.crc32(repr((request.prompt_token_ids, request.seed)).encode())
    words: list[str] = []
    num_bytes = 0
    while num_bytes <= request.max_tokens:
        state = zlib.crc32(state.to_bytes(4, "big"))
        words.append(WORDS[state % len(WORDS)])
        num_bytes += len(words[-1].encode()) + 1
    return " ".join(words)


def says(text: str) -> Callable[[GenerateRequest], str]:
    """An answer that is always `text`."""
    return lambda request: text


@dataclass
class DoubleEngine:
    """Implements serving.engine.Engine; its attributes say how it misbehaves and what happened to it.

    A chunk index in `fail_at` or `hold_at` means "before this chunk of every request": 0 is before the first.
    """

    answer: Callable[[GenerateRequest], str] = words_for
    model: str = "double"
    context_length: int = 512
    max_depth: int = 8
    num_slots: int = 8
    tokens_per_chunk: int = 4
    """One committed token and as many accepted proposals as fit."""
    delay_s: float = 0.0
    """Slept before every chunk, for measurements; tests that need an order use `hold_at`."""
    failure: Exception | None = None
    fail_at: int = 0
    hold_at: int | None = None
    ends_with: FinishReason | None = None
    """Replaces the reason that the answer would end with."""
    is_cut: bool = False
    """Ends every stream without a finish reason, as a broken engine would."""
    alive: bool = True
    ready: bool = True
    detail: str = ""
    heeds_seed: bool = True

    requests: list[GenerateRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    draft_version: int = 0
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request waits at `hold_at`."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets requests that wait at `hold_at` go on."""
    abort_seen: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model,
            context_length=self.context_length,
            max_depth=self.max_depth,
            num_slots=self.num_slots,
            heeds_seed=self.heeds_seed,
        )

    def drop(self, tenant: str, group_id: str) -> None:
        self.dropped.append((tenant, group_id))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        has_ended = False
        try:
            chunks = self._chunks(request)
            for index, chunk in enumerate(chunks):
                await self.misbehave(index)
                has_ended = index == len(chunks) - 1
                yield chunk
            self.finished.append(request.request_id)
        finally:
            if not has_ended:
                self.aborted.append(request.request_id)
                self.abort_seen.set()

    async def misbehave(self, index: int) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if index == self.hold_at:
            self.holding.set()
            await self.release.wait()
        if self.failure is not None and index == self.fail_at:
            raise self.failure

    def _chunks(self, request: GenerateRequest) -> list[Chunk]:
        tokens, reason = self._tokens(request)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        starts = range(0, len(tokens), self.tokens_per_chunk) or range(1)
        chunks = []
        for start in starts:
            is_last = start == starts[-1]
            ids = tokens[start : start + self.tokens_per_chunk]
            texts = [
                decoder.decode(bytes([token]), final=is_last and at == len(ids)) for at, token in enumerate(ids, 1)
            ]
            chunks.append(
                Chunk(
                    text="".join(texts),
                    token_ids=tuple(ids),
                    pieces=tuple(
                        Piece(text, "head" if at < len(ids) else "target") for at, text in enumerate(texts, 1) if text
                    ),
                    num_accepted=max(len(ids) - 1, 0),
                    finish_reason=(self.ends_with or reason) if is_last and not self.is_cut else None,
                )
            )
        return chunks

    def _tokens(self, request: GenerateRequest) -> tuple[bytes, FinishReason]:
        """The bytes of the answer, cut before the first stop string and at `max_tokens`."""
        text = self.answer(request)
        found = [at for stop in request.stop if (at := text.find(stop)) >= 0]
        tokens = text[: min(found, default=len(text))].encode()
        if len(tokens) > request.max_tokens:
            return tokens[: request.max_tokens], "length"
        return tokens, "stop"

    def install_draft(self, version: int) -> SwapReport:
        report = SwapReport(version=version, previous=self.draft_version, stall_ms=0.0, step=len(self.finished))
        self.draft_version = version
        return report

    def set_depth(self, depth: int) -> None:
        self.depths.append(depth)

    def health(self) -> EngineHealth:
        num_running = len(self.requests) - len(self.finished) - len(self.aborted)
        return EngineHealth(
            alive=self.alive, ready=self.ready, num_running=num_running, num_waiting=0, detail=self.detail
        )
