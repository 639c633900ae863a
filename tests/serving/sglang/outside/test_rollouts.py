"""Rollouts on SGLang servers: by token ids over HTTP, with room by their own figures, every sample accounted for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry

from serving.answer_text import LocalTokenizer
from serving.engine import CapturePolicy, GenerateRequest
from serving.gateway.app import Rollouts, create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.upstream import Upstream
from serving.rollout.driver import Driver
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.order import ContextAware
from serving.rollout.samples import GroupRequest, GroupWork, SampleState
from serving.rollout.scheduler import Policy
from serving.sglang.outside.rollouts import STREAM_INTERVAL, PoolSettings, ServerPool, SglangRolloutEngine
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import EngineError
from tests.fixtures.toy import toy_tokenizer
from tests.serving.gateway.client import serve
from tests.serving.gateway.passage import host
from tests.serving.rollout.engines import Results
from tests.serving.sglang.outside.rollout_server import RolloutServer, router, token_after

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    toy_tokenizer().save_pretrained(folder)
    return LocalTokenizer(folder)


@pytest.fixture
def size(tokenizer: LocalTokenizer) -> int:
    """Tokens that it may say: letters, none of which ends an answer."""
    return 20


def wiring(tokenizer: LocalTokenizer, **changes: Any) -> PoolSettings:
    values: dict[str, Any] = {
        "tokenizer": tokenizer,
        "target": "f" * 64,
        "share": SlotsShare(),
        "target_version": lambda: 0,
        "heeds_seed": lambda: True,
        "end_group": lambda tenant, group_id: None,
    }
    return PoolSettings(**{**values, **changes})


def group(
    name: str = "g",
    *,
    n: int = 4,
    max_tokens: int = 40,
    priority: int = 0,
    alpha: int | None = None,
    prompt: tuple[int, ...] = PROMPT,
    **fields: Any,
) -> GroupWork:
    request = GroupRequest(
        group_id=name,
        prompt_token_ids=prompt,
        seeds=tuple(range(n)),
        max_tokens=max_tokens,
        priority=priority,
        max_staleness=alpha,
    )
    values: dict[str, Any] = {"sampling": SamplingParams(temperature=1.0), "logprobs": True, **fields}
    return GroupWork(request=request, policy=CapturePolicy(tenant="t", group_id=name), **values)


def text_after(prompt: tuple[int, ...], count: int, size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(tokens, 0, size))
    return tokens[len(prompt) :]


class Stage:
    """A driver on servers behind a router that lists them."""

    def __init__(self, driver: Driver, pool: ServerPool, results: Results, workers: list[str]) -> None:
        self.driver, self.pool, self.results, self.workers = driver, pool, results, workers

    def alive(self) -> list[bool]:
        """Whether each server counts as such, in the order of the workers."""
        engines = self.pool._engines
        return [url in engines and engines[url].is_alive for url in self.workers]

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(2000):
            self.driver.tick()
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not come")


@asynccontextmanager
async def staged(wires: PoolSettings, *servers: RolloutServer, chunk_tokens: int = 16) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as opened:
        workers = [(await opened.enter_async_context(serve(server.app(), grace_s=0))).url for server in servers]
        front = await opened.enter_async_context(serve(router(workers), grace_s=0))
        results = Results()
        driver = Driver([], Policy(order=ContextAware(), chunk_tokens=chunk_tokens), on_ended=results.take)
        pool = ServerPool((front.url,), True, wires, poll_s=0.02)
        async with pool.running(driver.set_engines):
            stage = Stage(driver, pool, results, workers)
            await stage.until(lambda: driver.has_engine)
            yield stage
            await driver.close()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("is_incremental", [False, True])
def test_samples_come_from_all_servers_with_text_logprobs_and_requests_of_their_own(
    tokenizer: LocalTokenizer, size: int, is_incremental: bool
) -> None:
    servers = [RolloutServer(size, pause_s=0.01, is_incremental=is_incremental) for _ in range(2)]
    ended: list[tuple[str, str]] = []

    async def scene() -> None:
        async with staged(wiring(tokenizer, end_group=lambda *one: ended.append(one)), *servers) as stage:
            stage.driver.submit([group()])
            await stage.until(lambda: len(stage.results.by_sample) == 4)
            stage.driver.check()
            expected = text_after(PROMPT, 40, size)
            for result in stage.results.by_sample.values():
                assert (list(result.tokens), result.reason) == (expected, "length")
                assert result.text == tokenizer.decode(expected)
                assert result.logprobs == (-0.5,) * 40
            assert len({result.engine for result in stage.results.by_sample.values()}) == 2
            assert ended == [("t", "g")] * 2, "once for each engine"

    run(scene)
    bodies = [body for server in servers for body in server.bodies]
    assert len({body["rid"] for body in bodies}) == len(bodies)
    assert {body["rid"].partition("#")[0] for body in bodies} == {f"g/{number}" for number in range(4)}
    assert {body["cache_salt"] for body in bodies} == {"t"}
    policy = bodies[0]["sampling_params"]["custom_params"]["slipstream"]
    assert (policy["tenant"], policy["group_id"], policy["target"]) == ("t", "g", "f" * 64)
    assert {body["sampling_params"]["sampling_seed"] for body in bodies} == set(range(4))


def test_a_cancelled_sample_takes_no_other_with_it(tokenizer: LocalTokenizer, size: int) -> None:
    """SGLang aborts all requests whose ids begin with the aborted one (sgl-project/sglang#30912)."""
    server = RolloutServer(size, most=12, pause_s=0.01)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.submit([group("g", n=1, max_tokens=400), group("h", n=1, max_tokens=400)])
            # In their order, so that numbers counted up would begin alike.
            stage.driver.submit(group(f"g{number}", n=1, max_tokens=80) for number in range(10))
            await stage.until(lambda: len(server.running) == 12)
            stage.driver.cancel(["g", "h"])
            await stage.until(lambda: len(stage.results.by_sample) == 12)
            ended = [result for result in stage.results.by_sample.values() if result.reason == "length"]
            assert [result.num_leases for result in ended] == [1] * 10

    run(scene)
    ids = sorted(body["rid"] for body in server.bodies)
    assert (len(server.aborted), len(ids)) == (2, 12)
    assert not any(longer.startswith(shorter) for shorter, longer in pairwise(ids))


def test_a_restarted_gateway_repeats_no_id_of_a_request(tokenizer: LocalTokenizer, size: int) -> None:
    """SGLang refuses an id that is in use, also by an abandoned request (sgl-project/sglang#19035)."""
    server = RolloutServer(size)

    async def scene() -> None:
        for _ in range(2):
            async with staged(wiring(tokenizer), server) as stage:
                stage.driver.submit([group(n=2)])
                await stage.until(lambda: len(stage.results.by_sample) == 2)

    run(scene)
    assert len({body["rid"] for body in server.bodies}) == 4


def test_what_was_said_is_not_said_twice_when_a_server_dies(tokenizer: LocalTokenizer, size: int) -> None:
    servers = RolloutServer(size, pause_s=0.01), RolloutServer(size, pause_s=0.01)

    async def scene() -> None:
        async with staged(wiring(tokenizer), *servers) as stage:
            stage.driver.submit([group(n=8, max_tokens=200)])
            await stage.until(lambda: stage.driver.num_tokens > 400)
            servers[0].is_down = True
            await stage.until(lambda: len(stage.results.by_sample) == 8)
            stage.driver.check()
            assert stage.driver.num_lost > 0
            expected = text_after(PROMPT, 200, size)
            assert all(list(result.tokens) == expected for result in stage.results.by_sample.values())
            assert stage.driver.num_tokens == 8 * 200, "none twice, none lost"
            servers[0].is_down = False
            await stage.until(lambda: not stage.driver._lost)

    run(scene)


def test_a_stream_that_breaks_off_is_a_failure_of_its_sample_alone(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size, pause_s=0.01, breaks_on=(9, 9))

    async def scene() -> None:
        async with staged(wiring(tokenizer), server, chunk_tokens=1000) as stage:
            stage.driver.submit([group("good", n=4, max_tokens=200)])
            await stage.until(lambda: len(server.running) == 4)
            stage.driver.submit([group("bad", n=1, prompt=(9, 9))])
            await stage.until(lambda: len(stage.results.by_sample) == 5)
            bad = stage.results.by_sample.pop("bad0")
            assert (bad.reason, bad.detail) == ("refused", "the engine failed on it repeatedly")
            assert all(one.num_leases == 1 for one in stage.results.by_sample.values()), "none was stopped"
            assert stage.driver.num_lost == 0
            stage.driver.check()

    run(scene)


def test_a_stop_string_is_found_where_a_sample_went_on_in_the_middle_of_it(
    tokenizer: LocalTokenizer, size: int
) -> None:
    """Chunks end behind 16 tokens; what is more urgent displaces the sample there."""
    server = RolloutServer(size, most=1, pause_s=0.005)
    expected = text_after(PROMPT, 40, size)
    stop = tokenizer.decode(expected[14:18])

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.submit([group("a", n=1, stop=(stop,))])
            await stage.until(lambda: stage.driver.num_tokens >= STREAM_INTERVAL)
            stage.driver.submit([group("b", n=1, max_tokens=5, priority=1)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)
            one = stage.results.by_sample["a0"]
            assert (one.reason, one.text) == ("stop", tokenizer.decode(expected).partition(stop)[0])
            assert list(one.tokens) == expected[: len(one.tokens)]
            assert one.num_leases == 2, "the case must move"

    run(scene)


def test_what_others_run_goes_first(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size, most=6, others=2, pause_s=0.01)

    async def scene() -> None:
        async with staged(wiring(tokenizer, share=SlotsShare(0.8)), server) as stage:
            stage.driver.submit([group(n=12, max_tokens=400)])
            await stage.until(lambda: stage.driver.num_tokens > 800)
            assert stage.driver.counts[SampleState.RUNNING] == 4
            for _ in range(10):  # all chunks may end just then, and there is nothing to abort
                server.others = 5
                await stage.until(lambda: len(server.running) == 1)
                if server.aborted:
                    break
                server.others = 2
                await stage.until(lambda: len(server.running) == 4)
            assert server.aborted, "a slot is given up at once"
            stage.driver.check()
            server.others = 0
            await stage.until(lambda: len(stage.results.by_sample) == 12)
            expected = text_after(PROMPT, 400, size)
            assert all(list(result.tokens) == expected for result in stage.results.by_sample.values())

    run(scene)


def aborted(status: int, message: str) -> bytes:
    finish = {"type": "abort", "status_code": status, "message": message}
    return b"data: " + json.dumps({"output_ids": [], "meta_info": {"finish_reason": finish}}).encode() + b"\n\n"


def ended(tokens: list[int], *logprobs: list[float | int | None]) -> bytes:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
    return b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"


def test_a_sample_waits_for_a_server_whose_queue_is_full(tokenizer: LocalTokenizer, size: int) -> None:
    """SGLang says so in a stream's last event (sgl-project/sglang#19357)."""
    server = RolloutServer(size, num_full=9)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.submit([group(n=1)])
            await stage.until(lambda: len(stage.results.by_sample) == 1)
            [result] = stage.results.by_sample.values()
            assert (result.reason, len(result.tokens)) == ("length", 40)

    run(scene)


def test_servers_join_and_leave(tokenizer: LocalTokenizer, size: int) -> None:
    servers = RolloutServer(size, pause_s=0.01), RolloutServer(size, pause_s=0.01)

    async def scene() -> None:
        async with staged(wiring(tokenizer), *servers) as stage:
            gone = stage.workers.pop(0)
            await stage.until(lambda: len(stage.driver._engines) == 1)
            stage.driver.submit([group(n=8, max_tokens=1000)])
            await stage.until(lambda: stage.driver.num_tokens > 100)
            assert not servers[0].bodies
            stage.workers[:] = [gone]
            await stage.until(lambda: len(stage.results.by_sample) == 8)
            assert servers[0].bodies
            assert stage.driver.num_tokens == 8000

    run(scene)


def test_a_server_that_has_no_load_to_report_holds_up_no_other(tokenizer: LocalTokenizer, size: int) -> None:
    starting = RolloutServer(size, num_ranks=0)

    async def scene() -> None:
        async with staged(wiring(tokenizer), starting, RolloutServer(size)) as stage:
            assert stage.alive() == [False, True]
            stage.driver.submit([group(n=2)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)
            starting.num_ranks = 1
            await stage.until(lambda: stage.alive() == [True, True])

    run(scene)


def test_a_server_that_hangs_holds_up_no_other(tokenizer: LocalTokenizer, size: int) -> None:
    hanging, other = RolloutServer(size), RolloutServer(size)

    async def scene() -> None:
        async with staged(wiring(tokenizer), hanging, other) as stage:
            await stage.until(lambda: stage.alive() == [True, True])
            hangs, answers = (stage.pool._engines[url] for url in stage.workers)
            hanging.is_silent, hanging.num_polls = True, 0
            await stage.until(lambda: hanging.num_polls)
            for others, num_slots in ((other.most, 0), (0, other.most)):
                other.others = others
                await stage.until(lambda expected=num_slots: answers.num_slots == expected)
            assert (hanging.num_polls, hangs._num_missed) == (1, 0), "its poll still waits"
            hanging.is_silent = False

    run(scene)


def test_ranks_that_a_router_lists_are_one_server(tokenizer: LocalTokenizer, size: int) -> None:
    """With `--dp-aware` it lists `http://host:port@rank`, which is no address (sgl-project/sglang#26237)."""
    server = RolloutServer(size)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            (url,) = stage.workers
            stage.workers[:] = [f"{url}@0", f"{url}@1"]
            await stage.pool.poll(stage.driver.set_engines)
            assert list(stage.pool._engines) == [url]
            stage.driver.submit([group(n=2)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)

    run(scene)


def test_a_sample_longer_than_the_cache_of_every_server_is_answered(tokenizer: LocalTokenizer, size: int) -> None:
    """A cache smaller than the context is no reason to wait for ever (vllm-project/vllm#52530)."""
    server = RolloutServer(size, max_tokens=50)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.submit([group(n=3, max_tokens=100)])
            await stage.until(lambda: len(stage.results.by_sample) == 3)
            expected = text_after(PROMPT, 100, size)
            assert all(list(result.tokens) == expected for result in stage.results.by_sample.values())
            stage.driver.check()

    run(scene)


@pytest.mark.parametrize(
    ("server", "fields", "why"),
    [
        ({"refusal": JSONResponse({"unknown": "shape"}, 400)}, {}, "refuses"),
        ({"refusal": JSONResponse({"error": {"message": "nested"}}, 400)}, {}, "nested"),
        ({"events": [b'data: {"error": {"message": "too long", "code": 400}}\n\n']}, {}, "too long"),
        ({"events": [aborted(400, "too long")]}, {}, "too long"),
        ({"events": [aborted(500, "no memory")]}, {}, "repeatedly"),
        ({"events": [b"data: {]\n\n"]}, {}, "repeatedly"),
        ({"events": [ended([5, 6], [-0.5, 5, None])]}, {}, "repeatedly"),
        ({"events": [ended([5, 6], [-0.5, 6, None], [-0.5, 5, None])]}, {}, "repeatedly"),
        ({"events": []}, {}, "repeatedly"),
        ({}, {"sampling": SamplingParams(temperature=1.0, top_p=0.9)}, "top_p"),
    ],
)
def test_what_cannot_be_answered_ends_as_refused(
    tokenizer: LocalTokenizer, size: int, server: dict[str, Any], fields: dict[str, Any], why: str
) -> None:
    async def scene() -> None:
        async with staged(wiring(tokenizer), RolloutServer(size, **server)) as stage:
            stage.driver.submit([group(n=2, **fields)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)
            for result in stage.results.by_sample.values():
                assert (result.state, result.reason) == (SampleState.ABORTED, "refused")
                assert why in result.detail

    run(scene)


@pytest.mark.parametrize(("order", "sign"), [("high first", -1), ("low first", 1), (None, None)])
def test_greedy_tokens_have_logprob_0_and_rollouts_come_last(
    tokenizer: LocalTokenizer, size: int, order: Literal["low first", "high first"] | None, sign: int | None
) -> None:
    server = RolloutServer(size, end_after=20, by_priority=order)

    async def scene() -> None:
        async with staged(wiring(tokenizer, heeds_seed=lambda: False), server) as stage:
            stage.driver.submit([group(n=1, sampling=SamplingParams(temperature=0.0, top_p=0.9))])
            await stage.until(lambda: stage.results.by_sample)
            (result,) = stage.results.by_sample.values()
            assert (result.reason, result.logprobs, len(result.tokens)) == ("stop", (0.0,) * 16, 16)

    run(scene)
    (body,) = server.bodies
    assert "sampling_seed" not in body["sampling_params"]
    assert body.get("priority") == (None if sign is None else sign * 10**6)


def test_a_seed_of_64_bits_is_one_that_sglang_takes(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            work = group(n=1, max_tokens=8)
            stage.driver.submit([replace(work, request=replace(work.request, seeds=(2**62 + 2**31 + 5,)))])
            await stage.until(lambda: stage.results.by_sample)

    run(scene)
    assert [body["sampling_params"]["sampling_seed"] for body in server.bodies] == [5]


@asynccontextmanager
async def one_engine(server: RolloutServer, wires: PoolSettings) -> AsyncIterator[SglangRolloutEngine]:
    """An engine that was polled once."""
    async with serve(server.app(), grace_s=0) as behind:
        engine = SglangRolloutEngine(behind.url, wires)
        await engine.poll()
        try:
            yield engine
        finally:
            await engine.close()


def test_rollouts_have_their_share_of_a_servers_memory(tokenizer: LocalTokenizer, size: int) -> None:
    async def scene() -> None:
        server = RolloutServer(size, max_tokens=1000, num_ranks=2)
        async with one_engine(server, wiring(tokenizer, share=SlotsShare(0.75))) as engine:
            assert (engine.num_slots, engine.memory_tokens) == (12, 1500)

    run(scene)


def test_streams_that_break_off_together_ask_the_server_once(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size, breaks_on=PROMPT)

    async def scene() -> None:
        async with one_engine(server, wiring(tokenizer)) as engine:
            server.is_silent = True

            sampling = SamplingParams(temperature=1.0)
            request = GenerateRequest(request_id="r", prompt_token_ids=PROMPT, max_tokens=9, sampling=sampling)

            async def break_off() -> None:
                async for _ in engine.generate(request):
                    pass

            streams = [asyncio.create_task(break_off()) for _ in range(8)]
            while len(server.bodies) < 8 or server.running or server.num_polls < 2:  # noqa: ASYNC110 - a test's
                await asyncio.sleep(0.001)
            server.is_silent = False
            failures = await asyncio.gather(*streams, return_exceptions=True)
            assert {type(failure) for failure in failures} == {EngineError}
            assert server.num_polls - 1 < 4, "and not each of the eight"

    run(scene)


def test_tokens_are_of_the_target_that_said_them(tokenizer: LocalTokenizer, size: int) -> None:
    """Samples that may mix targets go on under new weights; those that may not end, with no token of the new."""
    server = RolloutServer(size, pause_s=0.01)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.submit([group("may", n=2, max_tokens=400), group("may not", n=2, max_tokens=400, alpha=0)])
            await stage.until(lambda: stage.driver.num_tokens > 100)
            server.label, server.seed = "3", 3
            await stage.until(lambda: len(stage.results.by_sample) == 4)
            for result in stage.results.by_sample.values():
                of_old = 0
                while of_old < len(result.tokens) and list(result.tokens[: of_old + 1]) == text_after(
                    PROMPT, of_old + 1, size
                ):
                    of_old += 1
                if result.sample_id.group_id == "may":
                    assert (result.state, len(result.tokens), result.target_version) == (SampleState.FINISHED, 400, 0)
                    text, first = [*PROMPT, *result.tokens], len(PROMPT) + of_old
                    assert 0 < of_old < 400
                    assert all(text[t] == token_after(text[:t], 3, size) for t in range(first, len(text)))
                else:
                    assert result.state is SampleState.STALE
                    assert 0 < of_old == len(result.tokens) < 400
            stage.driver.check()

    run(scene)


@pytest.mark.parametrize(("alpha", "num_tokens"), [(0, 3), (None, 8)])
def test_tokens_of_two_targets_in_one_event_are_told_apart(
    tokenizer: LocalTokenizer, size: int, alpha: int | None, num_tokens: int
) -> None:
    spans = [{"version": "default", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 8}]
    meta = {
        "finish_reason": {"type": "length", "length": 8},
        "output_token_logprobs": [[-0.5, token, None] for token in range(8)],
        "weight_version": "5",
        "weight_versions": spans,
    }
    event = b"data: " + json.dumps({"output_ids": list(range(8)), "meta_info": meta}).encode() + b"\n\n"

    async def scene() -> None:
        # The plugin may have said by then that the target has moved.
        async with staged(wiring(tokenizer, target_version=lambda: 5), RolloutServer(size, events=[event])) as stage:
            stage.driver.submit([group(n=1, max_tokens=8, alpha=alpha)])
            await stage.until(lambda: stage.results.by_sample)
            (result,) = stage.results.by_sample.values()
            assert (result.tokens, result.target_version) == (tuple(range(num_tokens)), 4)
            assert result.state is (SampleState.FINISHED if alpha is None else SampleState.STALE)
            assert len(result.logprobs) == num_tokens

    run(scene)


def test_a_server_with_older_weights_than_another_gets_no_samples(tokenizer: LocalTokenizer, size: int) -> None:
    servers = RolloutServer(size, label="2", seed=2), RolloutServer(size, label="1", seed=1)

    async def scene() -> None:
        async with staged(wiring(tokenizer), *servers) as stage:
            await stage.until(lambda: stage.alive() == [True, False])
            stage.driver.submit([group(n=8, max_tokens=40)])
            await stage.until(lambda: len(stage.results.by_sample) == 8)
            assert {result.target_version for result in stage.results.by_sample.values()} == {2}
            assert not servers[1].bodies
            servers[1].label, servers[1].seed = "2", 2
            await stage.until(lambda: stage.alive() == [True, True])
            stage.driver.submit([group("next", n=16, max_tokens=40)])
            await stage.until(lambda: len(stage.results.by_sample) == 24)
            assert servers[1].bodies

    run(scene)


def test_a_dead_server_with_newer_weights_holds_up_no_other(tokenizer: LocalTokenizer, size: int) -> None:
    dying, older = RolloutServer(size, label="2", seed=2), RolloutServer(size, label="1", seed=1)

    async def scene() -> None:
        async with staged(wiring(tokenizer), dying, older) as stage:
            await stage.until(lambda: stage.alive() == [True, False])
            dying.is_down = True
            await stage.until(lambda: stage.alive() == [False, True])
            stage.driver.submit([group(n=2)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)
            assert {result.target_version for result in stage.results.by_sample.values()} == {1}

    run(scene)


def test_a_server_that_starts_again_is_not_taken_for_one_with_the_announced_weights(
    tokenizer: LocalTokenizer, size: int
) -> None:
    server = RolloutServer(size, label="2", seed=2)

    async def scene() -> None:
        async with staged(wiring(tokenizer), server) as stage:
            stage.driver.set_target_version(2)
            stage.driver.submit([group("before", n=2)])
            await stage.until(lambda: len(stage.results.by_sample) == 2)
            server.is_down = True
            await stage.until(lambda: stage.alive() == [False])
            server.label, server.seed, server.is_down = "default", 0, False
            await stage.until(lambda: stage.alive() == [True])
            stage.driver.submit([group("after", n=2), group("fresh", n=2, alpha=0)])
            await stage.until(lambda: len(stage.results.by_sample) >= 4)
            server.label, server.seed = "2", 2
            await stage.until(lambda: len(stage.results.by_sample) == 6)
            versions = {name: result.target_version for name, result in stage.results.by_sample.items()}
            assert versions == {
                **dict.fromkeys(("before0", "before1", "fresh0", "fresh1"), 2),
                **dict.fromkeys(("after0", "after1"), 0),
            }

    run(scene)


def test_a_server_that_falls_behind_is_given_nothing_for_what_ends_there(tokenizer: LocalTokenizer, size: int) -> None:
    newer, older = (RolloutServer(size, label="1", most=4, pause_s=0.01) for _ in range(2))

    async def scene() -> None:
        async with staged(wiring(tokenizer), newer, older) as stage:
            stage.driver.submit([group("a", n=8, max_tokens=1000)])
            await stage.until(lambda: len(older.running) == 4)
            newer.label = "2"
            await stage.until(lambda: not stage.pool._engines[stage.workers[1]].takes_new)
            stage.driver.submit([group("b", n=8)])
            stage.driver.cancel(["a"])
            await stage.until(lambda: len(stage.results.by_sample) == 16)
            assert {body["rid"].partition("/")[0] for body in older.bodies} == {"a"}

    run(scene)


def test_a_gateway_that_stops_aborts_what_runs(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size, pause_s=0.01)
    groups = [{"prompt": list(PROMPT), "n": 2, "max_tokens": 4000, "temperature": 1.0}]

    async def scene() -> None:
        async with serve(server.app(), grace_s=0) as behind:
            async with _gateway(ServerPool((behind.url,), False, wiring(tokenizer)), behind.url) as client:
                waiting = _ready(client, {"model": host().info.model, "id": "one", "groups": groups})
                asking = asyncio.ensure_future(anext(waiting))
                while len(server.running) < 2:  # noqa: ASYNC110 - a test's
                    await asyncio.sleep(0.001)
            await asyncio.gather(asking, return_exceptions=True)
            assert len(server.aborted) == 2

    run(scene)


def test_the_gateway_has_the_route_in_front_of_sglang(tokenizer: LocalTokenizer, size: int) -> None:
    server = RolloutServer(size)

    async def scene() -> None:
        async with AsyncExitStack() as opened:
            behind = await opened.enter_async_context(serve(server.app(), grace_s=0))
            pool = ServerPool((behind.url,), False, wiring(tokenizer))
            client = await opened.enter_async_context(_gateway(pool, behind.url))
            groups = [{"prompt": list(PROMPT), "n": 2, "max_tokens": 12, "temperature": 1.0}]
            body = {"model": host().info.model, "id": "one", "groups": groups}
            async for _ in _ready(client, body):
                pass
            answer = await client.get("/v1/rollouts/one/samples")
            said = [json.loads(line) for line in answer.text.splitlines() if line]
            expected = text_after(PROMPT, 12, size)
            assert [one["tokens"] for one in said if one["object"] == "rollout.sample"] == [expected] * 2
            assert said[-1]["state"] == "ended"
            metrics = (await client.get("/metrics")).text
            assert "slipstream_rollout_tokens_total 24.0" in metrics

    run(scene)


@asynccontextmanager
async def _gateway(pool: ServerPool, url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of the pool."""
    app = create_passthrough_app(
        host(),
        Upstream(url),
        settings=GatewaySettings(),
        registry=CollectorRegistry(),
        rollouts=Rollouts(pool=pool, slots_share=pool.settings.share, tokenizer=pool.settings.tokenizer),
    )
    async with serve(app, grace_s=0) as front, httpx.AsyncClient(base_url=front.url, timeout=20) as client:
        yield client


async def _ready(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
    """Asks until the pool has looked at its server."""
    for _ in range(500):
        answer = await client.post("/v1/rollouts", json=body)
        if answer.status_code == 200:
            yield answer
            return
        assert answer.status_code == 503, answer.text
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")
