"""`/v1/rollouts` as clients meet it: streams, cursors, cancelling, limits, tenants, and everything that is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from serving.engine import TargetReport
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from serving.gateway.rollouts.registry import Rollout, RolloutRegistry
from serving.gateway.rollouts.schema import MAX_GROUPS
from serving.rollout.samples import MAX_SAMPLES
from speculator.errors import EngineBusyError, EngineDeadError, StreamError
from speculator.redis.trace_stream import GroupRewards
from tests.fixtures.doubles import DoubleEngine, says
from tests.serving.gateway.client import CHAT, HELLO, FullEngine, ask, error_of, serve
from tests.serving.gateway.keyfile import KeyFile
from tests.serving.gateway.test_admin import KEY, KEYS
from tests.serving.rollout.engines import SeededEngine, until, work

ROLLOUTS = "/v1/rollouts"
ENDS = ("stop", "length")


def body(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "double", "groups": list(groups or ({"prompt": "hello", "n": 2, "max_tokens": 9},)), **fields}


def app_of(engine: DoubleEngine, registry: CollectorRegistry | None = None, **settings: Any) -> FastAPI:
    rewards = settings.pop("send_rewards", None)
    return create_app(
        engine,
        settings=GatewaySettings(**settings),
        registry=registry or CollectorRegistry(),
        send_rewards=rewards,
    )


def talk(app: FastAPI, with_client: Callable[[httpx.AsyncClient], Awaitable[None]], *, grace_s: int = 5) -> None:
    """Over a real socket."""

    async def run() -> None:
        async with (
            serve(app, grace_s=grace_s) as server,
            httpx.AsyncClient(base_url=server.url, timeout=20) as client,
        ):
            await with_client(client)

    asyncio.run(run())


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def post(engine: DoubleEngine, document: dict[str, Any], **settings: Any) -> httpx.Response:
    return ask(app_of(engine, **settings), lambda client: client.post(ROLLOUTS, json=document))


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines() if line]


def samples(said: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    found = [one for one in said if one["object"] == "rollout.sample"]
    by_name = {(one["group_id"], one["sample"]): one for one in found}
    assert len(by_name) == len(found), "a sample came twice"
    return by_name


# -- what comes back ------------------------------------------------------------------------------------------------


def test_samples_come_back_with_everything_about_them() -> None:
    engine = DoubleEngine(answer=says("abcdefgh"))
    document = body(
        {"id": "text", "prompt": "hello", "seeds": [7, 8], "max_tokens": 5},
        {"id": "tokens", "prompt": [104, 105], "temperature": 0.0, "ignore_eos": True},
        {"messages": HELLO, "n": 3, "stop": "f"},
        id="step-1",
    )
    said = lines(post(engine, document))
    assert [one["object"] for one in said] == ["rollout", *["rollout.sample"] * 6, "rollout.end"]
    assert (said[0]["id"], said[0]["num_groups"], said[0]["num_samples"]) == ("step-1", 3, 6)
    assert (said[-1]["state"], said[-1]["next"], said[-1]["samples"]) == ("ended", 6, {"finished": 6})
    assert [one["number"] for one in said[1:-1]] == list(range(6))
    found = samples(said)
    assert found["text", 0] == {
        "object": "rollout.sample",
        "number": found["text", 0]["number"],
        "group_id": "text",
        "sample": 0,
        "seed": 7,
        "state": "finished",
        "finish_reason": "length",
        "tokens": list(b"abcde"),
        "text": "abcde",
        "logprobs": [],
        "target_version": 0,
        "engine": "local",
        "num_leases": 1,
        "turns": None,
        "detail": None,
    }
    assert (found["tokens", 0]["text"], found["tokens", 0]["finish_reason"]) == ("abcdefgh", "stop")
    assert [found["2", number]["text"] for number in range(3)] == ["abcde"] * 3
    asked = {request.request_id.rpartition("/")[0].partition("/")[2]: request for request in engine.requests}
    assert (asked["text"].prompt_token_ids, asked["text"].logprobs) == (tuple(b"hello"), True)
    assert asked["tokens"].sampling.temperature == 0
    assert {name: request.ignore_eos for name, request in asked.items()} == {"text": False, "tokens": True, "2": False}
    assert asked["2"].prompt_token_ids == tuple(b"<user>hello\n<assistant>")
    assert len({request.policy.group_id for request in engine.requests}) == 3, "suffixes are shared within a group"


def test_each_sample_has_a_seed_of_its_own() -> None:
    """Otherwise all samples of a group are one."""
    found = samples(lines(post(DoubleEngine(), body({"prompt": "a", "n": 8, "max_tokens": 3}))))
    assert len({one["seed"] for one in found.values()}) == 8


def test_a_client_may_ask_for_events() -> None:
    app = app_of(DoubleEngine())
    headers = {"accept": "text/event-stream"}
    response = ask(app, lambda client: client.post(ROLLOUTS, json=body(), headers=headers))
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    said = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert [one["object"] for one in said] == ["rollout", "rollout.sample", "rollout.sample", "rollout.end"]


def test_whoever_wants_no_logprobs_gets_none_and_the_engine_is_not_asked() -> None:
    engine = DoubleEngine()
    found = samples(lines(post(engine, body(logprobs=False))))
    assert {one["logprobs"] for one in found.values()} == {None}
    assert not any(request.logprobs for request in engine.requests)


def test_capture_is_the_requests_and_the_keys_choice(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    user, shy = keys.add("user"), keys.add("shy", capture=False)
    engine = DoubleEngine()

    async def with_client(client: httpx.AsyncClient) -> None:
        for headers, capture in ((user, True), (user, False), (shy, True)):
            document = body(slipstream={"capture": capture, "domain": "maths"})
            (await client.post(ROLLOUTS, json=document, headers=headers)).raise_for_status()

    ask(app_of(engine, keys_file=keys.path), with_client)
    policies = [request.policy for request in engine.requests[::2]]
    assert [(policy.tenant, policy.capture, policy.domain) for policy in policies] == [
        ("tenant-of-user", True, "maths"),
        ("tenant-of-user", False, "maths"),
        ("tenant-of-shy", False, "maths"),
    ]


# -- following, cancelling ------------------------------------------------------------------------------------------


def test_a_client_that_lost_its_connection_goes_on_where_it_was() -> None:
    engine = DoubleEngine(hold_at=1, num_slots=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        quick = {"prompt": "a", "n": 3, "max_tokens": 3, "priority": 1}
        document = body(quick, {"prompt": "b", "max_tokens": 9}, id="r")
        async with client.stream("POST", ROLLOUTS, json=document) as response:
            async for line in response.aiter_lines():
                if json.loads(line).get("number") == 1:
                    break
        state = (await client.get(f"{ROLLOUTS}/r")).json()
        assert (state["state"], state["num_ended"] >= 2, state["num_samples"]) == ("running", True, 4)
        engine.release.set()
        said = lines(await client.get(f"{ROLLOUTS}/r/samples?after=2"))
        assert [one["number"] for one in said[1:-1]] == [2, 3]
        assert len(samples(lines(await client.get(f"{ROLLOUTS}/r/samples")))) == 4
        assert samples(lines(await client.get(f"{ROLLOUTS}/r/samples?after=4"))) == {}
        for after in ("5", "-1", "x", "1" * 20):
            refused = await client.get(f"{ROLLOUTS}/r/samples?after={after}")
            assert (refused.status_code, error_of(refused)["param"]) == (400, "after")

    talk(app_of(engine, rollout_slots_share=1.0), with_client)
    assert len(engine.requests) == 4, "nothing was generated twice"


class Moved:
    """Stands for `TargetUpdater`: every announcement is right."""

    def announce(self, version: int, path: str | None) -> TargetReport:
        return TargetReport(version=version, previous=0, stall_ms=0.0)


def test_samples_that_are_too_old_for_an_announced_target_end() -> None:
    engine = DoubleEngine(hold_at=1, num_slots=2)
    settings, rewarded = GatewaySettings(admin_key=SecretStr(KEY), rollout_slots_share=1.0), list[GroupRewards]()
    app = create_app(
        engine, settings=settings, registry=CollectorRegistry(), targets=Moved(), send_rewards=rewarded.extend
    )

    async def with_client(client: httpx.AsyncClient) -> None:
        old = {"id": "old", "prompt": "a", "n": 1, "max_tokens": 9, "max_staleness": 0, "priority": 1}
        document = body(old, {"id": "any", "prompt": "b", "n": 2, "max_tokens": 9}, id="r")
        async with client.stream("POST", ROLLOUTS, json=document) as response:
            following = response.aiter_lines()
            await engine.holding.wait()
            for version in (2, 1):
                (await client.post("/v1/target-version", headers=KEYS, json={"version": version})).raise_for_status()
            engine.release.set()
            found = samples([json.loads(line) async for line in following if line])
        assert (found["old", 0]["state"], found["old", 0]["finish_reason"]) == ("stale", "stale")
        ends = {number: (found["any", number]["state"], found["any", number]["target_version"]) for number in range(2)}
        assert ends == {0: ("finished", 0), 1: ("finished", 2)}
        # What has come of it was returned, and can teach.
        (await client.post(f"{ROLLOUTS}/r/rewards", json=rewards(("old", 0, 1)))).raise_for_status()
        assert [group.rewards for group in rewarded] == [{0: 1.0}]

    talk(app, with_client)


def test_a_job_that_comes_later_does_not_wait_for_all_of_another() -> None:
    engine = DoubleEngine(hold_at=1, num_slots=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        first = body({"prompt": "a", "n": 4, "max_tokens": 9}, job="one")
        second = body({"prompt": "bb", "n": 1, "max_tokens": 9}, job="two", weight=2)
        answers = [asyncio.create_task(client.post(ROLLOUTS, json=first))]
        await engine.holding.wait()
        answers.append(asyncio.create_task(client.post(ROLLOUTS, json={**second, "id": "second"})))
        while (await client.get(f"{ROLLOUTS}/second")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.release.set()
        for answer in await asyncio.gather(*answers):
            assert lines(answer)[-1]["state"] == "ended"

    talk(app_of(engine, rollout_slots_share=1.0), with_client)
    lengths = [len(request.prompt_token_ids) for request in engine.requests]
    assert lengths.index(max(lengths)) == 1, "the other job has had more by then"


def test_rollouts_give_slots_up_while_interactive_requests_miss_their_objective() -> None:
    engine = DoubleEngine(hold_at=2, tokens_per_chunk=1, answer=says("abcdefghijkl"))
    registry = CollectorRegistry()

    def figures() -> tuple[float | None, float | None]:
        running = registry.get_sample_value("slipstream_rollout_samples", {"state": "running"})
        return registry.get_sample_value("slipstream_rollout_slots_share"), running

    async def with_client(client: httpx.AsyncClient) -> None:
        document = body({"prompt": "hello", "n": 6, "max_tokens": 9})
        rollout = asyncio.create_task(client.post(ROLLOUTS, json=document))
        await eventually(lambda: is_now(0.75, 6.0))
        for _ in range(2):
            (await client.post(CHAT, json={"model": "double", "messages": HELLO, "max_tokens": 2})).raise_for_status()
        await eventually(lambda: is_now(0.375, 3.0))
        engine.release.set()
        found = samples(lines(await rollout))
        assert {sample["finish_reason"] for sample in found.values()} == {"length"}
        assert [len(sample["tokens"]) for sample in found.values()] == [9] * 6
        families = {family.name: family.samples for family in registry.collect()}
        states = {sample.labels["state"]: sample.value for sample in families["slipstream_rollout_samples"]}
        assert states == dict.fromkeys(("waiting", "running", "paused", "awaiting"), 0), "of unfinished ones alone"

    async def is_now(share: float, running: float) -> bool:
        return figures() == (share, running)

    talk(app_of(engine, registry, interactive_itl_p99_s=1e-9), with_client)


def test_a_client_that_vanishes_has_a_while_to_come_back_and_then_all_is_cancelled() -> None:
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body(id="r")) as response:
            await anext(response.aiter_lines())
            await engine.holding.wait()
        async with asyncio.timeout(10):
            await engine.abort_seen.wait()
        said = lines(await client.get(f"{ROLLOUTS}/r/samples"))
        assert said[-1]["state"] == "cancelled"
        assert {one["finish_reason"] for one in samples(said).values()} == {"cancelled"}

    talk(app_of(engine, rollout_grace_s=0.2), with_client)
    assert len(engine.aborted) == 2


def test_a_client_that_reads_or_asks_is_there() -> None:
    now_s = 0.0

    async def run() -> None:
        nonlocal now_s
        settings = GatewaySettings(rollout_grace_s=60)
        rollout_registry = RolloutRegistry([SeededEngine("x", num_slots=0)], settings, clock=lambda: now_s)
        rollout = rollout_registry.submit("t", "r", "key", {"a": work("key/a", samples=1)}, "")
        with rollout_registry.reading(rollout):
            now_s = 1000.0
            rollout_registry.tick()
        now_s += 59
        rollout_registry.tick()
        rollout_registry.find("t", "r")
        now_s += 59
        rollout_registry.tick()
        assert rollout.state == "running"
        now_s += 2
        rollout_registry.tick()
        assert rollout.state == "cancelled"

    asyncio.run(run())


def test_cancelling_stops_the_engine_and_keeps_what_there_is() -> None:
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body(id="r")) as response:
            reading = response.aiter_lines()
            await anext(reading)
            await engine.holding.wait()
            cancelled = (await client.delete(f"{ROLLOUTS}/r")).json()
            assert (cancelled["state"], cancelled["samples"]) == ("cancelled", {"aborted": 2})
            rest = [json.loads(line) async for line in reading]
        assert [one["object"] for one in rest] == ["rollout.sample", "rollout.sample", "rollout.end"]
        assert [len(one["tokens"]) for one in rest[:2]] == [4, 4], "what it had"
        again = (await client.delete(f"{ROLLOUTS}/r")).json()
        assert again["state"] == "cancelled"

    talk(app_of(engine), with_client)
    assert (len(engine.aborted), engine.finished) == (2, [])


def test_a_group_can_be_cancelled_by_itself() -> None:
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        groups = [{"id": name, "prompt": "p", "max_tokens": 20} for name in ("a", "c", "d")]
        async with client.stream("POST", ROLLOUTS, json=body(id="r", groups=groups)) as response:
            reading = response.aiter_lines()
            await anext(reading)
            await engine.holding.wait()
            refused = await client.delete(f"{ROLLOUTS}/r", params={"group_id": ["c", "e"]})
            assert (refused.status_code, error_of(refused)["code"]) == (404, "group_not_found")
            cancelled = (await client.delete(f"{ROLLOUTS}/r", params={"group_id": ["a", "c"]})).json()
            assert (cancelled["state"], cancelled["num_ended"]) == ("running", 2), "nothing of what was refused"
            ended = [json.loads(await anext(reading)) for _ in range(2)]
            assert [(one["group_id"], one["finish_reason"]) for one in ended] == [
                ("a", "cancelled"),
                ("c", "cancelled"),
            ]
            left = (await client.delete(f"{ROLLOUTS}/r")).json()
            assert (left["state"], left["num_ended"]) == ("cancelled", 3)

    talk(app_of(engine), with_client)


def test_a_rollout_of_which_a_group_was_cancelled_ends_as_any_other() -> None:
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        groups = [{"id": name, "prompt": "p", "max_tokens": 20} for name in ("a", "b")]
        async with client.stream("POST", ROLLOUTS, json=body(id="r", groups=groups)) as response:
            await engine.holding.wait()
            await client.delete(f"{ROLLOUTS}/r", params={"group_id": "a"})
            engine.release.set()
            *_, last = [json.loads(line) async for line in response.aiter_lines() if line]
        assert (last["state"], last["samples"]) == ("ended", {"aborted": 1, "finished": 1})
        assert (await client.delete(f"{ROLLOUTS}/r")).json()["state"] == "ended", "too late to cancel"

    talk(app_of(engine), with_client)


def test_each_sample_is_counted_once_while_others_of_its_group_run() -> None:
    engine = DoubleEngine(answer=lambda request: "one" if request.seed == 7 else "a longer one", hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        group = {"prompt": "p", "seeds": [7, 8], "max_tokens": 20}
        async with client.stream("POST", ROLLOUTS, json=body(group, id="r")) as response:
            reading = response.aiter_lines()
            assert [json.loads(await anext(reading))["object"] for _ in range(2)] == ["rollout", "rollout.sample"]
            await engine.holding.wait()
            said = (await client.get(f"{ROLLOUTS}/r")).json()
            assert (said["num_ended"], said["samples"]) == (1, {"finished": 1, "running": 1})
            engine.release.set()

    talk(app_of(engine), with_client)


def test_an_engine_has_a_while_to_come_back_from_when_it_was_last_there() -> None:
    now_s, engine = 0.0, SeededEngine("x", num_slots=0)

    async def run() -> None:
        nonlocal now_s
        registry = RolloutRegistry([engine], GatewaySettings(), clock=lambda: now_s)
        rollout = registry.submit("t", "r", "key", {"a": work("key/a", samples=1)}, "")
        with registry.reading(rollout):
            now_s = 1000.0
            registry.tick()
            engine.is_alive = False
            for seconds, is_gone in ((29, False), (2, True)):
                now_s += seconds
                registry.tick()
                assert registry.has_no_engine is is_gone

    asyncio.run(run())


def test_a_gateway_that_stops_ends_what_runs() -> None:
    engine = SeededEngine("x", holds_after=0)

    async def run() -> None:
        registry = RolloutRegistry([engine], GatewaySettings())
        async with registry.running():
            registry.submit("t", "r", "key", {"a": work("key/a", samples=6)}, "")
            await until(lambda: engine.num_open == 4)
        assert engine.num_open == 0

    asyncio.run(run())
    assert len(engine.requests) == 4, "and begins nothing"


def test_a_finished_rollout_is_kept_for_a_while_and_then_gone() -> None:
    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=body(id="r")))

        async def is_gone() -> bool:
            # To ask does not keep what has ended.
            return (await client.get(f"{ROLLOUTS}/r")).status_code != 200

        await eventually(is_gone)
        gone = await client.get(f"{ROLLOUTS}/r")
        assert (gone.status_code, error_of(gone)["code"]) == (410, "rollout_forgotten")
        lines(await client.post(ROLLOUTS, json=body(id="r")))

    talk(app_of(DoubleEngine(), rollout_keep_s=0.2), with_client)


def test_what_has_ended_is_kept_for_a_while_after_its_last_reader() -> None:
    """One that learns between two samples comes for the rest when its stream was cut."""
    now_s = 0.0

    async def run() -> None:
        nonlocal now_s
        settings = GatewaySettings(rollout_keep_s=600)
        registry = RolloutRegistry([SeededEngine("x", num_slots=0)], settings, clock=lambda: now_s)
        rollout = registry.submit("t", "r", "key", {"a": work("key/a", samples=1)}, "")
        registry.cancel(rollout)
        with registry.reading(rollout):
            now_s = 1000.0
            registry.tick()
        now_s += 599
        registry.tick()
        assert registry.find("t", "r") is rollout
        now_s += 2
        registry.tick()
        with pytest.raises(ApiError, match="deleted"):
            registry.find("t", "r")

    asyncio.run(run())


def test_what_has_ended_makes_room_for_what_is_new_and_what_runs_does_not() -> None:
    engine = DoubleEngine(hold_at=1)
    document = body({"prompt": "a", "n": 2, "max_tokens": 9})

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json={**document, "id": "r"}) as response:
            reading = response.aiter_lines()
            await anext(reading)
            full = await client.post(ROLLOUTS, json=document)
            assert (full.status_code, error_of(full)["code"]) == (429, "rollouts_full")
            assert int(full.headers["retry-after"]) > 0
            engine.release.set()
            assert len([line async for line in reading]) == 3
        lines(await client.post(ROLLOUTS, json=document))
        assert (await client.get(f"{ROLLOUTS}/r")).status_code == 410

    talk(app_of(engine, rollout_max_samples=3), with_client)


def test_a_rollout_that_never_fits_is_refused_for_good() -> None:
    """Not as one that may come again later."""
    refused = post(DoubleEngine(), body({"prompt": "hello", "n": 2, "max_tokens": 9}), rollout_max_tokens=22)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "rollout_too_large")


@pytest.mark.parametrize("limits", [{"rollout_max_samples": 2}, {"rollout_max_tokens": 220}])
@pytest.mark.parametrize(("is_read", "gone"), [(False, "old"), (True, "new")])
def test_what_ended_first_and_is_not_being_read_makes_room(limits: dict[str, Any], is_read: bool, gone: str) -> None:
    now_s = 0.0

    async def run() -> None:
        nonlocal now_s
        settings = GatewaySettings(**limits)
        registry = RolloutRegistry([SeededEngine("x", num_slots=0)], settings, clock=lambda: now_s)

        def begin(name: str) -> Rollout:
            return registry.submit("t", name, name, {"a": work(f"{name}/a", samples=1)}, "")

        for name in ("old", "new"):
            registry.cancel(begin(name))
            now_s += 1
        with registry.reading(registry.find("t", "old")) if is_read else nullcontext():
            begin("third")
        [kept] = {"old", "new"} - {gone}
        assert registry.find("t", kept).state == "cancelled"
        with pytest.raises(ApiError, match="deleted"):
            registry.find("t", gone)

    asyncio.run(run())


def test_a_tick_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.rollouts.registry._TICK_S", 0)
    num_ticks = 0

    class Failing(RolloutRegistry):
        def tick(self) -> None:
            nonlocal num_ticks
            num_ticks += 1
            raise KeyError("a bug")

    async def run() -> None:
        async with Failing([], GatewaySettings()).running():
            while num_ticks < 3:  # noqa: ASYNC110 - the task's own
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert num_ticks >= 3


def test_a_stream_that_lasts_too_long_ends_with_where_to_go_on() -> None:
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        said = lines(await client.post(ROLLOUTS, json=body(id="r")))
        assert (said[-1]["state"], said[-1]["next"]) == ("running", 0)
        engine.release.set()
        assert len(samples(lines(await client.get(f"{ROLLOUTS}/r/samples?after=0")))) == 2

    talk(app_of(engine, max_request_s=0.3), with_client)


def test_a_client_that_reads_slowly_is_not_told_that_it_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples have ended, but its time is up before it has read them."""
    monkeypatch.setattr("serving.gateway.rollouts.routes._BLOCK", 1)
    app, sent = app_of(DoubleEngine(), max_request_s=0.5), list[bytes]()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0.1)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def with_client(client: httpx.AsyncClient) -> None:
        await client.post(ROLLOUTS, json=body({"prompt": "hello", "n": 20, "max_tokens": 9}, id="r"))
        scope = {"type": "http", "method": "GET", "path": f"{ROLLOUTS}/r/samples", "query_string": b""}
        await app({**scope, "headers": [(b"host", b"127.0.0.1")]}, receive, send)
        (_, *first, last) = [json.loads(line) for line in b"".join(sent).splitlines() if line]
        assert last["error"]["code"] == "deadline_exceeded"
        assert 0 < len(first) < 20
        rest = lines(await client.get(f"{ROLLOUTS}/r/samples?after={len(first)}"))
        assert len(samples([*first, *rest])) == 20

    talk(app, with_client)


