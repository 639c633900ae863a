"""SGLang servers as engines of rollouts: samples by token ids over HTTP, capacity by each server's own figures.

A lease is one request to `/generate`. It ends where the sample does, or when the scheduler takes it back, which aborts
the request. A sample resumes as a request for the prompt and the tokens so far. The server's prefix cache usually has
all of these but the last token. Events come every few tokens; tokens that a server had not sent when it died are
generated again.

Requests go to servers directly, even where a router stands before them, so that we know which server has a prefix. The
router lists the servers, and each server says how many requests and tokens it has room for (`/v1/loads`). Requests of
others there go first.

Servers report the requests of others with a delay, so the smaller of two polls counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import msgspec
import structlog

from serving.answer_text import AnswerText, LocalTokenizer
from serving.engine import Chunk, GenerateRequest
from serving.gateway.errors import ApiError
from serving.gateway.passthrough import whole_events
from serving.gateway.upstream import Upstream
from serving.request_metadata import POLICY_KEY, TARGET_KEY, version_of_label
from serving.rollout.engines import RolloutEngine
from serving.rollout.interactive_share import SlotsShare
from serving.sglang.outside.pool import list_servers
from serving.sglang.outside.weights import Weights
from speculator.errors import EngineBusyError, EngineDeadError, EngineError, RequestError, type_and_place

log = structlog.get_logger(__name__)

POLL_S = 0.5
_PATIENCE_S = 0.5
"""How long a poll of all servers waits for each."""
_TIMEOUT_S = 5.0
_MISSED_POLLS = 6
"""Failed polls in a row after which a server counts as dead: one that reads a long prompt may answer late."""
_MOST_OPEN = 100_000
"""So many connections that only the scheduler limits the requests of a server."""
STREAM_INTERVAL = 8
"""Tokens between two events of a stream, each of which has all tokens so far."""
_MAX_SEED = 2**31 - 1
"""SGLang hashes seeds as 32 bit numbers."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """What is common to all servers of one model."""

    tokenizer: LocalTokenizer
    target: str
    """Fingerprint of what they must serve."""
    share: SlotsShare
    """The share of a server's requests that rollouts may have; of its memory they may have the most."""
    target_version: Callable[[], int]
    """The target's version where the labels of SGLang's weights do not say it."""
    heeds_seed: Callable[[], bool]
    end_group: Callable[[str, str], None]
    """A tenant's prompt group has ended. Must not block."""


class _Load(msgspec.Struct):
    """The load of one data-parallel rank; see SGLang's `managers/load_snapshot.py`."""

    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    message: str = ""
    status_code: int | None = None
    """Of an abort."""


class _Span(msgspec.Struct):
    """The tokens of an answer from the end of the span before up to `end`, all by one version of the weights."""

    version: str
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_version: str = ""
    """The label of the weights that gave the last token."""
    weight_versions: list[_Span] = []


