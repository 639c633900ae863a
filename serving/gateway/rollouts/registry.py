"""The registry of rollouts: running ones, and for a while ended ones.

    submit ──▶ running ──(every sample has ended)──▶ ended ──(kept for a while, or no room)──▶ forgotten
                  └──(DELETE, or no client for a while)──▶ cancelled, and so ended

A rollout is visible to its tenant alone. Its finished samples are kept as the lines that clients get, in the order in
which they ended: a client that lost its connection asks for the lines after the last one it has. Nothing is written
to disk, so a restart of the gateway loses all rollouts.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from serving.rollout.driver import Driver
from serving.rollout.engines import RolloutEngine
from serving.rollout.order import ContextAware
from serving.rollout.samples import EndReason, GroupWork, SampleResult, SampleState, Turn
from serving.rollout.scheduler import Policy
from speculator.errors import EngineError, RequestError

log = structlog.get_logger(__name__)
_TICK_S = 0.1
_MAX_FORGOTTEN = 10_000
"""Ids of forgotten rollouts that are kept, to answer 410 and not 404."""
_RETRY_S = 5
_ERASURE_S = 10.0
"""How long `erase` waits for the event loop."""
ENGINE_GRACE_S = 30.0
"""How long no engine may run before waiting clients get an error: time for a restart."""


class RolloutRegistry:
    """All rollouts of a gateway. For the event loop, except `erase`; `running` cancels and forgets in time."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        settings: GatewaySettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self.clock = settings, clock
        policy = Policy(order=ContextAware(), chunk_tokens=settings.rollout_chunk_tokens)
        self.driver = Driver(engines, policy, on_ended=self._on_sample_end, on_turn=self._on_turn, clock=clock)
        self._rollouts: dict[tuple[str, str], Rollout] = {}
        self._by_key: dict[str, Rollout] = {}
        self._forgotten: deque[tuple[str, str]] = deque(maxlen=_MAX_FORGOTTEN)
        self.ended: Counter[EndReason] = Counter()
        """Samples that ended since the start, by reason."""
        self._last_engine_s = clock()
        """When an engine was last seen alive."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        ticking = asyncio.create_task(self._tick_on())
        try:
            yield
        finally:
            self._loop = None
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await self.driver.close()

    @property
    def has_no_engine(self) -> bool:
        """Whether no engine has run for longer than a restart takes."""
        return not self.driver.has_engine and self.clock() - self._last_engine_s > ENGINE_GRACE_S

    # -- what clients ask for -----------------------------------------------------------------------------------------

    def check_size(self, num_samples: int, num_tokens: int = 0) -> None:
        """Raise RequestError for a rollout above the limits, even alone; `num_tokens`: the most that it may hold."""
        samples, tokens = self._settings.rollout_max_samples, self._settings.rollout_max_tokens
        if num_samples > samples or num_tokens > tokens:
            counted = f"{num_samples} samples" + (
                f" with up to {num_tokens} tokens, prompts included" if num_tokens else ""
            )
            message = f"{counted}; at most {samples} and {tokens} tokens here: split the rollout."
            raise RequestError(message, param="groups", code="rollout_too_large")

    def submit(self, tenant: str, rollout_id: str, key: str, groups: dict[str, GroupWork], asked: str) -> Rollout:
        """Begin a rollout whose groups are called `key`/name; `asked` is a hash of the request. Raises ApiError (409,
        429, 503) or RequestError.
        """
        if (known := self._rollouts.get((tenant, rollout_id))) is not None:
            if known.asked != asked:
                # A client that takes it for its own would get the samples of other prompts.
                message = f"There is a rollout {rollout_id} with other groups or options: choose another id."
                raise ApiError(409, message, code="rollout_differs", param="id")
            message = f"There is a rollout {rollout_id} already: ask for its samples, or choose another id."
            raise ApiError(409, message, code="rollout_exists", param="id")
        if not self.driver.has_engine:
            raise ApiError(503, "No engine runs: retry later.", code="engine_unavailable", retry_after_s=_RETRY_S)
        rollout = Rollout(
            tenant=tenant,
            rollout_id=rollout_id,
            key=key,
            groups=groups,
            asked=asked,
            created_s=int(time.time()),
            seen_s=self.clock(),
        )
        self._make_room(rollout)
        self._rollouts[tenant, rollout_id] = self._by_key[key] = rollout
        self.driver.submit(groups.values())
        return rollout

    def find(self, tenant: str, rollout_id: str) -> Rollout:
        """A tenant's rollout; counts as a sign of life of its client. Raises ApiError (404, 410)."""
        rollout = self._rollouts.get((tenant, rollout_id))
        if rollout is None:
            if (tenant, rollout_id) in self._forgotten:
                message = "This rollout has ended and was deleted."
                raise ApiError(410, message, code="rollout_forgotten", param="rollout_id")
            raise ApiError(404, "There is no such rollout.", code="rollout_not_found", param="rollout_id")
        rollout.seen_s = self.clock()
        return rollout

    def cancel(self, rollout: Rollout, names: Collection[str] = ()) -> None:
        """Cancel the samples that have not ended, of the groups `names` or of all."""
        rollout.is_cancelled = rollout.is_cancelled or (not names and rollout.ended_s is None)
        self.driver.cancel(work.request.group_id for name, work in rollout.groups.items() if not names or name in names)

    def erase(self, tenants: Collection[str]) -> None:
        """End and forget all rollouts of these tenants, and wait for it; for threads other than the event loop's.

        Raises EngineError if the event loop does not do it in time.
        """
        loop = self._loop
        if loop is None:
            return  # the app is not served yet, or no more: there are no rollouts
        try:
            asyncio.run_coroutine_threadsafe(self._erase(tenants), loop).result(_ERASURE_S)
        except TimeoutError:
            raise EngineError("the gateway has not yet forgotten the rollouts of erased tenants") from None

    @contextmanager
    def reading(self, rollout: Rollout) -> Iterator[None]:
        """Enclose the time in which a client is connected to the rollout's stream."""
        rollout.num_readers += 1
        try:
            yield
        finally:
            rollout.num_readers -= 1
            rollout.seen_s = self.clock()
            if rollout.ended_s is not None:
                # A slow client's stream may be cut long after the end, and it comes for the rest.
                rollout.ended_s = rollout.seen_s

    def counts_of(self, rollout: Rollout) -> Counter[SampleState]:
        counts = Counter(rollout.ends.values())
        for work in rollout.groups.values():
            of_group = self.driver.counts_of(work.request.group_id)
            counts.update({state: count for state, count in of_group.items() if not state.has_ended})
        return counts

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Cancel rollouts that no client has asked about lately, forget old ended ones, and run the driver's tick."""
        now_s = self.clock()
        for rollout in list(self._rollouts.values()):
            if rollout.ended_s is not None:
                if now_s - rollout.ended_s > self._settings.rollout_keep_s and not rollout.num_readers:
                    self._forget(rollout)
            elif not rollout.num_readers and now_s - rollout.seen_s > self._settings.rollout_grace_s:
                log.info("rollout abandoned", rollout=rollout.key, num_ended=len(rollout.ends))
                self.cancel(rollout)
        self.driver.tick()
        if self.driver.has_engine:
            self._last_engine_s = now_s

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
            except Exception:
                # A bug here; the next tick does the rest.
                log.exception("rollouts not looked after, will retry")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _on_sample_end(self, result: SampleResult) -> None:
        self.ended[result.reason] += 1
        key, _, name = result.sample_id.group_id.partition("/")
        rollout = self._by_key[key]
        if len(rollout.ends) + 1 == rollout.num_samples:
            rollout.ended_s = self.clock()
        rollout.add(name, result)

    def _on_turn(self, turn: Turn) -> None:
        key, _, name = turn.sample_id.group_id.partition("/")
        self._by_key[key].add_turn(name, turn)

    def _make_room(self, rollout: Rollout) -> None:
        """Forget the rollouts that ended first until a new one fits. Raises ApiError (429), or RequestError if it never
        fits.
        """
        self.check_size(rollout.num_samples, rollout.num_tokens)
        samples, tokens = self._settings.rollout_max_samples, self._settings.rollout_max_tokens
        known = [*self._rollouts.values()]
        over_samples = sum(one.num_samples for one in known) + rollout.num_samples - samples
        over_tokens = sum(one.num_tokens for one in known) + rollout.num_tokens - tokens
        given_up = []
        for one in sorted((one for one in known if one.ended_s is not None), key=lambda one: one.ended_s or 0.0):
            if over_samples <= 0 and over_tokens <= 0:
                break
            if not one.num_readers:
                given_up.append(one)
                over_samples -= one.num_samples
                over_tokens -= one.num_tokens
        if over_samples > 0 or over_tokens > 0:
            message = "The limit on running samples is reached: retry later."
            raise ApiError(429, message, code="rollouts_full", retry_after_s=_RETRY_S)
        for one in given_up:
            self._forget(one)

    async def _erase(self, tenants: Collection[str]) -> None:
        for rollout in [one for one in self._rollouts.values() if one.tenant in tenants]:
            self.cancel(rollout)
            # A stream that is being read gets no further line.
            rollout.lines.clear()
            rollout.ends.clear()
            self._forget(rollout)

    def _forget(self, rollout: Rollout) -> None:
        del self._rollouts[rollout.tenant, rollout.rollout_id], self._by_key[rollout.key]
        self._forgotten.append((rollout.tenant, rollout.rollout_id))


