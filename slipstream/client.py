"""A client of `/v1/rollouts`: groups of samples from a running server, over as many connections as it takes.

    with Rollouts("http://127.0.0.1:8000") as rollouts:
        rollout = rollouts.start([Group(prompt="2 + 2 =", n=8, max_tokens=20)])
        rewards = {sample.key: float("4" in sample.text) for sample in rollout}
        rollout.reward(rewards)

`AsyncRollouts` is the same with `async with`, `async for` and `await`. Samples come as they end, each once. A
connection that breaks is made again. The client names the rollout, so a request whose answer was lost is not sent
blindly again: the samples are asked for by that name first, and only a server that does not know it gets the groups
once more.
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
"""A server that lives sends something every ten seconds."""
_SHORT_S = 10.0
_LATER = (429, 503)
"""Statuses with which a server says: retry."""


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One prompt and how often to answer it (docs/how-to/rollouts.md). The server fills in what is left out."""

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
    """Of a sample in its rollout."""

    group_id: str
    sample: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that has ended; docs/how-to/rollouts.md says what each field is."""

    object: Literal["rollout.sample"] = "rollout.sample"
    number: int
    """In the order in which they ended."""
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
    """Where, among its tokens, the turns of the model begin and end; the rest its environment has said."""
    detail: str | None = None

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.group_id, self.sample)


Rewards = Mapping[SampleKey, float] | Mapping[tuple[str, int], float]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample has said, which its environment is to answer."""

    object: Literal["rollout.turn"] = "rollout.turn"
    number: int
    """Among all that the rollout has said."""
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
    """One rollout, from its submission to its last sample: what to ask next, and what an answer means. No I/O."""

    def __init__(self, url: str, body: dict[str, Any], places: Sequence[str], retry_s: float) -> None:
        """`places` name the groups in a refusal."""
        self.rollout_id = body["id"] = body.get("id") or uuid4().hex
        self._url, self._body, self._places, self._retry_s = url, body, places, retry_s
        self._num_heard = 0
        """Samples and turns."""
        self._failing_since_s: float | None = None
        self._was_there = False
        """The server has answered at all."""
        self._is_known = False
        """The server may know the rollout."""
        self.has_ended = False
        self.why = ""
        """The connection under way will have ended without a last line."""

    def next_call(self) -> _Call:
        self.why = "the stream ended too early"
        if self._is_known:
            return _Call("GET", f"/v1/rollouts/{self.rollout_id}/samples?after={self._num_heard}")
        self._is_known = True
        return _Call("POST", "/v1/rollouts", self._body)

    def heard(self, line: bytes) -> Sample | Turn | None:
        """A line of a stream."""
        self._was_there = True
        said = decoded(line, dict[str, Any], self._url) if line else {}
        kind = said.get("object")
        if kind != "rollout" and "error" not in said:
            # The first line alone is no sign of progress.
            self._failing_since_s = None
        if kind in _KINDS and said["number"] == self._num_heard:
            self._num_heard += 1
            return decoded(line, _KINDS[kind], self._url)
        if kind == "rollout.end" and said["num_ended"] == said["num_samples"]:
            self.has_ended = True
        elif "error" in said:
            self.why = said["error"]["message"]
        return None

    def refused(self, call: _Call, response: httpx.Response) -> None:
        """An answer that is no stream. Raises for what will not be another time."""
        self._was_there = True
        self.why = message_of(response)
        is_new = call.method == "POST"
        if response.status_code in _LATER:
            self._is_known = not is_new
        elif response.status_code == 404 and not is_new and not self._num_heard:
            self._is_known = False  # the first request never got there
        elif is_new and response.status_code != 409:  # with that it did, and goes on
            raise ConfigError(self._refusal(self.why))
        elif not is_new:
            raise EngineError(f"the server has lost the rollout after {self._num_heard} samples: {self.why}")

    def broke(self, failure: httpx.TransportError) -> None:
        """Raises ConfigError where nobody was ever there."""
        if not self._was_there and isinstance(failure, httpx.ConnectError | httpx.UnsupportedProtocol):
            raise ConfigError(f"nothing answers at {self._url}: start the server, or check --url") from None
        self.why = type(failure).__name__

    def pause_s(self) -> float:
        """Before the next call. Raises EngineError once that has been going on for too long."""
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._retry_s:
            raise EngineError(f"{self._url} is gone after {self._num_heard} samples: {self.why}")
        return _PAUSE_S

    def _refusal(self, message: str) -> str:
        group = re.search(r"\(groups\[(\d{1,9})\]", message)
        where = group and dict(enumerate(self._places)).get(int(group[1]))
        return f"{where}: {message}" if where else message


