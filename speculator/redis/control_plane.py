"""Control plane in Redis between trainer, operator and engines: draft versions, canary, depths, reports, load."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis.client import RedisKeys, redis_errors, until_unraced

ENGINE_TTL_S = 30
RESTING_TTL_S = 60
POOL_METRICS_TTL_S = 10
AWAITED_S = 10.0
"""An engine that failed to get the canary slot counts as waiting for so long; it asks every few seconds."""
CRASHES_KEPT_S = 24 * 3600
_ATTEMPTS = 5
_MOST_SKEW_MS = 24 * 3600 * 1000
"""How far the clocks of engines may differ: by hours where one runs on local time."""


class CanaryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Holder of the canary slot, and the draft version that it tries."""

    engine_id: str
    process: str
    """Distinguishes processes that use, or used, the same engine id."""
    version: int


class CanarySlot(NamedTuple):
    """State of the canary slot after an engine asked for it."""

    is_held: bool
    """Whether the asking engine holds the slot."""
    is_awaited: bool
    """Whether another engine has failed to get the slot lately."""
    num_crashed: int
    """Crashes: other processes that began a trial of the version within a day, and neither released the slot nor
    outlasted their probation. Only set for the holder."""


class DraftPointer:
    """The draft version that engines should run, the canary slot, and the engines' reports."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)

    @redis_errors
    def publish(self, version: int) -> None:
        self._redis.set(self._keys.desired_draft, version)

    @redis_errors
    def published(self) -> int | None:
        """The version last published; None before the first."""
        return _number(self._redis.get(self._keys.desired_draft), self._keys.desired_draft)

    @redis_errors
    def replace(self, old: int, new: int) -> bool:
        """Publish `new` if `old` is still published; returns whether it did."""
        key = self._keys.desired_draft

        def swap(transaction: Any) -> None:
            found = _number(transaction.get(key), key)
            transaction.multi()
            if found == old:
                transaction.set(key, new)

        return bool(self._transact(swap, key))

    @redis_errors
    def pin(self, version: int) -> None:
        """Have engines run this version, whatever is published, until `unpin`."""
        self._redis.set(self._keys.pinned_draft, version)

    @redis_errors
    def unpin(self) -> None:
        self._redis.delete(self._keys.pinned_draft)

    @redis_errors
    def pinned(self) -> int | None:
        return _number(self._redis.get(self._keys.pinned_draft), self._keys.pinned_draft)

    @redis_errors
    def desired(self) -> int | None:
        """The version that engines should run: the pinned one, else the published one, else None."""
        keys = (self._keys.pinned_draft, self._keys.desired_draft)
        pinned, published = map(_number, self._redis.mget(keys), keys)
        return published if pinned is None else pinned

    @redis_errors
    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None:
        """Replace an engine's status; it disappears ENGINE_TTL_S after its last report."""
        key, ttl_ms = self._keys.engine(engine_id), int(ENGINE_TTL_S * 1000)
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.delete(key)
            transaction.hset(key, mapping=dict(status))
            transaction.pexpire(key, ttl_ms)
            transaction.zadd(self._keys.engines, {engine_id: now_ms() + ttl_ms})
            # Long after they have expired: an engine whose clock is ahead must not remove the others.
            transaction.zremrangebyscore(self._keys.engines, "-inf", now_ms() - _MOST_SKEW_MS)
            transaction.execute()

    @redis_errors
    def engines(self) -> dict[str, dict[str, str]]:
        """The latest status of every engine that reported within ENGINE_TTL_S, by engine id."""
        ids = [engine_id.decode() for engine_id in self._redis.zrange(self._keys.engines, 0, -1)]
        with self._redis.pipeline(transaction=False) as pipeline:
            for engine_id in ids:
                pipeline.hgetall(self._keys.engine(engine_id))
            reports = pipeline.execute()
        return {
            engine_id: {field.decode(): value.decode() for field, value in report.items()}
            for engine_id, report in zip(ids, reports, strict=True)
            if report
        }

    @redis_errors
    def hold_pool_metrics(self, gateway: str) -> bool:
        """Whether this gateway exports the pool's metrics: the first that asks, until it has not asked for
        POOL_METRICS_TTL_S. Otherwise a sum over several gateways would count each engine several times.
        """
        key = self._keys.pool_metrics
        if self._redis.set(key, gateway, nx=True, ex=POOL_METRICS_TTL_S):
            return True
        if self._redis.get(key) != gateway.encode():
            return False
        self._redis.set(key, gateway, ex=POOL_METRICS_TTL_S)
        return True

    @redis_errors
    def set_trainer_resting(self, is_resting: bool) -> None:
        """Set for RESTING_TTL_S that the trainer pauses, or clear it."""
        if is_resting:
            self._redis.set(self._keys.trainer_resting, 1, ex=RESTING_TTL_S)
        else:
            self._redis.delete(self._keys.trainer_resting)

    @redis_errors
    def is_trainer_resting(self) -> bool:
        # By GET, which every user's rules allow.
        return self._redis.get(self._keys.trainer_resting) is not None

    @redis_errors
    def hold_canary(self, holder: CanaryHolder, *, ttl_s: float, on_probation: bool) -> CanarySlot:
        """Take the canary's slot for `ttl_s` seconds, or renew it.

        Only one engine holds it. A restarted engine may take it over from its former process. A process that ends
        `on_probation` without `release_canary` counts as a crash. Raises StreamError.
        """

        def take(transaction: Any) -> None:
            found = self._holder(transaction.get(self._keys.canary))
            transaction.multi()
            if found is None or found.engine_id == holder.engine_id:
                self._hold(transaction, holder, ttl_s, on_probation)
            else:
                transaction.set(self._keys.canary_awaited, holder.engine_id, px=int(AWAITED_S * 1000))

        results = self._transact(take, self._keys.canary)
        if len(results) == 1:
            return CanarySlot(is_held=False, is_awaited=True, num_crashed=0)
        processes, waiting = results[-2:]
        others = set(processes) - {holder.process.encode()}
        return CanarySlot(True, waiting not in (None, holder.engine_id.encode()), len(others))

    @redis_errors
    def release_canary(self, holder: CanaryHolder, *, forget_crashes: bool = False) -> None:
        """Release the slot if `holder` has it; its process then does not count as crashed.

        `forget_crashes` also clears the crashes of other processes that tried the version. Raises StreamError.
        """
        trials = self._keys.canary_trials(holder.version)

        def give_back(transaction: Any) -> None:
            found = self._holder(transaction.get(self._keys.canary))
            transaction.multi()
            if found == holder:
                transaction.delete(self._keys.canary)
            if forget_crashes:
                transaction.delete(trials)
            else:
                transaction.zrem(trials, holder.process)

        self._transact(give_back, self._keys.canary)

    def _transact(self, work: Callable[[Any], None], key: str) -> list[Any]:
        """`Redis.transaction`, which retries for ever, with a bounded number of attempts."""

        def once() -> list[Any]:
            with self._redis.pipeline(transaction=True) as transaction:
                transaction.watch(key)
                work(transaction)
                results: list[Any] = transaction.execute()
                return results

        return until_unraced(once, attempts=_ATTEMPTS, what=key)

    def _hold(self, transaction: Any, holder: CanaryHolder, ttl_s: float, on_probation: bool) -> None:
        trials = self._keys.canary_trials(holder.version)
        transaction.set(self._keys.canary, msgspec.json.encode(holder), px=int(ttl_s * 1000))
        if on_probation:
            transaction.zadd(trials, {holder.process: now_ms()})
            transaction.pexpire(trials, CRASHES_KEPT_S * 1000)
        else:
            transaction.zrem(trials, holder.process)
        transaction.zrange(trials, 0, -1)
        transaction.get(self._keys.canary_awaited)

    def _holder(self, document: bytes | None) -> CanaryHolder | None:
        try:
            return None if document is None else msgspec.json.decode(document, type=CanaryHolder)
        except msgspec.MsgspecError as error:
            raise StreamError(
                f"Redis has something at {self._keys.canary} that Slipstream did not write ({error}): delete that key"
            ) from error


