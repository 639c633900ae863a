"""Several SGLang servers behind sglang-router: one stream, one pointer, and what becomes of requests when one dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.answer_text import LocalTokenizer
from serving.request_metadata import OTHER_TARGET, TARGET_KEY, RequestMetadata
from serving.sglang.outside.pool import check_routers
from slipstream.client import Group, Rollouts, Sample
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.trace import TraceHeader, decode_trace
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.waiting import wait_until
from tests.sglang.pooled import ENGINES, MODEL, Pooled, find_router

pytestmark = pytest.mark.skipif(find_router() is None, reason="no sglang-router: make test-sglang installs it")


class Redis:
    """The pool's Redis, which can be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = EmbeddedRedis(folder)
        self.url = self._process.url

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self.stop()

    def start(self) -> None:
        self._process = EmbeddedRedis(self._folder)

    def stop(self) -> None:
        self._process.stop()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """Other modules serve the same model, with versions of their own."""
    started = Redis(tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def pool(
    model_dir: Path, draft_store: DraftStore, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pooled]:
    folder = tmp_path_factory.mktemp("pool")
    shutil.copytree(draft_store.root, folder / "drafts")
    # In bfloat16 logprobs depend on what else is in the batch, now and then by a third.
    pooled = Pooled(
        folder, model_dir, folder / "drafts", redis.url, settings={"WATCH": "0"}, flags=("--dtype", "float32")
    )
    with pooled.running():
        yield pooled


@pytest.fixture(scope="module")
def key(model_dir: Path) -> str:
    return model_key(model_dir, target_fingerprint(model_dir))


@pytest.fixture(scope="module")
def pointer(pool: Pooled, key: str) -> DraftPointer:
    return DraftPointer(connect(pool.redis_url), key)


@pytest.fixture(scope="module")
def stream(pool: Pooled, key: str) -> TraceStream:
    return TraceStream(connect(pool.redis_url), key, max_bytes=1 << 30)


def ask(pool: Pooled, text: str, *, max_tokens: int = 8, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **fields}
    return httpx.post(f"{pool.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def read(stream: TraceStream, count: int, *, domain: str | None = None) -> list[TraceHeader]:
    """Headers of so many traces, of this domain alone where one is given."""
    found: list[TraceHeader] = []

    def enough() -> bool:
        entries = stream.read(100, 100)
        headers = [decode_trace(entry.payload).header for entry in entries]
        found.extend(header for header in headers if domain in (None, header.domain))
        stream.ack([entry.id for entry in entries])
        return len(found) >= count

    wait_until(enough)
    return found


def versions(pointer: DraftPointer) -> dict[str, int]:
    return {engine_id: int(report["version"]) for engine_id, report in pointer.engines().items()}


def test_requests_of_both_engines_are_in_one_stream_as_the_gateway_marked_them(
    pool: Pooled, stream: TraceStream
) -> None:
    def one(number: int) -> httpx.Response:
        policy = {"capture": number < 6, "domain": "geography", "group_id": f"g{number}"}
        return ask(pool, f"Name river number {number}.", slipstream=policy)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(one, range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    headers = read(stream, 6)
    assert {header.engine_id for header in headers} == set(ENGINES)
    assert sorted(header.group_id for header in headers) == [f"g{number}" for number in range(6)], "an opt-out counts"
    assert {header.domain for header in headers} == {"geography"}
    asked = {answer.headers["x-request-id"] for answer in answers}
    assert {header.request_id for header in headers} <= asked


def test_engines_refuse_what_is_meant_for_another_target(pool: Pooled) -> None:
    marks = RequestMetadata(rid="for-another", cache_salt="default", policy={"capture": False, TARGET_KEY: "0" * 64})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 4}
    url = f"{pool.router_url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=marks.to_header(), timeout=60, trust_env=False)
    assert (answer.status_code, OTHER_TARGET in answer.text) == (503, True)
    with pytest.raises(ConfigError, match="another target"):
        check_routers((pool.router_url,), MODEL, "0" * 64)
    answer = ask(pool, "Name a sea.", slipstream={"capture": False})
    assert answer.status_code == 200, "the gateway means theirs"


def test_rollouts_run_on_both_engines_and_say_what_plain_requests_do(pool: Pooled, stream: TraceStream) -> None:
    drawn_from = [5, 6, 7, 8, 9]
    chat = [{"role": "user", "content": "Name a river."}]
    groups = [
        {"id": "greedy", "messages": chat, "n": 1, "max_tokens": 100, "temperature": 0},
        {"id": "drawn", "prompt": drawn_from, "n": 6, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True},
    ]
    body = {"model": MODEL, "id": "pooled", "groups": groups, "slipstream": {"domain": "rollouts"}}
    url = f"{pool.url}/v1/rollouts"
    answers: list[httpx.Response] = []

    def taken() -> bool:
        answers.append(httpx.post(url, json=body, timeout=60, trust_env=False))
        assert answers[-1].status_code in (200, 503), answers[-1].text
        return answers[-1].status_code == 200

    wait_until(taken)
    said = [json.loads(line) for line in answers[-1].text.splitlines() if line]
    samples = {(one["group_id"], one["sample"]): one for one in said if one["object"] == "rollout.sample"}
    assert said[-1]["state"] == "ended"
    assert {one["state"] for one in samples.values()} == {"finished"}
    assert len({one["engine"] for one in samples.values()}) == 2
    greedy = samples["greedy", 0]
    prompt = LocalTokenizer(pool.model_dir).encode_chat(chat)
    own, most = _read(pool, prompt, greedy["tokens"])
    assert own == pytest.approx(most, abs=0.02)
    assert (greedy["finish_reason"], set(greedy["logprobs"])) == ("stop", {0.0})
    assert greedy["tokens"][-1] in LocalTokenizer(pool.model_dir).end_token_ids, "the token that ended it"
    assert greedy["text"] == LocalTokenizer(pool.model_dir).decode(greedy["tokens"])
    drawn = [samples["drawn", number] for number in range(6)]
    assert len({tuple(one["tokens"]) for one in drawn}) > 1, "temperature 1 is drawn"
    for one in drawn:
        assert (len(one["tokens"]), len(one["logprobs"])) == (40, 40)
        assert one["logprobs"] == pytest.approx(_read(pool, drawn_from, one["tokens"])[0], abs=0.02)
    headers = read(stream, 7)
    assert {header.domain for header in headers} == {"rollouts"}
    assert {header.request_id.partition("#")[0].rpartition("/")[2] for header in headers} == set("012345")


def test_both_follow_the_pointer(pool: Pooled, pointer: DraftPointer) -> None:
    pointer.pin(_another_version(pool.store))
    wait_until(lambda: versions(pointer) == dict.fromkeys(ENGINES, 2))
    wait_until(lambda: "slipstream_draft_version 2.0" in pool.metrics())
    assert "slipstream_pool_engines 2.0" in pool.metrics()
    # What two engines say may reach the gateway one after the other.
    wait_until(lambda: "slipstream_pool_same_version_engines 2.0" in pool.metrics())
    wait_until(lambda: 'slipstream_swaps_total{outcome="installed"} 2.0' in pool.metrics())


def test_a_rollout_outlives_redis_an_engine_the_router_and_the_gateway(pool: Pooled, redis: Redis) -> None:
    """Each sample comes once, and of those that the client has none is generated again."""
    lengths = {"a": 12, "b": 40, "c": 100}
    groups = [
        Group(id=name, prompt=[5, 6, number], n=4, max_tokens=most, temperature=1.0, ignore_eos=True)
        for number, (name, most) in enumerate(lengths.items(), start=7)
    ]
    heard: list[Sample] = []

    def hear() -> None:
        with Rollouts(pool.url) as rollouts:
            for sample in rollouts.start(groups):
                heard.append(sample)

    with ThreadPoolExecutor(1) as threads:
        listening = threads.submit(hear)
        wait_until(lambda: heard)
        redis.kill()
        for name in ("first", pool.routers[0]):
            pool.kill(name)
        wait_until(lambda: any(sample.group_id == "b" for sample in heard))
        redis.start()
        pool.kill(pool.gateways[0])
        for name in (pool.gateways[0], pool.routers[0]):
            pool.start(name)
        num_heard = len(heard)
        pool.start_engine("first")
        listening.result()
    assert sorted(sample.key for sample in heard) == [(name, number) for name in lengths for number in range(4)]
    assert {(sample.state, len(sample.tokens)) for sample in heard if sample.group_id == "c"} == {("finished", 100)}
    ended = re.search(r'^slipstream_rollout_ended_samples_total{reason="length"} (.*)$', pool.metrics(), re.MULTILINE)
    assert ended is not None
    assert float(ended[1]) == len(heard) - num_heard > 0


def test_a_killed_engine_takes_its_own_requests_along_and_no_others(pool: Pooled, stream: TraceStream) -> None:
    """The last test of the module: one engine is left. How it came back is in `benchmarks/results/sglang_pool.md`."""

    stories = {"domain": "stories"}

    def streamed(number: int) -> bool:
        """Whether it came to its end."""
        # Long enough to be seen running at the same time: an engine says now and then how many do.
        answer = ask(pool, f"Tell story {number}.", max_tokens=200, stream=True, ignore_eos=True, slipstream=stories)
        lines = answer.text.splitlines()
        return "data: [DONE]" in lines and not any(line.startswith('data: {"error"') for line in lines)

    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(streamed, number) for number in range(4)]
        wait_until(lambda: all(running := [pool.num_running(engine) for engine in ENGINES]) and sum(running) == 4)
        on_it = pool.num_running("first")
        pool.kill("first")
        others = [ask(pool, f"And {number}?", slipstream=stories) for number in range(4)]
        outcomes = Counter(stream.result() for stream in streams)
    assert [answer.status_code for answer in others] == [200] * 4
    assert outcomes == {True: 4 - on_it, False: on_it}
    assert {header.engine_id for header in read(stream, 4 - on_it + 4, domain="stories")} == {"second"}


def test_the_router_knows_the_words_of_the_page() -> None:
    router = find_router()
    assert router is not None
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "many-engines.md").read_text()
    [command] = re.findall(r"^sglang-router launch (?:.*\\\n)*.*$", page, re.MULTILINE)
    flags = re.findall(r"--[\w-]+", command)
    assert len(flags) > 5
    shown = subprocess.run([*router, "launch", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert set(flags) <= set(re.findall(r"--[\w-]+", shown))


def _read(pool: Pooled, prompt: list[int], answer: list[int]) -> tuple[list[float], list[float]]:
    """How likely SGLang finds these tokens where it only reads them, and the likeliest ones there."""
    body = {
        "input_ids": prompt + answer,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 1,
        "logprob_start_len": len(prompt) - 1,
    }
    said = httpx.post(f"{pool.url_of('second')}/generate", json=body, timeout=60, trust_env=False).json()["meta_info"]
    own = [logprob for logprob, _, _ in said["input_token_logprobs"][1:]]
    return own, [likeliest[0][0] for likeliest in said["input_top_logprobs"][1:]]


def _another_version(root: Path) -> int:
    """The first draft again, with its output layer turned round."""
    store = DraftStore(root)
    state, first = store.load(1), store.manifest(1)
    version = store.write(
        {**state, "lm_head.weight": -state["lm_head.weight"]},
        store.config(1),
        parent=1,
        target_fingerprint=first.target_fingerprint,
        info={},
    ).version
    admit(store, version, target_fingerprint=first.target_fingerprint, actor="test", reason="another one")
    return version