def test_groups_with_one_deadline_are_equally_urgent() -> None:
    """Otherwise the first group ends before the next one's first sample has shown how long its others will be."""
    engine = DoubleEngine(num_slots=1)
    groups = [{"prompt": prompt, "n": 2, "max_tokens": 5, "deadline_s": 60} for prompt in ("a", "bb")]
    assert len(samples(lines(post(engine, body(*groups))))) == 4
    assert [len(request.prompt_token_ids) for request in engine.requests[:2]] == [1, 2]


def test_a_deadline_counts_from_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.rollouts.registry._TICK_S", 0)
    engine = DoubleEngine(hold_at=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        document = body({"prompt": "a", "max_tokens": 9, "deadline_s": 60}, id="r")
        async with client.stream("POST", ROLLOUTS, json=document) as response:
            async with asyncio.timeout(10):
                await engine.holding.wait()
            for _ in range(3):
                assert (await client.get(f"{ROLLOUTS}/r")).json()["state"] == "running"
            engine.release.set()
            found = samples([json.loads(line) async for line in response.aiter_lines() if line])
        assert found["0", 0]["state"] == "finished"

    talk(app_of(engine), with_client)


def test_a_server_that_stops_tells_the_stream_so() -> None:
    engine = DoubleEngine(hold_at=1)

    async def run() -> str:
        async with httpx.AsyncClient(timeout=20) as client:
            async with serve(app_of(engine), grace_s=0) as server:
                sending = client.stream("POST", server.url + ROLLOUTS, json=body())
                response = await sending.__aenter__()
                await engine.holding.wait()
            said = (await response.aread()).decode()
            await sending.__aexit__(None, None, None)
            return said

    assert json.loads(asyncio.run(run()).splitlines()[-1])["error"]["code"] == "shutting_down"
    assert len(engine.aborted) == 2


# -- beside others --------------------------------------------------------------------------------------------------


def test_other_requests_get_the_slots_that_they_need() -> None:
    """Four slots, three of them for rollouts at most; three chats make two samples of the rollout wait."""
    engine = DoubleEngine(hold_at=1, num_slots=4)

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body({"prompt": "a", "n": 8, "max_tokens": 9}, id="r")) as _:
            await engine.holding.wait()

            async def running() -> int:
                return int((await client.get(f"{ROLLOUTS}/r")).json()["samples"].get("running", 0))

            assert await running() == 3
            chats = [
                asyncio.create_task(client.post(CHAT, json={"model": "double", "messages": HELLO, "max_tokens": 9}))
                for _ in range(3)
            ]

            async def have_slots() -> bool:
                return await running() == 1

            await eventually(have_slots)
            engine.release.set()
            for chat in chats:
                assert (await chat).status_code == 200
        assert len(samples(lines(await client.get(f"{ROLLOUTS}/r/samples")))) == 8

    registry = CollectorRegistry()
    talk(app_of(engine, registry), with_client)
    assert registry.get_sample_value("slipstream_rollout_leases_total", {"outcome": "resumed"}) == 2
    ends = [registry.get_sample_value("slipstream_rollout_ended_samples_total", {"reason": reason}) for reason in ENDS]
    assert sum(end or 0 for end in ends) == 8


