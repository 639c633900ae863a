"""What SGLang is told about depth, and how steps, times and acceptance find each other."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.engine import Proposed, Stratum, WatchedRound
from serving.metrics import TEXTS
from serving.sglang.device import CpuDevice, Device
from serving.sglang.proposals.depth import DepthControl, TimedStep
from serving.sglang.proposals.draft_sleep import PROBE_EVERY_STEPS, SLEEP_AFTER_STEPS, DraftSleep
from serving.sglang.proposals.remembered_text import Continuations
from serving.sglang.proposals.step_clock import RoundTally, StepClock
from serving.sglang.report import EngineReport
from serving.speedup import ControlShare, SpeedupMeter
from speculator.proposals.suffix_drafter import TextSource
from tests.serving.sglang.harness import Finish, Request
from tests.serving.sglang.slow_device import SlowDevice

SECONDS = {0: 1.0, 1: 1.2, 3: 1.6}


def make_control(
    *,
    is_fresh: bool = False,
    control_share: float = 0.0,
    plain_share: float = 0.0,
    seen: list[WatchedRound] | None = None,
    seconds: dict[int, float] | None = None,
    device: Device | None = None,
) -> DepthControl:
    """`seconds` by depth, of rounds of one request, are planned by instead of the measured ones."""
    control = DepthControl(
        [0, 1, 3],
        StepClock(device or CpuDevice()),
        SpeedupMeter(),
        head_depth=3,
        draft_sleep=DraftSleep(is_fresh=is_fresh),
        version=1,
        control=ControlShare(control_share),
        plain_share=plain_share,
        is_alone=not seconds,
        on_round=None if seen is None else seen.append,
    )
    control.learn_times([TimedStep(1, depth, cost, uses_head=depth > 0) for depth, cost in (seconds or {}).items()] * 8)
    return control


def requests(count: int) -> list[Any]:
    """Greedy ones of one domain."""
    params = {"custom_params": {"slipstream": {"tenant": "t", "domain": "code"}}, "top_k": 1}
    return [Request([1, 2, 3], f"r{index}", **params) for index in range(count)]


def step(control: DepthControl, batch: list[Any], *, accepts: bool = False) -> int:
    depth = control.steps_for(len(batch))
    control.started()
    control.launched(batch, depth)
    control.verified([depth if accepts else 0] * len(batch))
    return depth


def test_a_fresh_draft_is_never_run_until_there_is_another_version() -> None:
    control, batch = make_control(is_fresh=True), requests(2)
    assert {step(control, batch) for _ in range(2 * PROBE_EVERY_STEPS)} == {0}
    assert control.is_asleep
    control.draft_changed(2)
    assert not control.is_asleep
    assert {step(control, requests(2)) for _ in range(30)} == {0, 1, 3}


def test_prompts_that_only_random_weights_could_read_are_not_read_and_leave_requests_cold() -> None:
    seen: list[WatchedRound] = []
    control, unread = make_control(is_fresh=True, seen=seen), requests(1)
    assert not control.reads_prompt_of(unread)
    control.draft_changed(2)
    assert control.reads_prompt_of(requests(1))
    while step(control, [*unread, *requests(1)], accepts=True) == 0:
        pass
    assert len(seen[-1].verifications) == 1
    asleep = make_control(seconds=SECONDS)
    while not asleep.is_asleep:
        step(asleep, requests(1))
    assert asleep.reads_prompt_of(requests(1)), "it may be woken at any step"


def test_a_useless_draft_falls_asleep_and_is_looked_at_again() -> None:
    control, batch = make_control(seconds=SECONDS), requests(1)
    steps = 0
    while not control.is_asleep:
        step(control, batch)
        steps += 1
        assert steps < 4 * SLEEP_AFTER_STEPS
    for _ in range(PROBE_EVERY_STEPS):
        step(control, batch)
    assert not control.is_asleep
    assert control.needs_no_reading(batch)
    assert step(control, requests(1)) == 0, "the step before was of cold ones alone"
    assert [step(control, requests(1)) > 0 for _ in range(10)].count(True) >= 8


def test_requests_that_went_cold_say_nothing_about_the_draft() -> None:
    control, cold = make_control(is_fresh=True, seconds=SECONDS), requests(1)
    step(control, cold)
    control.draft_changed(2)
    for _ in range(200):
        control.started()
        control.launched([*cold, *requests(1)], 1)
        control.verified([1, 0])
    assert float(control.explanation()["acceptance"].split(",")[0]) < 0.1, "the other one's"
    for _ in range(400):
        step(control, requests(1), accepts=True)
    assert float(control.explanation()["acceptance"].split(",")[0]) > 0.8


@pytest.mark.parametrize("seconds", [{0: 1.0, 1: 1.8, 3: 3.0}, {0: 1.0, 1: 1.1, 3: 1.3}], ids=["dear", "cheap"])
def test_a_version_that_comes_into_a_long_cold_answer_is_looked_at_in_the_next(seconds: dict[int, float]) -> None:
    """Where a draft that nobody has seen is taken to pay, and where it is not."""
    control, cold = make_control(is_fresh=True, seconds=seconds), requests(1)
    step(control, cold)
    control.draft_changed(2)
    assert {step(control, cold, accepts=True) for _ in range(20 * SLEEP_AFTER_STEPS)} == {0}
    assert not control.is_asleep
    assert control.needs_no_reading(cold)
    assert not control.needs_no_reading([*cold, *requests(1)])
    depths = [step(control, requests(1), accepts=True) for _ in range(30)]
    assert depths.count(3) > 10


def test_what_was_learnt_of_the_last_version_gives_way_to_what_the_next_one_shows() -> None:
    def learnt(*, is_new: bool) -> float:
        control = make_control(seconds=SECONDS)
        for _ in range(400):
            step(control, requests(1), accepts=True)
        if is_new:
            control.draft_changed(2)
        for _ in range(20):
            control.started()
            control.launched(requests(1), 3)
            control.verified([0])
        return float(control.explanation()["acceptance"].split(",")[0])

    assert learnt(is_new=True) < learnt(is_new=False) - 0.2


def test_a_step_of_a_draft_that_fell_asleep_behind_a_control_step_is_no_control_step() -> None:
    seen: list[WatchedRound] = []
    control = make_control(seen=seen, control_share=0.5)
    while not seen or seen[-1].drafted:
        step(control, requests(1))
    control._draft_sleep = DraftSleep(is_fresh=True)
    assert step(control, requests(1)) == 0
    assert seen[-1].drafted


def test_an_answer_that_had_ended_has_no_span_of_the_verification_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "serving.sglang.proposals.depth.record",
        lambda parent, name, seconds, **fields: spans.append({"name": name, **fields}),
    )
    control, batch = make_control(seconds=SECONDS), requests(2)
    batch[0].finished_reason = Finish("length")
    control.started()
    control.launched(batch, 3)
    control.verified([2, 1])
    told = {"name": "verify", "batch": 2, "depth": 3, "accepted": 1, "from_text": False, "draft_version": 1}
    assert spans == [told]


def test_what_the_steps_add_up_to() -> None:
    control, batch = make_control(control_share=0.5), requests(2)
    depths = [step(control, batch, accepts=True) for _ in range(40)]
    report = EngineReport.parse(control.tally.report())
    plain = report.rounds["control"]
    assert (sum(report.rounds.values()), plain) == (40, 20)
    assert report.round_tokens == {
        "speculative": 2 * sum(1 + depth for depth in depths) - 2 * plain,
        "control": 2 * plain,
    }
    assert report.decode_ms.keys() == {"speculative", "control"}
    assert control.tally.report().keys().isdisjoint(control.explanation()), "both are in one report"
    assert report.proposals == report.accepted
    assert report.proposals["3"] == 2 * sum(depth >= 3 for depth in depths) > 0


def test_results_that_come_a_step_late_meet_their_step() -> None:
    """Overlap scheduling launches the next step before the result of the last one is processed."""
    control, batch = make_control(control_share=0.5, seconds=SECONDS), requests(2)
    depths = []
    for turn in range(400):
        depths.append(control.steps_for(2))
        control.started()
        control.launched(batch, depths[-1])
        if turn > 0:
            control.verified([depths[-2]] * 2)
    control.verified([depths[-1]] * 2)
    assert control.num_verified_tokens == sum(2 + 2 * depth for depth in depths if depth)
    assert control.num_verifications == 2 * sum(depth > 0 for depth in depths)
    measured = control.meter.measure()
    assert measured.baseline_rounds + measured.speculative_rounds == 400
    assert 150 < measured.baseline_rounds < 250


def test_what_the_watch_is_told() -> None:
    """The version at launch, the stratum of each request, and nothing of requests that went cold."""
    seen: list[WatchedRound] = []
    control, cold = make_control(is_fresh=True, control_share=0.2, seen=seen), requests(1)
    step(control, cold)
    assert [(round_.drafted, round_.verifications, round_.kind) for round_ in seen] == [(True, (), None)], "it sleeps"
    control.draft_changed(2)
    seen.clear()
    for _ in range(50):
        step(control, [*cold, *requests(1)], accepts=True)
    assert {round_.version for round_ in seen} == {2}
    assert sum(not round_.drafted for round_ in seen) in (9, 10, 11)
    verified = [round_ for round_ in seen if round_.verifications]
    assert len(verified) > 20
    assert all(round_.drafted for round_ in verified)
    for round_ in verified:
        (only,) = round_.verifications
        assert (only.stratum, only.accepted) == (Stratum("code", "greedy"), only.depth)
        assert round_.kind == (2, 2 * only.depth, 0)


@pytest.mark.parametrize(
    "ends", [{"finished_reason": Finish("stop")}, {"is_retracted": True}], ids=["ended", "retracted"]
)
def test_a_verification_behind_the_end_of_an_answer_costs_time_and_says_nothing(ends: dict[str, Any]) -> None:
    """Overlap scheduling verifies a request once more after its last step."""
    seen: list[WatchedRound] = []
    control, (goes_on, over) = make_control(seconds=SECONDS, seen=seen), requests(2)
    for _ in range(200):
        control.started()
        control.launched([goes_on, over], 3)
        vars(over).update(ends)
        control.verified([3, 1])
    report = EngineReport.parse({name: str(value) for name, value in control.report().items()})
    assert (control.num_verifications, control.num_verified_tokens) == (200, 800)
    assert report.round_tokens == {"speculative": 800, "control": 0}
    assert report.proposals == report.accepted == {"1": 200, "2": 200, "3": 200}
    assert report.tokens_by_length == {"head/context/512": 800, "head/answer/32": 800}
    assert float(control.explanation()["acceptance"].split(",")[1]) > 0.9
    assert [one.spec_num_cap_tokens for one in (goes_on, over)] == [600, 0]
    assert {(round_.batch, round_.committed, round_.proposed) for round_ in seen} == {(2, 4, Proposed(6))}
    assert {(one.request_id, one.accepted) for round_ in seen for one in round_.verifications} == {("r0", 3)}


def test_the_estimate_leaves_plain_decoding_its_row_behind_an_answers_end() -> None:
    """It computes one as well: a verification behind the end counts as one that accepts nothing."""

    def estimate(second: Any, accepted: int) -> object:
        control, (first, _) = make_control(seconds=SECONDS), requests(2)
        control.started()
        control.launched([first, second], 3)
        control.verified([3, accepted])
        return control.report()["speedup_estimated"]

    (goes_on, over) = requests(2)
    over.finished_reason = Finish("stop")
    assert estimate(over, 1) == estimate(goes_on, 0) != estimate(goes_on, 1)


def test_text_behind_the_end_of_an_answer_is_not_counted() -> None:
    seen: list[WatchedRound] = []
    control, batch = make_long_control(seen, is_fresh=True), requests(1)
    batch[0].finished_reason = Finish("stop")
    assert with_text(control, batch, [8]) == 8
    report = EngineReport.parse({name: str(value) for name, value in control.report().items()})
    assert (report.text_proposals, report.verifications_by_length, seen[-1].committed) == ({}, {}, 0)
    assert control.tally.report()["accepted_text"] == "own=0,group=0,tenant=0"


def test_the_speedup_end_to_end_counts_what_answers_have_got() -> None:
    """Answers of 8 tokens, by a draft that is always right, with overlap scheduling."""
    device = SlowDevice()
    control = make_control(seconds=SECONDS, device=device, plain_share=0.2)
    got, took_s = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for _ in range(400):
        (request,), missing, depths = requests(1), 8, list[int]()
        while request.finished_reason is None:
            depths.append(control.steps_for(1))
            control.started()
            device.now_s += SECONDS[depths[-1]]
            took_s[depths[-1] > 0] += SECONDS[depths[-1]]
            control.launched([request], depths[-1])
            device.finish()
            if len(depths) > 1:
                control.verified([depths[-2]])
                came = min(1 + depths[-2], missing)
                got[depths[-2] > 0] += came
                missing -= came
            if missing == 0:
                request.finished_reason = Finish("stop")
        control.verified([depths[-1]])
    ratio = took_s[False] / got[False] / (took_s[True] / got[True])
    assert control.end_to_end.measure().ratio == pytest.approx(ratio, rel=0.05)


def test_a_fixed_depth_is_measured_too() -> None:
    control = DepthControl(
        [3],
        StepClock(CpuDevice()),
        SpeedupMeter(),
        head_depth=3,
        version=1,
        control=ControlShare(0.0),
        draft_sleep=DraftSleep(is_fresh=True),
    )
    control.started()
    control.launched(requests(1), 3)
    control.verified([2])
    assert (control.depth, control.num_verified_tokens, control.is_asleep) == (3, 3, False)
    assert control.explanation() == {}


def test_the_baseline_is_the_time_of_a_server_that_has_no_draft_to_keep_up_to_date() -> None:
    seen: list[WatchedRound] = []
    device = SlowDevice()
    control = make_control(control_share=0.5, seen=seen, seconds=SECONDS, device=device)
    for _ in range(40):
        control.interrupted(requests(1))
        depth = control.steps_for(1)
        control.started()
        device.now_s += 1.0
        control.committed()
        device.now_s += 0.25
        control.launched(requests(1), depth)
        device.finish()
        control.verified([depth])
    assert {(round_.drafted, round_.seconds) for round_ in seen} == {(False, 1.0), (True, 1.25)}
    planned = {(step.depth > 0, step.seconds) for step in control.pop_times()}
    assert planned == {(False, 1.0), (True, 1.25)}, "drafting must beat such a server"


def test_a_draft_that_earns_only_what_its_own_reading_costs_falls_asleep() -> None:
    """A step of one token takes 1, and 1.25 with the draft's reading; one with a proposal brings 1.1 tokens in 1.2."""
    device = SlowDevice()
    control, batch = make_control(device=device), requests(1)
    for number in range(2000):
        depth = control.steps_for(1)
        control.started()
        device.now_s += 1.0 if depth == 0 else 1.2
        if not control.needs_no_reading(batch):
            control.committed()
            device.now_s += 0.25 if depth == 0 else 0.0
        control.launched(batch, depth)
        device.finish()
        control.verified([int(depth > 0 and number % 10 == 0)])
    assert control.is_asleep


