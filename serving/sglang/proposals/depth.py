"""Choose what each of SGLang's decode steps proposes, and measure what the steps cost and earn.

SGLang switches between prebuilt states, one for each candidate depth; depth 0 drafts nothing and keeps the draft's
cache warm. The planner (`speculator.proposals.length_planner`) chooses the next depth, and whether the head or earlier
text proposes. Without `--speculative-adaptive` the depth is fixed, all proposals are the head's, and only the measuring
remains.

A step's acceptance is known when its result is processed, its time when the device is through with it; with overlap
scheduling both come after the next step was launched, in order.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from serving.acceptance import SOURCES, AcceptanceByLength, LengthKey
from serving.engine import Proposed, Stratum, Verification, WatchedRound, stratum_of
from serving.sglang.capture.request import parent_of, policy_of, sampling_of
from serving.sglang.proposals.draft_sleep import DraftSleep
from serving.sglang.proposals.remembered_text import Continuations
from serving.sglang.proposals.step_clock import RoundTally, StepClock
from serving.speedup import NO_AB, AbSpeedup, Arm, ControlShare, EstimatedSpeedup, SpeedupMeter
from speculator.proposals.length_planner import LengthPlan, LengthPlanner
from speculator.proposals.planner import DecayingMean
from speculator.tracing import Parent, record

_ATTRIBUTE = "_slipstream_facts"
_HEAD, _SUFFIX = SOURCES


@dataclass(eq=False)
class _RequestFacts:
    """What the measurements need of a request: of what kind it is, and the parent of its rounds' tracing spans."""

    kind: Stratum
    parent: Parent | None
    num_prompt_tokens: int
    num_rounds: int = 0
    num_text_rounds: int = 0
    """Rounds in which earlier text proposed."""

    @property
    def stratum(self) -> Stratum:
        quarters = math.ceil(4 * self.num_text_rounds / self.num_rounds) if self.num_rounds else 0
        return self.kind._replace(remembered=quarters)


@dataclass(eq=False)
class _Round:
    version: int
    target_version: int
    depth: int
    plan: LengthPlan
    is_control: bool
    arm: Arm
    """Its arm in the A/B test of the end-to-end speedup."""
    cold: tuple[bool, ...]
    """Requests that the head has not read."""
    requests: list[Any]
    facts: tuple[_RequestFacts, ...]
    text: Continuations | None
    seconds: float | None = None
    reading_s: float = 0.0
    """Seconds of it in which the draft has read the tokens of a step without its own chains."""
    prompts_s: float = 0.0
    """Seconds of prefills before it."""
    accepted: Sequence[int] | None = None
    """Accepted proposals of each request, 0 of those that had ended."""
    ended: tuple[bool, ...] = ()
    """Requests that had ended, or were retracted: with overlap scheduling SGLang verifies these once more, and drops
    the result. Known with what was accepted.
    """
    from_text: Sequence[bool] = ()
    """Which of its proposals were earlier text; known with what was accepted."""

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def committed(self) -> int:
        """Tokens that it added to answers, once verified."""
        return self.batch - sum(self.ended) + sum(self.accepted or ())

    @property
    def uses_head(self) -> bool:
        return self.plan.uses_head

    @property
    def head_depth(self) -> int:
        """Proposals that are the head's. Without its passes it has made one; what follows that is filler."""
        return self.depth if self.uses_head else min(self.depth, 1)


class TimedStep(NamedTuple):
    """The time of a decode step, `seconds` as comparable with a server without a draft."""

    batch: int
    depth: int
    seconds: float
    uses_head: bool = True
    reading_s: float = 0.0
    """Seconds in which the draft has read the tokens of a step without its own chains."""


