"""The driver on engines that die, refuse, come back and lose their slots: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from serving.rollout.driver import MAX_FAILURES, Driver
from serving.rollout.engines import EngineCapacity, InProcessEngine
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.order import ContextAware, Fifo
from serving.rollout.samples import SampleId, SampleState, Turn
from serving.rollout.scheduler import Policy
from speculator.errors import EngineBusyError, EngineError, RequestError
from tests.fixtures.clock import Clock
from tests.fixtures.doubles import DoubleEngine
from tests.serving.rollout.engines import PROMPT, Results, SeededEngine, check_whole, token_at, until, work

LIMIT = 40
CHUNKED = Policy(order=ContextAware(), chunk_tokens=8)
POLICIES = {
    "fifo": Policy(order=Fifo(), chunk_tokens=8),
    "context-aware": CHUNKED,
}


def drive(
    talk: Callable[[Driver, Results], Awaitable[None]],
    *engines: SeededEngine,
    policy: Policy = CHUNKED,
    clock: Clock | None = None,
) -> Results:
    async def run() -> Results:
        results = Results()
        driver = Driver(engines, policy, on_ended=results.take, clock=clock or Clock())
        try:
            await talk(driver, results)
            driver.check()
        finally:
            await driver.close()
        assert all(engine.num_open == 0 for engine in engines), "a stream is left open"
        return results

    return asyncio.run(run())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_gives_the_samples_that_one_request_each_would_give(policy: Policy) -> None:
    engines = SeededEngine("x", num_slots=3), SeededEngine("y", num_slots=2, memory_tokens=200)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit(work(name, samples=9, max_tokens=LIMIT) for name in "abc")
        await results.wait_for(27)
        assert driver.num_tokens == sum(len(result.tokens) for result in results.by_sample.values())

    for result in drive(talk, *engines, policy=policy).by_sample.values():
        assert result.state is SampleState.FINISHED
        check_whole(result, limit=LIMIT)
    assert [engine.most_open for engine in engines] == [3, 2], "a slot idled, or there was one too many"
    assert [len(engine.dropped) for engine in engines] == [3, 3], "each group's text is dropped once, everywhere"


def test_an_engine_that_dies_with_twenty_samples_on_it() -> None:
    dying = SeededEngine("x", num_slots=20, dies_after=70)
    other = SeededEngine("y", num_slots=0)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=20, max_tokens=LIMIT)])
        await until(lambda: driver.num_lost)
        assert driver.num_lost == 20 - len(results.by_sample)
        assert driver.counts[SampleState.PAUSED] == driver.num_lost, "it has no engine now, and nothing is forgotten"
        driver.check()
        other.num_slots = 3
        driver.tick()
        await results.wait_for(20)
        dying.is_alive, dying.dies_after = True, None
        driver.submit([work("b", samples=5, max_tokens=LIMIT)])
        driver.tick()
        await results.wait_for(25)

    results = drive(talk, dying, other).by_sample
    assert sum(result.num_leases > 1 for result in results.values()) >= 10
    for result in results.values():
        check_whole(result, limit=LIMIT)
    assert {result.engine for name, result in results.items() if name.startswith("b")} >= {"x"}, "it is used again"


def test_a_machine_that_vanishes_holds_no_sample_for_ever() -> None:
    """Its connections stay open, and nothing else waits for a slot there."""
    gone = SeededEngine("x", num_slots=2, holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=LIMIT)])
        await until(lambda: gone.num_chunks == 2)
        driver.tick()
        assert driver.counts[SampleState.RUNNING] == 2
        gone.is_alive = False
        driver.set_engines([gone, SeededEngine("y")])
        driver.tick()
        await results.wait_for(2)

    for result in drive(talk, gone).by_sample.values():
        check_whole(result, limit=LIMIT)
        assert (result.engine, result.num_leases) == ("y", 2)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_that_dies_while_idle_is_waited_for_by_nobody(is_told: bool) -> None:
    """One that would have had the memory, and took nothing new before it died."""
    small, large = SeededEngine("x", memory_tokens=PROMPT + 1), SeededEngine("y")

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=3)])
        await results.wait_for(1)
        large.takes_new = False
        driver.submit([work("b", samples=1, max_tokens=LIMIT)])
        assert driver.counts[SampleState.WAITING] == 1
        large.is_alive = False
        if is_told:
            driver.set_engines([small, large])
        driver.tick()
        await results.wait_for(2)

    assert drive(talk, small, large).by_sample["b0"].engine == "x"


def test_a_conversation_goes_on_behind_what_its_environment_says() -> None:
    """Tokens depend on seed and position: those of a turn are what a plain sample has there."""
    engine = SeededEngine("x", num_slots=1, is_answered=True)
    turns: list[Turn] = []

    async def run() -> Results:
        results = Results()
        driver = Driver([engine], CHUNKED, on_ended=results.take, on_turn=turns.append)
        driver.submit([work("a", samples=2, max_tokens=40, turn_tokens=4)])
        await until(lambda: len(turns) == 2)
        assert driver.counts[SampleState.AWAITING] == 2, "the second had the slot while the first one waits"
        first, second = turns
        assert driver.awaited_turn(first.sample_id) == 0
        driver.observe(first.sample_id, (7, 7))
        driver.end_conversation(second.sample_id, failure="it broke")
        await until(lambda: len(turns) == 3)
        assert driver.awaited_turn(second.sample_id) is None
        assert driver.awaited_turn(SampleId("a", 2)) is None, "there is no such sample"
        driver.check()
        driver.observe(turns[2].sample_id, (8,) * 100)
        await results.wait_for(2)
        await driver.close()
        return results

    results = asyncio.run(run()).by_sample
    first = results["a0"] if turns[2].sample_id.number == 0 else results["a1"]
    (other,) = [result for result in results.values() if result is not first]
    seed = first.sample_id.number
    said = [7 if at in (4, 5) else token_at(seed, PROMPT + at) for at in range(10)]
    assert list(first.tokens) == [*said, *[8] * 30]
    assert (first.reason, first.turns) == ("length", ((0, 4), (6, 10)))
    observed = {4, 5, *range(10, 40)}
    assert first.logprobs == tuple(0.0 if at in observed else -token / 1000 for at, token in enumerate(first.tokens))
    assert [turn.logprobs for turn in turns] == [tuple(-token / 1000 for token in turn.tokens) for turn in turns]
    assert (other.state, other.reason, other.detail) == (SampleState.ABORTED, "environment", "it broke")


def test_what_an_engine_says_of_a_lease_that_is_over_counts_for_nothing() -> None:
    engine = SeededEngine("x", holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=LIMIT)])
        await until(lambda: engine.num_chunks >= 2)
        driver.cancel(["a", "b"])
        engine.release.set()
        await until(lambda: engine.num_open == 0)
        assert driver.num_tokens == 6

    for result in drive(talk, engine).by_sample.values():
        assert (result.state, result.reason, len(result.tokens)) == (SampleState.ABORTED, "cancelled", 3)


def test_each_sample_goes_to_the_emptiest_engine() -> None:
    engines = [SeededEngine(name, holds_after=0) for name in "xy"]

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=4, max_tokens=LIMIT)])
        await until(lambda: sum(engine.num_open for engine in engines) == 4)
        assert [engine.num_open for engine in engines] == [2, 2]
        for engine in engines:
            engine.release.set()
        await results.wait_for(4)

    drive(talk, *engines)


def test_slots_that_others_need_are_given_up_at_once_and_taken_again() -> None:
    engine = SeededEngine("x", holds_after=2)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=4, max_tokens=LIMIT)])
        await until(lambda: engine.num_chunks >= 8)
        engine.num_slots = 1
        driver.dispatch()
        assert (driver.counts[SampleState.RUNNING], driver.counts[SampleState.PAUSED]) == (1, 3)
        await until(lambda: engine.num_open <= 1)
        engine.num_slots, engine.holds_after = 4, None
        engine.release.set()
        driver.dispatch()
        await results.wait_for(4)

    for result in drive(talk, engine).by_sample.values():
        check_whole(result, limit=LIMIT)


def test_while_nothing_waits_no_running_sample_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may run, and each end of one dispatches: this is the event loop of all requests."""
    engines = [SeededEngine(name, num_slots=4, holds_after=1) for name in "xy"]

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=4, max_tokens=LIMIT)])
        await until(lambda: sum(engine.num_chunks for engine in engines) == 4)
        looked_at = list[object]()
        monkeypatch.setattr(EngineCapacity, "reserved_tokens", lambda capacity, sample: looked_at.append(sample))
        driver.tick()
        monkeypatch.undo()
        assert not looked_at
        for engine in engines:
            engine.release.set()
        await results.wait_for(4)

    drive(talk, *engines)


