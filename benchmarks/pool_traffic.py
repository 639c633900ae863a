"""Clients of a pool, what their requests came to, and who reads the traces of them beside the trainer."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
from redis.exceptions import RedisError

from slipstream.topics import Prompt
from speculator.codec import decode_trace
from speculator.json_lines import split_lines
from speculator.keys import RedisKeys
from speculator.redis_client import connect

OK, CUT, REFUSED = "ok", "cut", "refused"
"""Cut: it had begun, or was under way, when what it hung on ended. Refused: there was nobody to begin it."""
_PAUSE_S = 0.25
"""Before a client that was refused asks again, and before one looks for Redis again."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Times are of `time.monotonic`."""

    started_s: float
    ended_s: float
    outcome: str
    request_id: str
    asked_elsewhere: bool
    """Its first gateway refused the connection, and another one was asked at once."""


class Load:
    """Clients that stream one greedy answer after another to the same questions.

    Each keeps to one of the gateways at `urls`, as a connection through a load balancer does, and goes on to another
    where it is refused the connection.
    """

    def __init__(
        self, urls: Sequence[str], model: str, prompts: Sequence[Prompt], *, num_clients: int, max_tokens: int
    ) -> None:
        self._urls, self._model, self._prompts = urls, model, itertools.cycle(prompts)
        self._num_clients, self._max_tokens = num_clients, max_tokens
        self._stopping, self._threads = threading.Event(), list[threading.Thread]()
        self._may_ask, self._lock = threading.Event(), threading.Lock()
        self._may_ask.set()
        self.asked: list[Asked] = []
        self._under_way: dict[int, str] = {}
        """The gateway that each client asks now."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._threads = [threading.Thread(target=self._client, args=[number]) for number in range(self._num_clients)]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Answers under way come to their end."""
        self._stopping.set()
        self._may_ask.set()
        for thread in self._threads:
            thread.join()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No further request begins inside."""
        with self._lock:
            self._may_ask.clear()
        try:
            yield
        finally:
            self._may_ask.set()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def num_at(self, url: str) -> int:
        """Requests under way through this gateway."""
        with self._lock:
            return list(self._under_way.values()).count(url)

    def since(self, started_s: float) -> Counter[str]:
        """Outcomes of what ended since then."""
        return Counter(each.outcome for each in list(self.asked) if each.ended_s >= started_s)

    def _client(self, number: int) -> None:
        urls = deque(self._urls)
        urls.rotate(number)
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._stopping.is_set():
                self._may_ask.wait()
                with self._lock:
                    if not self._may_ask.is_set():
                        continue
                    self._under_way[number] = urls[0]
                    prompt = next(self._prompts)
                done = self._ask(client, urls, prompt, number)
                with self._lock:
                    del self._under_way[number]
                    self.asked.append(done)
                if done.outcome == REFUSED:
                    self._stopping.wait(_PAUSE_S)

    def _ask(self, client: httpx.Client, urls: deque[str], prompt: Prompt, number: int) -> Asked:
        """`urls` begin with the client's gateway, here and afterwards."""
        started_s, outcome, request_id, num_refused = time.monotonic(), REFUSED, "", 0
        while num_refused < len(urls):
            self._under_way[number] = urls[0]
            try:
                outcome, request_id = self._stream(client, urls[0], prompt)
                break
            except httpx.ConnectError:
                num_refused += 1
                urls.rotate(-1)
            except httpx.TransportError:
                outcome = CUT
                break
        return Asked(
            started_s=started_s,
            ended_s=time.monotonic(),
            outcome=outcome,
            request_id=request_id,
            asked_elsewhere=0 < num_refused < len(urls),
        )

    def _stream(self, client: httpx.Client, url: str, prompt: Prompt) -> tuple[str, str]:
        """Its outcome and the id of the request. Raises httpx.TransportError."""
        fields = {"max_tokens": self._max_tokens, "temperature": 0, "slipstream": {"domain": prompt.domain}}
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "stream": True,
            **fields,
        }
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            lines = [line for line in split_lines(response.iter_bytes()) if line]
        is_whole = lines[-1:] == [b"data: [DONE]"] and not any(line.startswith(b'data: {"error"') for line in lines)
        outcome = OK if is_whole else CUT if response.status_code == 200 else REFUSED
        return outcome, response.headers.get("x-request-id", "")


class Witness:
    """Reads the stream from its beginning, beside the trainer: which engine made which request's trace."""

    def __init__(self, redis_url: str, key: str) -> None:
        self._redis, self._stream = connect(redis_url), RedisKeys(model_key=key).ledger.traces
        self._stopping = threading.Event()
        self.engine_of: dict[str, str] = {}
        self.trace_ids: set[str] = set()
        self.appended_twice = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def num_of(self, engine: str) -> int:
        """Requests whose trace is this engine's."""
        return sum(each == engine for each in list(self.engine_of.values()))

    def _run(self) -> None:
        last = "0"
        while not self._stopping.is_set():
            try:
                last = self._read(last)
            except RedisError:
                self._stopping.wait(_PAUSE_S)

    def _read(self, last: str) -> str:
        for _, entries in self._redis.xread({self._stream: last}, count=100, block=200) or ():  # type: ignore[union-attr]
            for entry_id, fields in entries:
                header = decode_trace(fields[b"payload"]).header
                # An append whose answer got lost is made again; the trainer uses one of them.
                self.appended_twice += header.trace_id in self.trace_ids
                self.trace_ids.add(header.trace_id)
                self.engine_of[header.request_id] = header.engine_id
                last = entry_id
        return last
