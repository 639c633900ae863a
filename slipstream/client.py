"""Client of `/v1/rollouts`: requests groups of samples from a running server and survives broken connections.

    with Rollouts("http://127.0.0.1:8000") as rollouts:
        rollout = rollouts.start([Group(prompt="2 + 2 =", n=8, max_tokens=20)])
        rewards = {sample.key: float("4" in sample.text) for sample in rollout}
        rollout.reward(rewards)

`AsyncRollouts` is the same with `async with`, `async for` and `await`. Each sample is returned once, when it ends. A
broken connection is opened again. The client chooses the rollout's id. So after a lost response it first asks for the
samples of that id, and sends the groups again only to a server that does not know it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar
from uuid import uuid4

import httpx
import msgspec

from speculator.errors import ConfigError, EngineError
from speculator.host import asplit_lines, split_lines

T = TypeVar("T")
_PAUSE_S = 0.5
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
"""A running server sends something at least every ten seconds."""
_SHORT_S = 10.0
_MOST_OBSERVING = 64
"""Observations under way at once: thousands of connections that begin together are more than a server accepts."""
_LATER = frozenset((408, 429, *range(502, 600)))
"""Statuses after which the client retries: the server is busy, or a proxy in front of it does not reach it."""


class _NotNow(httpx.TransportError):
    """Such a status, where no rollout's request has been sent yet."""


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One prompt and how many samples to generate; docs/how-to/rollouts.md. Fields left out take server defaults."""

    id: str | None = None
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    n: int | None = None
    seeds: Sequence[int] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    deadline_s: float | None = None
    max_staleness: int | None = None
    when_stale: Literal["return", "abort"] | None = None
    environment: str | None = None
    turn_tokens: int | None = None
    redundant: int | None = None


class SampleKey(NamedTuple):
    """Identifies a sample in its rollout."""

    group_id: str
    sample: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that has ended; docs/how-to/rollouts.md describes the fields."""

    object: Literal["rollout.sample"] = "rollout.sample"
    number: int
    """Position in the order in which the rollout's samples ended."""
    group_id: str
    sample: int
    seed: int
    state: Literal["finished", "stale", "aborted"]
    finish_reason: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None
    target_version: int | None
    engine: str | None
    num_leases: int
    turns: tuple[tuple[int, int], ...] | None = None
    """(begin, end) of the model's turns within `tokens`; the other tokens are the environment's observations."""
    detail: str | None = None

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.group_id, self.sample)


