"""The step loop of the local engine: install staged weights, admit, read a prompt chunk, decode a round.

Nothing in a step waits for Redis, the disk or a client. After a round `RoundObserver` updates the metrics, both
speedups, the trial of the draft, and tracing spans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from serving.acceptance import AcceptanceByLength, ProposalSource
from serving.engine import Proposed, Stratum, SwapReport, TargetReport, Verification, WatchedRound
from serving.local.capture import LocalCapture
from serving.local.config import LocalEngineConfig
from serving.local.decode.proposer import RecentTexts, VerifiedProposal
from serving.local.decode.rounds import PrefillChunk, RoundReport, RoundRunner
from serving.local.draft import ServingDraft, StagedWeights
from serving.local.request import ActiveRequest
from serving.local.scheduler.queue import Inbox, Slots
from serving.local.target.model import StagedTarget, Target
from serving.metrics import TEXTS, EngineMetrics
from serving.speedup import HEAD_AB_ARMS, AbSpeedup, Arm, ControlShare, EstimatedSpeedup, SpeedupMeter
from speculator.errors import EngineDeadError
from speculator.proposals.planner import RoundPlanner
from speculator.redis.control_plane import EngineLoad
from speculator.tracing import record

_ALONE_EVERY = 8
_NO_DRAFTING = Arm(is_on=False, counts=False)


class DecodeLoop:
    """Runs the steps on the engine's thread. Other threads may set `depth` at any time, and read `target_version`.

    When the target's weights change, a running answer continues under the new weights with the old KV cache: as in a
    partial rollout, one policy begins it and another ends it. Its trace ends at the change, so no trace has labels of
    two targets. A prompt that is still being read is read again.
    """

    def __init__(
        self,
        config: LocalEngineConfig,
        *,
        inbox: Inbox,
        target: Target,
        draft: ServingDraft,
        planner: RoundPlanner,
        texts: RecentTexts,
        runner: RoundRunner,
        capture: LocalCapture,
        observer: RoundObserver,
        metrics: EngineMetrics,
        load: EngineLoad,
    ) -> None:
        self._inbox, self._target, self._draft, self._planner = inbox, target, draft, planner
        self._runner, self._capture, self._observer, self._metrics = runner, capture, observer, metrics
        self._prefill_chunk = config.prefill_chunk
        self._control = ControlShare(config.control_share)
        self.head_ab = AbSpeedup(config.head_off_share)
        self.end_to_end = AbSpeedup(config.plain_share)
        self._prompts_s = 0.0
        """Time of prefills since the last round."""
        self._slots = Slots(runner, num_slots=config.num_slots, prompt_labels=config.prompt_labels)
        self._load, self._num_steps, self._num_shareable = load, 0, 0
        self._texts, self._depth, self.target_version = texts, config.depth, 0

    @property
    def num_running(self) -> int:
        return len(self._slots.running)

    def run(self) -> None:
        """Run steps until the inbox is closed; running requests then end unfinished."""
        while self._inbox.wait(is_busy=bool(self._slots.all_requests)):
            with self._load.stepping():
                self.step()

    def step(self) -> None:
        started = time.perf_counter()
        self._num_steps += 1
        self._inbox.run_tasks()
        self._texts.index_received()
        self._metrics.aborted.inc(self._inbox.drop_aborted() + self._slots.drop_aborted())
        self._admit()
        piece = self._next_chunk()
        if piece is not None and not self._reads_in_round(piece):
            self._prefill(piece)
            piece = None
        self._prompts_s += time.perf_counter() - started
        if batch := self.num_running:
            started, arm = time.perf_counter(), self.end_to_end.next_arm()
            drafts = any(generation.request.drafts for generation in self._slots.running)
            committed = self._decode(piece, is_plain=not (arm.is_on and drafts))
            seconds, prompts_s = time.perf_counter() - started, self._prompts_s
            if drafts:  # or the round would be plain in both arms
                self.end_to_end.add(arm, batch=batch, seconds=seconds, committed=committed, prompts_s=prompts_s)
            self._prompts_s = 0.0

    def end(self) -> None:
        """Abort all requests that have a slot."""
        for generation in self._slots.all_requests:
            generation.abort()

    def install_draft(self, staged: StagedWeights) -> SwapReport:
        """Install a staged draft between two steps; on failure the version in service stays."""
        previous, started = self._draft.version, time.perf_counter()
        self._draft.install(staged)
        stall_s = time.perf_counter() - started
        # Otherwise siblings would copy keys of the old draft again and again.
        for generation in self._slots.all_requests:
            generation.can_share_draft_kv = generation.num_pairs_read == 0
        self._planner.renew()
        self._metrics.swaps.labels("installed").inc()
        self._metrics.swap_stall.observe(stall_s)
        self._metrics.draft_version.set(staged.version)
        self._metrics.last_swap.set_to_current_time()
        return SwapReport(version=staged.version, previous=previous, stall_ms=1000 * stall_s, step=self._num_steps)

    def install_target(self, version: int, staged: StagedTarget) -> TargetReport:
        """Install new target weights between two steps. A failure ends the engine, since half-copied weights must not
        serve.
        """
        previous, started = self.target_version, time.perf_counter()
        try:
            for slot, generation in enumerate(self._slots.running):
                self._hand_over(slot, generation)
                generation.capture = False
                # Its KV cache is the old target's.
                generation.can_share_prefix_kv = False
            if self._slots.prefilling is not None:
                self._slots.prefilling.restart_prefill()
            self._capture.cancel_labels()
            self._target.install(staged)
            self.target_version = version
            self._planner.renew()
            self._texts.target_updated(version)
        except Exception as error:
            raise EngineDeadError("the engine stopped while the target moved") from error
        return TargetReport(version=version, previous=previous, stall_ms=1000 * (time.perf_counter() - started))

    def _admit(self) -> None:
        while self._slots.can_admit and (generation := self._inbox.next_request()) is not None:
            # First, so that a later failure still aborts the request and its client is told.
            self._slots.admit(generation)
            generation.suffix = self._texts.begin(generation.request)

    def _next_chunk(self) -> PrefillChunk | None:
        if (generation := self._slots.prefilling) is None:
            return None
        start = generation.num_prefilled
        end = min(start + self._prefill_chunk, generation.num_prompt_tokens)
        return PrefillChunk(generation, self.num_running, start, generation.tokens[start:end])

    def _reads_in_round(self, piece: PrefillChunk) -> bool:
        """Whether to read the chunk in a round's pass, which reads the weights once for both. Every eighth chunk is
        read alone, and so is one before a control round unless it is the prompt's last: otherwise no round would be
        timed while prompts keep coming.
        """
        if not self._target.takes_windows or self.num_running == 0:
            return False
        # Not after a prompt's last chunk: the round then has one more request, another batch size.
        if not piece.ends_prompt and self._control.is_due(self.num_running):
            return False
        self._num_shareable += 1
        return self._num_shareable % _ALONE_EVERY > 0

    def _prefill(self, piece: PrefillChunk) -> None:
        started = time.perf_counter()
        self._runner.prefill(piece, drafting=self._depth > 0)
        self._end_chunk(piece, time.perf_counter() - started, in_round=False)
        self._finish_done()

    def _decode(self, piece: PrefillChunk | None, *, is_plain: bool) -> int:
        """Run a round; returns how many tokens it committed."""
        running = self._slots.running
        is_put_off = piece is not None and self._control.is_due(len(running))
        is_control = is_plain or (not is_put_off and self._control.is_control(len(running)))
        depth = 0 if is_control else self._depth
        arm = self.head_ab.next_arm() if depth else _NO_DRAFTING
        report = self._runner.run(running, depth, piece, may_ask_head=arm.is_on)
        self._observer.observe(report, is_control=is_control, target_version=self.target_version, head_arm=arm)
        if piece is not None:
            self._end_chunk(piece, report.seconds, in_round=True)
        else:
            self.head_ab.add(arm, batch=report.batch, seconds=report.seconds, committed=report.committed, prompts_s=0.0)
        self._finish_done()
        return report.committed

    def _end_chunk(self, piece: PrefillChunk, seconds: float, *, in_round: bool) -> None:
        """Record a span for a chunk that was read; after the prompt's last chunk its request starts to decode."""
        record(piece.generation.parent, "prefill", seconds, tokens=len(piece.tokens), in_round=in_round)
        if piece.ends_prompt:
            self._slots.start_decoding()

    def _finish_done(self) -> None:
        for generation in [generation for generation in self._slots.running if generation.finish_reason]:
            self._hand_over(self._slots.running.index(generation), generation)
            self._slots.free(generation)
            self._texts.count()

    def _hand_over(self, slot: int, generation: ActiveRequest) -> None:
        features = partial(self._runner.features, slot)
        self._capture.hand_over(generation, features, target_version=self.target_version)


