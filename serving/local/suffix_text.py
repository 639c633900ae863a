"""Text that suffix drafts come from: what this engine has written, and what others have of the same prompt groups."""

from __future__ import annotations

from collections.abc import Callable

from serving.engine import GenerateRequest
from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupKey
from serving.metrics import EngineMetrics
from speculator.proposals.suffix_drafter import SuffixDrafter, SuffixRequest

SuffixCacheTask = Callable[[SuffixDrafter], None]
"""A change of the text that is kept."""


class RecentTexts:
    """Used by the engine's thread. Without `drafter` no text is kept."""

    def __init__(self, drafter: SuffixDrafter | None, sharing: GroupSharing | None, metrics: EngineMetrics) -> None:
        self.drafter, self._sharing, self._metrics = drafter, sharing, metrics

    def begin(self, request: GenerateRequest) -> SuffixRequest | None:
        """What proposes from text for this request."""
        if self.drafter is None:
            return None
        policy = request.policy
        # Who opts out of capture leaves nothing for other requests, either.
        found = self.drafter.start(
            request.prompt_token_ids, tenant=policy.tenant, group_id=policy.group_id, shared=policy.capture
        )
        if self._sharing is not None and found.group is not None:
            found.publish = self._sharing.join(GroupKey(policy.tenant, policy.group_id), found.group, found.context)
        return found

    def take_shared(self) -> None:
        """A little of what has come from other engines."""
        if self._sharing is not None:
            self._sharing.take()

    def target_moved(self, version: int) -> None:
        if self.drafter is not None:
            self.drafter.target_moved()
        if self._sharing is not None:
            self._sharing.set_target_version(version)

    def change(self, task: SuffixCacheTask) -> None:
        if self.drafter is not None:
            task(self.drafter)
            self.count()

    def count(self) -> None:
        """Report how many tokens are kept."""
        if self.drafter is not None:
            self._metrics.suffix_tokens.set(self.drafter.num_tokens)
