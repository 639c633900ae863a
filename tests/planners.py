"""Planners whose rounds depend on nothing that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from speculator.proposals.planner import HeadVerdict, Plan, RoundPlanner


class FixedPlanner(RoundPlanner):
    """Always asks the head. Its chains end where the probability that the next token is reached and accepted, as the
    head itself sees it and on average over the requests, falls below `min_confidence`.
    """

    def __init__(self, min_confidence: float = 0.0) -> None:
        super().__init__(max_depth=0)
        self._min_confidence = min_confidence

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        batch = len(domains)
        return Plan(batch=batch, num_keys=num_keys, uses_head=head_depth > 0, from_suffix=(False,) * batch)

    @property
    def is_awake(self) -> bool:
        return True

    def head_probability(self, step: int, probability: float) -> float:
        return probability

    def is_worth_verifying(self, plan: Plan, num_proposals: int, reach: float, of_suffixes: float = 0.0) -> bool:
        return (reach + of_suffixes) / plan.batch >= self._min_confidence

    def is_worth_drafting(self, plan: Plan, num_steps: int, reach: float) -> bool:
        return True

    def observe(
        self, plan: Plan, *, num_proposals: int, num_steps: int, num_pairs: int, draft_s: float, verify_s: float | None
    ) -> None:
        """Nothing is measured."""

    def observe_head(self, verdicts: Iterable[HeadVerdict]) -> None:
        """Nothing is learned."""


class WholeTrees(FixedPlanner):
    """Every suffix tree, up to eight tokens of it, whatever that takes."""

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        batch = len(domains)
        return Plan(batch=batch, num_keys=num_keys, num_proposals=8, from_suffix=(False,) * batch)
