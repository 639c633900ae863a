"""Feeds SGLang's adaptive speculation: the depth of each decode step, and what the steps cost and earn.

SGLang switches between prebuilt states, one for each candidate depth; depth 0 drafts nothing and keeps the draft's
cache warm. The planner of both engines says which one is next (`speculator.proposals.planner`). Without
`--speculative-adaptive` the depth is fixed and only the measuring remains.

A step's acceptance is known when its result is processed, its time when the device is through with it; with overlap
scheduling both come after the next step was launched, in order.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serving.engine import Proposed, Stratum, Verification, WatchedRound, stratum_of
from serving.sglang.capture.request import parent_of, policy_of, sampling_of
from serving.sglang.device import Device, Mark
from serving.sglang.draft_sleep import Dormancy
from serving.speedup import ControlShare, EstimatedSpeedup, Group, SpeedupMeter
from speculator.proposals.planner import FadingMean, RoundPlanner
from speculator.tracing import Parent, record

_ASKED = "_slipstream_asked"


class _Asked(NamedTuple):
    """What is measured apart: whose request it is, and what kind; and the span that its rounds' are put under."""

    group: Group
    stratum: Stratum
    parent: Parent | None


@dataclass(eq=False)
class _Round:
    version: int
    target_version: int
    batch: int
    depth: int
    is_control: bool
    cold: tuple[bool, ...]
    requests: tuple[tuple[str, _Asked], ...]
    """(request id, what it asked)."""
    seconds: float | None = None
    accepted: Sequence[int] | None = None


class TimedStep(NamedTuple):
    """What a decode step took, `seconds` against those of a server without a draft."""

    batch: int
    depth: int
    seconds: float
    reading_s: float = 0.0
    """In which the draft has read what a step at depth 0 committed."""


