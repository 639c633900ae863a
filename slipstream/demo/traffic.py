"""Live traffic: clients that send requests with the openai client and measure rates and gaps as a user sees them."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import openai
import structlog

from slipstream.demo.topics import Prompt

log = structlog.get_logger(__name__)


SETTLING_S = 1.0
"""Start of a stretch that no rate counts, because all clients' first prompts are prefilled at the same time."""


@dataclass
class Stretch:
    """Period (unix time) in which every client had a request in flight, and the tokens that arrived in it."""

    start_s: float
    end_s: float = math.inf
    tokens: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class TrafficStats:
    """Measurements of the clients. `gaps` holds (unix time, seconds since the same answer's previous chunk)."""

    requests: int = 0
    failed: int = 0
    completion_tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)


class Traffic:
    """Clients that each send the next prompt, for `samples` answers, as soon as the answers before have ended.

    A context manager: the connections close at its end.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        prompts: Iterator[Prompt],
        *,
        max_tokens: int,
        temperature: float,
        samples: int = 1,
        keys: Mapping[str, str] | None = None,
        http: openai.DefaultAsyncHttpxClient | None = None,
    ) -> None:
        """`keys` are API keys by tenant, where the server needs them."""
        self._client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1",
            api_key="none",
            max_retries=0,
            timeout=300,
            # No proxy: the server is on this machine.
            http_client=http or openai.DefaultAsyncHttpxClient(trust_env=False),
            # The gateway closes idle connections between stretches, perhaps just as a request goes out on one.
            default_headers={"Connection": "close"},
        )
        self._model, self._prompts, self._keys = model, prompts, keys or {}
        self._max_tokens, self._temperature, self._samples = max_tokens, temperature, samples
        self._groups = itertools.count()
        self._stopping, self._stretch = True, Stretch(0.0)
        self.stats = TrafficStats()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def run(self, concurrency: int) -> None:
        """Generate a stretch of traffic until `stop`; answers in flight are finished first."""
        self._stopping = False
        self._stretch = Stretch(time.time() + SETTLING_S)
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(self._one_client())
        if self._stretch.seconds > 0:
            self.stats.stretches.append(self._stretch)

    def stop(self) -> None:
        if not self._stopping:
            self._stretch.end_s = time.time()
        self._stopping = True

    async def _one_client(self) -> None:
        while not self._stopping:
            self.stats.requests += 1
            try:
                await self._ask(next(self._prompts))
            except openai.OpenAIError as error:
                self.stats.failed += 1
                log.warning("request failed", reason=type(error).__name__)
                await asyncio.sleep(0.5)

    async def _ask(self, prompt: Prompt) -> None:
        about = {"domain": prompt.domain}
        if self._samples > 1:
            about["group_id"] = f"group-{next(self._groups)}"
        client = self._client.with_options(api_key=self._keys.get(prompt.tenant, "none"))
        stream = await client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            n=self._samples,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"slipstream": about},
        )
        latest: dict[int, float] = {}  # by sample
        finished = set()
        pieces: list[tuple[float, int]] = []
        num_tokens = 0
        async for chunk in stream:
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.finish_reason is not None:
                    finished.add(choice.index)
                if choice.delta.content:
                    now = time.perf_counter()
                    pieces.append((time.time(), len(choice.delta.content)))
                    if choice.index in latest:
                        self.stats.gaps.append((time.time(), now - latest[choice.index]))
                    latest[choice.index] = now
        if len(finished) < self._samples:
            # The client library raises nothing when a stream is cut without a finish reason.
            raise openai.OpenAIError("the stream ended without a finish reason")
        self.stats.completion_tokens += num_tokens
        num_characters = sum(size for _, size in pieces)
        # The protocol does not give a chunk's number of tokens: estimate it by the chunk's share of the characters.
        self._stretch.tokens += sum(
            num_tokens * size / num_characters
            for at_s, size in pieces
            if self._stretch.start_s <= at_s < self._stretch.end_s
        )