_MAX_ENDED = 4096


class EndedGroups:
    """Prompt groups without running samples: gateways add them, and engines drop their text."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._key = RedisKeys(model_key=model_key).ended_groups
        self._last_id: str | None = None

    @redis_errors
    def add(self, tenant: str, group_id: str) -> None:
        self._redis.xadd(self._key, {"tenant": tenant, "group_id": group_id}, maxlen=_MAX_ENDED)

    @redis_errors
    def read(self) -> list[tuple[str, str]]:
        """(tenant, group id) of groups added since the last call; [] at the first call."""
        if self._last_id is None:
            newest = self._redis.xrevrange(self._key, count=1)
            self._last_id = newest[0][0].decode() if newest else "0"
            return []
        rows = self._redis.xrange(self._key, min=f"({self._last_id}", count=_MAX_ENDED)
        if rows:
            self._last_id = rows[-1][0].decode()
        return [(fields[b"tenant"].decode(), fields[b"group_id"].decode()) for _, fields in rows]


def _number(value: bytes | None, key: str) -> int | None:
    """The number stored at `key`; raises StreamError where another client has written something else."""
    if value is None:
        return None
    if not (value.isdigit() and len(value) < 10):
        raise StreamError(f"Redis has {value[:20]!r} at {key}, which Slipstream did not write: delete that key")
    return int(value)


LINGER_S = 0.03
"""Pauses between steps of up to so many seconds count as busy: the GPU may still run what the step launched."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine_id() -> str:
    """Id of this machine, equal in all its processes and containers until it reboots; outside Linux the host name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def gpu_id(device: Any) -> str:
    """UUID of a `torch.device`'s GPU, the same in all containers; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