_LOGPROB_DIGITS = 6


@dataclass(kw_only=True)
class Rollout:
    """One rollout: its groups, and the encoded lines of its finished samples."""

    tenant: str
    rollout_id: str
    key: str
    """Unique prefix of its group and request ids; not chosen by a client."""
    groups: dict[str, GroupWork]
    asked: str
    """Hash of the request that began it."""
    created_s: int
    """Unix time."""
    seen_s: float
    """When a client last asked about it, on the registry's clock."""
    lines: list[bytes] = field(default_factory=list)
    """Encoded lines of ended samples, and of turns that wait for their environments; a client's cursor counts them."""
    ends: dict[tuple[str, int], SampleState] = field(default_factory=dict)
    """How each sample ended, by group and number."""
    num_readers: int = 0
    is_cancelled: bool = False
    ended_s: float | None = None
    """When its last sample ended or, later, its last reader left."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, at every change."""

    @functools.cached_property
    def num_samples(self) -> int:
        return sum(len(work.request.seeds) for work in self.groups.values())

    @functools.cached_property
    def num_tokens(self) -> int:
        """The most tokens that it may hold."""
        return sum(
            len(work.request.prompt_token_ids) + len(work.request.seeds) * work.request.max_tokens
            for work in self.groups.values()
        )

    @property
    def state(self) -> str:
        if self.ended_s is None:
            return "running"
        return "cancelled" if self.is_cancelled else "ended"

    def add(self, name: str, result: SampleResult) -> None:
        """A sample of the group `name` has ended."""
        number, work = result.sample_id.number, self.groups[name]
        logprobs = [round(logprob, _LOGPROB_DIGITS) for logprob in result.logprobs] if work.logprobs else None
        document = {
            "object": "rollout.sample",
            "number": len(self.lines),
            "group_id": name,
            "sample": number,
            "seed": work.request.seeds[number],
            "state": result.state,
            "finish_reason": result.reason,
            "tokens": result.tokens,
            "text": result.text,
            "logprobs": logprobs,
            "target_version": result.target_version,
            "engine": result.engine or None,
            "num_leases": result.num_leases,
            "turns": result.turns if work.request.turn_tokens is not None else None,
            "detail": result.detail or None,
        }
        self.ends[name, number] = result.state
        self._append_line(document)

    def add_turn(self, name: str, turn: Turn) -> None:
        """A sample of the group `name` has ended a turn and waits for its environment."""
        document = {
            "object": "rollout.turn",
            "number": len(self.lines),
            "group_id": name,
            "sample": turn.sample_id.number,
            "turn": turn.number,
            "finish_reason": turn.reason,
            "tokens": turn.tokens,
            "text": turn.text,
        }
        self._append_line(document)

    def _append_line(self, document: dict[str, Any]) -> None:
        self.lines.append(msgspec.json.encode(document))
        self.changed.set()
        self.changed = asyncio.Event()
