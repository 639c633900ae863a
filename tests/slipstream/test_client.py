"""The Python client of rollouts, in step with a gateway and on an event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.engine import GenerateRequest
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from slipstream.client import AsyncRollouts, Group, Rollouts, Sample, SampleKey, Turn
from speculator.errors import ConfigError, EngineError
from speculator.redis.trace_stream import GroupRewards
from tests.fixtures.connections import answering, leave_at_any_moment, until_closed
from tests.fixtures.doubles import DoubleEngine, words_for
from tests.hostile.api import running

GROUPS = [
    Group(id="sum", prompt="2 + 2 =", n=3, max_tokens=6, temperature=0.7),
    Group(messages=[{"role": "user", "content": "hello"}], seeds=[5, 6], max_tokens=5, stop=["zzz"]),
]


@pytest.fixture
def engine() -> DoubleEngine:
    return DoubleEngine()


@pytest.fixture
def rewarded() -> list[GroupRewards]:
    return []


@pytest.fixture
def url(engine: DoubleEngine, rewarded: list[GroupRewards]) -> Iterator[str]:
    app = create_app(engine, settings=GatewaySettings(), registry=CollectorRegistry(), send_rewards=rewarded.extend)
    with running(app) as site:
        yield site.url


def in_step(url: str) -> tuple[list[Sample], str]:
    with Rollouts(url) as rollouts:
        rollout = rollouts.start(GROUPS)
        samples = list(rollout)
        rollout.reward({sample.key: float(sample.sample) for sample in samples if sample.group_id == "sum"})
        return samples, rollouts.model()


def test_the_job_of_a_client_is_that_of_its_rollouts(url: str) -> None:
    with Rollouts(url, job="mine", weight=3) as rollouts:
        assert len(list(rollouts.start(GROUPS))) == len(in_step(url)[0])
    with Rollouts(url, job="not a name!") as rollouts, pytest.raises(ConfigError, match="job"):
        list(rollouts.start(GROUPS))
    with Rollouts(url, weight=0) as rollouts, pytest.raises(ConfigError, match="weight"):
        list(rollouts.start(GROUPS))


def on_a_loop(url: str) -> tuple[list[Sample], str]:
    async def run() -> tuple[list[Sample], str]:
        async with AsyncRollouts(url) as rollouts:
            rollout = rollouts.start(GROUPS)
            samples = [sample async for sample in rollout]
            await rollout.reward({sample.key: float(sample.sample) for sample in samples if sample.group_id == "sum"})
            return samples, await rollouts.model()

    return asyncio.run(run())


WAYS = pytest.mark.parametrize("way", [in_step, on_a_loop])


@WAYS
def test_typed_samples_come_and_rewards_go(
    way: Callable[[str], tuple[list[Sample], str]], url: str, rewarded: list[GroupRewards]
) -> None:
    samples, model = way(url)
    assert model == "double"
    assert {sample.key for sample in samples} == {*(("sum", n) for n in range(3)), ("1", 0), ("1", 1)}
    assert [sample.number for sample in samples] == list(range(5))
    by_key = {sample.key: sample for sample in samples}
    assert [by_key[SampleKey("1", n)].seed for n in range(2)] == [5, 6]
    for sample in samples:
        assert sample.state == "finished"
        assert len(sample.tokens) == (6 if sample.group_id == "sum" else 5)
    assert [group.rewards for group in rewarded] == [{0: 0.0, 1: 1.0, 2: 2.0}]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([], "one group"),
        ([Group(prompt="a", n=2000)], "groups"),
        ([{"prompt": "a", "speed": 3}], "speed"),
        ([Group()], "prompt"),
    ],
)
def test_what_cannot_be_is_refused(url: str, groups: list[Any], why: str) -> None:
    with Rollouts(url) as rollouts, pytest.raises(ConfigError, match=why):
        list(rollouts.start(groups))


def test_no_rewards_at_all_are_refused_and_not_ignored(url: str) -> None:
    with Rollouts(url) as rollouts:
        rollout = rollouts.start([Group(prompt="a", max_tokens=2)])
        assert len(list(rollout)) == 1
        with pytest.raises(ConfigError, match="rewards"):
            rollout.reward({})


def test_what_is_cancelled_comes_as_aborted(engine: DoubleEngine, url: str) -> None:
    engine.hold_at = 1
    with Rollouts(url) as rollouts:
        rollout = rollouts.start([Group(prompt="a", n=2, max_tokens=40)], rollout_id="mine")
        samples = iter(rollout)

        async def cancel() -> None:
            async with AsyncRollouts(url) as others:
                other = others.start([Group(prompt="a")], rollout_id="mine")
                while not engine.requests:  # noqa: ASYNC110 - of another thread
                    await asyncio.sleep(0.01)
                await other.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(cancel()))
        thread.start()
        assert {sample.state for sample in samples} == {"aborted"}
        thread.join()
        with pytest.raises(ConfigError, match="not finished"):
            rollout.reward({("0", 0): 1.0})


def test_the_id_of_another_rollout_is_no_way_to_its_samples(url: str) -> None:
    with Rollouts(url) as rollouts:
        assert len(list(rollouts.start([Group(prompt="one", max_tokens=4)], rollout_id="step-1"))) == 1
        again = rollouts.start([Group(prompt="one", max_tokens=4)], rollout_id="step-1")
        assert len(list(again)) == 1, "a repeated request is answered with what there is"
        with pytest.raises(ConfigError, match="choose another id"):
            list(rollouts.start([Group(prompt="another", max_tokens=4)], rollout_id="step-1"))


def test_observations_do_not_go_out_all_at_once(url: str) -> None:
    at_once, most, answered = 0, 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most, answered
        at_once, answered = at_once + 1, answered + 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return httpx.Response(200, json={})

    async def run() -> None:
        async with AsyncRollouts(url) as rollouts:
            rollouts.http = httpx.AsyncClient(base_url=url, transport=httpx.MockTransport(answer))
            rollout = rollouts.start([Group(prompt="one")])
            turns = [
                Turn(number=n, group_id="0", sample=n, turn=0, finish_reason="stop", tokens=(), text="")
                for n in range(500)
            ]
            await asyncio.gather(*(rollout.observe(turn, "go on") for turn in turns))

    asyncio.run(run())
    assert (answered, most) == (500, 64)


def test_what_the_server_has_deleted_needs_no_cancelling(engine: DoubleEngine) -> None:
    """Whoever learns between two samples may cancel groups long after the last one has ended."""
    settings = GatewaySettings(rollout_keep_s=0)
    with (
        running(create_app(engine, settings=settings, registry=CollectorRegistry())) as site,
        Rollouts(site.url) as all_,
    ):
        rollout = all_.start(GROUPS)
        list(rollout)
        while all_.http.get(f"/v1/rollouts/{rollout.rollout_id}").status_code != 410:
            time.sleep(0.01)
        rollout.cancel(["sum"])
        with pytest.raises(ConfigError, match="deleted"):
            rollout.reward({("sum", 0): 1.0})


def test_a_restarted_server_is_asked_for_what_had_not_ended(
    rewarded: list[GroupRewards], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is generated twice that the client has, and it may tell by nothing that there were two servers."""
    monkeypatch.setattr("slipstream.rollout_protocol.PAUSE_S", 0.01)
    groups = [
        Group(prompt="a", n=2, max_tokens=2),
        Group(id="seeds", prompt="b", seeds=[7, 8, 9], max_tokens=6),
        Group(id="needed", prompt="c", n=2, redundant=1, max_tokens=6),
        Group(id="dropped", prompt="d", n=4, max_tokens=6),
    ]

    def short_for_seven(request: GenerateRequest) -> str:
        return "one" if request.seed == 7 else words_for(request)

    engines = (
        DoubleEngine(answer=short_for_seven, hold_at=1, tokens_per_chunk=4, num_slots=32),
        DoubleEngine(num_slots=32),
    )
    sites = [
        running(
            create_app(engine, settings=GatewaySettings(), registry=CollectorRegistry(), send_rewards=rewarded.extend)
        )
        for engine in engines
    ]
    first, second = sites
    with ExitStack() as serving, Rollouts("http://127.0.0.1:9") as rollouts:
        with first as site:
            rollouts.http = httpx.Client(base_url="http://127.0.0.1:9", transport=(way := Way(site.url)))
            rollout = rollouts.start(groups)
            samples = iter(rollout)
            heard = [next(samples) for _ in range(3)]
            rollout.cancel(["dropped"])
            heard += [next(samples) for _ in range(4)]
        way.url = httpx.URL(serving.enter_context(second).url)
        heard += samples
        rollout.reward({("0", 0): 1.0, ("seeds", 0): 1.0, ("seeds", 2): 2.0})
    assert sorted(sample.key for sample in heard) == sorted(
        [("0", 0), ("0", 1), *(("seeds", n) for n in range(3)), *(("needed", n) for n in range(3))]
        + [("dropped", n) for n in range(4)]
    )
    assert [sample.number for sample in heard] == list(range(12))
    assert {(sample.sample, sample.seed) for sample in heard if sample.group_id == "seeds"} == {(0, 7), (1, 8), (2, 9)}
    assert Counter(sample.state for sample in heard) == {"finished": 7, "aborted": 5}
    again = engines[1].requests
    assert {request.prompt_token_ids for request in again} == {(ord("b"),), (ord("c"),)}
    assert {request.seed for request in again if request.prompt_token_ids == (ord("b"),)} == {8, 9}
    assert [group.rewards for group in rewarded] == [{1: 2.0}]