class DepthControl:
    """Used by the scheduler's thread."""

    def __init__(
        self,
        depths: Sequence[int],
        clock: StepClock,
        meter: SpeedupMeter,
        *,
        dormancy: Dormancy,
        version: int,
        control: ControlShare,
        is_alone: bool = True,
        on_round: Callable[[WatchedRound], object] | None = None,
    ) -> None:
        """`depths` are those that can be chosen, 0 first; where 0 is not among them, the depth is fixed.

        With `dormancy` a draft that does not pay is not kept up to date. `version` is the draft in service, `control`
        the share of plain steps. Where a rank is not alone, all learn the same times at meetings: `take_times`,
        `learn_times`. `on_round` is told what each step says about the draft and must not block.
        """
        self._depths, self._clock, self.meter, self._is_alone = depths, clock, meter, is_alone
        self._planner = RoundPlanner(max_depth=depths[-1]) if 0 in depths else None
        self._times: list[TimedStep] = []
        self._estimated = EstimatedSpeedup()
        self.tally = RoundTally()
        self._dormancy, self._version, self._control, self._on_round = dormancy, version, control, on_round
        self._is_control = False
        self._reading = FadingMean(0.0)
        """What the draft's reading of a step at depth 0 takes, in plain steps."""
        self._are_cold = False
        """All requests of the last step: what they accept is not observed, so nothing says that drafting pays."""
        self._rounds: deque[_Round] = deque()
        self.limit: int | None = None
        """The most that the operator allows, as agreed at the last meeting; None allows all."""
        self.depth = 0
        self.target_version = 0
        """Set by the follower's thread when a new target is announced."""
        self.num_verifications = self.num_verified_tokens = 0
        """Requests' verifications with proposals, and the tokens that they committed, bonus included."""

    def steps_for(self, batch: int) -> int:
        """The depth of the next decode step."""
        assert self._planner is not None
        if self._dormancy.is_asleep:
            return 0
        if self._control.is_control(batch):
            self._is_control = True
            return 0
        if self._are_cold:
            return 0
        plan = self._planner.plan_depth(
            batch, [depth for depth in self._depths if self.limit is None or depth <= self.limit]
        )
        return plan.num_proposals

    @property
    def is_asleep(self) -> bool:
        return self._planner is not None and self._dormancy.is_asleep

    def needs_no_reading(self, requests: Sequence[Any]) -> bool:
        """Whether the draft need not read what a step at depth 0 commits to these requests."""
        return self.is_asleep or (self._planner is not None and self._dormancy.are_cold(requests))

    def reads_prompt_of(self, requests: list[Any]) -> bool:
        """Whether the draft reads a prefill of these requests; where it does not, they go cold."""
        reads = self._planner is None or self._dormancy.reads_prompts
        if not reads:
            self._dormancy.mark(requests)
        return reads

    def arrived(self, request: Any) -> None:
        """A request whose prefix SGLang has not looked for yet."""
        namespace = "" if self._planner is None else self._dormancy.prefix_namespace
        if namespace:
            request.extra_key = f"{request.extra_key}|{namespace}" if request.extra_key else namespace

    def started(self) -> None:
        """A decode step begins."""
        self._clock.start()

    def committed(self) -> None:
        """A step at depth 0 has its tokens, and now the draft reads them. A server without drafts would end here."""
        self._clock.commit()

    def interrupted(self) -> None:
        """A prefill runs instead of a decode step."""
        self._clock.interrupt()

    def launched(self, requests: list[Any], depth: int) -> None:
        """A decode step with `depth` proposals a request has been launched; prefills are not told."""
        self.depth = depth
        if self.is_asleep:
            self._dormancy.mark(requests)
        cold = tuple(self._dormancy.is_cold(request) for request in requests)
        asked = tuple((str(request.rid), _asked_by(request)) for request in requests)
        round_ = _Round(self._version, self.target_version, len(requests), depth, self._is_control, cold, asked)
        self._are_cold = self._dormancy.are_cold(requests)
        if self._planner is not None and self._dormancy.is_asleep and self._dormancy.slept():
            self._planner.look_again()
        self._is_control = False
        self._rounds.append(round_)
        self._clock.stop(round_)
        for timed in self._clock.finished():
            done = timed.about
            done.seconds = timed.committed_s if done.is_control else timed.whole_s
            # A server without a draft has no reading behind its steps.
            seconds = timed.whole_s if done.depth else timed.committed_s
            self._times.append(TimedStep(done.batch, done.depth, seconds, timed.whole_s - seconds))
        if self._is_alone:
            self.learn_times(self.take_times())
        self._settle()

    def take_times(self) -> list[TimedStep]:
        """What this rank's steps took since this was last asked."""
        times, self._times = self._times, []
        return times

    def learn_times(self, times: list[TimedStep]) -> None:
        """Plan by these from now on, too."""
        if self._planner is None:
            return
        for step in times:
            self._planner.observe_round(step.batch, step.depth, step.seconds)
            if step.reading_s:
                self._reading.add(step.reading_s / step.seconds)

    def verified(self, accepted: Sequence[int]) -> None:
        """The result of the oldest launched step: accepted proposals of each request."""
        round_ = next((round_ for round_ in self._rounds if round_.accepted is None), None)
        if round_ is None:
            return
        round_.accepted = list(accepted)
        if self._planner is not None and not round_.is_control:
            self._weigh(self._planner, round_, sum(accepted))
        if round_.depth > 0:
            if self._planner is not None:
                for count, is_cold in zip(round_.accepted, round_.cold, strict=True):
                    if not is_cold:
                        self._planner.positions.add(round_.depth, count)
            self.num_verifications += round_.batch
            self.num_verified_tokens += round_.batch + sum(round_.accepted)
        self._settle()

    def _weigh(self, planner: RoundPlanner, done: _Round, num_accepted: int) -> None:
        """Does the draft save time? By what all ranks know: expected times, and what was accepted."""
        plain_s = planner.times.verify_s(done.batch, 0, 0)
        if self.is_asleep or all(done.cold) or not plain_s:
            return
        took = planner.times.verify_s(done.batch, done.depth, 0) / plain_s if done.depth else 1 + self._reading.value
        self._dormancy.saved(1 + num_accepted / done.batch - took)

    def renewed(self, version: int) -> None:
        """Another draft version is in service."""
        self._version = version
        self._dormancy.wake()
        if self._planner is not None:
            self._planner.renew()

    def explanation(self) -> dict[str, str]:
        """What the choice of the depth rests on, empty where it is fixed: the share of proposals at each position that
        are accepted once reached, and the milliseconds of a step by batch size and depth.
        """
        if self._planner is None:
            return {}
        rates = [f"{self._planner.positions.rate(position):.3f}" for position in range(1, self._depths[-1] + 1)]
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
        committed = done.batch + sum(accepted)
        groups = [asked.group for _, asked in done.requests]
        self.meter.add(
            batch=done.batch,
            drafted=not done.is_control,
            seconds=seconds,
            committed=committed,
            earned=[(group, 1 + count) for group, count in zip(groups, accepted, strict=True)],
        )
        self.tally.add(drafted=not done.is_control, depth=done.depth, seconds=seconds, accepted=accepted)
        if self._planner is not None and not done.is_control:
            expected_s, plain_s = (self._planner.times.verify_s(done.batch, depth, 0) for depth in (done.depth, 0))
            if plain_s:
                self._estimated.add(batch=done.batch, committed=committed, expected_s=expected_s, plain_s=plain_s)
        _record(done, seconds, accepted)
        if self._on_round is None:
            return
        self._on_round(_watched(done, seconds, accepted))