def test_a_slot_that_another_request_leaves_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.rollouts.registry._TICK_S", 1000)
    engine = DoubleEngine(hold_at=1, num_slots=1)

    async def with_client(client: httpx.AsyncClient) -> None:
        chat = asyncio.create_task(client.post(CHAT, json={"model": "double", "messages": HELLO, "max_tokens": 9}))
        await engine.holding.wait()
        asking = asyncio.create_task(client.post(ROLLOUTS, json=body({"prompt": "a", "max_tokens": 9}, id="r")))

        async def waits() -> bool:
            said = (await client.get(f"{ROLLOUTS}/r")).json()
            return said.get("samples") == {"waiting": 1}

        await eventually(waits)
        engine.release.set()
        assert (await chat).status_code == 200
        assert len(samples(lines(await asyncio.wait_for(asking, 10)))) == 1

    talk(app_of(engine), with_client)


def test_one_tenant_never_sees_anothers_rollouts(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    alice, bob = keys.add("alice"), keys.add("bob")
    sent: list[Sequence[GroupRewards]] = []

    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=body(id="r"), headers=alice))
        reward = {"rewards": [{"group_id": "0", "sample": 0, "reward": 1}]}
        for method, path, document in (
            ("GET", "/r", None),
            ("GET", "/r/samples", None),
            ("DELETE", "/r", None),
            ("POST", "/r/rewards", reward),
        ):
            response = await client.request(method, ROLLOUTS + path, json=document, headers=bob)
            assert (response.status_code, error_of(response)["code"]) == (404, "rollout_not_found"), (method, path)
        lines(await client.post(ROLLOUTS, json=body(id="r"), headers=bob))
        assert (await client.get(f"{ROLLOUTS}/r", headers=alice)).json()["num_ended"] == 2

    ask(app_of(DoubleEngine(), keys_file=keys.path, send_rewards=sent.append), with_client)
    assert sent == []