class DepthControl:
    """Chooses the depth of each step, and measures the steps. Used by the scheduler's thread."""

    def __init__(
        self,
        depths: Sequence[int],
        clock: StepClock,
        meter: SpeedupMeter,
        *,
        head_depth: int,
        draft_sleep: DraftSleep,
        version: int,
        control: ControlShare,
        plain_share: float = 0.0,
        is_alone: bool = True,
        on_round: Callable[[WatchedRound], object] | None = None,
    ) -> None:
        """`depths` are those that can be chosen, 0 first; where 0 is not among them, the depth is fixed. Those beyond
        `head_depth` are for earlier text alone.

        `draft_sleep` lets a draft that does not pay sleep. `version` is the draft in service, `control` the share of
        control steps, `plain_share` that of plain stretches. Several ranks all learn the same times at meetings:
        `pop_times`, `learn_times`. `on_round` is called with what each step says about the draft and must not block.
        """
        self._depths, self._clock, self.meter, self._is_alone = depths, clock, meter, is_alone
        self._head_depth = head_depth
        self._planner = LengthPlanner(max_depth=head_depth) if 0 in depths else None
        self._times: list[TimedStep] = []
        self._estimated = EstimatedSpeedup()
        self.tally = RoundTally()
        self._draft_sleep, self._version, self._control, self._on_round = draft_sleep, version, control, on_round
        self._is_control = False
        self.end_to_end = AbSpeedup(plain_share)
        self._arm = NO_AB
        self.text: Continuations | None = None
        """Continuations for the requests of the next step."""
        self.plan = LengthPlan(batch=0)
        """The plan of the next decode step."""
        self._reading: defaultdict[int, DecayingMean] = defaultdict(lambda: DecayingMean(0.0))
        """What the draft's reading of a step without its chains takes, in plain steps, by depth."""
        self._are_cold = False
        """Whether all requests of the last step are cold: the head is then not used."""
        self._rounds: deque[_Round] = deque()
        self._present: Sequence[Any] = ()
        """Requests of the last step, decode or prefill."""
        self.depth = 0
        self.target_version = 0
        """Set by the follower's thread when a new target is announced."""
        self.by_length = AcceptanceByLength()
        self.num_verifications = self.num_verified_tokens = 0
        """Requests' verifications with proposals, and the tokens that they committed, bonus included."""

    def found(self, text: Continuations | None) -> None:
        """Set the continuations for the next step's requests, before it is planned."""
        self.text = text

    def steps_for(self, batch: int) -> int:
        """The depth of the next decode step."""
        assert self._planner is not None
        nothing = LengthPlan(batch=batch)
        self._arm = self.end_to_end.next_arm()
        if self.is_asleep and self.text is None:
            self.plan = nothing
            return 0
        self._is_control = not self._arm.is_on or self._control.is_control(batch)
        self.plan = nothing if self._is_control else self._planned(self._planner, batch)
        return self.plan.num_proposals

    def _planned(self, planner: LengthPlanner, batch: int) -> LengthPlan:
        asks_head = not self.is_asleep and not self._are_cold
        gains = None
        if self.text is not None and len(self.text.counts) == batch:
            gains = self.text.gains(self._depths)
        head_depths = [depth for depth in self._depths if depth <= self._head_depth] if asks_head else [0]
        return planner.plan(batch, self._depths, head_lengths=head_depths, text_gains_BL=gains)

    @property
    def is_asleep(self) -> bool:
        return self._planner is not None and self._draft_sleep.is_asleep

    def needs_no_reading(self, requests: Sequence[Any]) -> bool:
        """Whether the draft may skip the tokens that a step without its chains commits to these requests."""
        return self.is_asleep or (self._planner is not None and self._draft_sleep.are_cold(requests))

    def reads_prompt_of(self, requests: list[Any]) -> bool:
        """Whether the draft reads a prefill of these requests; where it does not, they go cold."""
        reads = self._planner is None or self._draft_sleep.reads_prompts
        if not reads:
            self._draft_sleep.mark(requests)
        return reads

    def arrived(self, request: Any) -> None:
        """Choose the prefix cache of a request, before SGLang looks for its prefix."""
        namespace = "" if self._planner is None else self._draft_sleep.prefix_namespace
        if namespace:
            request.extra_key = f"{request.extra_key}|{namespace}" if request.extra_key else namespace

    def released(self, request: Any) -> None:
        """A request gives up its KV cache: it has ended, or was retracted and will be prefilled again."""
        self._draft_sleep.released(request)

    def started(self) -> None:
        """A decode step begins."""
        self._clock.start()

    def committed(self) -> None:
        """Mark that a step without the draft's chains has its tokens, before the draft reads them.

        A server without drafts would end here.
        """
        self._clock.commit()

    def interrupted(self, requests: Sequence[Any]) -> None:
        """A prefill of these requests runs instead of a decode step."""
        self._clock.interrupt(is_idle=all(request.finished() for request in self._present))
        self._present = requests

    def launched(self, requests: list[Any], depth: int) -> None:
        """Note a decode step with `depth` proposals a request that has been launched; leave out prefills."""
        self.depth = depth
        if self.is_asleep:
            self._draft_sleep.mark(requests)
        plan = self.plan
        if self._planner is None or depth != plan.num_proposals:
            plan = LengthPlan(batch=len(requests), num_proposals=depth, uses_head=depth > 0)
        round_ = _Round(
            self._version,
            self.target_version,
            depth,
            plan,
            self._is_control,
            self._arm,
            cold=tuple(map(self._draft_sleep.is_cold, requests)),
            requests=list(requests),
            facts=tuple(_facts_of(request) for request in requests),
            text=self.text if plan.from_text else None,
        )
        self._are_cold = self._draft_sleep.are_cold(requests)
        if self._planner is not None and self._draft_sleep.is_asleep and self._draft_sleep.count_step():
            self._planner.probe_again()
        self._is_control = False
        self._rounds.append(round_)
        self._present = round_.requests
        self._clock.stop(round_)
        for timed in self._clock.finished():
            done = timed.about
            done.seconds = timed.committed_s if done.is_control else timed.whole_s
            done.prompts_s = timed.before_s
            # Without the draft's reading where the head's chains are not used: while the draft sleeps there is none.
            seconds = timed.whole_s if done.uses_head else timed.committed_s
            done.reading_s = timed.whole_s - timed.committed_s
            self._times.append(TimedStep(done.batch, done.depth, seconds, done.uses_head, done.reading_s))
        if self._is_alone:
            self.learn_times(self.pop_times())
        self._settle()

    def pop_times(self) -> list[TimedStep]:
        """The times of this rank's steps since the last call."""
        times, self._times = self._times, []
        return times

    def learn_times(self, times: list[TimedStep]) -> None:
        """Add these times to those that the planner goes by."""
        if self._planner is None:
            return
        for step in times:
            self._planner.observe(step.batch, step.depth, step.seconds, uses_head=step.uses_head)
            if step.reading_s and (plain_s := self._planner.seconds(step.batch, 0, uses_head=False)):
                self._reading[step.depth].add(step.reading_s / plain_s)

    def verified(self, accepted: Sequence[int]) -> None:
        """The result of the oldest launched step: accepted proposals of each request."""
        round_ = next((round_ for round_ in self._rounds if round_.accepted is None), None)
        if round_ is None:
            return
        round_.ended = tuple(request.is_retracted or request.finished() for request in round_.requests)
        round_.accepted = [0 if had_ended else count for count, had_ended in zip(accepted, round_.ended, strict=True)]
        planned = round_.plan.from_text or (False,) * round_.batch
        round_.from_text = planned if round_.text is None else round_.text.agree(round_.requests, planned)
        if self._planner is not None and not round_.is_control:
            self._weigh(self._planner, round_, sum(round_.accepted))
        if round_.depth > 0:
            self._count(round_, round_.accepted)
        self._settle()

    def _count(self, done: _Round, accepted: Sequence[int]) -> None:
        """Count the accepted proposals of a round."""
        rows = zip(done.requests, done.facts, accepted, done.cold, done.from_text, done.ended, strict=True)
        for request, facts, count, is_cold, is_text, had_ended in rows:
            if had_ended:
                continue
            facts.num_rounds += 1
            facts.num_text_rounds += is_text
            if self._planner is not None and not is_cold and not is_text:
                self._planner.positions.add(done.head_depth, min(count, done.head_depth))
            # SGLang's own field for it.
            request.spec_num_cap_tokens += done.depth if is_text else done.head_depth
        num_verified = done.batch - sum(done.ended)
        self.num_verifications += num_verified
        self.num_verified_tokens += num_verified + sum(accepted)
        self._count_by_length(done, accepted)

    def _count_by_length(self, done: _Round, accepted: Sequence[int]) -> None:
        """Count accept lengths, without those of the head where it ran no passes, or had not read the request."""
        answers = np.array([len(request.output_ids) for request in done.requests])
        contexts = answers + [facts.num_prompt_tokens for facts in done.facts]
        committed, counts = np.add(accepted, 1), ~np.array(done.ended)
        from_text = np.array(done.from_text) & counts
        by_head = ~(from_text | np.array(done.cold)) & counts & done.uses_head
        for source, rows in ((_HEAD, by_head), (_SUFFIX, from_text)):
            if rows.any():
                self.by_length.add(source, contexts[rows], answers[rows], committed[rows])

    def _weigh(self, planner: LengthPlanner, done: _Round, num_accepted: int) -> None:
        """Weigh, for `DraftSleep`, the time that the head saved against the best round without its chains.

        It uses only what all ranks know: expected times, and what was accepted.
        """
        plain_s = planner.seconds(done.batch, 0, uses_head=False)
        if self.is_asleep or all(done.cold) or not plain_s:
            return
        if not done.uses_head:
            self._draft_sleep.add_saving(-self._reading[done.depth].value)
            return
        took_s = planner.seconds(done.batch, done.depth, uses_head=True)
        headless_s = done.plan.headless_s or plain_s / done.batch
        self._draft_sleep.add_saving(((done.batch + num_accepted) * headless_s - took_s) / plain_s)

    def draft_changed(self, version: int) -> None:
        """Another draft version is in service."""
        self._version = version
        self._draft_sleep.wake()
        if self._planner is not None:
            self._planner.renew()

    def explanation(self) -> dict[str, str]:
        """What the choice of the depth rests on, empty where it is fixed: the share of proposals at each position that
        are accepted once reached, and the milliseconds of a step by batch size and depth.
        """
        if self._planner is None:
            return {}
        rates = [f"{self._planner.positions.rate(position):.3f}" for position in range(1, self._head_depth + 1)]
        times = sorted(self._planner.times.verify_ms_by_size().items())
        return {
            "acceptance": ",".join(rates),
            "round_ms": ",".join(f"{batch}/{depth}={ms:.1f}" for (batch, depth), ms in times),
        }

    def report(self) -> dict[str, str | int | float]:
        """Fields of the engine's report."""
        fields: dict[str, str | int | float] = {
            "depth": self.depth,
            "asleep": int(self.is_asleep),
            "verifications": self.num_verifications,
            "verified_tokens": self.num_verified_tokens,
            **self.explanation(),
            **self.tally.report(),
            "verifications_by_length": _joined(self.by_length.verifications()),
            "tokens_by_length": _joined(self.by_length.tokens()),
        }
        if self.num_verifications:
            fields["accept_length"] = round(self.num_verified_tokens / self.num_verifications, 4)
        if (estimate := self._estimated.ratio()) is not None:
            fields["speedup_estimated"] = round(estimate, 4)
        return fields

    def _settle(self) -> None:
        while self._rounds:
            done = self._rounds[0]
            if done.seconds is None or done.accepted is None:
                return
            self._rounds.popleft()
            self._measure(done, done.seconds, done.accepted)

    def _measure(self, done: _Round, seconds: float, accepted: Sequence[int]) -> None:
        self.meter.add(batch=done.batch, drafted=not done.is_control, seconds=seconds, committed=done.committed)
        self.end_to_end.add(
            done.arm, batch=done.batch, seconds=seconds, committed=done.committed, prompts_s=done.prompts_s
        )
        self.tally.add(
            drafted=not done.is_control,
            depths=(done.head_depth, done.depth),
            seconds=seconds,
            committed=done.committed,
            accepted=accepted,
            from_text=done.from_text,
            ended=done.ended,
            sources=None if done.text is None else done.text.sources,
        )
        if self._planner is not None and not done.is_control:
            expected_s = self._planner.seconds(done.batch, done.depth, uses_head=done.uses_head)
            if not done.uses_head:
                expected_s += done.reading_s
            if plain_s := self._planner.seconds(done.batch, 0, uses_head=False):
                # Plain decoding, too, computes a row behind each answer's end.
                plain_rows = done.batch + sum(accepted)
                self._estimated.add(batch=done.batch, committed=plain_rows, expected_s=expected_s, plain_s=plain_s)
        _record(done, seconds, accepted)
        if self._on_round is None:
            return
        self._on_round(_watched(done, seconds, accepted))