def test_a_busy_engine_is_asked_again_at_the_next_tick() -> None:
    engine = SeededEngine("x", failures=[EngineBusyError("full")] * (MAX_FAILURES + 1))

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        for tick in range(1, MAX_FAILURES + 2):
            await until(lambda: driver.counts[SampleState.WAITING])
            assert len(engine.requests) == tick, "not again and again without a pause"
            driver.tick()
        await results.wait_for(1)

    check_whole(drive(talk, engine).by_sample["a0"], limit=LIMIT)


def test_a_busy_engine_keeps_its_sample_where_no_other_has_a_slot() -> None:
    busy, full = SeededEngine("x", num_slots=1, failures=[EngineBusyError("full")]), SeededEngine("y", num_slots=1)
    full.holds_after = 0

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=LIMIT)])
        await until(lambda: driver.counts[SampleState.WAITING])
        driver.tick()
        await results.wait_for(1)
        assert results.by_sample["a0"].engine == "x"
        full.release.set()
        await results.wait_for(2)

    drive(talk, busy, full)


def test_a_sample_is_not_left_to_an_engine_that_takes_nothing_any_more() -> None:
    failing, other = SeededEngine("x", failures=[EngineError("once")]), SeededEngine("y")

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        other.takes_new = False
        await until(lambda: driver.counts[SampleState.WAITING])
        driver.tick()
        await results.wait_for(1)

    check_whole(drive(talk, failing, other).by_sample["a0"], limit=LIMIT)