def test_a_draft_that_now_and_then_seems_to_pay_and_reads_for_it_falls_asleep() -> None:
    """A step with a proposal brings 1.22 tokens a request in 1.2; in every other step the draft only reads."""
    device, random_ = SlowDevice(), random.Random(0)
    control, batch = make_control(device=device), requests(8)
    depths = []
    for _ in range(3000):
        depths.append(control.steps_for(8))
        control.started()
        device.now_s += SECONDS[depths[-1]]
        if not control.needs_no_reading(batch):
            control.committed()
            device.now_s += 0.1 if depths[-1] == 0 else 0.0
        control.launched(batch, depths[-1])
        device.finish()
        control.verified([int(depths[-1] > 0 and random_.random() < 0.22) for _ in batch])
        if control.is_asleep:
            break
    assert control.is_asleep
    assert 20 < sum(depth > 0 for depth in depths) < len(depths) - 20


@pytest.mark.parametrize("plain_s", [1.0, 0.01])
def test_a_draft_that_saves_less_than_its_reading_costs_falls_asleep_however_fast_the_machine(plain_s: float) -> None:
    """Of a plain step, a step with a proposal saves a tenth, and reading takes a fourth in every other step."""
    device = SlowDevice()
    control, batch = make_control(device=device), requests(1)
    for number in range(400):
        depth = 0 if number % 2 else control.steps_for(1)
        control.started()
        device.now_s += plain_s * SECONDS[depth]
        if not control.needs_no_reading(batch):
            control.committed()
            device.now_s += plain_s * (0.25 if depth == 0 else 0.0)
        control.launched(batch, depth)
        device.finish()
        control.verified([int(depth > 0 and number % 20 < 6)])
    assert control.is_asleep


