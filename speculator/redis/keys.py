"""Every Redis key of Slipstream.

All keys of a model share one prefix, and one transaction can change them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculator.redis.stream_accounting import LedgerKeys


@dataclass(frozen=True, kw_only=True)
class RedisKeys:
    """The names of one model's keys; `model_key` is a slug that the caller derives from the target's name."""

    model_key: str

    def _key(self, name: str) -> str:
        return f"slipstream:{{{self.model_key}}}:{name}"

    @property
    def ledger(self) -> LedgerKeys:
        return LedgerKeys(
            traces=self._key("traces"),
            sizes=self._key("sizes"),
            num_appended=self._key("num_appended"),
            accounts=self._key("accounts"),
            open=self._key("open"),
            former_erased=self._key("erased"),
        )

    @property
    def dead_letters(self) -> str:
        return self._key("dead_letters")

    @property
    def desired_draft(self) -> str:
        return self._key("desired_draft")

    @property
    def pinned_draft(self) -> str:
        return self._key("pinned_draft")

    @property
    def erasures(self) -> str:
        """Hash: time of the order in milliseconds by tenant."""
        return self._key("erasures")

    @property
    def rewards(self) -> str:
        return self._key("rewards")

    @property
    def trainers(self) -> str:
        """Hash: the last report of each trainer process by its name."""
        return self._key("trainers")

    @property
    def engines(self) -> str:
        """Sorted set of engine ids by the time, in milliseconds, at which their report expires."""
        return self._key("engines")

    def engine(self, engine_id: str) -> str:
        return self._key(f"engine:{engine_id}")

    @property
    def canary(self) -> str:
        """String: the engine that may try a version before it is confirmed; expires where it is not renewed."""
        return self._key("canary")

    @property
    def canary_awaited(self) -> str:
        """String: the id of an engine that asked for the canary's slot in vain; expires soon."""
        return self._key("canary_awaited")

    def canary_trials(self, version: int) -> str:
        """Sorted set: processes that began to try a version and have not ended in order, by time in milliseconds."""
        return self._key(f"canary_trials:{version}")

    def depth(self, engine_id: str) -> str:
        return self._key(f"depth:{engine_id}")

    def target_version(self, process: str) -> str:
        return self._key(f"target_version:{process}")

    @property
    def group_texts(self) -> str:
        """Sorted set of the groups that have a text, by the time, in milliseconds, at which it was last added to."""
        return self._key("group_texts")

    def group_text(self, group: str) -> str:
        """String: serving/group_cache/texts.py; `group` is a member of `group_texts`."""
        return self._key(f"group_text:{group}")
