"""`slipstream serve --engine sglang` with real SGLang behind the gateway, used and watched as its users would."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from playwright.sync_api import expect
from pydantic import BaseModel

from speculator.draft.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import decode_trace
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.telemetry import LIVE, SGLANG, prometheus, questions, without_data
from tests.fixtures.waiting import wait_until
from tests.hostile import extremes
from tests.hostile.judge import tallied
from tests.page.conftest import Watched, browser, watched
from tests.sglang.served import Served, serving

__all__ = ["browser", "watched"]

NAME = "SmolLM2-135M-Instruct"

NOT_SO_SOON = {
    f'max by (baseline) (slipstream_speedup_{kind}_ratio_{end}{{instance=~".*"}})'
    for kind in ("measured", "end_to_end")
    for end in ("lower", "upper")
}
"""Intervals need half a minute of traffic, and five plain stretches."""


@pytest.fixture(scope="module")
def served(model_dir: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("serve"), model_dir, redis_url) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client


def _messages(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    question = _messages("What is the capital of France?")
    whole = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=16)
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_an_answer_says_what_became_of_its_proposals(client: openai.OpenAI) -> None:
    question = _messages("Say the days of the week three times, and nothing else.")
    whole = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=40)
    *_, last = client.chat.completions.create(
        model=NAME,
        messages=question,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    for answer in (whole, last):
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        said = answer.model_dump()["metrics"]["speculative_decoding"]
        steps, accepted = said["num_spec_steps"], said["num_accepted_draft_tokens"]
        assert sum(said["acceptance_histogram"]) == steps > 0
        assert sum(count * number for count, number in enumerate(said["acceptance_histogram"])) == accepted
        assert accepted <= said["num_draft_tokens"] <= 16 * steps
        # A prompt's first token is of no verification; what an answer's end cuts off was accepted all the same.
        assert answer.usage.completion_tokens <= 1 + steps + accepted < answer.usage.completion_tokens + 16
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens == accepted
    assert "sglext" not in whole.model_dump()


def test_what_sglang_knows_passes_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="One, two, three,", temperature=0, max_tokens=4, logprobs=2)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4


class Person(BaseModel):
    name: str
    age: int


def test_responses_whole_streamed_and_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=20)
    assert "Paris" in whole.output_text
    assert whole.model_dump()["store"] is False
    assert whole.usage is not None
    with client.responses.stream(**asked, max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    asked["input"] = "Anna is 31. Extract."
    parsed = client.responses.parse(**asked, text_format=Person, max_output_tokens=60).output_parsed
    assert parsed == Person(name="Anna", age=31)
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(model=NAME, input="word " * 20_000, stream=True)
    with pytest.raises(openai.BadRequestError, match="'store': false"):
        client.responses.create(model=NAME, input="Hi", store=True)


def test_structured_outputs_and_tools(client: openai.OpenAI) -> None:
    """In drafting rounds, too, no token is against the grammar."""
    question = _messages("Anna is 31. Extract.")
    answer = client.chat.completions.parse(
        model=NAME, messages=question, response_format=Person, temperature=0, max_tokens=60
    )
    assert answer.choices[0].message.parsed == Person(name="Anna", age=31)
    assert answer.model_dump()["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function: Any = {"name": "weather", "parameters": {**city, "additionalProperties": False}, "strict": True}
    called = client.chat.completions.create(
        model=NAME,
        messages=_messages("How is the weather in Paris?"),
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        temperature=0,
        max_tokens=80,
    )
    [call, *_] = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_anthropics_client(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        asked = {"model": NAME, "messages": _messages("What is the capital of France?"), "max_tokens": 16}
        whole = client.messages.create(**asked)
        assert 0 < whole.usage.output_tokens <= 16
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream)
            assert stream.get_final_message().usage.input_tokens == whole.usage.input_tokens
        counted = client.messages.count_tokens(model=NAME, messages=asked["messages"])
        assert counted.input_tokens == whole.usage.input_tokens
        too_long = {**asked, "messages": _messages("word " * 20_000)}
        with pytest.raises(anthropic.BadRequestError, match="context length"):
            client.messages.create(**too_long)
        with pytest.raises(anthropic.BadRequestError, match="context length"), client.messages.stream(**too_long):
            pass


def test_tokens_and_what_sglang_refuses(served: Served, client: openai.OpenAI) -> None:
    with httpx.Client(base_url=served.url, trust_env=False) as plain:
        tokens = plain.post("/tokenize", json={"model": NAME, "prompt": "Grüße, 日本"}).json()["tokens"]
        assert plain.post("/detokenize", json={"model": NAME, "tokens": tokens}).json() == {"text": "Grüße, 日本"}
    with pytest.raises(openai.BadRequestError, match="--is-embedding"):
        client.embeddings.create(model=NAME, input="hello")


def test_no_request_for_what_the_model_lacks_ends_sglang(served: Served, client: openai.OpenAI) -> None:
    for ids in ([-1], [10**6]):
        with pytest.raises(openai.BadRequestError, match="token ids must lie in"):
            client.completions.create(model=NAME, prompt=ids, max_tokens=1)
    bodies: tuple[dict[str, Any], ...] = (
        {"logprobs": 10**6},
        {"logprobs": 1, "extra_body": {"ebnf": "root ::= root"}},
        {"extra_body": {"min_tokens": 1, "stop_token_ids": [10**9]}},
        {"extra_body": {"top_k": 2**40}},
        {"extra_body": {"repetition_penalty": 1e-42}},
        {"logit_bias": {"5": 1e39}},
        {"extra_body": {"min_tokens": 1, "regex": "a"}},
        {"extra_body": {"regex": "[a-z]{1,99999}" * 40}},
    )
    for asked in bodies:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, prompt="hello", max_tokens=1, **asked)
    for spaces in ("no", 1, []):
        values = {"chat_template_kwargs": {"spaces_between_special_tokens": spaces}}
        with pytest.raises(openai.BadRequestError, match="spaces_between_special_tokens"):
            client.chat.completions.create(model=NAME, messages=_messages("hello"), extra_body=values)
    circle = {"type": "json_schema", "json_schema": {"name": "circle", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=NAME, messages=_messages("hello"), response_format=circle)  # type: ignore[call-overload]
    assert served.answers()


def test_extreme_values_do_no_harm(served: Served) -> None:
    """A few hundred of them; `benchmarks.bad_inputs --url` sends all."""
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    names = ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest")
    for name, listed in zip(names, extremes.FIELDS.values(), strict=True):
        assert set(getattr(protocol, name).model_fields) == set(listed), "SGLang has other fields"
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as sender:
        all_of_them = [*extremes.inputs(sender, NAME)]
        tallied("SGLang: extreme values", iter(random.Random(0).sample(all_of_them, 400))).check()
    assert served.answers()


def test_no_answer_ends_in_half_a_character(client: openai.OpenAI) -> None:
    prompt = "Repeat this: " + 8 * "😀" + ". Answer: 😀😀😀"
    texts = []
    for limit in range(1, 7):
        asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": limit}
        texts.append(client.completions.create(**asked).choices[0].text)
        stream = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == texts[-1]
    assert "😀" in texts[-1]
    assert len(set(texts)) < len(texts), "a character takes several tokens"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)


def test_errors_have_one_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not serve the model"):
        client.chat.completions.create(model="other", messages=_messages("Hi"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=_messages("Hi"), temperature=-3)
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=_messages("word " * 20_000), max_tokens=10)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_prefix_cache_is_parted_by_salt(served: Served, path: str) -> None:
    """And so by tenant, whose name is the salt or its beginning."""
    beginning = f"A beginning that many requests to {path} have. " * 8
    asked = {"prompt": beginning} if path == "completions" else {"messages": _messages(beginning)}

    def num_cached(salt: str | None) -> int:
        body = {**asked, "model": NAME, "max_tokens": 1, "cache_salt": salt, "return_cached_tokens_details": True}
        answer = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60, trust_env=False).raise_for_status().json()
        found = answer.get("sglext")
        return int(found["cached_tokens_details"]["device"]) if found else 0

    for salt in ("mine", "yours"):
        assert num_cached(salt) == 0
        assert num_cached(salt) > 60
    # Others have brought no more than what the template puts before each question.
    assert num_cached(None) < 60
    assert num_cached(None) > 60


def test_a_prompt_that_leaves_less_room_than_the_limit_is_answered(served: Served) -> None:
    body = {"model": NAME, "messages": _messages("word " * 400), "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_lines()).startswith('data: {"id"')


def test_policy_reaches_the_trace(client: openai.OpenAI, model_dir: Path, redis_url: str) -> None:
    stream = TraceStream(connect(redis_url), model_key(model_dir, target_fingerprint(model_dir)), max_bytes=1 << 30)
    river = {"model": NAME, "messages": _messages("Name a river."), "max_tokens": 8}
    bodies = {
        "chat/completions": river,
        "messages": river,
        "responses": {"model": NAME, "input": "Name a river.", "max_output_tokens": 10},
    }
    expected = {f"{path} {is_streamed}" for path in bodies for is_streamed in (False, True)}
    for domain in expected:
        path, is_streamed = domain.split()
        body = {**bodies[path], "stream": is_streamed == "True"}
        for policy in ({"capture": False, "domain": "none"}, {"domain": domain, "group_id": "g7"}):
            client.post(f"/{path}", cast_to=httpx.Response, body={**body, "slipstream": policy})
    deadline = time.monotonic() + 20
    domains: list[str] = []
    while not expected <= {*domains} and time.monotonic() < deadline:
        entries = stream.read(50, 500)
        domains += [decode_trace(entry.payload).header.domain for entry in entries]
        stream.ack([entry.id for entry in entries])
    assert sorted(domain for domain in domains if domain) == sorted(expected)


def test_metrics_show_what_the_plugin_reports(served: Served) -> None:
    wait_until(lambda: "slipstream_engine_report_fresh 1.0" in served.metrics())
    assert "slipstream_draft_version 1.0" in served.metrics()


def test_another_version_comes_into_service(served: Served, model_dir: Path, redis_url: str) -> None:
    """Until then the first one sleeps, which has learnt nothing."""
    pointer = DraftPointer(connect(redis_url), model_key(model_dir, target_fingerprint(model_dir)))
    pointer.pin(_another_version(served.store, model_dir))
    wait_until(lambda: "slipstream_draft_version 2.0" in served.metrics())


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: make system-packages installs it")
def test_every_query_of_sglangs_dashboard_and_of_the_gateways_own_metrics_has_data(
    served: Served, client: openai.OpenAI, tmp_path: Path
) -> None:
    asked = questions(SGLANG) + [one for one in questions(LIVE) if "slipstream_gateway_" in one[1]]
    assert "slipstream_gateway_inter_token_latency_seconds" in str(asked)
    jobs = {"gateway": int(served.url.rsplit(":", 1)[1]), "sglang": served.port_of_sglang()}
    with prometheus(tmp_path / "prometheus", jobs) as url:

        def missing() -> set[str]:
            # SGLang measures the time between tokens of streamed answers alone.
            list(client.chat.completions.create(model=NAME, messages=_messages("Count."), max_tokens=24, stream=True))
            return {expr for _, expr in without_data(url, asked, time.time())} - NOT_SO_SOON

        deadline = time.monotonic() + 30
        while (nothing := missing()) and time.monotonic() < deadline:
            pass
        assert nothing == set()


def _another_version(root: Path, model_dir: Path) -> int:
    store, draft = DraftStore(root), fresh_draft(model_dir, seed=1)
    first = store.manifest(1)
    version = store.write(
        {**draft_state(draft), **{name: store.load(1)[name] for name in ("d2t", "t2d")}},
        draft_config_json(draft.config),
        parent=1,
        target_fingerprint=first.target_fingerprint,
        info={},
    ).version
    admit(store, version, target_fingerprint=first.target_fingerprint, actor="test", reason="random weights")
    return version


def _spans(served: Served, service: str, *names: str) -> list[Span]:
    """Those that the collector has of a service, with one of these names."""
    found = []
    for body in list(served.exported):
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            if any(each.value.string_value == service for each in sent.resource.attributes):
                found += [span for scope in sent.scope_spans for span in scope.spans if span.name in names]
    return found


def test_spans_of_its_scheduler_join_those_of_the_gateway(served: Served) -> None:
    def requests() -> dict[bytes, Span]:
        return {span.span_id: span for span in _spans(served, "slipstream-gateway", "request")}

    def rounds() -> list[Span]:
        return _spans(served, "slipstream-sglang", "verify", "capture")

    wait_until(lambda: len({span.name for span in rounds()}) == 2)
    wait_until(lambda: {span.parent_span_id for span in rounds()} <= requests().keys())
    known = requests()
    for span in rounds():
        request = known[span.parent_span_id]
        assert span.trace_id == request.trace_id
        assert request.start_time_unix_nano < span.start_time_unix_nano < span.end_time_unix_nano
    wait_until(lambda: _spans(served, "slipstream-sglang", "swap"))
    [swap] = _spans(served, "slipstream-sglang", "swap")
    assert {span.parent_span_id for span in _spans(served, "slipstream-sglang", "stage", "install")} == {swap.span_id}


def test_the_page_is_live(watched: Watched, served: Served) -> None:
    page = watched.page
    page.goto(served.url)
    page.wait_for_selector("[data-connection=live]")
    expect(page.locator("#model")).to_have_text(NAME)
    expect(page.locator("#version")).to_have_text("v2")
    page.fill("#prompt", "What is the capital of France?")
    page.fill("#max-tokens", "40")
    page.click("#send")
    expect(page.locator("#answer")).to_contain_text("Paris")
    expect(page.locator("#answer-status")).to_contain_text("first token after")
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#positions tr")).not_to_have_count(0)


def test_it_stops_in_order(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.log.read_text()[-3000:]
    assert not served.answers()
