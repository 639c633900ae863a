"""Text that suffix drafts come from: what this engine has written, and what others have of the same prompt groups."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from serving.engine import GenerateRequest
from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupKey
from serving.metrics import EngineMetrics
from speculator.proposals.suffix_drafter import SuffixDrafter, SuffixRequest

Errand = Callable[[SuffixDrafter], None]
"""Something to do with the text that is kept, between two steps."""


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

    def run(self, errands: Collection[tuple[Errand, Future[None]]]) -> None:
        """All of them are told that they are done, also those behind one that fails."""
        try:
            if self.drafter is not None:
                for errand, _ in errands:
                    errand(self.drafter)
                self.count()
        finally:
            for _, done in errands:
                done.set_result(None)

    def count(self) -> None:
        if self.drafter is not None:
            self._metrics.suffix_tokens.set(self.drafter.num_tokens)