def test_a_keys_limits_hold(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    slow, reader = keys.add("slow", requests_per_minute=1), keys.add("reader", read_only=True)

    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=body(id="r"), headers=slow))
        refused = await client.post(ROLLOUTS, json=body(), headers=slow)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        refused = await client.get(f"{ROLLOUTS}/r", headers=reader)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "key_is_read_only")

    ask(app_of(DoubleEngine(), keys_file=keys.path), with_client)


def test_what_was_begun_is_looked_after_whatever_the_limits_and_the_queue(tmp_path: Path) -> None:
    keys, sent = KeyFile(tmp_path / "keys.json"), list[object]()
    engine = FullEngine(hold_at=0)
    slow = keys.add("slow", requests_per_minute=1, max_concurrent=1)
    reward = {"rewards": [{"group_id": "0", "sample": 0, "reward": 1.0}]}

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body(id="r"), headers=slow) as response:
            await anext(response.aiter_lines())
            refused = await client.post(CHAT, json={"model": "double", "messages": HELLO}, headers=slow)
            assert error_of(refused)["code"] == "engine_busy"
            assert (await client.get(f"{ROLLOUTS}/r", headers=slow)).json()["state"] == "running"
            engine.release.set()
            assert len(samples(lines(await client.get(f"{ROLLOUTS}/r/samples", headers=slow)))) == 2
        for method, path, document in (("POST", "/r/rewards", reward), ("DELETE", "/r", None)):
            answer = await client.request(method, ROLLOUTS + path, json=document, headers=slow)
            assert answer.status_code == 200, answer.text

    talk(app_of(engine, keys_file=keys.path, send_rewards=sent.append), with_client)
    assert len(sent) == 1