class _Failure(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    """An event of a stream, with all tokens so far."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Failure | None = None


_EVENT = msgspec.json.Decoder(_Event)


class SglangRolloutEngine:
    """Implements `serving.rollout.engines.RolloutEngine` for one server."""

    def __init__(self, url: str, settings: PoolSettings) -> None:
        self._url, self._settings = url.rstrip("/"), settings
        self._upstream = Upstream(url, max_connections=_MOST_OPEN)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False)
        self._num_open = 0
        """Requests of ours that are under way."""
        self._num_missed = _MISSED_POLLS
        self.target_label = 0
        """The version of its weights, where SGLang's label for them says it."""
        self._num_behind = 0
        """Polls in a row at which another server had newer ones."""
        self._priority: int | None = None
        """The lowest priority, where the server schedules by priority."""
        self._is_incremental = False
        """Whether an event has only the tokens since the one before (SGLang's `--incremental-streaming-output`)."""
        self._others = (0, 0)
        """Requests of others at the last two polls."""
        self._load = _Load(0, 0, 0, 0)
        self._aborting: set[asyncio.Task[None]] = set()
        self._check: asyncio.Task[bool] | None = None

    @property
    def name(self) -> str:
        return urlsplit(self._url).netloc

    @property
    def num_slots(self) -> int:
        most = self._load.max_running_requests
        return max(0, min(self._settings.share.slots(most), most - min(self._others)))

    @property
    def takes_new(self) -> bool:
        # Where the weights are older than another server's, the new ones may only be a moment late.
        return not self._num_behind

    @property
    def memory_tokens(self) -> int:
        return int(self._settings.share.most * self._load.max_total_num_tokens)

    @property
    def is_answering(self) -> bool:
        """Whether it has lately answered a poll."""
        return self._num_missed < _MISSED_POLLS

    @property
    def is_alive(self) -> bool:
        # What runs with older weights goes on.
        return self.is_answering and (self._num_behind < _MISSED_POLLS or self._num_open > 0)

    def drop_group_text(self, tenant: str, group_id: str) -> None:
        self._settings.end_group(tenant, group_id)

    def check_weights(self, newest: int) -> None:
        """Compare with the newest weights in the pool: a server with older ones takes nothing new, and finally counts
        as dead once nothing runs there.
        """
        self._num_behind = self._num_behind + 1 if self.target_label < newest else 0

    async def poll(self) -> None:
        """Poll how much room there is. Without an answer the last figures stand, until the server counts as dead."""
        num_open = self._num_open
        try:
            if not self.is_answering:
                server = (await self._http.get("/server_info")).raise_for_status().json()
                lowest = _LAST if server["schedule_low_priority_values_first"] else -_LAST
                self._priority = lowest if server["enable_priority_scheduling"] else None
                self._is_incremental = server.get("incremental_streaming_output", False)
            answer = (await self._http.get("/v1/loads", params={"include": "core"})).raise_for_status()
            loads = msgspec.json.decode(answer.content, type=_Loads).loads
            # TypeError while no rank has said what it does, early in a server's life.
            self._load = _Load(*(sum(column) for column in zip(*map(msgspec.structs.astuple, loads), strict=True)))
            info = (await self._http.get("/model_info")).raise_for_status()
            self.target_label = version_of_label(msgspec.json.decode(info.content, type=Weights).weight_version) or 0
        except (httpx.HTTPError, ValueError, LookupError, TypeError, msgspec.MsgspecError):
            self._num_missed += 1
            return
        self._num_missed = 0
        others = self._load.num_running_reqs + self._load.num_waiting_reqs - num_open
        self._others = self._others[1], max(others, 0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `serving.engine.Engine.generate`."""
        begun = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_answered :]
        answer = _Answer(request, AnswerText(self._settings.tokenizer, request.stop, begun), self._settings)
        # A new id each time: an aborted request may still be under way when its sample resumes here, or when a gateway
        # was restarted, and SGLang refuses an id that is in use. It also aborts every request whose id begins with the
        # aborted one, so all have the same length.
        rid = f"{request.request_id}#{uuid4().hex}"
        body = self._body(request, rid)
        self._num_open += 1
        has_ended, before = False, _Event()
        try:
            async with aclosing(self._events(body)) as events:
                async for event in events:
                    has_ended = event.meta_info.finish_reason is not None
                    if self._is_incremental:
                        event = before = _joined(before, event)
                    for chunk in answer.take(event):
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
            raise EngineError("the stream ended before the answer did")
        except EngineDeadError as failure:
            if not isinstance(failure.__cause__, httpx.ConnectError | httpx.ConnectTimeout) and await self._answers():
                # Of this request alone: what else runs there goes on.
                raise EngineError("the connection broke off") from failure
            self._num_missed = _MISSED_POLLS
            raise
        finally:
            self._num_open -= 1
            if not has_ended and self.is_alive:
                task = asyncio.create_task(self._abort(rid))
                self._aborting.add(task)
                task.add_done_callback(self._aborting.discard)

    async def _answers(self) -> bool:
        """Whether the server answers now; streams that break off together ask it once."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._asked())
        return await asyncio.shield(self._check)

    async def _asked(self) -> bool:
        try:
            return (await self._http.get("/v1/loads", params={"include": "core"})).is_success
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close the connections once abandoned streams have ended."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self._num_open and time.monotonic() < deadline_s:  # noqa: ASYNC110 - no stream knows that it is the last
            await asyncio.sleep(0.01)
        await asyncio.gather(*self._aborting, *filter(None, [self._check]))
        await self._upstream.close()
        await self._http.aclose()

    def _body(self, request: GenerateRequest, rid: str) -> bytes:
        """Raises RequestError for what this server cannot do."""
        sampling = request.sampling
        if request.logprobs and sampling.temperature and (sampling.top_p < 1 or sampling.top_k):
            raise RequestError(
                "SGLang's logprobs leave top_p and top_k out of account: drop these two, or pass logprobs false",
                param="logprobs",
            )
        policy = {**asdict(request.policy), **({TARGET_KEY: self._settings.target} if self._settings.target else {})}
        params = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop": list(request.stop),
            "ignore_eos": request.ignore_eos,
            "stream_interval": STREAM_INTERVAL,
            "custom_params": {POLICY_KEY: policy},
        }
        if request.seed is not None and self._settings.heeds_seed():
            params["sampling_seed"] = request.seed & _MAX_SEED
        body = {
            "rid": rid,
            "input_ids": request.prompt_token_ids,
            "sampling_params": params,
            "stream": True,
            "return_logprob": request.logprobs,
            "cache_salt": request.policy.tenant,
        }
        return msgspec.json.encode(body | ({} if self._priority is None else {"priority": self._priority}))

    async def _events(self, body: bytes) -> AsyncGenerator[_Event, None]:
        """Raises RequestError, EngineBusyError, EngineDeadError or EngineError."""
        try:
            async with self._upstream.answer("/generate", body, {}) as response:
                async for block in whole_events(response):
                    for line in block.split(b"\n\n"):
                        if line and line != b"data: [DONE]":
                            yield _checked(_EVENT.decode(line.removeprefix(b"data: ")))
        except ApiError as refused:
            raise _as_error(refused.status, refused.message) from None
        except msgspec.MsgspecError as error:
            raise EngineError(f"SGLang's stream cannot be read: {error}") from None

    async def _abort(self, rid: str) -> None:
        try:
            await self._http.post("/abort_request", json={"rid": rid})
        except httpx.HTTPError as error:
            # Closing the connection aborts the request, too, a little later.
            log.info("rollout sample not aborted", engine=self.name, error=type_and_place(error))


_LAST = 10**6
"""Further from 0 than the priority of a client's request."""


def _joined(before: _Event, event: _Event) -> _Event:
    """An event with all tokens so far, from one that has only the newest."""
    logprobs = [*before.meta_info.output_token_logprobs, *event.meta_info.output_token_logprobs]
    meta = msgspec.structs.replace(event.meta_info, output_token_logprobs=logprobs)
    return _Event(output_ids=[*before.output_ids, *event.output_ids], meta_info=meta)


def _checked(event: _Event) -> _Event:
    """Raises what `generate` does where the event is an error."""
    if event.error is not None:
        raise _as_error(event.error.code, event.error.message)
    finish = event.meta_info.finish_reason
    if finish is not None and finish.type == "abort":
        message = f"SGLang aborted the request: {finish.message}"
        if finish.status_code == 503:
            # Its queue is full, or a request of a higher priority took this one's place there.
            raise EngineBusyError(message, retry_after_s=1)
        raise _as_error(finish.status_code or 500, message)
    return event


def _as_error(status: int, message: str) -> Exception:
    if status == 429:
        return EngineBusyError(message, retry_after_s=1)
    return RequestError(message) if 400 <= status < 500 else EngineError(message)


@dataclass
class _Answer:
    """One request's answer so far."""

    request: GenerateRequest
    text: AnswerText
    settings: PoolSettings
    num_tokens: int = 0

    def take(self, event: _Event) -> Iterator[Chunk]:
        """Yield the new tokens, up to what ends the answer, in one chunk for each version of the target."""
        finish, meta = event.meta_info.finish_reason, event.meta_info
        said, newest = event.output_ids, version_of_label(meta.weight_version)
        spans = [(span.version, min(span.end, len(said))) for span in meta.weight_versions[:-1]]
        for label, end in [*spans, (meta.weight_version, len(said))]:
            is_last = end == len(said)
            if end > self.num_tokens or (is_last and finish is not None):
                version = version_of_label(label)
                if version is None:
                    version = self.settings.target_version()
                    version = version if newest is None else min(version, newest - 1)
                new, found = said[self.num_tokens : end], meta.output_token_logprobs[self.num_tokens : end]
                if self.request.logprobs and [token for _, token, _ in found] != new:
                    raise EngineError("SGLang's logprobs are not those of the tokens")
                logprobs = [logprob for logprob, _, _ in found]
                chunk = self._part(new, logprobs, version, finish if is_last else None)
                yield chunk
                if chunk.finish_reason is not None:
                    return

    def _part(self, new: list[int], logprobs: list[float], version: int, finish: _Finish | None) -> Chunk:
        num_taken = 0
        for token in new[: self.request.max_tokens - self.num_tokens]:
            self.text.push(token, "target")
            num_taken += 1
            if self.text.stopped:
                break
        self.num_tokens += num_taken
        reason: Literal["stop", "length"] | None = None
        if self.text.stopped or (finish is not None and finish.type == "stop"):
            reason = "stop"
        elif finish is not None:
            reason = "length"
        shown = self.text.take() if reason is None else self.text.finish()
        greedy = not self.request.sampling.temperature
        return Chunk(
            text="".join(piece.text for piece in shown),
            pieces=tuple(shown),
            token_ids=tuple(new[:num_taken]),
            finish_reason=reason,
            logprobs=tuple(0.0 if greedy else logprob for logprob in logprobs[:num_taken]),
            target_version=version,
        )


@dataclass
class ServerPool:
    """The servers that rollouts run on: the one at `urls`, or those behind the routers there. An `EnginePool`."""

    urls: Sequence[str]
    is_routed: bool
    settings: PoolSettings
    poll_s: float = POLL_S
    _engines: dict[str, SglangRolloutEngine] = field(default_factory=dict)
    _polls: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The last poll of each server, which may be under way: one that does not answer holds up no other."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set)
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=_TIMEOUT_S, trust_env=False))

    @asynccontextmanager
    async def running(self, on_change: Callable[[Iterable[RolloutEngine]], None]) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._poll_repeatedly(on_change))
        try:
            yield
        finally:
            under_way = [looking, *self._polls.values()]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await asyncio.gather(*self._closing, *(engine.close() for engine in self._engines.values()))
            self._http.close()

    async def poll(self, on_change: Callable[[Iterable[RolloutEngine]], None]) -> None:
        urls = await self._servers() if self.is_routed else self.urls
        gone = {url: self._engines.pop(url) for url in self._engines.keys() - urls}
        new = {url: SglangRolloutEngine(url, self.settings) for url in urls if url not in self._engines}
        self._engines |= new
        for url, engine in gone.items():
            self._polls.pop(url).cancel()
            closing = asyncio.create_task(engine.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for url, engine in self._engines.items():
            if url not in self._polls or self._polls[url].done():
                self._polls[url] = asyncio.create_task(engine.poll())
        if self._engines:
            await asyncio.wait([self._polls[url] for url in self._engines], timeout=_PATIENCE_S)
        newest = max((engine.target_label for engine in self._engines.values() if engine.is_answering), default=0)
        for engine in self._engines.values():
            engine.check_weights(newest)
        if gone or new:
            log.info("rollout servers", servers=sorted(engine.name for engine in self._engines.values()))
            on_change(self._engines.values())
        for task in self._polls.values():
            if task.done():
                task.result()

    async def _servers(self) -> Sequence[str]:
        """The addresses of the servers; those known so far where no router answers."""
        listed = await asyncio.to_thread(list_servers, self._http, self.urls)
        return tuple(self._engines) if listed is None else listed

    async def _poll_repeatedly(self, on_change: Callable[[Iterable[RolloutEngine]], None]) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self.poll(on_change)
            except Exception as error:
                log.error("rollout servers not polled", error=type_and_place(error))
            await asyncio.sleep(max(self.poll_s - (time.monotonic() - began_s), 0.05))