def _joined(counts: Mapping[LengthKey, int]) -> str:
    return ",".join(f"{'/'.join(key)}={count}" for key, count in counts.items())


def _facts_of(request: Any) -> _RequestFacts:
    """What the measurements need of a request, read once and kept with it."""
    facts: _RequestFacts | None = getattr(request, _ATTRIBUTE, None)
    if facts is None:
        params = request.sampling_params
        policy = policy_of(params.custom_params)
        stratum = stratum_of(policy.domain, sampling_of(params))
        num_tokens = len(request.origin_input_ids)
        facts = _RequestFacts(stratum, parent_of(params.custom_params), num_tokens)
        setattr(request, _ATTRIBUTE, facts)
    return facts


def _watched(done: _Round, seconds: float, accepted: Sequence[int]) -> WatchedRound:
    is_out = map(any, zip(done.cold, done.ended, done.from_text, strict=True))
    rows = zip(done.requests, done.facts, accepted, is_out, strict=True) if done.uses_head else ()
    by_text = done.depth * sum(done.from_text)
    return WatchedRound(
        version=done.version,
        target_version=done.target_version,
        batch=done.batch,
        drafted=not done.is_control,
        seconds=seconds,
        committed=done.committed,
        proposed=Proposed(done.batch * done.depth - by_text, by_text) if done.uses_head else None,
        verifications=tuple(
            Verification(str(request.rid), facts.stratum, count, done.depth)
            for request, facts, count, is_out in rows
            if not is_out
        ),
    )


def _record(done: _Round, seconds: float, accepted: Sequence[int]) -> None:
    """A span in each answer that is traced. It ends now: with overlap scheduling up to a step after its round."""
    for facts, count, is_text, had_ended in zip(done.facts, accepted, done.from_text, done.ended, strict=True):
        if had_ended:
            continue
        record(
            facts.parent,
            "verify",
            seconds,
            batch=done.batch,
            depth=done.depth,
            accepted=count,
            from_text=is_text,
            draft_version=done.version,
        )


class DepthSwitchLogFilter(logging.Filter):
    """Drops the line that SGLang logs at every switch of the depth: control rounds would fill its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Switch adaptive runtime state" not in record.getMessage()