def test_an_engine_that_fails_because_it_has_died_is_lost_at_once_and_told_once() -> None:
    engine = SeededEngine("x", failures=[EngineError("the connection broke off")])

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        engine.is_alive = False
        await until(lambda: driver.num_lost)
        for _ in range(3):
            driver.tick()
        engine.is_alive = True
        driver.tick()
        await results.wait_for(1)

    with capture_logs() as logs:
        check_whole(drive(talk, engine).by_sample["a0"], limit=LIMIT)
    assert [line["event"] for line in logs] == ["rollout engine lost", "rollout engine back"]


def test_being_busy_is_no_failure_of_the_sample() -> None:
    failures = [*[EngineBusyError("full")] * MAX_FAILURES, *[EngineError("once")] * (MAX_FAILURES - 1)]
    engine = SeededEngine("x", failures=failures)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        while not results.by_sample:
            driver.tick()
            await asyncio.sleep(0)

    check_whole(drive(talk, engine).by_sample["a0"], limit=LIMIT)


def test_a_group_that_an_engine_refuses_ends_with_the_reason() -> None:
    engine = SeededEngine("x", failures=[RequestError("token 9999 is unknown", param="prompt")])

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=3, max_tokens=LIMIT)])
        await results.wait_for(3)
        driver.submit([work("b", samples=1, max_tokens=LIMIT)])
        await results.wait_for(4)

    results = drive(talk, SeededEngine("y", num_slots=0), engine)
    refused = [result for result in results.by_sample.values() if result.state is SampleState.ABORTED]
    assert {(result.reason, result.detail) for result in refused} == {("refused", "token 9999 is unknown")}