# -- what is refused ------------------------------------------------------------------------------------------------

GROUP = {"prompt": "hello"}


@pytest.mark.parametrize(
    ("document", "param", "code"),
    [
        (body({**GROUP, "n": 0}), "groups[0].n", "invalid_value"),
        (body({**GROUP, "n": True}), "groups[0].n", "invalid_type"),
        (body({**GROUP, "seeds": []}), "groups[0].seeds", "invalid_value"),
        (body({**GROUP, "seeds": [1, 2], "n": 3}), "groups[0].seeds", "invalid_value"),
        (body({**GROUP, "seeds": [1, 2, 3], "n": 3, "redundant": 1}), "groups[0].seeds", "invalid_value"),
        (body({**GROUP, "seeds": [1, 2], "redundant": 2}), "groups[0].redundant", "invalid_value"),
        (body({**GROUP, "n": MAX_SAMPLES, "redundant": 1}), "groups[0].redundant", "invalid_value"),
        (body({**GROUP, "n": MAX_SAMPLES + 1}), "groups[0].n", "invalid_value"),
        (body({**GROUP, "seeds": [0] * (MAX_SAMPLES + 1)}), "groups[0].seeds", "invalid_value"),
        (body({**GROUP, "max_tokens": 0}), "groups[0].max_tokens", "invalid_value"),
        (body({**GROUP, "max_staleness": -1}), "groups[0].max_staleness", "invalid_value"),
        (body({**GROUP, "environment": "e", "turn_tokens": 0}), "groups[0].turn_tokens", "invalid_value"),
        (body(GROUP, weight=0), "weight", "invalid_value"),
        (body(GROUP, {**GROUP, "id": "x"}, {**GROUP, "id": "x"}), "groups[2].id", "invalid_value"),
        (body({**GROUP, "id": "a/b"}), "groups[0].id", "invalid_value"),
        ({"model": "double", "groups": []}, "groups", "invalid_value"),
        ({"model": "double", "groups": [GROUP] * (MAX_GROUPS + 1)}, "groups", "invalid_value"),
        (body({}), "groups[0].prompt", "invalid_value"),
        (body({**GROUP, "messages": HELLO}), "groups[0].prompt", "invalid_value"),
        (body({"prompt": ""}), "groups[0].prompt", "invalid_value"),
        (body({"prompt": [1, -2]}), "groups[0].prompt[1]", "invalid_value"),
        (body({"prompt": "x" * 600}), "groups[0].prompt", "context_length_exceeded"),
        (body({**GROUP, "max_tokens": 600}), "groups[0].prompt", "context_length_exceeded"),
        (body({**GROUP, "deadline_s": 0}), "groups[0].deadline_s", "invalid_value"),
        (body({**GROUP, "when_stale": "keep"}), "groups[0].when_stale", "invalid_value"),
        (body({**GROUP, "tenant": "other"}), "groups[0].tenant", "unknown_parameter"),
        (body({**GROUP, "n": MAX_SAMPLES}, {**GROUP, "n": MAX_SAMPLES}), "groups", "rollout_too_large"),
        # Counted before the prompts are looked at and seeds are drawn.
        (body(*[{"prompt": "x" * 600, "n": MAX_SAMPLES}] * 2), "groups", "rollout_too_large"),
    ],
)
def test_a_bad_rollout_is_refused_by_the_field_at_fault(document: dict[str, Any], param: str, code: str) -> None:
    engine = DoubleEngine()
    response = post(engine, document, rollout_max_samples=2000)
    assert response.status_code == 400, response.text
    assert (error_of(response)["param"], error_of(response)["code"]) == (param, code)
    assert engine.requests == []