Rewards = Mapping[SampleKey, float] | Mapping[tuple[str, int], float]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Text that a sample has generated and its environment must answer."""

    object: Literal["rollout.turn"] = "rollout.turn"
    number: int
    """Position among all samples and turns that the rollout has sent."""
    group_id: str
    sample: int
    turn: int
    """From 0."""
    finish_reason: Literal["stop", "length"]
    tokens: tuple[int, ...]
    text: str

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.group_id, self.sample)


_KINDS: Mapping[Any, type[Sample | Turn]] = {"rollout.sample": Sample, "rollout.turn": Turn}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Call(NamedTuple):
    method: str
    path: str
    body: dict[str, Any] | None = None


class _Progress:
    """The protocol state of one rollout: which request comes next, and what a response means. No I/O."""

    def __init__(self, url: str, body: dict[str, Any], places: Sequence[str], retry_s: float) -> None:
        """`places` say where each group comes from, for error messages."""
        self.rollout_id = body["id"] = body.get("id") or uuid4().hex
        self._url, self._body, self._places, self._retry_s = url, body, places, retry_s
        self._num_heard = 0
        """Samples and turns received."""
        self._failing_since_s: float | None = None
        self._wait_s = 0.0
        """How long a full server wants to be left alone."""
        self._was_there = False
        """The server has answered at least once."""
        self._is_known = False
        """The server may know the rollout."""
        self.has_ended = False
        self.why = ""
        """Why the current connection ended early."""

    def next_call(self) -> _Call:
        self.why = "the stream ended too early"
        if self._is_known:
            return _Call("GET", f"/v1/rollouts/{self.rollout_id}/samples?after={self._num_heard}")
        self._is_known = True
        return _Call("POST", "/v1/rollouts", self._body)

    def on_line(self, line: bytes) -> Sample | Turn | None:
        """Process a line of the response stream; returns the sample or turn in it."""
        self._was_there = True
        said = decoded(line, dict[str, Any], self._url) if line else {}
        kind = said.get("object")
        if kind != "rollout" and "error" not in said:
            # The first line does not show that samples arrive.
            self._failing_since_s = None
        if kind in _KINDS and said["number"] == self._num_heard:
            self._num_heard += 1
            return decoded(line, _KINDS[kind], self._url)
        if kind == "rollout.end" and said["num_ended"] == said["num_samples"]:
            self.has_ended = True
        elif "error" in said:
            self.why = said["error"]["message"]
        return None

    def on_refusal(self, call: _Call, response: httpx.Response) -> None:
        """Process a response that is not 200. Raises ConfigError or EngineError where a retry would not help."""
        self._was_there = True
        self.why = message_of(response)
        is_new = call.method == "POST"
        if response.status_code in _LATER:
            self._is_known = not is_new
            self.on_later(response)
        elif response.status_code == 404 and not is_new and not self._num_heard:
            self._is_known = False  # the first request never reached the server
        elif is_new and (_error_of(response) or {}).get("code") != "rollout_exists":
            raise ConfigError(self._refusal(self.why))
        elif not is_new:
            raise EngineError(f"the server lost the rollout after {self._num_heard} samples: {self.why}")

    def on_later(self, response: httpx.Response) -> None:
        """Process a status after which the client retries: for `retry_s`, but for as long as a server is full."""
        self.why = message_of(response)
        if response.status_code == 429:
            self._failing_since_s, wait_s = None, response.headers.get("retry-after", "")
            self._wait_s = min(float(wait_s), _SHORT_S) if wait_s.isdecimal() else 0.0

    def on_disconnect(self, failure: httpx.TransportError) -> None:
        """Process a broken connection. Raises ConfigError where the server has never answered."""
        if not self._was_there and isinstance(failure, httpx.ConnectError | httpx.UnsupportedProtocol):
            raise ConfigError(f"nothing answers at {self._url}: start the server, or check --url") from None
        self.why = str(failure) if isinstance(failure, _NotNow) else type(failure).__name__

    def pause_s(self) -> float:
        """Seconds to wait before the next call. Raises EngineError after `retry_s` without progress."""
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._retry_s:
            raise EngineError(f"{self._url} is gone after {self._num_heard} samples: {self.why}")
        wait_s, self._wait_s = self._wait_s, 0.0
        return max(wait_s, _PAUSE_S)

    def _refusal(self, message: str) -> str:
        group = re.search(r"\(groups\[(\d{1,9})\]", message)
        where = group and dict(enumerate(self._places)).get(int(group[1]))
        return f"{where}: {message}" if where else message


def decoded(raw: bytes, kind: type[T], url: str) -> T:
    """Decode JSON of this type. Raises ConfigError where it does not fit: it is not a Slipstream server."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        raise ConfigError(f"{url} does not answer like a Slipstream server: check --url") from None


def message_of(response: httpx.Response) -> str:
    """The server's error message, with the field at fault."""
    if (error := _error_of(response)) is None:
        return f"status {response.status_code}"
    return f"{error['message']} ({error['param'] or error['code']})"


def _error_of(response: httpx.Response) -> dict[str, Any] | None:
    """The server's error; None where the response has none of ours, such as a proxy's."""
    try:
        error = response.json()["error"]
        return {name: error[name] for name in ("message", "param", "code")}
    except (ValueError, KeyError, TypeError):
        return None


def _body(groups: Sequence[Group | Mapping[str, Any]], rollout_id: str | None, *, logprobs: bool) -> dict[str, Any]:
    """The body of a request that starts a rollout, without the model. Raises ConfigError."""
    if not groups:
        raise ConfigError("a rollout needs at least one group")
    named = [msgspec.to_builtins(group) if isinstance(group, Group) else dict(group) for group in groups]
    return {"id": rollout_id, "groups": named, "logprobs": logprobs}


def _rewards(rewards: Rewards) -> dict[str, Any]:
    of_samples = ((key, float(one)) for key, one in rewards.items())
    return {"rewards": [{"group_id": name, "sample": number, "reward": one} for (name, number), one in of_samples]}


