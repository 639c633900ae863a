"""Tenants that are to be forgotten: a standing order in Redis, and who has carried it out.

    slipstream tenants erase ──▶ order(tenant, now) ──▶ engines and trainers look every few seconds, forget, report

An order stays. Whoever starts later, or is given an older backup, forgets too: what was created up to the order's time.
Engines say how far they are in their report (`DraftPointer.report_engine`, field `erased_ms`), trainers here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import redis

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis.client import redis_errors
from speculator.redis.keys import RedisKeys

TRAINER_TTL_S = 120.0
"""A trainer that has not reported for so long is taken to have stopped; a step, or a gate, takes less."""


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer process says about itself."""

    at_ms: int
    erased_ms: int
    """Time of the newest order that it has carried out; 0 for none."""
    removed: dict[str, int] = {}
    """Traces that it has removed for orders since its start, by tenant."""


class Erasures:
    """One model's orders."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        keys = RedisKeys(model_key=model_key)
        self._orders, self._trainers = keys.erasures, keys.trainers

    @redis_errors
    def order(self, tenant: str) -> int:
        """From now on everything of this tenant up to now is to be forgotten; returns the order's time, unique."""
        newest = max(self.orders().values(), default=0)
        at_ms = max(now_ms(), newest + 1)
        self._redis.hset(self._orders, tenant, at_ms)
        return at_ms

    @redis_errors
    def orders(self) -> dict[str, int]:
        """Time of the order in milliseconds by tenant."""
        try:
            return {tenant.decode(): int(at_ms) for tenant, at_ms in self._redis.hgetall(self._orders).items()}
        except ValueError as error:
            raise _none_of_ours(self._orders, error) from error

    @redis_errors
    def report(self, trainer: str, report: TrainerReport) -> None:
        self._redis.hset(self._trainers, trainer, msgspec.json.encode(report))

    @redis_errors
    def leave(self, trainer: str) -> None:
        """The trainer has stopped."""
        self._redis.hdel(self._trainers, trainer)

    @redis_errors
    def trainers(self) -> dict[str, TrainerReport]:
        """Those that run, as far as can be told."""
        since_ms = now_ms() - int(1000 * TRAINER_TTL_S)
        try:
            found = {
                name.decode(): msgspec.json.decode(report, type=TrainerReport)
                for name, report in self._redis.hgetall(self._trainers).items()
            }
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _none_of_ours(self._trainers, error) from error
        return {name: report for name, report in found.items() if report.at_ms >= since_ms}


def _none_of_ours(key: str, error: Exception) -> StreamError:
    return StreamError(f"somebody else has written to {key} in Redis ({error}): remove what is none of ours")


def covers(orders: Mapping[str, int], tenant: str, created_ms: int) -> bool:
    """Whether a trace is one of those to be forgotten."""
    return created_ms <= orders.get(tenant, -1)