def test_what_sglang_does_between_two_steps_is_part_of_the_second() -> None:
    device = SlowDevice()
    clock = StepClock(device)
    for number in range(5):
        if number == 2:
            device.now_s += 50.0
            clock.interrupt(is_idle=False)
            clock.interrupt(is_idle=False)
        if number == 4:
            device.now_s += 50.0
            clock.interrupt(is_idle=True)
            device.now_s += 3.0
        clock.start()
        device.now_s += 1.0
        clock.commit()
        device.now_s += 0.25
        clock.stop(number)
        device.now_s += 0.5
    device.finish()
    times = [(timed.about, timed.before_s, timed.committed_s, timed.whole_s) for timed in clock.finished()]
    assert times == [
        (0, 0.0, 1.0, 1.25),
        (1, 0.0, 1.5, 1.75),
        (2, 50.5, 1.0, 1.25),
        (3, 0.0, 1.5, 1.75),
        (4, 3.0, 1.0, 1.25),
    ]


def test_a_scheduler_that_was_held_up_is_no_slow_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice()
    clock = StepClock(device)
    for pause_s in (0.0, 30.0):
        device.now_s += pause_s
        monkeypatch.setattr("time.monotonic", lambda held_s=pause_s: 1000.0 + held_s)
        clock.start()
        device.now_s += 1.0
        clock.stop(None)
    device.finish()
    assert [timed.whole_s for timed in clock.finished()] == [1.0, 1.0]


