"""Whom a round is told to: the metrics, both speedups, the watch of the draft and the traces of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from serving.engine import Proposed, Stratum, Verification, WatchedRound
from serving.local.decode.rounds import RoundReport
from serving.local.request import Generation
from serving.metrics import EngineMetrics
from serving.speedup import EstimatedSpeedup, HeadArm, SpeedupMeter
from speculator.tracing import record


@dataclass(frozen=True)
class Round:
    """A round that has just run, with the requests of its rows."""

    report: RoundReport
    running: Sequence[Generation]
    depth: int
    is_control: bool
    draft_version: int
    target_version: int
    head_arm: HeadArm


class RoundTeller:
    """Used by the engine's thread; `on_round` must not block."""

    def __init__(
        self, metrics: EngineMetrics, meter: SpeedupMeter, on_round: Callable[[WatchedRound], object] | None
    ) -> None:
        self._metrics, self._meter, self._on_round = metrics, meter, on_round
        self.estimated_speedup = EstimatedSpeedup()

    def tell(self, round_: Round) -> None:
        report = round_.report
        plan = report.plan
        self._metrics.observe_round(
            batch=report.batch,
            drafted=report.drafted,
            read_prompt=report.read_prompt,
            seconds=report.seconds,
            committed=report.committed,
            proposed=report.proposed,
            depths=report.depths,
            accepted=report.accepted,
            from_head=report.from_head,
            look=None if report.look is None else report.look.is_right,
            expected=(plan.expected_tokens, plan.expected_s),
        )
        if not report.read_prompt:
            self._measure(round_)
            if round_.head_arm.counts:
                self._metrics.observe_head_ab(
                    batch=report.batch,
                    with_head=round_.head_arm.may_ask,
                    seconds=report.seconds,
                    committed=report.committed,
                    asked=plan.uses_head,
                )
        if plan.expected_s:
            self.estimated_speedup.add(
                batch=report.batch, committed=report.committed, expected_s=plan.expected_s, plain_s=plan.plain_s
            )
        if self._on_round is not None:
            self._on_round(_watched(round_))
        _record_spans(round_)

    def _measure(self, round_: Round) -> None:
        report = round_.report
        policies = [generation.request.policy for generation in round_.running]
        self._meter.add(
            batch=report.batch,
            drafted=report.drafted,
            seconds=report.seconds,
            committed=report.committed,
            earned=[
                ((policy.tenant, policy.domain), tokens) for policy, tokens in zip(policies, report.earned, strict=True)
            ],
        )


def _record_spans(round_: Round) -> None:
    """One in each answer that is traced."""
    report = round_.report
    rows = zip(round_.running, report.proposed, report.accepted, report.from_head, strict=True)
    for generation, proposed, accepted, is_heads in rows:
        record(
            generation.parent,
            "verify",
            report.seconds,
            batch=report.batch,
            depth=round_.depth,
            proposed=proposed,
            accepted=accepted,
            from_head=is_heads,
            draft_version=round_.draft_version,
            read_prompt=report.read_prompt,
        )


def _watched(round_: Round) -> WatchedRound:
    report = round_.report
    return WatchedRound(
        version=round_.draft_version,
        target_version=round_.target_version,
        batch=report.batch,
        drafted=not round_.is_control,
        seconds=report.seconds,
        committed=report.committed,
        proposed=_proposed(report, round_.depth),
        read_prompt=report.read_prompt,
        verifications=tuple(_verifications(round_)),
    )


def _proposed(report: RoundReport, depth: int) -> Proposed | None:
    """None where the head was not asked, or had more to read than a round of its own commits."""
    if not any(report.from_head) or report.num_pairs > report.batch * (depth + 1):
        return None
    by_draft = sum(num for num, is_heads in zip(report.proposed, report.from_head, strict=True) if is_heads)
    return Proposed(by_draft, report.num_tokens - report.batch - by_draft)


def _stratum(generation: Generation) -> Stratum:
    quarters = math.ceil(4 * generation.num_suffix_rounds / generation.num_rounds)
    return generation.stratum._replace(remembered=quarters)


def _verifications(round_: Round) -> Iterator[Verification]:
    report = round_.report
    for generation, accepted, is_heads in zip(round_.running, report.accepted, report.from_head, strict=True):
        if is_heads:
            yield Verification(generation.request.request_id, _stratum(generation), accepted, round_.depth)
    if (look := report.look) is not None:
        looked_at = round_.running[look.row]
        stratum = _stratum(looked_at)._replace(of_looks=True)
        yield Verification(looked_at.request.request_id, stratum, look.accepted, 1)