def decoded(raw: bytes, kind: type[T], url: str) -> T:
    """Raises ConfigError for what no Slipstream server says."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        raise ConfigError(f"{url} answers as no Slipstream server does: check --url") from None


def message_of(response: httpx.Response) -> str:
    """What the server says about a refusal, with the field that it names."""
    try:
        error = response.json()["error"]
        return f"{error['message']} ({error['param'] or error['code']})"
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def _body(groups: Sequence[Group | Mapping[str, Any]], rollout_id: str | None, *, logprobs: bool) -> dict[str, Any]:
    """Of a rollout, without its model. Raises ConfigError."""
    if not groups:
        raise ConfigError("a rollout has one group at least")
    named = [msgspec.to_builtins(group) if isinstance(group, Group) else dict(group) for group in groups]
    return {"id": rollout_id, "groups": named, "logprobs": logprobs}


def _rewards(rewards: Rewards) -> dict[str, Any]:
    of_samples = rewards.items()
    return {"rewards": [{"group_id": name, "sample": number, "reward": one} for (name, number), one in of_samples]}


def _cancelled(groups: Iterable[str] | None) -> dict[str, list[str]] | None:
    """The query; None where there is nothing to cancel."""
    if groups is None:
        return {}
    return {"group_id": names} if (names := [*groups]) else None


def _check(response: httpx.Response) -> httpx.Response:
    """Raises ConfigError where the server refuses, EngineError where it cannot."""
    if response.is_success:
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
    """Of both clients."""

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
        """`model` None is the one that the server serves. Jobs of a tenant share the engines by their weights. A
        rollout is given up after `retry_s` without a sample or an answer. Raises ConfigError for what is no address.
        """
        self.url, self._model, self._retry_s = url, model, retry_s
        self._job: dict[str, Any] = {"weight": weight, **({} if job is None else {"job": job})}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "timeout": _TIMEOUT,
            # A server may close an idle connection just as a request goes out on it, and not all are sent again.
            "limits": httpx.Limits(max_keepalive_connections=0),
            "trust_env": False,
        }
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is no address ({error}): check --url") from None

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
        if response.status_code != 200:
            raise ConfigError(f"{self.url} does not say what it serves: {message_of(response)}")
        return decoded(response.content, _Models, self.url).data[0].id


class Rollouts(_Options):
    """A connection to a server; a context manager."""

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
        """A rollout, which begins when its first sample is asked for. A refusal names the `places` of groups. Raises
        ConfigError.
        """
        return Rollout(self, self._progress(groups, rollout_id, places, logprobs=logprobs))

    def model(self) -> str:
        """Raises ConfigError where the server does not say it; httpx.TransportError."""
        self._model = self._model or self._served(self.http.get("/v1/models", timeout=_SHORT_S))
        return self._model


class Rollout:
    """One rollout; iterating it gives its samples as they end, each once.

    Raises ConfigError for what the server refuses, EngineError where it goes away for good.
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
                            if (said := progress.heard(line)) is not None:
                                yield _answered(said)
                    else:
                        response.read()
                        progress.refused(call, response)
            except httpx.TransportError as failure:
                progress.broke(failure)
            if not progress.has_ended:
                time.sleep(progress.pause_s())

    def reward(self, rewards: Rewards) -> None:
        """Of finished samples, by group and number; a later one takes an earlier one's place. All are taken or none."""
        with _away(self._client.url):
            _check(self._client.http.post(f"/v1/rollouts/{self.rollout_id}/rewards", json=_rewards(rewards)))

    def cancel(self, groups: Iterable[str] | None = None) -> None:
        """End what has not ended, of these groups or of all; it comes as aborted."""
        if (query := _cancelled(groups)) is not None:
            with _away(self._client.url):
                url = f"/v1/rollouts/{self.rollout_id}"
                _check(self._client.http.delete(url, params=query, timeout=_SHORT_S))


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
        self.rollout_id = progress.rollout_id

    async def __aiter__(self) -> AsyncIterator[Sample]:
        async for said in self.everything():
            yield _answered(said)

    async def everything(self) -> AsyncIterator[Sample | Turn]:
        """Samples that have ended, and turns that wait for `observe`."""
        progress, http = self._progress, self._client.http
        while not progress.has_ended:
            try:
                call = progress.next_call()
                body = None if call.body is None else {**call.body, "model": await self._client.model()}
                async with http.stream(call.method, call.path, json=body) as response:
                    if response.status_code == 200:
                        async for line in asplit_lines(response.aiter_bytes()):
                            if (said := progress.heard(line)) is not None:
                                yield said
                    else:
                        await response.aread()
                        progress.refused(call, response)
            except httpx.TransportError as failure:
                progress.broke(failure)
            if not progress.has_ended:
                await asyncio.sleep(progress.pause_s())

    async def observe(
        self, turn: Turn, observation: str | Sequence[Mapping[str, Any]] | None = None, *, failure: str | None = None
    ) -> None:
        """Answer a turn, with a text or messages; None ends the sample, and a `failure` aborts it. Once is enough: a
        turn that was answered stays as it is. Raises ConfigError where the server refuses, EngineError where it is gone
        for good.
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
                response = await self._client.http.post(url, json={"observations": [said]})
            except httpx.TransportError as broken:
                progress.broke(broken)
            else:
                if response.status_code not in _LATER:
                    _check(response)
                    return
                progress.why = message_of(response)
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
                _check(await self._client.http.delete(url, params=query, timeout=_SHORT_S))