def test_a_sample_on_which_an_engine_fails_again_and_again_is_given_up() -> None:
    engine = SeededEngine("x", failures=[EngineError("no")] * MAX_FAILURES)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        while not results.by_sample:
            driver.tick()
            await asyncio.sleep(0)

    assert drive(talk, engine).by_sample["a0"].reason == "refused"
    assert len(engine.requests) == MAX_FAILURES


def test_failures_before_and_after_new_tokens_are_not_in_a_row() -> None:
    failures = [EngineError("no")] * (MAX_FAILURES - 1)
    engine = SeededEngine("x", failures=[*failures], holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        while not engine.num_chunks:
            driver.tick()
            await asyncio.sleep(0)
        engine.num_slots, engine.failures = 0, [*failures]
        driver.dispatch()
        engine.num_slots, engine.holds_after = 1, None
        while not results.by_sample:
            driver.tick()
            await asyncio.sleep(0)

    check_whole(drive(talk, engine).by_sample["a0"], limit=LIMIT)


def test_an_engine_that_fails_on_everything_takes_no_sample_with_it() -> None:
    """It has free slots at once again, so that a sample could fail there three times in a row."""
    broken = SeededEngine("x", failures=[EngineError("no")] * 1000)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work(name, samples=8, max_tokens=LIMIT) for name in "ab"])
        while len(results.by_sample) < 16:
            driver.tick()
            await asyncio.sleep(0)

    results = drive(talk, broken, SeededEngine("y", num_slots=2)).by_sample
    assert broken.requests
    for result in results.values():
        check_whole(result, limit=LIMIT)


def test_a_sample_that_fails_late_leaves_its_siblings_alone() -> None:
    engine = SeededEngine("x", num_slots=2, holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=LIMIT)])
        await until(lambda: engine.num_chunks == 2)
        engine.failures = [RequestError("there is no room")]
        engine.num_slots = 1
        driver.dispatch()
        engine.num_slots = 2
        driver.dispatch()
        await results.wait_for(1)
        engine.release.set()
        await results.wait_for(2)

    results = drive(talk, engine).by_sample
    assert (results["a1"].reason, len(results["a1"].tokens)) == ("refused", 3)
    check_whole(results["a0"], limit=LIMIT)


def test_a_new_target_ends_what_is_too_old_and_stops_the_engine_on_it() -> None:
    engine = SeededEngine("x", num_slots=3, holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit(
            [
                work("a", samples=1, max_tokens=LIMIT, max_staleness=0),
                work("b", samples=1, max_tokens=LIMIT, max_staleness=0, when_stale="abort"),
                work("c", samples=1, max_tokens=LIMIT, max_staleness=1),
            ]
        )
        await until(lambda: engine.num_chunks >= 3)
        driver.set_target_version(1)
        assert sorted(results.by_sample) == ["a0", "b0"]
        driver.set_target_version(1)
        assert len(results.by_sample) == 2, "it is no news"
        engine.release.set()
        driver.submit([work("d", samples=1, max_tokens=LIMIT)])
        await results.wait_for(4)

    results = drive(talk, engine).by_sample
    told = {name: (result.state, len(result.tokens), result.target_version) for name, result in results.items()}
    assert (told["a0"], told["b0"]) == ((SampleState.STALE, 3, 0), (SampleState.ABORTED, 0, 0))
    assert (told["c0"][0], told["c0"][2], told["d0"][2]) == (SampleState.FINISHED, 0, 1)
    assert (results["b0"].logprobs, results["b0"].text) == ((), ""), "nor anything else of an old target"


def test_a_target_that_moves_before_it_is_announced_mixes_nothing() -> None:
    engine = SeededEngine("x", num_slots=3, holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work(name, samples=1, max_tokens=6, max_staleness=0) for name in ("a", "b")])
        await until(lambda: engine.num_chunks >= 2)
        engine.target_version = 1
        driver.submit([work("c", samples=1, max_tokens=3, max_staleness=0)])
        engine.release.set()
        await results.wait_for(3)
        driver.set_target_version(1)

    results = drive(talk, engine).by_sample
    told = {name: (result.state, len(result.tokens), result.target_version) for name, result in results.items()}
    assert told == {
        "a0": (SampleState.STALE, 3, 0),
        "b0": (SampleState.STALE, 3, 0),
        "c0": (SampleState.FINISHED, 3, 1),
    }