def _asked_by(request: Any) -> _Asked:
    """Read from a request once; it is kept with it."""
    asked: _Asked | None = getattr(request, _ASKED, None)
    if asked is None:
        params = request.sampling_params
        policy = policy_of(params.custom_params)
        stratum = stratum_of(policy.domain, sampling_of(params))
        asked = _Asked((policy.tenant, policy.domain), stratum, parent_of(params.custom_params))
        setattr(request, _ASKED, asked)
    return asked


def _watched(done: _Round, seconds: float, accepted: Sequence[int]) -> WatchedRound:
    rows = zip(done.requests, accepted, done.cold, strict=True) if done.depth > 0 else ()
    return WatchedRound(
        version=done.version,
        target_version=done.target_version,
        batch=done.batch,
        drafted=not done.is_control,
        seconds=seconds,
        committed=done.batch + sum(accepted),
        proposed=Proposed(done.batch * done.depth) if done.depth > 0 else None,
        verifications=tuple(
            Verification(request_id, asked.stratum, count, done.depth)
            for (request_id, asked), count, is_cold in rows
            if not is_cold
        ),
    )


def _record(done: _Round, seconds: float, accepted: Sequence[int]) -> None:
    """A span in each answer that is traced. It ends now: with overlap scheduling up to a step after its round."""
    for (_, asked), count in zip(done.requests, accepted, strict=True):
        record(
            asked.parent,
            "verify",
            seconds,
            batch=done.batch,
            depth=done.depth,
            accepted=count,
            draft_version=done.version,
        )


class QuietSwitches(logging.Filter):
    """SGLang logs every switch of the depth; control rounds would fill its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Switch adaptive runtime state" not in record.getMessage()


_MODES = ("speculative", "control")


class RoundTally:
    """What decode steps add up to since the start. Written by the scheduler's thread, read by the follower's."""

    def __init__(self) -> None:
        self._rounds, self._tokens = dict.fromkeys(_MODES, 0), dict.fromkeys(_MODES, 0)
        self._seconds = dict.fromkeys(_MODES, 0.0)
        self._proposals, self._accepted = Counter[int](), Counter[int]()

    def add(self, *, drafted: bool, depth: int, seconds: float, accepted: Sequence[int]) -> None:
        """A step with `depth` proposals for each request, of which so many were accepted."""
        mode = "speculative" if drafted else "control"
        self._rounds[mode] += 1
        self._seconds[mode] += seconds
        self._tokens[mode] += len(accepted) + sum(accepted)
        for position in range(1, depth + 1):
            self._proposals[position] += len(accepted)
            self._accepted[position] += sum(count >= position for count in accepted)

    def report(self) -> dict[str, str]:
        """Fields of the engine's report, each `name=count,…`."""
        return {
            "rounds": _counts(self._rounds),
            "decode_ms": _counts({mode: round(1000 * seconds) for mode, seconds in self._seconds.items()}),
            "round_tokens": _counts(self._tokens),
            # Copied in one piece: the other thread may be adding a position.
            "proposals": _counts(self._proposals.copy()),
            "accepted": _counts(self._accepted.copy()),
        }


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in counts.items())


@dataclass(frozen=True)
class StepTime:
    """One measured step, with whatever `stop` was told about it."""

    committed_s: float
    """Until it had its tokens."""
    whole_s: float
    """With the draft's reading of them."""
    about: Any


_LONGEST_GAP_S = 1.0
"""Between two steps. What waits longer was held up by something else than its steps."""


class StepClock:
    """How long decode steps take on the device, where one may run on when the next one starts; used by one thread.

    A step begins where the one before it ended: what SGLang does in between, and a client waits for, is part of it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._started = device.mark()
        self._committed: Mark | None = None
        self._last: Mark | None = None
        """The end of the step before, where nothing has come between."""
        self._stopped_s = 0.0
        self._running: deque[tuple[Mark, Mark, Mark, Any]] = deque()

    def start(self) -> None:
        if time.monotonic() - self._stopped_s > _LONGEST_GAP_S:
            self._last = None
        self._started = self._last or self._device.mark()
        self._committed = None

    def commit(self) -> None:
        """The step has its tokens, before `stop`; where nobody says so, it has them at its end."""
        self._committed = self._device.mark()

    def stop(self, about: Any) -> None:
        """The step is over."""
        over = self._device.mark()
        self._last, self._stopped_s = over, time.monotonic()
        self._running.append((self._started, self._committed or over, over, about))

    def interrupt(self) -> None:
        """Something else runs before the next step."""
        self._last = None

    def finished(self) -> list[StepTime]:
        """The steps that have ended since the last call, oldest first; never waits."""
        times = []
        while self._running and self._running[0][2].is_reached:
            start, committed, over, about = self._running.popleft()
            times.append(StepTime(committed.seconds_since(start), over.seconds_since(start), about))
        return times