def test_a_prefix_that_no_draft_has_read_is_of_no_later_request() -> None:
    def key(control: DepthControl, own: str | None) -> str | None:
        request = SimpleNamespace(extra_key=own)
        control.arrived(request)
        return request.extra_key

    fresh, learnt = make_control(is_fresh=True), make_control()
    assert (key(fresh, None), key(fresh, "lora")) == (None, "lora")
    fresh.draft_changed(2)
    first = key(fresh, None)
    assert first
    assert key(fresh, "lora") == f"lora|{first}"
    fresh.draft_changed(3)
    assert key(fresh, None) == first, "it has read all of them"
    learnt.draft_changed(2)
    assert key(learnt, None) is None


def test_a_retracted_request_is_drafted_for_again_once_it_is_read_again() -> None:
    def retracted_and_read(control: DepthControl, request: Any) -> int:
        """Its greatest depth after its next prefill, but for the first step, planned before the request was seen."""
        request.is_retracted = True
        control.released(request)
        request.is_retracted = False
        assert control.reads_prompt_of([request])
        step(control, [request])
        return max(step(control, [request], accepts=True) for _ in range(60))

    control, (asleep,) = make_control(seconds=SECONDS), requests(1)
    while not control.is_asleep:
        step(control, [asleep])
    step(control, [asleep])
    control.draft_changed(2)
    assert {step(control, [asleep]) for _ in range(30)} == {0}
    assert retracted_and_read(control, asleep) == 3

    control, (unread,) = make_control(is_fresh=True, seconds=SECONDS), requests(1)
    control.arrived(unread)
    assert not control.reads_prompt_of([unread])
    control.released(unread)
    control.draft_changed(2)
    assert retracted_and_read(control, unread) == 0, "SGLang may still have its unread prompt"


