"""Client of `/v1/rollouts`: requests groups of samples from a running server and survives broken connections.

    with Rollouts("http://127.0.0.1:8000") as rollouts:
        rollout = rollouts.start([Group(prompt="2 + 2 =", n=8, max_tokens=20)])
        rewards = {sample.key: float("4" in sample.text) for sample in rollout}
        rollout.reward(rewards)

`AsyncRollouts` is the same with `async with`, `async for` and `await`. Each sample is returned once, when it ends. A
broken connection is opened again. The client chooses the rollout's id. So after a lost response it first asks for the
samples of that id, and sends the groups again only to a server that does not know it: one that has been restarted is
asked for those that had not ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Self

import httpx
import msgspec

from slipstream.rollout_protocol import (
    LATER,
    SHORT_S,
    Group,
    NotNow,
    Progress,
    Rewards,
    Sample,
    SampleKey,
    Turn,
    body_of,
    decoded,
    refusal_of,
)
from speculator.connections import SeparateConnections, server_url
from speculator.errors import ConfigError, EngineError
from speculator.host import asplit_lines, split_lines

__all__ = ["AsyncRollout", "AsyncRollouts", "Group", "Rewards", "Rollout", "Rollouts", "Sample", "SampleKey", "Turn"]

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
"""A running server sends something at least every ten seconds."""
_MOST_OBSERVING = 64
"""Observations under way at once: thousands of connections that begin together are more than a server accepts."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


def _check(response: httpx.Response) -> None:
    """Raises ConfigError for a 4xx response, EngineError for another failure."""
    if not response.is_success:
        raise (ConfigError if response.is_client_error else EngineError)(refusal_of(response).message)


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
        self.url, self._model, self._retry_s = server_url(url, "--url"), model, retry_s
        self._job: dict[str, Any] = {"weight": weight, **({} if job is None else {"job": job})}
        # No header can carry the line end of a file or a Kubernetes secret.
        key = (api_key or "").strip()
        headers = {"authorization": f"Bearer {key}".encode()} if key else {}
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "timeout": _TIMEOUT,
            "trust_env": False,
        }

    def _progress(
        self,
        groups: Sequence[Group | Mapping[str, Any]],
        rollout_id: str | None,
        places: Sequence[str],
        *,
        logprobs: bool,
    ) -> Progress:
        body = {**body_of(groups, rollout_id, logprobs=logprobs), **self._job}
        return Progress(self.url, body, places, self._retry_s)

    def _served(self, response: httpx.Response) -> str:
        if response.status_code in LATER:
            raise NotNow(refusal_of(response).message)
        if response.status_code != 200:
            raise ConfigError(f"{self.url}/v1/models does not list the model: {refusal_of(response).message}")
        return decoded(response.content, _Models, self.url).data[0].id


class Rollouts(_Options):
    """Client of one server; a context manager."""

    def __enter__(self) -> Self:
        # A server may close an idle connection just as a request goes out on it, and httpx would not retry all.
        self.http = httpx.Client(**self._options, limits=httpx.Limits(max_keepalive_connections=0))
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
        self._model = self._model or self._served(self.http.get("/v1/models", timeout=SHORT_S))
        return self._model


class Rollout:
    """One rollout; iterating it gives its samples as they end, each once.

    Raises ConfigError where the server refuses the request, EngineError where it stays away for `retry_s`.
    """

    def __init__(self, client: Rollouts, progress: Progress) -> None:
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
        """Send rewards of finished samples, which replace earlier ones. The server accepts all of them or none; samples
        from before its restart are left out.
        """
        if (body := self._progress.rewards(rewards)) is not None:
            with _away(self._client.url):
                _check(self._client.http.post(f"/v1/rollouts/{self.rollout_id}/rewards", json=body))

    def cancel(self, groups: Iterable[str] | None = None) -> None:
        """Abort the running samples of these groups, or of all; each still arrives, as aborted, unless a restart of the
        server lost it.
        """
        for query in self._progress.cancelled(groups):
            with _away(self._client.url):
                url = f"/v1/rollouts/{self.rollout_id}"
                response = self._client.http.delete(url, params=query, timeout=SHORT_S)
            if not self._progress.on_cancelled(response):
                _check(response)


class AsyncRollouts(_Options):
    """As `Rollouts`, for an event loop."""

    async def __aenter__(self) -> Self:
        self.http = httpx.AsyncClient(**self._options, transport=SeparateConnections())
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
        self._model = self._model or self._served(await self.http.get("/v1/models", timeout=SHORT_S))
        return self._model


class AsyncRollout:
    """As `Rollout`, with `async for`; also for samples that environments answer (slipstream/rollout.py)."""

    def __init__(self, client: AsyncRollouts, progress: Progress) -> None:
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
                if response.status_code not in LATER:
                    _check(response)
                    return
                progress.on_later(response)
            await asyncio.sleep(progress.pause_s())

    async def reward(self, rewards: Rewards) -> None:
        """As `Rollout.reward`."""
        if (body := self._progress.rewards(rewards)) is not None:
            with _away(self._client.url):
                _check(await self._client.http.post(f"/v1/rollouts/{self.rollout_id}/rewards", json=body))

    async def cancel(self, groups: Iterable[str] | None = None) -> None:
        """As `Rollout.cancel`."""
        for query in self._progress.cancelled(groups):
            with _away(self._client.url):
                url = f"/v1/rollouts/{self.rollout_id}"
                response = await self._client.http.delete(url, params=query, timeout=SHORT_S)
            if not self._progress.on_cancelled(response):
                _check(response)
