"""Where the engines of one model agree how far a version has spread: a small document in Redis, changed in one step.

No process leads. Whoever asks for a place, or has one, reads the document and the reports of the living, lets the
policy decide (speculator/waves.py), and writes; where another was quicker it reads again. An engine that dies in
between has changed nothing, and its report ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import redis

from speculator.errors import StreamError
from speculator.keys import RedisKeys
from speculator.redis_client import redis_errors
from speculator.waves import EngineView, Spread

Views = Callable[[], dict[str, EngineView]]
Change = Callable[[Spread | None, Views], Spread | None]
"""From what is written, and the living engines where they matter, to what is to be written; None changes nothing."""

_ATTEMPTS = 5
_NUMBERS = ("version", "trial_target", "wants", "trial_verifications")
_FIELDS = (*_NUMBERS, "trial_life")


class ChangesSpread(Protocol):
    """What an engine needs of it; `Fleet`, or whoever connects later (serving/sglang/pointer.py)."""

    def change_spread(self, change: Change) -> Spread | None: ...


class Fleet:
    """The engines of one model. `model_key` names the target's fingerprint: engines of another are another fleet."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)

    @redis_errors
    def spread(self) -> Spread | None:
        """None before the first version was tried. Raises StreamError, also for what is none of ours."""
        return self._decoded(self._redis.get(self._keys.spread))

    @redis_errors
    def change_spread(self, change: Change) -> Spread | None:
        """The spread after the change; as it is where `change` wants none, or others were quicker several times.

        `change` may be called more than once. Raises StreamError, and what `change` raises.
        """
        found = None
        for _ in range(_ATTEMPTS):
            with self._redis.pipeline(transaction=True) as transaction:
                transaction.watch(self._keys.spread)
                found = self._decoded(transaction.get(self._keys.spread))
                changed = change(found, self.views)
                if changed is None or changed == found:
                    return found
                transaction.multi()
                transaction.set(self._keys.spread, msgspec.json.encode(changed))
                try:
                    transaction.execute()
                except redis.WatchError:
                    continue
                return changed
        return found

    @redis_errors
    def views(self) -> dict[str, EngineView]:
        """The engines that reported lately and take part, by engine id."""
        ids = [engine_id.decode() for engine_id in self._redis.zrange(self._keys.engines, 0, -1)]
        with self._redis.pipeline(transaction=False) as asked:
            for engine_id in ids:
                asked.hmget(self._keys.engine(engine_id), _FIELDS)
            found = asked.execute()
        views = {
            engine_id: _view(dict(zip(_FIELDS, values, strict=True)))
            for engine_id, values in zip(ids, found, strict=True)
        }
        return {engine_id: view for engine_id, view in views.items() if view is not None}

    def _decoded(self, document: bytes | None) -> Spread | None:
        try:
            return None if document is None else msgspec.json.decode(document, type=Spread)
        except msgspec.MsgspecError as error:
            raise StreamError(
                f"Redis has something at {self._keys.spread} that is none of ours ({error}): delete that key"
            ) from error


def _view(report: Mapping[str, bytes | None]) -> EngineView | None:
    """None where the report has expired, or is of an engine that takes no part: it does not say what it wants."""
    numbers = {name: int(value) for name in _NUMBERS if (value := report[name]) is not None and value.isdigit()}
    if len(numbers) < len(_NUMBERS):
        return None
    return EngineView(
        draft=numbers["version"],
        target=numbers["trial_target"],
        wants=numbers["wants"],
        verifications=numbers["trial_verifications"],
        life=(report["trial_life"] or b"").decode(errors="replace"),
    )