def text_for(batch: list[Any], tokens: list[int]) -> Continuations:
    """Text that is always right, for the first of these requests."""
    found, probabilities = np.zeros((len(batch), len(tokens)), np.int32), np.zeros((len(batch), len(tokens)))
    found[0], probabilities[0] = tokens, 1.0
    counts = np.zeros(len(batch), np.int64)
    counts[0] = len(tokens)
    first = np.array([len(one.origin_input_ids) + len(one.output_ids) for one in batch])
    sources = np.full(len(batch), TextSource.GROUP)
    return Continuations(found, probabilities, counts, first, sources, [len(one.output_ids) for one in batch])


def with_text(control: DepthControl, batch: list[Any], accepted: list[int], *, came: list[int] | None = None) -> int:
    """One step; `came` is what the host learns of the first request while it runs."""
    control.found(text_for(batch, [5] * 9))
    depth = control.steps_for(len(batch))
    control.started()
    control.launched(batch, depth)
    batch[0].output_ids += came or []
    control.verified(accepted)
    return depth


def make_long_control(seen: list[WatchedRound], *, is_fresh: bool = False) -> DepthControl:
    """Head and text at the same price; text goes on to 8."""
    control = DepthControl(
        [0, 1, 3, 8],
        StepClock(CpuDevice()),
        SpeedupMeter(),
        head_depth=3,
        draft_sleep=DraftSleep(is_fresh=is_fresh),
        version=1,
        control=ControlShare(0),
        is_alone=False,
        on_round=seen.append,
    )
    for batch in (1, 2):
        times = [TimedStep(batch, depth, 1 + 0.1 * depth, uses_head=depth > 0) for depth in (0, 1, 3)]
        control.learn_times([*times, TimedStep(batch, 8, 1.8, uses_head=False)] * 20)
    return control