def _cancelled(groups: Iterable[str] | None) -> dict[str, list[str]] | None:
    """Query parameters of a cancel request; None where there is nothing to cancel."""
    if groups is None:
        return {}
    return {"group_id": names} if (names := [*groups]) else None


def _check(response: httpx.Response, *, or_gone: bool = False) -> httpx.Response:
    """Raises ConfigError for a 4xx response, EngineError for another failure; `or_gone` accepts 410."""
    if response.is_success or (or_gone and response.status_code == 410):
        return response
    raise (ConfigError if response.is_client_error else EngineError)(message_of(response))


@contextmanager
def _away(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as failure:
        raise EngineError(f"{url} does not answer: {type(failure).__name__}") from None


def _answered(said: Sample | Turn) -> Sample:
    if isinstance(said, Turn):
        raise ConfigError(f"group {said.group_id} waits for an environment: use slipstream.rollout.Conversations")
    return said


class _Options:
    """Constructor options that both clients share."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        job: str | None = None,
        weight: float = 1.0,
        retry_s: float = 60,
    ) -> None:
        """`model` None takes the one that the server serves. Jobs of a tenant share the engines by their weights. A
        rollout fails after `retry_s` without a sample or a response. Raises ConfigError for an invalid `url`.
        """
        self.url, self._model, self._retry_s = url, model, retry_s
        self._job: dict[str, Any] = {"weight": weight, **({} if job is None else {"job": job})}
        # No header can carry the line end of a file or a Kubernetes secret.
        key = (api_key or "").strip()
        headers = {"authorization": f"Bearer {key}".encode()} if key else {}
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "timeout": _TIMEOUT,
            # A server may close an idle connection just as a request goes out on it, and httpx would not retry all.
            "limits": httpx.Limits(max_keepalive_connections=0),
            "trust_env": False,
        }
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a valid address ({error}): check --url") from None

    def _progress(
        self,
        groups: Sequence[Group | Mapping[str, Any]],
        rollout_id: str | None,
        places: Sequence[str],
        *,
        logprobs: bool,
    ) -> _Progress:
        body = {**_body(groups, rollout_id, logprobs=logprobs), **self._job}
        return _Progress(self.url, body, places, self._retry_s)

    def _served(self, response: httpx.Response) -> str:
        if response.status_code in _LATER:
            raise _NotNow(message_of(response))
        if response.status_code != 200:
            raise ConfigError(f"{self.url}/v1/models does not list the model: {message_of(response)}")
        return decoded(response.content, _Models, self.url).data[0].id


class Rollouts(_Options):
    """Client of one server; a context manager."""

    def __enter__(self) -> Self:
        self.http = httpx.Client(**self._options)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def start(
        self,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        rollout_id: str | None = None,
        logprobs: bool = True,
        places: Sequence[str] = (),
    ) -> Rollout:
        """Create a rollout; its request goes out when iteration begins. `places` say where each group comes from, for
        error messages. Raises ConfigError.
        """
        return Rollout(self, self._progress(groups, rollout_id, places, logprobs=logprobs))

    def model(self) -> str:
        """Name of the served model. Raises ConfigError where the server does not list it; httpx.TransportError."""
        self._model = self._model or self._served(self.http.get("/v1/models", timeout=_SHORT_S))
        return self._model


class Rollout:
    """One rollout; iterating it gives its samples as they end, each once.

    Raises ConfigError where the server refuses the request, EngineError where it stays away for `retry_s`.
    """

    def __init__(self, client: Rollouts, progress: _Progress) -> None:
        self._client, self._progress = client, progress
        self.rollout_id = progress.rollout_id

    def __iter__(self) -> Iterator[Sample]:
        progress, http = self._progress, self._client.http
        while not progress.has_ended:
            try:
                call = progress.next_call()
                body = None if call.body is None else {**call.body, "model": self._client.model()}
                with http.stream(call.method, call.path, json=body) as response:
                    if response.status_code == 200:
                        for line in split_lines(response.iter_bytes()):
                            if (said := progress.on_line(line)) is not None:
                                yield _answered(said)
                    else:
                        response.read()
                        progress.on_refusal(call, response)
            except httpx.TransportError as failure:
                progress.on_disconnect(failure)
            if not progress.has_ended:
                time.sleep(progress.pause_s())

    def reward(self, rewards: Rewards) -> None:
        """Send rewards of finished samples, which replace earlier ones. The server accepts all of them or none."""
        with _away(self._client.url):
            _check(self._client.http.post(f"/v1/rollouts/{self.rollout_id}/rewards", json=_rewards(rewards)))

    def cancel(self, groups: Iterable[str] | None = None) -> None:
        """Abort the running samples of these groups, or of all; each still arrives, as aborted."""
        if (query := _cancelled(groups)) is not None:
            with _away(self._client.url):
                url = f"/v1/rollouts/{self.rollout_id}"
                _check(self._client.http.delete(url, params=query, timeout=_SHORT_S), or_gone=True)


class AsyncRollouts(_Options):
    """As `Rollouts`, for an event loop."""

    async def __aenter__(self) -> Self:
        self.http = httpx.AsyncClient(**self._options)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    def start(
        self,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        rollout_id: str | None = None,
        logprobs: bool = True,
        places: Sequence[str] = (),
    ) -> AsyncRollout:
        """As `Rollouts.start`."""
        return AsyncRollout(self, self._progress(groups, rollout_id, places, logprobs=logprobs))

    async def model(self) -> str:
        """As `Rollouts.model`."""
        self._model = self._model or self._served(await self.http.get("/v1/models", timeout=_SHORT_S))
        return self._model


class AsyncRollout:
    """As `Rollout`, with `async for`; also for samples that environments answer (slipstream/rollout.py)."""

    def __init__(self, client: AsyncRollouts, progress: _Progress) -> None:
        self._client, self._progress = client, progress
        self._observing = asyncio.Semaphore(_MOST_OBSERVING)
        self.rollout_id = progress.rollout_id

    async def __aiter__(self) -> AsyncIterator[Sample]:
        async for said in self.samples_and_turns():
            yield _answered(said)

    async def samples_and_turns(self) -> AsyncIterator[Sample | Turn]:
        """Iterate over samples that have ended, and turns that wait for `observe`."""
        progress, http = self._progress, self._client.http
        while not progress.has_ended:
            try:
                call = progress.next_call()
                body = None if call.body is None else {**call.body, "model": await self._client.model()}
                async with http.stream(call.method, call.path, json=body) as response:
                    if response.status_code == 200:
                        async for line in asplit_lines(response.aiter_bytes()):
                            if (said := progress.on_line(line)) is not None:
                                yield said
                    else:
                        await response.aread()
                        progress.on_refusal(call, response)
            except httpx.TransportError as failure:
                progress.on_disconnect(failure)
            if not progress.has_ended:
                await asyncio.sleep(progress.pause_s())

    async def observe(
        self, turn: Turn, observation: str | Sequence[Mapping[str, Any]] | None = None, *, failure: str | None = None
    ) -> None:
        """Answer a turn with a text or messages; None ends the sample, and a `failure` aborts it. A second answer to a
        turn has no effect. Raises ConfigError where the server refuses, EngineError where it stays away for `retry_s`.
        """
        said: dict[str, Any] = {"group_id": turn.group_id, "sample": turn.sample, "turn": turn.turn}
        if failure is not None:
            said["failure"] = failure[:1000]
        elif observation is None:
            said["done"] = True
        else:
            said["text" if isinstance(observation, str) else "messages"] = observation
        url, progress = f"/v1/rollouts/{self.rollout_id}/observations", self._progress
        while True:
            try:
                async with self._observing:
                    response = await self._client.http.post(url, json={"observations": [said]})
            except httpx.TransportError as broken:
                progress.on_disconnect(broken)
            else:
                if response.status_code not in _LATER:
                    _check(response)
                    return
                progress.on_later(response)
            await asyncio.sleep(progress.pause_s())

    async def reward(self, rewards: Rewards) -> None:
        """As `Rollout.reward`."""
        with _away(self._client.url):
            _check(await self._client.http.post(f"/v1/rollouts/{self.rollout_id}/rewards", json=_rewards(rewards)))

    async def cancel(self, groups: Iterable[str] | None = None) -> None:
        """As `Rollout.cancel`."""
        if (query := _cancelled(groups)) is not None:
            with _away(self._client.url):
                url = f"/v1/rollouts/{self.rollout_id}"
                _check(await self._client.http.delete(url, params=query, timeout=_SHORT_S), or_gone=True)