def test_another_model_and_a_body_that_is_too_large_are_refused() -> None:
    assert post(DoubleEngine(), {**body(), "model": "other"}).status_code == 404
    assert post(DoubleEngine(), body({"prompt": "x" * 2000}), max_body_bytes=1024).status_code == 413


def test_a_rollout_that_is_known_is_not_run_again() -> None:
    engine = DoubleEngine()

    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=body(id="r")))
        again = await client.post(ROLLOUTS, json=body(id="r"))
        assert (again.status_code, error_of(again)["code"], error_of(again)["param"]) == (409, "rollout_exists", "id")

    ask(app_of(engine), with_client)
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    "other", [body({"prompt": "another", "n": 2, "max_tokens": 9}, id="r"), body(id="r", weight=2)]
)
def test_the_id_of_another_rollout_is_refused_as_such(other: dict[str, Any]) -> None:
    engine = DoubleEngine()

    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=body(id="r")))
        refused = await client.post(ROLLOUTS, json=other)
        assert (refused.status_code, error_of(refused)["code"]) == (409, "rollout_differs")

    ask(app_of(engine), with_client)
    assert len(engine.requests) == 2


def test_a_busy_engine_loses_nothing() -> None:
    engine = DoubleEngine(failure=EngineBusyError("full"))

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body()) as response:
            reading = response.aiter_lines()
            await anext(reading)
            engine.failure = None
            assert len(samples([json.loads(line) async for line in reading if line])) == 2

    talk(app_of(engine), with_client)