def test_what_an_engine_with_an_older_target_sends_is_not_taken_for_the_new_one() -> None:
    moved, behind = (SeededEngine(name, num_slots=1, holds_after=1) for name in "xy")

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=6, max_staleness=0)])
        await until(lambda: moved.num_chunks == behind.num_chunks == 1)
        driver.submit([work("b", samples=4, max_tokens=6, max_staleness=0)])
        moved.target_version = 1
        moved.release.set()
        await until(lambda: len(behind.requests) > 1)
        behind.release.set()
        await until(lambda: len(results.by_sample) >= 4)
        behind.target_version = 1
        await results.wait_for(6)

    results = drive(talk, moved, behind).by_sample
    assert {name: result.state for name, result in results.items() if name[0] == "b"} == {
        f"b{number}": SampleState.FINISHED for number in range(4)
    }
    assert {result.target_version for name, result in results.items() if name[0] == "b"} == {1}
    assert not [
        name for name, result in results.items() if result.state is SampleState.FINISHED and result.engine == "y"
    ]


def test_an_engine_that_takes_nothing_new_keeps_what_it_runs() -> None:
    engine, other = SeededEngine("x", num_slots=2, holds_after=1), SeededEngine("y", num_slots=1, holds_after=1)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=3, max_tokens=6)])
        await until(lambda: engine.num_chunks == 2 and other.num_chunks == 1)
        driver.submit([work("b", samples=3, max_tokens=6)])
        engine.takes_new = False
        driver.tick()
        assert engine.num_open == 2
        engine.release.set()
        other.release.set()
        await results.wait_for(6)

    drive(talk, engine, other)
    assert [len(engine.requests), len(other.requests)] == [2, 4]


def test_an_engine_that_leaves_while_it_rests_is_forgotten() -> None:
    leaving = SeededEngine("x", failures=[EngineBusyError("full", retry_after_s=1)])
    staying = SeededEngine("y", num_slots=0)

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1)])
        await until(lambda: leaving.requests and not leaving.num_open)
        driver.set_engines([staying])
        staying.num_slots = 1
        driver.tick()
        await results.wait_for(1)

    assert drive(talk, leaving, staying).by_sample["a0"].engine == "y"


def test_a_deadline_ends_what_is_late_with_the_tokens_that_it_has() -> None:
    engine, clock = SeededEngine("x", num_slots=1, holds_after=1), Clock()

    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=2, max_tokens=LIMIT, deadline_s=5.0)])
        await until(lambda: engine.num_chunks >= 1)
        clock.now_s = 4.9
        driver.tick()
        assert not results.by_sample
        clock.now_s = 5.0
        driver.tick()

    results = drive(talk, engine, clock=clock).by_sample
    assert [(results[name].reason, len(results[name].tokens)) for name in ("a0", "a1")] == [
        ("deadline", 3),
        ("deadline", 0),
    ]


def test_a_group_id_is_free_again_when_the_group_has_ended() -> None:
    async def talk(driver: Driver, results: Results) -> None:
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        with pytest.raises(RequestError, match="there is a group a already"):
            driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        await results.wait_for(1)
        results.by_sample.clear()
        driver.submit([work("a", samples=1, max_tokens=LIMIT)])
        await results.wait_for(1)

    drive(talk, SeededEngine("x"))


def test_a_share_of_less_than_a_slot_is_one_slot_with_the_memory_of_one() -> None:
    engine = DoubleEngine(num_slots=2, context_length=100)
    small, whole = (InProcessEngine("x", engine, SlotsShare(share)) for share in (0.25, 1.0))
    assert (small.num_slots, small.memory_tokens) == (1, 100)
    assert (whole.num_slots, whole.memory_tokens) == (2, 200)