class RoundObserver:
    """Reports each round to metrics, speedup meter, tracing and `on_round`, which must not block."""

    def __init__(
        self, metrics: EngineMetrics, meter: SpeedupMeter, on_round: Callable[[WatchedRound], object] | None
    ) -> None:
        self._metrics, self._meter, self._on_round = metrics, meter, on_round
        self.estimated_speedup, self.by_length = EstimatedSpeedup(), AcceptanceByLength()

    def observe(self, report: RoundReport, *, is_control: bool, target_version: int, head_arm: Arm) -> None:
        plan, rows = report.proposals.plan, report.rows
        self._count(report)
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
                self._count_head_ab(report, with_head=head_arm.is_on)
        if report.depth > 0:
            self._count_verifications(report)
            self._count_by_length(rows)
        if plan.expected_s:
            self.estimated_speedup.add(
                batch=report.batch, committed=report.committed, expected_s=plan.expected_s, plain_s=plan.plain_s
            )
        if self._on_round is not None:
            self._on_round(_watched(report, is_control=is_control, target_version=target_version))
        _record_spans(report)

    def _count(self, report: RoundReport) -> None:
        size = str(report.batch)
        mode = "with_prompt" if report.read_prompt else "speculative" if report.depth else "control"
        self._metrics.rounds.labels(mode, size).inc()
        self._metrics.round_seconds.labels(mode, size).inc(report.seconds)
        self._metrics.round_tokens.labels(mode, size).inc(report.committed)
        if mode == "speculative":
            self._metrics.expected_tokens.labels(size).inc(report.proposals.plan.expected_tokens)
            self._metrics.expected_seconds.labels(size).inc(report.proposals.plan.expected_s)

    def _count_verifications(self, report: RoundReport) -> None:
        if report.proposals.probe is not None:
            self._metrics.probes.labels("accepted" if report.probe_was_right else "rejected").inc()
        self._metrics.verifications.inc(report.batch)
        self._metrics.verified_tokens.inc(report.batch + sum(row.num_accepted for row in report.rows))
        for row in report.rows:
            for text in row.accepted_sources:
                self._metrics.accepted_text.labels(TEXTS[text]).inc()
            tree, source = row.proposal.tree, "head" if row.from_head else "suffix"
            self._metrics.proposed_tokens.labels(source).inc(len(tree.tokens))
            for position in range(tree.depth):
                self._metrics.proposals.labels(source, str(position + 1)).inc()
                self._metrics.accepted.labels(source, str(position + 1)).inc(position < row.num_accepted)

    def _count_head_ab(self, report: RoundReport, *, with_head: bool) -> None:
        arm, size = HEAD_AB_ARMS[with_head], str(report.batch)
        self._metrics.head_ab_rounds.labels(arm, size).inc()
        self._metrics.head_ab_seconds.labels(arm, size).inc(report.seconds)
        self._metrics.head_ab_tokens.labels(arm, size).inc(report.committed)
        self._metrics.head_ab_asked.inc(report.proposals.plan.uses_head)

    def _count_by_length(self, rows: Sequence[VerifiedProposal]) -> None:
        by_source: dict[ProposalSource, list[VerifiedProposal]] = {
            "head": [row for row in rows if row.from_head],
            "suffix": [row for row in rows if not row.from_head and row.proposal.tree.tokens],
        }
        for source, of_source in by_source.items():
            committed = [row.num_committed for row in of_source]
            before = [(row.generation, count) for row, count in zip(of_source, committed, strict=True)]
            self.by_length.add(
                source,
                [len(one.tokens) - count for one, count in before],
                [one.num_completion_tokens - count for one, count in before],
                committed,
            )


def _record_spans(report: RoundReport) -> None:
    """Record a span of the round for each answer that is traced."""
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
    """None where the head did not run, or had more pairs to read than after a usual round."""
    by_head = [len(row.proposal.tree.tokens) for row in report.rows if row.from_head]
    if not by_head or report.proposals.num_pairs > report.batch * (report.depth + 1):
        return None
    return Proposed(sum(by_head), report.num_tokens - report.batch - sum(by_head))


def _verifications(report: RoundReport) -> Iterator[Verification]:
    for row in report.rows:
        if row.from_head:
            request_id = row.generation.request.request_id
            yield Verification(request_id, _stratum(row.generation), row.num_accepted, report.depth)
    if (probe := report.proposals.probe) is not None:
        probed_at = report.rows[probe.row].generation
        accepted = int(report.probe_was_right and probe.is_worth_it)
        stratum = _stratum(probed_at)._replace(of_probes=True)
        yield Verification(probed_at.request.request_id, stratum, accepted, 1)


def _stratum(generation: ActiveRequest) -> Stratum:
    quarters = math.ceil(4 * generation.num_suffix_rounds / generation.num_rounds)
    return generation.stratum._replace(remembered=quarters)