def test_what_a_dead_engine_had_waits_for_it_and_nothing_new_is_taken() -> None:
    engine = DoubleEngine(hold_at=0)

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body()) as response:
            reading = response.aiter_lines()
            await anext(reading)
            await engine.holding.wait()
            engine.failure, engine.alive = EngineDeadError("gone"), False
            engine.release.set()
            await engine.abort_seen.wait()
            refused = await client.post(ROLLOUTS, json=body())
            assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_unavailable")
            engine.failure, engine.alive = None, True
            assert len(samples([json.loads(line) async for line in reading if line])) == 2

    talk(app_of(engine), with_client)


def test_an_erased_tenants_rollouts_end_and_are_forgotten(tmp_path: Path) -> None:
    keys, engine = KeyFile(tmp_path / "keys.json"), DoubleEngine(hold_at=0)
    anna, bo = keys.add("anna"), keys.add("bo")
    app = app_of(engine, keys_file=keys.path)

    async def with_client(client: httpx.AsyncClient) -> None:
        async def status(name: str, headers: dict[str, str]) -> int:
            return (await client.get(f"{ROLLOUTS}/{name}", headers=headers)).status_code

        async with (
            client.stream("POST", ROLLOUTS, json=body(id="r"), headers=anna) as running,
            client.stream("POST", ROLLOUTS, json=body(id="r"), headers=bo) as other,
        ):
            following = running.aiter_lines(), other.aiter_lines()
            for each in following:
                await anext(each)
            await engine.holding.wait()
            await asyncio.to_thread(app.state.erase, {"tenant-of-anna"})
            said = [json.loads(line) async for line in following[0] if line]
            assert [(one["object"], one["num_ended"]) for one in said] == [("rollout.end", 0)]
            assert (await status("r", anna), await status("r", bo)) == (410, 200)
            await eventually(lambda: has_ended(2))
            engine.release.set()
            assert len(samples([json.loads(line) async for line in following[1] if line])) == 2
        lines(await client.post(ROLLOUTS, json=body(id="ended"), headers=anna))
        await asyncio.to_thread(app.state.erase, {"tenant-of-anna"})
        assert (await status("ended", anna), await status("r", bo)) == (410, 200)

    async def has_ended(count: int) -> bool:
        return len(engine.aborted) == count

    talk(app, with_client)
    app.state.erase({"tenant-of-anna"})


