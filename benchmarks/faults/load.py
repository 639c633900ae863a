"""Clients that send requests all the time, and the outcome of each request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import openai

from benchmarks.common.report import percentile

OK, CHANGED, CUT, BROKEN = "ok", "changed", "cut", "broken"
"""OK: whole. CHANGED: another text than before. CUT: the stream ended early without an error. BROKEN: the client
library raised."""
_KNOWN = tuple(f"known question {number}" for number in range(8))
_MAX_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request with its outcome; times are of `time.monotonic`."""

    started_s: float
    ended_s: float
    outcome: str
    """OK, CHANGED, CUT, BROKEN or the status of a refusal."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Requests that ended within a period of time."""

    requests: Sequence[Request]

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)

    @property
    def num_failed(self) -> int:
        return len(self.requests) - self.outcomes[OK]

    @property
    def p99_ms(self) -> float:
        """99th percentile of the latency of whole answers; 0 where there are none."""
        latencies = [request.ended_s - request.started_s for request in self.requests if request.outcome == OK]
        return 1000 * percentile(latencies, 99) if latencies else 0.0

    def __str__(self) -> str:
        failed = {outcome: count for outcome, count in sorted(self.outcomes.items()) if outcome != OK}
        unanswered = ", ".join(f"{count} {outcome}" for outcome, count in failed.items()) or "0 failed"
        return f"{self.outcomes[OK]} answered, {unanswered}"


class Load:
    """`num_clients` clients with a short pause between two questions. Every other question is asked again and again,
    and its greedy answer must be the first one; the rest are new, for the trainer to learn from.
    """

    def __init__(self, url: str, model: str, *, num_clients: int, pause_s: float) -> None:
        self.url, self.model = url, model
        self._num_clients, self._pause_s = num_clients, pause_s
        self._known: dict[str, str] = {}
        self._requests: list[Request] = []
        self._stopping = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join()

    def stop(self) -> None:
        """Send no more questions, and wait for the answers to those that were sent."""
        self._stopping.set()

    def since(self, start_s: float, end_s: float | None = None) -> Window:
        """Requests that ended between two times of `time.monotonic`; by default until now."""
        end_s = time.monotonic() if end_s is None else end_s
        ended = [request for request in tuple(self._requests) if start_s <= request.ended_s <= end_s]
        return Window(requests=ended)

    def last(self, seconds: float) -> Window:
        return self.since(time.monotonic() - seconds)

    async def _run(self) -> None:
        # Connections are not kept, so that each request after an outage opens a new one.
        http = openai.DefaultAsyncHttpxClient(timeout=30, trust_env=False, headers={"connection": "close"})
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(self._num_clients)))

    async def _client(self, client: openai.AsyncOpenAI, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            question = self._question(turn)
            started_s = time.monotonic()
            outcome = await self._ask(client, question)
            self._requests.append(Request(started_s=started_s, ended_s=time.monotonic(), outcome=outcome))
            turn += self._num_clients + 1
            await asyncio.sleep(self._pause_s)

    def _question(self, turn: int) -> str:
        if turn % 2 == 0:
            return f"new question {time.monotonic_ns()}"
        return _KNOWN[turn // 2 % len(_KNOWN)]

    async def _ask(self, client: openai.AsyncOpenAI, question: str) -> str:
        text, has_ended = "", False
        try:
            stream = await client.completions.create(
                model=self.model, prompt=question, max_tokens=_MAX_TOKENS, temperature=0, stream=True
            )
            async for event in stream:
                for choice in event.choices:
                    text += choice.text
                    has_ended |= choice.finish_reason is not None
        except openai.APIStatusError as error:
            return str(error.status_code)
        except (openai.OpenAIError, httpx.HTTPError):
            return BROKEN
        if not has_ended:
            return CUT
        is_known = question in _KNOWN
        return OK if not is_known or self._known.setdefault(question, text) == text else CHANGED