Cancels = dict[str, list[str] | None]
"""Groups to cancel, or all, after so many samples ("heard 2") or in a pause before a request ("pause 1")."""


class ScriptedGateway:
    """Answers in this order, a cancellation with `to_cancel`."""

    def __init__(self, answers: list[httpx.Response], to_cancel: httpx.Response) -> None:
        self._answers, self._to_cancel = iter(answers), to_cancel
        self.asked: list[tuple[str, object]] = []
        """Samples of each group in POST, names of groups in DELETE."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert len(request.url.raw_path) < 8192, "more than a server takes"
        if request.method == "DELETE":
            self.asked.append(("DELETE", request.url.params.get_list("group_id")))
        elif request.method == "POST":
            body = msgspec.json.decode(request.content)
            self.asked.append(("POST", {group["id"]: group["n"] for group in body["groups"]}))
        answer = self._to_cancel if request.method == "DELETE" else next(self._answers)
        return httpx.Response(answer.status_code, content=answer.content)  # a client binds what it is given to itself


def hear_in_step(
    gateway: ScriptedGateway, groups: list[Group], cancels: Cancels, monkeypatch: pytest.MonkeyPatch
) -> list[SampleKey]:
    pauses, heard = itertools.count(1), list[SampleKey]()
    with Rollouts("http://gateway", model="m") as rollouts:
        rollouts.http = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(gateway))
        rollout = rollouts.start(groups)

        def cancel_at(moment: str) -> None:
            if moment in cancels:
                rollout.cancel(cancels[moment])

        monkeypatch.setattr(time, "sleep", lambda _: cancel_at(f"pause {next(pauses)}"))
        for sample in rollout:
            heard.append(sample.key)
            cancel_at(f"heard {len(heard)}")
    return heard


def hear_on_a_loop(
    gateway: ScriptedGateway, groups: list[Group], cancels: Cancels, monkeypatch: pytest.MonkeyPatch
) -> list[SampleKey]:
    async def run() -> list[SampleKey]:
        pauses, heard = itertools.count(1), list[SampleKey]()
        async with AsyncRollouts("http://gateway", model="m") as rollouts:
            rollouts.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(gateway))
            rollout = rollouts.start(groups)

            async def cancel_at(moment: str) -> None:
                if moment in cancels:
                    await rollout.cancel(cancels[moment])

            monkeypatch.setattr(asyncio, "sleep", lambda _: cancel_at(f"pause {next(pauses)}"))
            async for sample in rollout:
                heard.append(sample.key)
                await cancel_at(f"heard {len(heard)}")
        return heard

    return asyncio.run(run())


def said(*keys: tuple[str, int], is_all: bool = False) -> httpx.Response:
    """A stream of these samples, which breaks off unless they are all."""
    lines: list[Any] = [{"object": "rollout"}] if keys else []
    lines += [
        Sample(
            number=number,
            group_id=group_id,
            sample=sample,
            seed=0,
            state="finished",
            finish_reason="stop",
            tokens=(),
            text="",
            logprobs=None,
            target_version=None,
            engine=None,
            num_leases=1,
        )
        for number, (group_id, sample) in enumerate(keys)
    ]
    if is_all:
        lines.append({"object": "rollout.end", "num_ended": len(keys), "num_samples": len(keys)})
    return httpx.Response(200, content=b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def lost() -> httpx.Response:
    error = {"message": "There is no such rollout.", "param": "rollout_id", "code": "rollout_not_found"}
    return httpx.Response(404, json={"error": error})


def done() -> httpx.Response:
    return httpx.Response(200, json={"object": "rollout"})


ASKED = ("POST", {"a": 2, "b": 2})


@pytest.mark.parametrize("environment", [None, "e"])
@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
@pytest.mark.parametrize(
    ("answers", "to_cancel", "cancels", "asked"),
    [
        ([said(), lost(), said(("a", 0), ("a", 1), is_all=True)], done(), {"pause 1": ["b"]}, [("POST", {"a": 2})]),
        ([said(), lost()], done(), {"pause 1": None}, []),
        ([said(), lost(), said(("a", 0), ("a", 1), is_all=True)], lost(), {"pause 2": ["b"]}, [("POST", {"a": 2})]),
        ([said(), lost()], lost(), {"pause 2": None}, []),
        (
            [httpx.Response(502), said(("a", 0), ("a", 1), is_all=True)],
            lost(),
            {"pause 1": ["b"]},
            [("POST", {"a": 2})],
        ),
    ],
)
def test_what_is_cancelled_before_a_restart_is_not_asked_for_after_it(
    hear: Callable[..., list[SampleKey]],
    environment: str | None,
    answers: list[httpx.Response],
    to_cancel: httpx.Response,
    cancels: Cancels,
    asked: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where nothing has been heard: then environments have been told nothing, either."""
    gateway = ScriptedGateway(answers, to_cancel)
    groups = [Group(id=name, prompt=name, n=2, environment=environment) for name in "ab"]
    assert hear(gateway, groups, cancels, monkeypatch) == ([("a", 0), ("a", 1)] if asked else [])
    ((_, names),) = [(method, names) for method, names in gateway.asked if method == "DELETE"]
    assert names == (["b"] if asked else [])
    assert [call for call in gateway.asked if call[0] == "POST"] == [ASKED, *asked]