def test_a_draft_that_sleeps_is_not_asked_where_text_goes_on() -> None:
    seen: list[WatchedRound] = []
    control, batch = make_long_control(seen, is_fresh=True), requests(1)
    assert with_text(control, batch, [8]) == 8
    assert not control.plan.uses_head
    assert control.needs_no_reading(batch)
    assert (seen[-1].proposed, seen[-1].verifications, seen[-1].committed) == (None, (), 9)
    assert control.tally.report()["text_accepted"] == ",".join(f"{position}=1" for position in range(1, 9))
    assert control.tally.report()["accepted_text"] == "own=0,group=8,tenant=0"
    control.found(None)
    assert control.steps_for(1) == 0


def test_a_head_that_pays_only_because_text_waits_for_its_reading_falls_asleep() -> None:
    """Reading takes 0.3. In a second the head brings 3 tokens in 1.9, text 2 in 1.5, and without reading 2 in 1.2."""
    device = SlowDevice()
    control, batch, text = make_control(device=device), requests(1), text_for(requests(1), [5])
    for number in range(1000):
        control.found(text)
        depth = control.steps_for(1)
        control.started()
        device.now_s += SECONDS[depth]
        if not control.needs_no_reading(batch):
            control.committed()
            device.now_s += 0.3
        accepted = (3 if number % 3 else 0) if control.plan.uses_head else 1
        control.launched(batch, depth)
        device.finish()
        control.verified([min(depth, accepted)])
    assert control.is_asleep
    control.found(text)
    assert control.steps_for(1) == 1


def test_what_text_has_proposed_says_nothing_of_the_head() -> None:
    seen: list[WatchedRound] = []
    control = make_long_control(seen)
    for _ in range(60):
        batch = requests(2)
        # Text is dear here: it goes along with the head's chains.
        control.learn_times([TimedStep(2, 8, 9.0, uses_head=False), TimedStep(2, 3, 9.0, uses_head=False)])
        depth = with_text(control, batch, [3, 0])
        if depth == 3 and control.plan.uses_head:
            break
    assert control.plan.from_text == (True, False)
    assert [(one.request_id, one.accepted) for one in seen[-1].verifications] == [("r1", 0)]
    assert seen[-1].proposed == Proposed(by_draft=3, by_text=3)
    assert seen[-1].verifications[0].stratum.remembered == 0
    for _ in range(100):
        with_text(control, requests(2), [3, 0])
    assert float(control.explanation()["acceptance"].split(",")[0]) < 0.2


def test_text_of_other_requests_is_not_planned_with() -> None:
    """Of a step that SGLang has put together anew since it was looked for."""
    control = make_long_control([], is_fresh=True)
    control.found(text_for(requests(2), [5] * 9))
    assert control.steps_for(1) == 0
    assert not any(control.plan.from_text)


@pytest.mark.parametrize(("from_text", "rounds", "quarters"), [(0, 0, 0), (0, 8, 0), (1, 8, 1), (3, 8, 2), (8, 8, 4)])
def test_answers_with_as_much_text_of_before_are_compared(from_text: int, rounds: int, quarters: int) -> None:
    """In quarters of their rounds, none of which stands for some."""
    seen: list[WatchedRound] = []
    control, batch = make_long_control(seen), requests(1)
    step(control, batch)
    facts = vars(batch[0])["_slipstream_facts"]
    facts.num_rounds, facts.num_text_rounds = rounds, from_text
    assert facts.stratum.remembered == quarters


def test_text_that_did_not_come_true_was_not_proposed() -> None:
    """With overlap scheduling the host learns that when it has the verdict."""
    seen: list[WatchedRound] = []
    control, batch = make_long_control(seen), requests(1)
    with_text(control, batch, [0], came=[7])
    assert control.tally.report()["text_accepted"] == ""
    assert control.tally.report()["accepted_text"] == "own=0,group=0,tenant=0"
    assert control.tally.report()["accepted"] == "1=0"


