"""Live traffic: clients that talk to the gateway with the openai client and measure what a user would see."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import openai
import structlog

from slipstream.topics import Prompt

log = structlog.get_logger(__name__)


@dataclass
class TrafficStats:
    """What the clients saw. `gaps` holds (unix time, seconds since the same answer's previous chunk)."""

    requests: int = 0
    failed: int = 0
    completion_tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)


class Traffic:
    """`concurrency` clients, each asking the next prompt for `samples` answers as soon as those before have ended."""

    def __init__(
        self,
        base_url: str,
        model: str,
        prompts: Iterator[Prompt],
        *,
        max_tokens: int,
        temperature: float,
        samples: int = 1,
    ) -> None:
        # No proxy: the server is on this machine.
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._client = openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=300, http_client=http
        )
        self._model, self._prompts = model, prompts
        self._max_tokens, self._temperature, self._samples = max_tokens, temperature, samples
        self._groups = itertools.count()
        self._stopping = False
        self.stats = TrafficStats()

    async def run(self, concurrency: int) -> None:
        """Generate traffic until `stop`; answers in flight are finished first."""
        async with self._client, asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(self._one_client())

    def stop(self) -> None:
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
        stream = await self._client.chat.completions.create(
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
        async for chunk in stream:
            if chunk.usage is not None:
                self.stats.completion_tokens += chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.finish_reason is not None:
                    finished.add(choice.index)
                if choice.delta.content:
                    now = time.perf_counter()
                    if choice.index in latest:
                        self.stats.gaps.append((time.time(), now - latest[choice.index]))
                    latest[choice.index] = now
        if len(finished) < self._samples:
            # The client library says nothing when a stream is cut without a finish reason.
            raise openai.OpenAIError("the stream ended without a finish reason")
