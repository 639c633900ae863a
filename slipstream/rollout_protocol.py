"""What a client and a server of `/v1/rollouts` say to each other: typed, and without I/O."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

import httpx
import msgspec

from speculator.errors import ConfigError, EngineError

T = TypeVar("T")
PAUSE_S = 0.5
SHORT_S = 10.0
LATER = frozenset((408, 429, *range(502, 600)))
"""Statuses after which the client retries: the server is busy, or a proxy in front of it does not reach it."""


_MOST_CANCELLED = 100
"""Groups that one request cancels: a server takes 16 KiB of address and headers, and a name has up to 64 characters."""


class NotNow(httpx.TransportError):
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


class Call(NamedTuple):
    method: str
    path: str
    body: dict[str, Any] | None = None


class Progress:
    """The protocol state of one rollout: which request comes next, and what a response means. No I/O."""

    def __init__(self, url: str, body: dict[str, Any], places: Sequence[str], retry_s: float) -> None:
        """`places` say where each group comes from, for error messages."""
        self.rollout_id = body["id"] = body.get("id") or uuid4().hex
        self._url, self._retry_s = url, retry_s
        self._body = self._asked = body
        """The first request, and the last one."""
        self._places = dict(zip(_names(body), places, strict=False))
        self._num_heard = self._num_before = 0
        """Samples and turns received since the last request, and before."""
        self._ended: dict[str, dict[int, bool]] = defaultdict(dict)
        """Whether they have finished, by group and number."""
        self._asked_for: dict[str, list[int]] | None = None
        """Numbers of the samples in the last request, by group; None: all."""
        self._cancelled: set[str] = set()
        self._failing_since_s: float | None = None
        self._wait_s = 0.0
        """How long a full server wants to be left alone."""
        self._was_there = False
        """The server has answered at least once."""
        self._is_known = False
        """The server may know the rollout."""
        self._may_begin = True
        """The server has not yet answered the request that begins the rollout."""
        self.has_ended = False
        self.why = ""
        """Why the current connection ended early."""

    def next_call(self) -> Call:
        self.why = "the stream ended too early"
        if self._is_known:
            return Call("GET", f"/v1/rollouts/{self.rollout_id}/samples?after={self._num_heard}")
        self._is_known = self._may_begin = True
        return Call("POST", "/v1/rollouts", self._asked)

    def on_line(self, line: bytes) -> Sample | Turn | None:
        """Process a line of the response stream; returns the sample or turn in it."""
        self._was_there, self._may_begin = True, False
        said = decoded(line, dict[str, Any], self._url) if line else {}
        kind = said.get("object")
        if kind != "rollout" and "error" not in said:
            # The first line does not show that samples arrive.
            self._failing_since_s = None
        if kind in _KINDS and said["number"] == self._num_heard:
            self._num_heard += 1
            heard = decoded(line, _KINDS[kind], self._url)
            return self._on_sample(heard) if isinstance(heard, Sample) else heard
        if kind == "rollout.end" and said["num_ended"] == said["num_samples"]:
            self.has_ended = True
        elif "error" in said:
            self.why = said["error"]["message"]
        return None

    def on_refusal(self, call: Call, response: httpx.Response) -> None:
        """Process a response that is not 200. Raises ConfigError or EngineError where a retry would not help."""
        self._was_there, self._may_begin = True, False
        is_new = call.method == "POST"
        if response.status_code in LATER:
            self._is_known = not is_new
            self.on_later(response)
            return
        self.why, code = refusal_of(response)
        if is_new:
            if code != "rollout_exists":
                raise ConfigError(self._refusal(self.why))
        elif code != "rollout_not_found" and (response.status_code != 404 or self._num_heard):
            raise EngineError(self._lost())
        elif self._num_heard or self._cancelled:
            self._begin_again()
        else:
            self._is_known = False  # the first request never reached the server

    def _on_sample(self, heard: Sample) -> Sample:
        """The sample as the first request would have it numbered."""
        number = heard.sample if self._asked_for is None else self._asked_for[heard.group_id][heard.sample]
        self._ended[heard.group_id][number] = heard.state == "finished"
        return msgspec.structs.replace(heard, sample=number, number=self._num_all - 1)

    def _begin_again(self) -> None:
        """Ask for what had neither ended nor been cancelled when the server lost the rollout, as by a restart. Raises
        EngineError where environments answered: what they were told is gone.
        """
        groups = dict(zip(_names(self._body), self._body["groups"], strict=True))
        if self._num_all and any(group.get("environment") for group in groups.values()):
            raise EngineError(self._lost())
        asked, self._asked_for = [], {}
        for name, group in groups.items():
            seeds, redundant = group.get("seeds"), group.get("redundant") or 0
            num_samples = len(seeds) if seeds else (group.get("n") or 1) + redundant
            ended = self._ended[name]
            numbers = [number for number in range(num_samples) if number not in ended]
            num_needed = num_samples - redundant - sum(ended.values())
            if numbers and num_needed > 0 and name not in self._cancelled:
                self._asked_for[name] = numbers
                redundant = max(len(numbers) - num_needed, 0)
                rest = {**group, "id": name, "redundant": redundant, "n": len(numbers) - redundant}
                if seeds:
                    rest = {**rest, "n": None, "seeds": [seeds[number] for number in numbers]}
                asked.append(rest)
        self._asked, self._is_known, self.has_ended = {**self._body, "groups": asked}, False, not asked
        self._num_before, self._num_heard = self._num_all, 0

    def on_later(self, response: httpx.Response) -> None:
        """Process a status after which the client retries: for `retry_s`, but for as long as a server is full."""
        self.why = refusal_of(response).message
        if response.status_code == 429:
            self._failing_since_s, wait_s = None, response.headers.get("retry-after", "")
            self._wait_s = min(float(wait_s), SHORT_S) if wait_s.isdecimal() else 0.0

    def on_disconnect(self, failure: httpx.TransportError) -> None:
        """Process a broken connection. Raises ConfigError where the server has never answered."""
        if not self._was_there and isinstance(failure, httpx.ConnectError | httpx.UnsupportedProtocol):
            raise ConfigError(f"nothing answers at {self._url}: start the server, or check --url") from None
        self._may_begin = False
        self.why = str(failure) if isinstance(failure, NotNow) else type(failure).__name__

    def pause_s(self) -> float:
        """Seconds to wait before the next call. Raises EngineError after `retry_s` without progress."""
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        if now_s - self._failing_since_s > self._retry_s:
            raise EngineError(f"{self._url} is gone after {self._num_all} samples: {self.why}")
        wait_s, self._wait_s = self._wait_s, 0.0
        return max(wait_s, PAUSE_S)

    def _refusal(self, message: str) -> str:
        group = re.search(r"\(groups\[(\d{1,9})\]", message)
        where = group and self._places.get(dict(enumerate(_names(self._asked))).get(int(group[1]), ""))
        return f"{where}: {message}" if where else message

    def _lost(self) -> str:
        return f"the server lost the rollout after {self._num_all} samples: {self.why}"

    @property
    def _num_all(self) -> int:
        return self._num_before + self._num_heard

    def rewards(self, rewards: Rewards) -> dict[str, Any] | None:
        """The body of a request with the rewards of samples that the server knows; None where it knows none."""
        said = [
            {"group_id": name, "sample": known, "reward": float(reward)}
            for (name, number), reward in rewards.items()
            if (known := self._known_as(name, number)) is not None
        ]
        return {"rewards": said} if said or not rewards else None

    def _known_as(self, name: str, number: int) -> int | None:
        if self._asked_for is None:
            return number
        numbers = self._asked_for.get(name, [])
        return numbers.index(number) if number in numbers else None

    def cancelled(self, groups: Iterable[str] | None) -> Iterator[dict[str, list[str]]]:
        """Query parameters of the requests that cancel these groups, or all; none where there is nothing to cancel.
        Take each when the response to the one before was processed.
        """
        all_names = _names(self._body)
        names = all_names if groups is None else [*groups]
        self._cancelled.update(names)
        if groups is None:
            yield {}
            return
        for start in range(0, len(names), _MOST_CANCELLED):
            some = names[start : start + _MOST_CANCELLED]
            if self._asked_for is not None:
                # A restarted server would refuse to cancel any group because of one that ended before.
                ended = set(all_names) - self._asked_for.keys()
                some = [name for name in some if name not in ended]
            if some:
                yield {"group_id": some}

    def on_cancelled(self, response: httpx.Response) -> bool:
        """Process the response to such a request; returns whether a refusal means that nothing is left to cancel."""
        if response.status_code != 404:
            return response.status_code == 410
        if self._may_begin or refusal_of(response).code != "rollout_not_found":
            return False
        if not self._is_known:
            # The next request would begin what is cancelled; a known rollout is missed when its samples are asked for.
            self._begin_again()
        return True


def _names(body: Mapping[str, Any]) -> list[str]:
    """Ids of the groups of a request."""
    return [str(group.get("id") or number) for number, group in enumerate(body["groups"])]


def decoded(raw: bytes, kind: type[T], url: str) -> T:
    """Decode JSON of this type. Raises ConfigError where it does not fit: it is not a Slipstream server."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (ValueError, RecursionError):
        raise ConfigError(f"{url} does not answer like a Slipstream server: check --url") from None


class Refusal(NamedTuple):
    message: str
    """The server's, with the field at fault."""
    code: str | None
    """None where the response is none of ours, such as a proxy's."""


def refusal_of(response: httpx.Response) -> Refusal:
    """What a response says that is not 200."""
    try:
        error = response.json()["error"]
        return Refusal(f"{error['message']} ({error['param'] or error['code']})", error["code"])
    except (ValueError, KeyError, TypeError):
        return Refusal(f"status {response.status_code}", None)


def body_of(groups: Sequence[Group | Mapping[str, Any]], rollout_id: str | None, *, logprobs: bool) -> dict[str, Any]:
    """The body of a request that starts a rollout, without the model. Raises ConfigError."""
    if not groups:
        raise ConfigError("a rollout needs at least one group")
    named = [msgspec.to_builtins(group) if isinstance(group, Group) else dict(group) for group in groups]
    return {"id": rollout_id, "groups": named, "logprobs": logprobs}
