"""Engines of different speed: what they cost is measured, and work goes where it is cheap or ends soonest."""

from __future__ import annotations

import pytest

from serving.rollout.engine_costs import Cost
from serving.rollout.order import ContextAware
from serving.rollout.samples import SampleState
from serving.rollout.scheduler import Policy, Scheduler
from speculator.errors import EngineBusyError
from tests.serving.rollout.engines import Results, SeededEngine, until, work
from tests.serving.rollout.groups import names, request, sample
from tests.serving.rollout.test_driver import Clock, Driver, drive

ROOMY = 100_000


def scheduler_of(**step_s: float) -> Scheduler:
    """Engines by name that read a token in 10 ms and decode one in this time; chunks of 20 tokens."""
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=20))
    for name, seconds in step_s.items():
        scheduler.prefill.measured(name, 1000, 10.0)
        scheduler.decode.measured(name, 1000, 1000 * seconds, batch=4)
    return scheduler


def test_a_sample_goes_on_where_its_tokens_have_been_read() -> None:
    scheduler = scheduler_of(x=0.01, y=0.01)
    scheduler.submit(request("a", samples=2, max_tokens=30))
    (first,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.next_for("y", 2, ROOMY, 1)
    scheduler.progressed(first, (0,) * 15)
    scheduler.preempted(first)
    assert scheduler.next_for("y", 1, ROOMY) == []
    assert names(scheduler.next_for("x", 1, ROOMY)) == ["a0"]


def test_an_unknown_engine_is_as_fast_as_the_others_on_average() -> None:
    cost = Cost(0.01)
    assert cost.at("x", 1) == cost.at("y", 8) > 0
    cost.measured("x", 100, 1.0, batch=4)
    cost.measured("y", 100, 3.0, batch=4)
    assert cost.at("z", 4) == cost.at(None, 4) == pytest.approx(0.02)
    cost.forget("y")
    assert cost.at("y", 4) == pytest.approx(0.01)


def test_a_step_grows_with_the_batch_as_measured() -> None:
    cost = Cost(0.01)
    for batch in (1, 16, 1, 16):
        cost.measured("x", 200, 200 * (0.01 + 0.001 * batch), batch=batch)
    assert cost.at("x", 8) == pytest.approx(0.018, rel=0.02)
    assert cost.at("x", 32) == pytest.approx(0.042, rel=0.02)


def test_an_engine_that_paused_once_is_not_slow() -> None:
    cost = Cost(0.01)
    for _ in range(10):
        cost.measured("x", 100, 1.0, batch=4)
    cost.measured("x", 10, 600.0, batch=4)
    assert cost.at("x", 4) < 0.011


def test_what_others_read_meanwhile_is_no_decoding() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=100))
    scheduler.submit(request("a", samples=1, prompt_token_ids=(0,) * 1000))
    (lease,) = scheduler.next_for("x", 2, ROOMY)
    scheduler.measure(lease, 1, 10.01)
    for _ in range(1000):
        scheduler.measure(lease, 10, 0.1)
    before_s = scheduler.decode.at("x", 1)
    scheduler.submit(request("b", samples=1))
    (other,) = scheduler.next_for("x", 1, ROOMY)
    scheduler.measure(other, 1, 0.11)
    scheduler.measure(lease, 10, 0.1 + 10 * scheduler.prefill.at("x"))
    assert scheduler.decode.at("x", 1) == pytest.approx(before_s, rel=1e-3)
    assert scheduler.prefill.at("x") == pytest.approx(0.01, rel=0.05)


def test_what_an_engine_has_read_in_part_is_no_measure_of_reading() -> None:
    scheduler = scheduler_of(x=0.01, y=0.01)
    scheduler.submit(request("a", samples=2))
    scheduler.next_for("x", 1, ROOMY)
    (lease,) = scheduler.next_for("y", 1, ROOMY)
    scheduler.progressed(lease, (0,) * 5)
    scheduler.preempted(lease)
    (again,) = scheduler.next_for("x", 1, ROOMY)  # which has read the prompt for the other sample
    before_s = scheduler.prefill.at("x")
    scheduler.measure(again, 1, 60.0)
    assert scheduler.prefill.at("x") == before_s


def test_a_new_group_is_expected_to_be_as_long_as_others_of_its_job() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=20))
    for name, read_s, step_s in (("reads", 0.001, 0.02), ("decodes", 0.01, 0.002)):
        scheduler.prefill.measured(name, 1000, 1000 * read_s)
        scheduler.decode.measured(name, 1000, 1000 * step_s, batch=1)
        scheduler.next_for(name, 1, ROOMY)
    scheduler.submit(request("a", samples=1, job="short", prompt_token_ids=(0,) * 100))
    assert scheduler.next_for("reads", 1, ROOMY) == [], "it may need all of its 100 tokens"
    (lease,) = scheduler.next_for("decodes", 1, ROOMY)
    scheduler.finished(lease, (0,) * 5, "stop")
    scheduler.submit(request("b", samples=1, job="short", prompt_token_ids=(0,) * 100))
    assert names(scheduler.next_for("reads", 1, ROOMY)) == ["b0"]


