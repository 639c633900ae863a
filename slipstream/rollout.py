"""`slipstream rollout`: a file of groups to a server, its samples back, over as many connections as it takes.

The client names the rollout, so a request whose answer was lost is not sent blindly again: the samples are asked for by
that name first, and only a server that does not know it gets the groups once more.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from speculator.errors import ConfigError, EngineError

_PAUSE_S = 0.5
_CONNECT_S = 10.0
_SILENCE_S = 60.0
"""A server that lives sends something every ten."""
_LATER = (429, 503)
"""Statuses with which a server says: retry."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    url: str
    api_key: str | None
    model: str | None
    """None: the one that the server serves."""
    logprobs: bool
    retry_s: float
    """Without a sample or an answer for so long, it is given up."""


def read_groups(path: Path, defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of a file, one JSON object a line; what a line does not say, `defaults` do. Raises ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): check the path") from None
    groups: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            group = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(group, dict):
            raise ConfigError(f'{path}, line {number} must be an object like {{"prompt": "…", "n": 8}}')
        groups.append({"id": str(len(groups)), **defaults, **group})
    if not groups:
        raise ConfigError(f"{path} has no groups: write one JSON object a line")
    return groups


class RolloutClient:
    """One rollout, from its submission to its last sample."""

    def __init__(self, options: RolloutOptions, groups: Sequence[dict[str, Any]]) -> None:
        self._options, self._groups = options, groups
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
        headers = {"authorization": f"Bearer {self._options.api_key}"} if self._options.api_key else {}
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        try:
            client = httpx.Client(base_url=self._options.url, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self._options.url!r} is no address ({error}): check --url") from None
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
                    message = f"nothing answers at {self._options.url}: start the server, or check --url"
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
                yield from (json.loads(line) if line else {} for line in response.iter_lines())
                return
            response.read()
            self._check_refusal(response)
            yield {"error": {"message": _message(response)}}

    def _body(self, http: httpx.Client) -> dict[str, Any]:
        model = self._options.model
        if model is None:
            response = http.get("/v1/models", timeout=_CONNECT_S)
            if response.status_code != 200:
                raise ConfigError(f"{self._options.url} does not say what it serves: {_message(response)}")
            model = response.json()["data"][0]["id"]
        return {"id": self._id, "model": model, "groups": self._groups, "logprobs": self._options.logprobs}

    def _check_refusal(self, response: httpx.Response) -> None:
        """Raises for what will not be another time."""
        is_new = response.request.method == "POST"
        if response.status_code in _LATER:
            self._is_known = not is_new
        elif response.status_code == 404 and not is_new and not self._num_samples:
            self._is_known = False  # the first request never got there
        elif is_new and response.status_code != 409:  # with that it did, and goes on
            raise ConfigError(_message(response))
        elif not is_new:
            message = f"the server has lost the rollout after {self._num_samples} samples: {_message(response)}"
            raise EngineError(message)

    def _pause(self, why: str) -> None:
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._options.retry_s:
            raise EngineError(f"{self._options.url} is gone after {self._num_samples} samples: {why}")
        time.sleep(_PAUSE_S)


def _message(response: httpx.Response) -> str:
    """What the server says about a refusal, with the field that it names."""
    try:
        error = response.json()["error"]
        return f"{error['message']} ({error['param'] or error['code']})"
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
