"""Who is told of a round: the metrics, both speedups, the watch of the draft and the traces of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from serving.engine import Proposed, Stratum, Verification, WatchedRound
from serving.local.decode.rounds import RoundReport
from serving.local.request import ActiveRequest
from serving.metrics import EngineMetrics
from serving.speedup import EstimatedSpeedup, HeadArm, SpeedupMeter
from speculator.tracing import record


class RoundObserver:
    """Used by the engine's thread; `on_round` must not block."""

    def __init__(
        self, metrics: EngineMetrics, meter: SpeedupMeter, on_round: Callable[[WatchedRound], object] | None
    ) -> None:
        self._metrics, self._meter, self._on_round = metrics, meter, on_round
        self.estimated_speedup = EstimatedSpeedup()

    def observe(self, report: RoundReport, *, is_control: bool, target_version: int, head_arm: HeadArm) -> None:
        plan, look, rows = report.proposals.plan, report.proposals.look, report.rows
        self._metrics.observe_round(
            batch=report.batch,
            drafted=report.depth > 0,
            read_prompt=report.read_prompt,
            seconds=report.seconds,
            committed=report.committed,
            proposed=tuple(len(row.proposal.tree.tokens) for row in rows),
            depths=tuple(row.proposal.tree.depth for row in rows),
            accepted=tuple(row.num_accepted for row in rows),
            from_head=tuple(row.from_head for row in rows),
            look=None if look is None else report.look_was_right,
            expected=(plan.expected_tokens, plan.expected_s),
        )
        if not report.read_prompt:
            policies = [row.generation.request.policy for row in rows]
            self._meter.add(
                batch=report.batch,
                drafted=report.depth > 0,
                seconds=report.seconds,
                committed=report.committed,
                earned=[
                    ((policy.tenant, policy.domain), row.num_committed)
                    for policy, row in zip(policies, rows, strict=True)
                ],
            )
            if head_arm.counts:
                self._metrics.observe_head_ab(
                    batch=report.batch,
                    with_head=head_arm.may_ask,
                    seconds=report.seconds,
                    committed=report.committed,
                    asked=plan.uses_head,
                )
        if plan.expected_s:
            self.estimated_speedup.add(
                batch=report.batch, committed=report.committed, expected_s=plan.expected_s, plain_s=plan.plain_s
            )
        if self._on_round is not None:
            self._on_round(_watched(report, is_control=is_control, target_version=target_version))
        _record_spans(report)


def _record_spans(report: RoundReport) -> None:
    """One in each answer that is traced."""
    for row in report.rows:
        record(
            row.generation.parent,
            "verify",
            report.seconds,
            batch=report.batch,
            depth=report.depth,
            proposed=len(row.proposal.tree.tokens),
            accepted=row.num_accepted,
            from_head=row.from_head,
            draft_version=report.draft_version,
            read_prompt=report.read_prompt,
        )


def _watched(report: RoundReport, *, is_control: bool, target_version: int) -> WatchedRound:
    return WatchedRound(
        version=report.draft_version,
        target_version=target_version,
        batch=report.batch,
        drafted=not is_control,
        seconds=report.seconds,
        committed=report.committed,
        proposed=_proposed(report),
        read_prompt=report.read_prompt,
        verifications=tuple(_verifications(report)),
    )


def _proposed(report: RoundReport) -> Proposed | None:
    """None where the head was not asked, or had more to read than a round of its own commits."""
    by_head = [len(row.proposal.tree.tokens) for row in report.rows if row.from_head]
    if not by_head or report.proposals.num_pairs > report.batch * (report.depth + 1):
        return None
    return Proposed(sum(by_head), report.num_tokens - report.batch - sum(by_head))


def _verifications(report: RoundReport) -> Iterator[Verification]:
    for row in report.rows:
        if row.from_head:
            request_id = row.generation.request.request_id
            yield Verification(request_id, _stratum(row.generation), row.num_accepted, report.depth)
    if (look := report.proposals.look) is not None:
        looked_at = report.rows[look.row].generation
        accepted = int(report.look_was_right and look.is_worth_it)
        stratum = _stratum(looked_at)._replace(of_looks=True)
        yield Verification(looked_at.request.request_id, stratum, accepted, 1)


def _stratum(generation: ActiveRequest) -> Stratum:
    quarters = math.ceil(4 * generation.num_suffix_rounds / generation.num_rounds)
    return generation.stratum._replace(remembered=quarters)
