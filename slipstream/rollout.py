"""The client of `slipstream rollout`: groups to a server, its samples back, over as many connections as it takes.

The client names the rollout, so a request whose answer was lost is not sent blindly again: the samples are asked for by
that name first, and only a server that does not know it gets the groups once more.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import httpx
import msgspec

from speculator.errors import ConfigError, EngineError
from speculator.host import read_json_lines, split_lines

T = TypeVar("T")
_PAUSE_S = 0.5
_CONNECT_S = 10.0
_SILENCE_S = 60.0
"""A server that lives sends something every ten."""
_LATER = (429, 503)
"""Statuses with which a server says: retry."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


def read_groups(path: Path, defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The groups of a file by where they stand; what a line does not say, `defaults` do. Raises ConfigError."""
    rows = read_json_lines(path, dict[str, Any], example='{"prompt": "…", "n": 8}')
    groups = {
        f"{path}, line {number}": {"id": str(index), **defaults, **group} for index, (number, group) in enumerate(rows)
    }
    if not groups:
        raise ConfigError(f"{path} has no groups: write one JSON object a line")
    return groups


class RolloutClient:
    """One rollout, from its submission to its last sample."""

    def __init__(
        self,
        groups: Mapping[str, dict[str, Any]],
        *,
        url: str,
        api_key: str | None,
        model: str | None,
        logprobs: bool,
        retry_s: float,
    ) -> None:
        """`groups` by where they stand, which is what a refusal names; `model` None is the one that the server serves.

        The client gives up after `retry_s` without a sample or an answer.
        """
        self._groups, self._url, self._api_key = groups, url, api_key
        self._model, self._logprobs, self._retry_s = model, logprobs, retry_s
        self._id = uuid4().hex
        self._num_samples = 0
        self._failing_since_s: float | None = None
        self._was_there = False
        """The server has answered at all."""
        self._is_known = False
        """The server may know the rollout."""

    def run(self, on_sample: Callable[[dict[str, Any]], object]) -> Counter[str]:
        """How many samples ended in each state; `on_sample` gets each of them once, as the server sent it.

        Raises ConfigError for what the server refuses, EngineError where it goes away for good.
        """
        states: Counter[str] = Counter()
        headers = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        try:
            client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self._url!r} is no address ({error}): check --url") from None
        with client as http:
            try:
                for sample in self._samples(http):
                    states[sample["state"]] += 1
                    on_sample(sample)
            except KeyboardInterrupt:
                with suppress(httpx.HTTPError):
                    http.delete(f"/v1/rollouts/{self._id}", timeout=_CONNECT_S)
                raise
        return states

    def _samples(self, http: httpx.Client) -> Iterator[dict[str, Any]]:
        while True:
            why = "the stream ended too early"
            try:
                for said in self._stream(http):
                    kind = said.get("object")
                    if kind != "rollout" and "error" not in said:
                        # The first line alone is no sign of progress.
                        self._failing_since_s = None
                    if kind == "rollout.sample" and said["number"] == self._num_samples:
                        self._num_samples += 1
                        yield said
                    elif kind == "rollout.end" and said["next"] == said["num_samples"]:
                        return
                    elif "error" in said:
                        why = said["error"]["message"]
            except httpx.TransportError as failure:
                if not self._was_there and isinstance(failure, httpx.ConnectError | httpx.UnsupportedProtocol):
                    message = f"nothing answers at {self._url}: start the server, or check --url"
                    raise ConfigError(message) from None
                why = type(failure).__name__
            self._pause(why)

    def _stream(self, http: httpx.Client) -> Iterator[dict[str, Any]]:
        """What one connection brings; an empty line is an empty object."""
        if self._is_known:
            sending = http.stream("GET", f"/v1/rollouts/{self._id}/samples?after={self._num_samples}")
        else:
            sending = http.stream("POST", "/v1/rollouts", json=self._body(http))
            self._is_known = True
        with sending as response:
            self._was_there = True
            if response.status_code == 200:
                for line in split_lines(response.iter_bytes()):
                    yield self._decoded(line, dict[str, Any]) if line else {}
                return
            response.read()
            self._check_refusal(response)
            yield {"error": {"message": _message(response)}}

    def _body(self, http: httpx.Client) -> dict[str, Any]:
        model = self._model
        if model is None:
            response = http.get("/v1/models", timeout=_CONNECT_S)
            if response.status_code != 200:
                raise ConfigError(f"{self._url} does not say what it serves: {_message(response)}")
            model = self._decoded(response.content, _Models).data[0].id
        return {"id": self._id, "model": model, "groups": [*self._groups.values()], "logprobs": self._logprobs}

    def _check_refusal(self, response: httpx.Response) -> None:
        """Raises for what will not be another time."""
        is_new = response.request.method == "POST"
        if response.status_code in _LATER:
            self._is_known = not is_new
        elif response.status_code == 404 and not is_new and not self._num_samples:
            self._is_known = False  # the first request never got there
        elif is_new and response.status_code != 409:  # with that it did, and goes on
            raise ConfigError(self._refusal(response))
        elif not is_new:
            message = f"the server has lost the rollout after {self._num_samples} samples: {_message(response)}"
            raise EngineError(message)

    def _refusal(self, response: httpx.Response) -> str:
        message = _message(response)
        group = re.search(r"\(groups\[(\d{1,9})\]", message)
        where = group and dict(enumerate(self._groups)).get(int(group[1]))
        return f"{where}: {message}" if where else message

    def _decoded(self, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (ValueError, RecursionError):
            raise ConfigError(f"{self._url} answers as no Slipstream server does: check --url") from None

    def _pause(self, why: str) -> None:
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._retry_s:
            raise EngineError(f"{self._url} is gone after {self._num_samples} samples: {why}")
        time.sleep(_PAUSE_S)


def _message(response: httpx.Response) -> str:
    """What the server says about a refusal, with the field that it names."""
    try:
        error = response.json()["error"]
        return f"{error['message']} ({error['param'] or error['code']})"
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