# -- rewards --------------------------------------------------------------------------------------------------------


def rewards(*rows: tuple[str, int, float]) -> dict[str, Any]:
    return {"rewards": [{"group_id": name, "sample": number, "reward": reward} for name, number, reward in rows]}


def test_rewards_go_on_under_the_names_of_the_traces() -> None:
    engine, sent = DoubleEngine(), []
    document = body({"id": "a", "prompt": "x", "n": 2}, {"id": "b", "prompt": "y"}, id="r")

    async def with_client(client: httpx.AsyncClient) -> None:
        lines(await client.post(ROLLOUTS, json=document))
        given = rewards(("a", 0, 1), ("b", 0, -0.5), ("a", 1, 0.25))
        answer = await client.post(f"{ROLLOUTS}/r/rewards", json=given)
        assert answer.json() == {"object": "rollout.rewards", "id": "r", "num_rewards": 3}

    ask(app_of(engine, send_rewards=sent.extend), with_client)
    assert [(group.tenant, group.rewards) for group in sent] == [
        ("default", {0: 1.0, 1: 0.25}),
        ("default", {0: -0.5}),
    ]
    named = {f"{group.group_id}/{number}" for group in sent for number in group.rewards}
    assert named == {request.request_id for request in engine.requests}


@pytest.mark.parametrize(
    ("given", "status", "code", "param"),
    [
        (rewards(("0", 0, 1), ("x", 0, 1)), 404, "sample_not_found", "rewards[1]"),
        (rewards(("0", 2, 1)), 404, "sample_not_found", "rewards[0]"),
        (rewards(("0", 0, 1), ("0", 0, 2)), 400, "duplicate", "rewards[1]"),
        (rewards(("1", 0, 1)), 409, "sample_not_finished", "rewards[0]"),
        (rewards(("0", -1, 1)), 400, "invalid_value", "rewards[0].sample"),
        (rewards(("0", 0, 1e10)), 400, "invalid_value", "rewards[0].reward"),
        ({"rewards": []}, 400, "invalid_value", "rewards"),
        ({}, 400, "missing_required_parameter", "rewards"),
    ],
)
def test_bad_rewards_are_refused_and_none_of_them_is_taken(
    given: dict[str, Any], status: int, code: str, param: str
) -> None:
    sent: list[Any] = []

    quick, held = {**GROUP, "n": 2, "max_tokens": 3, "priority": 1}, {**GROUP, "max_tokens": 9}

    async def with_client(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", ROLLOUTS, json=body(quick, held, id="r")) as response:
            async for line in response.aiter_lines():
                if json.loads(line).get("number") == 1:
                    break
            answer = await client.post(f"{ROLLOUTS}/r/rewards", json=given)
        assert (answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) == (status, code, param)

    talk(app_of(DoubleEngine(hold_at=1), send_rewards=sent.append), with_client)
    assert sent == []


def test_rewards_that_lead_nowhere_are_refused() -> None:
    def fail(_: object) -> None:
        raise StreamError("Redis cannot be reached")

    for send, capture, status, code in (
        (None, True, 409, "nothing_recorded"),
        (fail, False, 409, "nothing_recorded"),
        (fail, True, 503, "rewards_unavailable"),
    ):
        document = body(id="r", slipstream={"capture": capture})

        async def with_client(
            client: httpx.AsyncClient, document: Any = document, status: int = status, code: str = code
        ) -> None:
            lines(await client.post(ROLLOUTS, json=document))
            answer = await client.post(f"{ROLLOUTS}/r/rewards", json=rewards(("0", 0, 1)))
            assert (answer.status_code, error_of(answer)["code"]) == (status, code)

        ask(app_of(DoubleEngine(), send_rewards=send), with_client)