class EngineLoad:
    """Measures the share of time that an engine spends in steps.

    The engine's thread calls `stepping`, another thread `report`. Neither locks, so the share may be off by one step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, gpu: str = "") -> None:
        """`clock` gives seconds. `gpu` is the engine's GPU (`gpu_id`)."""
        self._clock, self._gpu = clock, gpu
        self._busy_s, self._changed_s, self._is_stepping = 0.0, clock() - LINGER_S, False
        self._reported_busy_s, self._reported_s = 0.0, clock()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose one step of the engine."""
        self._change(is_stepping=True)
        try:
            yield
        finally:
            self._change(is_stepping=False)

    def report(self) -> dict[str, str | float]:
        """Fields of the engine's report: its machine, its GPU, and `busy`, the share of time in steps since the last
        call.
        """
        now_s = self._clock()
        busy_s = self._busy_s + (now_s - self._changed_s if self._is_stepping else 0.0)
        share = (busy_s - self._reported_busy_s) / max(now_s - self._reported_s, 1e-6)
        self._reported_busy_s, self._reported_s = busy_s, now_s
        return {"machine": machine_id(), "card": self._gpu, "busy": round(min(max(share, 0.0), 1.0), 3)}

    def _change(self, *, is_stepping: bool) -> None:
        now_s = self._clock()
        passed_s = now_s - self._changed_s
        if self._is_stepping or passed_s < LINGER_S:
            self._busy_s += passed_s
        self._changed_s, self._is_stepping = now_s, is_stepping


def busiest_local_engine(reports: Mapping[str, Mapping[str, str]]) -> float:
    """Return how busy the busiest engine of this machine is, from 0 to 1; 0 where none reports. `reports` are fields
    by engine id, as `DraftPointer.engines` reads them.
    """
    return max((_busy(report) for report in reports.values() if report.get("machine") == machine_id()), default=0.0)


def are_heads_asleep(reports: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether there are engines, and all report that they do not use their draft head."""
    return bool(reports) and all(report.get("asleep") == "1" for report in reports.values())


def is_gpu_busy(reports: Mapping[str, Mapping[str, str]], gpu: str) -> bool:
    """Whether an engine on this GPU was in a step lately; False if `gpu` is empty."""
    return bool(gpu) and any(_busy(report) > 0 for report in reports.values() if report.get("card") == gpu)


def _busy(report: Mapping[str, str]) -> float:
    """The busy share in a report; 0 if it cannot be read, since the engine may run another release."""
    with contextlib.suppress(ValueError):
        if 0 <= (busy := float(report.get("busy", ""))) <= 1:
            return busy
    return 0.0