def test_sglangs_books_say_what_each_verification_proposed() -> None:
    control, batch = make_long_control([], is_fresh=True), requests(2)
    assert with_text(control, batch, [8, 0]) == 8
    assert [one.spec_num_cap_tokens for one in batch] == [8, 1], "without the head's passes it has proposed one"
    batch[0].finished_reason, batch[1].is_retracted = Finish("length"), True
    with_text(control, batch, [8, 0])
    assert [one.spec_num_cap_tokens for one in batch] == [8, 1], "SGLang counts no verification of these"


def test_acceptance_is_counted_by_length_for_each_source() -> None:
    control = make_long_control([])
    batch = requests(2)
    batch[1].origin_input_ids = [1] * 600
    while not (with_text(control, batch, [3, 1]) == 3 and control.plan.uses_head):
        control = make_long_control([])
        control.learn_times([TimedStep(2, 8, 9.0, uses_head=False), TimedStep(2, 3, 9.0, uses_head=False)] * 20)
    report = EngineReport.parse({name: str(value) for name, value in control.report().items()})
    assert report.verifications_by_length == {
        "head/context/1024": 1,
        "head/answer/32": 1,
        "suffix/context/512": 1,
        "suffix/answer/32": 1,
    }
    assert report.tokens_by_length == {
        "head/context/1024": 2,
        "head/answer/32": 2,
        "suffix/context/512": 4,
        "suffix/answer/32": 4,
    }


def test_end_to_end_counts_prompts_and_takes_no_reading_from_who_is_served_plainly() -> None:
    """A draft that is always right doubles the speed of rounds. Half of all time goes into prompts."""
    device = SlowDevice()
    control = make_control(seconds={0: 1.0, 1: 1.0, 3: 2.0}, device=device, plain_share=0.2)
    batch, depths = requests(1), []
    for number in range(6 * 240):
        if number % 4 == 0:
            batch[0].finished_reason = Finish("length")
            device.now_s += 100.0
            control.interrupted(batch := requests(1))
            device.now_s += 4.0
        depths.append(control.steps_for(1))
        control.started()
        device.now_s += 1.0
        control.committed()
        device.now_s += 0.0 if depths[-1] else 0.5
        control.launched(batch, depths[-1])
        device.finish()
        control.verified([depths[-1]])
    measured = control.end_to_end.measure()
    per_round = sum(1 + depth for depth in depths if depth) / sum(depth > 0 for depth in depths)
    assert depths.count(0) == pytest.approx(6 * 48, abs=30)
    # A token of a prompt's four seconds has a fourth of a round's tokens: the same plainly and not.
    prompt_s = 1.0 / (1 + 0.8 * (per_round - 1))
    assert measured.ratio == pytest.approx((1 + prompt_s) / (1 / per_round + prompt_s), rel=0.02)
    assert measured.lower is not None
    assert float(EngineReport.parse({"end_to_end": "1.5"}).end_to_end or 0) == 1.5


def test_proposals_are_counted_by_position_as_one_by_one() -> None:
    tally, dice = RoundTally(), random.Random(0)
    proposals, right = [Counter[int](), Counter[int]()], [Counter[int](), Counter[int]()]
    by_source = Counter[str]()
    for _ in range(50):
        depths = dice.randrange(4), dice.choice((0, 3, 16, 100))
        from_text = [dice.random() < 0.5 for _ in range(dice.randrange(1, 6))]
        accepted = [dice.randint(0, depths[is_text]) for is_text in from_text]
        ended = [not count and not is_text for count, is_text in zip(accepted, from_text, strict=True)]
        sources = np.array([dice.randrange(3) for _ in from_text])
        tally.add(
            drafted=True,
            depths=depths,
            seconds=0.1,
            committed=1,
            accepted=accepted,
            from_text=from_text,
            ended=ended,
            sources=sources,
        )
        for count, is_text, is_out, source in zip(accepted, from_text, ended, sources, strict=True):
            if is_out:
                continue
            by_source[TEXTS[source]] += count * is_text
            for position in range(1, min(depths[is_text], 64) + 1):
                proposals[is_text][position] += 1
                right[is_text][position] += count >= position
    report = EngineReport.parse(tally.report())
    assert report.accepted_text == by_source
    for source, of_source, accepted_of in (
        (0, report.proposals, report.accepted),
        (1, report.text_proposals, report.text_accepted),
    ):
        assert of_source == {str(position): count for position, count in proposals[source].items()}
        assert accepted_of == {str(position): right[source][position] for position in proposals[source]}