def test_long_prompts_go_where_prefill_is_cheap_and_long_answers_where_decoding_is() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=20))
    for name, read_s, step_s in (("reads", 0.001, 0.02), ("decodes", 0.01, 0.002)):
        scheduler.prefill.measured(name, 1000, 1000 * read_s)
        scheduler.decode.measured(name, 1000, 1000 * step_s, batch=2)
        scheduler.next_for(name, 0, ROOMY)
    for name in "abcd":
        is_long = name in "bd"
        scheduler.submit(
            request(name, samples=1, max_tokens=20 if is_long else 200, prompt_token_ids=(0,) * 900 * is_long + (0,))
        )
    assert sorted(names(scheduler.next_for("reads", 2, ROOMY))) == ["b0", "d0"]
    assert sorted(names(scheduler.next_for("decodes", 2, ROOMY))) == ["a0", "c0"]


def test_a_slow_engine_leaves_the_last_samples_to_a_faster_one_with_a_free_slot() -> None:
    scheduler = scheduler_of(slow=0.1, fast=0.01)
    scheduler.next_for("fast", 1, ROOMY)
    scheduler.submit(request("a", samples=2))
    assert scheduler.next_for("slow", 2, ROOMY) == []
    assert names(scheduler.next_for("fast", 1, ROOMY)) == ["a0"]
    assert names(scheduler.next_for("slow", 2, ROOMY)) == ["a1"], "nothing waits for a slot that is held"


@pytest.mark.parametrize(("prompt", "verdict"), [(10, "stop"), (900, "go on")])
def test_a_sample_moves_where_that_earns_more_than_reading_it_again(prompt: int, verdict: str) -> None:
    scheduler = scheduler_of(slow=0.1, fast=0.01)
    scheduler.submit(request("a", samples=1, prompt_token_ids=(0,) * prompt))
    (lease,) = scheduler.next_for("slow", 1, ROOMY)
    assert scheduler.progressed(lease, (0,) * 20) == "go on", "no other engine has asked"
    scheduler.next_for("fast", 1, ROOMY)
    assert scheduler.progressed(lease, (0,) * 20) == verdict
    if verdict == "stop":
        assert scheduler.next_for("slow", 1, ROOMY) == []
        assert names(scheduler.next_for("fast", 1, ROOMY)) == ["a0"]
        assert scheduler.num_read_again == prompt + 40
    scheduler.check()


def test_a_sample_is_not_left_to_a_faster_engine_that_has_failed_on_it() -> None:
    scheduler = scheduler_of(slow=0.1, fast=0.01)
    scheduler.next_for("slow", 1, ROOMY)
    scheduler.submit(request("a", samples=1))
    (lease,) = scheduler.next_for("fast", 1, ROOMY)
    scheduler.preempted(lease, has_failed=True)
    assert scheduler.next_for("fast", 1, ROOMY) == []
    assert names(scheduler.next_for("slow", 1, ROOMY)) == ["a0"]


def test_a_lost_engine_is_waited_for_by_nobody() -> None:
    scheduler = scheduler_of(slow=0.1, fast=0.01)
    scheduler.next_for("fast", 1, ROOMY)
    scheduler.submit(request("a", samples=1))
    assert scheduler.next_for("slow", 1, ROOMY) == []
    scheduler.engine_lost("fast")
    assert names(scheduler.next_for("slow", 1, ROOMY)) == ["a0"]


def test_what_is_left_of_a_conversation_is_read_and_decoded_as_its_group_has_shown() -> None:
    scheduler = Scheduler(Policy(order=ContextAware(), chunk_tokens=100))
    scheduler.submit(request("a", samples=2, max_tokens=100, turn_tokens=50))
    first, _ = scheduler.next_for("x", 2, ROOMY)
    assert scheduler.turn_ended(first, (0,) * 10)
    scheduler.observed(first.sample_id, (0,) * 30)
    (first,) = scheduler.next_for("x", 1, ROOMY)
    assert scheduler.turn_ended(first, (0,) * 20)
    scheduler.done(first.sample_id)
    assert scheduler._work_left(sample(scheduler, "a1")) == pytest.approx((30, 30), rel=0.02), (
        "60 tokens, of which the environment says half"
    )


def test_a_driver_measures_its_engines_and_gives_up_on_a_busy_one() -> None:
    class Ticking(Clock):
        def __call__(self) -> float:
            self.now_s += 1.0
            return self.now_s

    slow, fast = SeededEngine("slow", num_slots=1), SeededEngine("fast", num_slots=1, holds_after=0)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=30)])
        driver.submit([work("b", samples=1, max_tokens=30)])
        await until(lambda: "a0" in results.by_sample or "b0" in results.by_sample)
        prefill, decode = driver._scheduler.prefill, driver._scheduler.decode
        assert decode.at("slow", 1) == pytest.approx(1 / 3)
        prefill.measured("fast", 1000, 0.01)
        decode.measured("fast", 1000, 1.0, batch=1)
        decode.measured("slow", 1000, 333.0, batch=1)
        fast.failures = [EngineBusyError("full", retry_after_s=1)] * 3
        fast.release.set()
        await results.wait_for(2)
        driver.submit([work("c", samples=1, max_tokens=30)])
        await results.wait_for(3)
        assert results.by_sample["c0"].engine == "slow", "the fast one is busy until the next tick"
        assert all(result.state is SampleState.FINISHED for result in results.by_sample.values())

    drive(talk, slow, fast, clock=Ticking())