@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
@pytest.mark.parametrize("moment", ["heard 1", "heard 2", "pause 1", "pause 2"])
def test_a_rollout_that_a_restart_lost_needs_no_cancelling(
    hear: Callable[..., list[SampleKey]], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client still reads what it had received, and asks for the rest without what it cancelled."""
    answers = [said(("a", 0), ("b", 0)), lost(), said(("a", 0), is_all=True)]
    gateway = ScriptedGateway(answers, to_cancel=lost())
    groups = [Group(id=name, prompt=name, n=2) for name in "ab"]
    assert hear(gateway, groups, {moment: ["b"]}, monkeypatch) == [("a", 0), ("b", 0), ("a", 1)]
    assert gateway.asked == [ASKED, ("DELETE", ["b"]), ("POST", {"a": 1})]


@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
@pytest.mark.parametrize(
    ("names", "deletes"), [(["a", "b"], [("DELETE", ["b"])]), (["a"], []), (["a", "no"], [("DELETE", ["no"])])]
)
def test_groups_that_ended_before_a_restart_are_cancelled_no_more(
    hear: Callable[..., list[SampleKey]], names: list[str], deletes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restarted server does not know them, and would refuse to cancel the others with them."""
    answers = [said(("a", 0), ("a", 1)), lost(), said(("b", 0), ("b", 1), is_all=True)]
    gateway = ScriptedGateway(answers, to_cancel=done())
    groups = [Group(id=name, prompt=name, n=2) for name in "ab"]
    assert len(hear(gateway, groups, {"heard 3": names}, monkeypatch)) == 4
    assert gateway.asked == [ASKED, ("POST", {"b": 2}), *deletes]


@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
@pytest.mark.parametrize(("moment", "to_cancel", "num_deletes"), [("pause 1", done(), 3), ("pause 2", lost(), 1)])
def test_many_groups_are_cancelled_by_several_requests(
    hear: Callable[..., list[SampleKey]],
    moment: str,
    to_cancel: httpx.Response,
    num_deletes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of them is asked for once the server has lost the rollout."""
    names = [f"{number:064}" for number in range(250)]
    gateway = ScriptedGateway([said(("a", 0)), lost(), said(("a", 0), is_all=True)], to_cancel)
    groups = [Group(id=name, prompt=name, n=2) for name in ["a", *names]]
    assert hear(gateway, groups, {moment: names}, monkeypatch) == [("a", 0), ("a", 1)]
    _, *deletes, again = gateway.asked
    parts = [names[:100], names[100:200], names[200:]]
    assert deletes == [("DELETE", part) for part in parts[:num_deletes]]
    assert again == ("POST", {"a": 1})


@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
def test_a_stream_that_ends_before_the_last_sample_is_continued_and_gives_each_sample_once(
    hear: Callable[..., list[SampleKey]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server ends it after the longest time of a request."""
    end = msgspec.json.encode({"object": "rollout.end", "num_ended": 1, "num_samples": 2})
    first = httpx.Response(200, content=said(("a", 0)).content + end + b"\n")
    gateway = ScriptedGateway([first, said(("a", 0), ("a", 1), is_all=True)], done())
    assert hear(gateway, [Group(id="a", prompt="a", n=2)], {}, monkeypatch) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize("hear", [hear_in_step, hear_on_a_loop])
def test_a_404_that_is_none_of_ours_loses_only_what_was_heard(
    hear: Callable[..., list[SampleKey]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a proxy's while the server starts."""
    groups = [Group(id="a", prompt="a", n=1)]
    gateway = ScriptedGateway([said(), httpx.Response(404), said(("a", 0), is_all=True)], done())
    assert hear(gateway, groups, {}, monkeypatch) == [("a", 0)]
    assert gateway.asked == [("POST", {"a": 1})] * 2
    with pytest.raises(EngineError, match="lost the rollout after 1"):
        hear(ScriptedGateway([said(("a", 0)), httpx.Response(404)], done()), groups, {}, monkeypatch)


def test_a_server_that_has_answered_and_is_not_there_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    answers = iter([said(("a", 0)), None, said(("a", 0), ("a", 1), is_all=True)])

    def answer(request: httpx.Request) -> httpx.Response:
        if (found := next(answers)) is None:
            raise httpx.ConnectError("refused", request=request)
        return found

    with Rollouts("http://gateway", model="m") as rollouts:
        rollouts.http = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(answer))
        rollout = rollouts.start([Group(id="a", prompt="a", n=2)])
        assert [sample.key for sample in rollout] == [("a", 0), ("a", 1)]


def test_a_server_that_answers_with_errors_alone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    lines = b'{"object": "rollout"}\n{"error": {"message": "No engine runs."}}\n'
    gateway = ScriptedGateway([httpx.Response(200, content=lines)] * 3, done())
    with Rollouts("http://gateway", model="m", retry_s=0) as rollouts:
        rollouts.http = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(gateway))
        with pytest.raises(EngineError, match=r"is gone after 0 samples: No engine runs\."):
            list(rollouts.start([Group(id="a", prompt="a", n=1)]))


def test_a_rollout_that_may_be_about_to_begin_is_not_taken_for_cancelled() -> None:
    """The server does not know it yet, and would then run all of it."""

    async def run() -> None:
        async with AsyncRollouts("http://gateway", model="m") as rollouts:

            async def answer(request: httpx.Request) -> httpx.Response:
                if request.method == "DELETE":
                    return lost()
                with pytest.raises(ConfigError, match="no such rollout"):
                    await rollout.cancel()
                return said(("a", 0), is_all=True)

            rollouts.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
            rollout = rollouts.start([Group(id="a", prompt="a")])
            with pytest.raises(ConfigError, match="no such rollout"):
                await rollout.cancel()
            assert [sample.key async for sample in rollout] == [("a", 0)]

    asyncio.run(run())


def test_what_environments_were_told_is_lost_with_the_server() -> None:
    lines = b'{"object": "rollout"}\n' + msgspec.json.encode(
        Turn(number=0, group_id="0", sample=0, turn=0, finish_reason="stop", tokens=(1,), text="a")
    )

    def answer(request: httpx.Request) -> httpx.Response:
        is_new = request.method == "POST"
        return httpx.Response(200, content=lines + b"\n") if is_new else lost()

    async def run() -> None:
        async with AsyncRollouts("http://gateway", model="m") as rollouts:
            rollouts.http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
            async for _ in rollouts.start([Group(prompt="a", environment="e")]).samples_and_turns():
                pass

    with pytest.raises(EngineError, match="lost the rollout after 1"):
        asyncio.run(run())


def test_a_call_cancelled_at_any_moment_leaves_no_connection_open() -> None:
    async def run() -> None:
        async with answering() as (url, connections), AsyncRollouts(url) as rollouts:
            await leave_at_any_moment(lambda: rollouts.http.get("/v1/models"))
            assert (await rollouts.http.get("/v1/models")).content == b"ok"
            await until_closed(connections)

    asyncio.run(run())


class Way(httpx.HTTPTransport):
    """To the gateway that has this address at the moment."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = httpx.URL(url)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(host=self.url.host, port=self.url.port)
        return super().handle_request(request)


def test_the_base_url_of_an_openai_client_is_taken(url: str) -> None:
    assert in_step(f"{url}/v1/")[1] == in_step(url)[1]


@WAYS
def test_a_server_that_is_not_there(way: Callable[[str], object]) -> None:
    with pytest.raises(ConfigError, match="nothing answers"):
        way("http://127.0.0.1:9")
    for bad in ("http://127.0.0.1:x", "127.0.0.1:8000", "127.0.0.1"):
        with pytest.raises(ConfigError, match=f"--url {bad} is not an address"):
            way(bad)


def test_no_proxy_of_the_environment_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not reach this machine, and gets no key."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert in_step(url)[1] == on_a_loop(url)[1] == "double"


def test_a_reward_that_the_server_cannot_take_now_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rollouts("http://gateway") as rollouts:
        full = httpx.MockTransport(lambda _: httpx.Response(503, json={}))
        rollouts.http = httpx.Client(base_url="http://gateway", transport=full)
        with pytest.raises(EngineError, match="status 503"):
            rollouts.start(GROUPS).reward({("sum", 0): 1.0})


def test_a_reward_for_a_server_that_has_gone() -> None:
    with Rollouts("http://127.0.0.1:9") as rollouts, pytest.raises(EngineError, match="does not answer"):
        rollouts.start(GROUPS).reward({("sum", 0): 1.0})


def test_an_observation_for_a_server_that_is_not_there() -> None:
    async def run() -> None:
        async with AsyncRollouts("http://127.0.0.1:9", retry_s=0) as rollouts:
            turn = Turn(number=0, group_id="0", sample=0, turn=0, finish_reason="stop", tokens=(), text="")
            with pytest.raises(ConfigError, match="nothing answers"):
                await rollouts.start(GROUPS).observe(turn, "go on")

    asyncio.run(run())


@WAYS
def test_a_proxy_that_does_not_reach_the_server_is_asked_again(
    way: Callable[[str], tuple[list[Sample], str]], engine: DoubleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.rollout_protocol.PAUSE_S", 0.01)
    statuses = iter([502, 504, 0, 520, 0, 503, 0, 408, 502])
    with running(behind_a_proxy(engine, statuses)) as site:
        samples, _ = way(site.url)
    assert [sample.number for sample in samples] == list(range(5))
    assert next(statuses, None) is None
    with (
        running(behind_a_proxy(engine, itertools.repeat(502))) as site,
        Rollouts(site.url, retry_s=0.05) as rollouts,
        pytest.raises(EngineError, match="is gone after 0 samples: status 502"),
    ):
        list(rollouts.start(GROUPS))


def test_an_observation_that_does_not_reach_the_server_is_sent_again(
    engine: DoubleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.rollout_protocol.PAUSE_S", 0.01)

    async def run(url: str) -> Sample | None:
        async with AsyncRollouts(url, model="double") as rollouts:
            rollout = rollouts.start([Group(prompt="a", max_tokens=30, turn_tokens=4, environment="e")])
            async for said in rollout.samples_and_turns():
                if isinstance(said, Sample):
                    return said
                await rollout.observe(said)
        return None

    statuses = iter([0, 502, 429])
    with running(behind_a_proxy(engine, statuses)) as site:
        sample = asyncio.run(asyncio.wait_for(run(site.url), 20))
    assert sample is not None
    assert sample.finish_reason == "done"
    assert next(statuses, None) is None


def test_a_full_server_is_asked_until_it_has_room(engine: DoubleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, so `retry_s` does not count."""
    monkeypatch.setattr("slipstream.rollout_protocol.PAUSE_S", 0.05)
    with running(behind_a_proxy(engine, iter([0, *[429] * 8]))) as site, Rollouts(site.url, retry_s=0.1) as rollouts:
        assert len(list(rollouts.start(GROUPS))) == 5


def test_a_full_server_is_left_alone_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks again turns all prompts into tokens again."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    answers = iter([(429, "7"), (429, "3600"), (502, "7"), (400, "7")])

    def answer(request: httpx.Request) -> httpx.Response:
        status, wait_s = next(answers)
        return httpx.Response(status, headers={"retry-after": wait_s})

    with Rollouts("http://full", model="m") as rollouts:
        rollouts.http = httpx.Client(base_url="http://full", transport=httpx.MockTransport(answer))
        with pytest.raises(ConfigError, match="status 400"):
            list(rollouts.start(GROUPS))
    assert pauses == [7, 10, 0.5], "but not for hours"


def behind_a_proxy(engine: DoubleEngine, statuses: Iterator[int]) -> FastAPI:
    """A gateway behind a proxy that answers with these statuses by itself; 0 and no more: it passes a request on."""

    class Proxy:
        def __init__(self, app: ASGIApp) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            status = next(statuses, 0) if scope["type"] == "http" else 0
            await (Response("<h1>Bad Gateway</h1>", status) if status else self.app)(scope, receive, send)

    app = create_app(engine, settings=GatewaySettings(), registry=CollectorRegistry(), send_rewards=lambda _: None)
    app.add_middleware(Proxy)
    return app


def test_a_key_may_end_in_a_line_end_and_be_of_any_letters(engine: DoubleEngine) -> None:
    app = create_app(engine, settings=GatewaySettings(api_key=SecretStr("schlüssel\n")), registry=CollectorRegistry())
    with running(app) as site:
        with Rollouts(site.url, api_key="schlüssel\r\n") as rollouts:
            assert rollouts.model() == "double"
        with Rollouts(site.url, api_key="\n") as rollouts, pytest.raises(ConfigError, match="key"):
            rollouts.model()
