"""OpenTelemetry spans: which there are, under what, what they say, and that they cost nothing and wait for nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.hotswap.follower import DraftFollower
from speculator import tracing
from speculator.errors import ConfigError
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.telemetry import collecting
from tests.fixtures.toy import random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.gateway.client import CHAT, HELLO, ask, gateway
from tests.serving.gateway.passage import host, talk
from tests.serving.hotswap.test_hotswap import FakePointer
from tests.serving.local.harness import fixed_engine
from tests.serving.sglang.capture.test_capture import Request, end, make_capture, prefill, settle, verify
from tests.serving.sglang.outside.fake_sglang import MODEL, FakeSglang
from tests.serving.sglang.proposals.test_depth import make_control, step
from tests.serving.sglang.test_swap import model
from tests.trainer.answers import answer_traces
from tests.trainer.examples import config_for, promote
from trainer.loop import Trainer

__all__ = ["model"]

CANARY = "xyzzy"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}


class Seen:
    """The spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def everything(self) -> str:
        return "".join(span.to_json() for span in self.exporter.get_finished_spans())


@pytest.fixture
def seen() -> Iterator[Seen]:
    seen = Seen()
    tracing.start_spans(SimpleSpanProcessor(seen.exporter), service="test")
    yield seen
    tracing.close_spans()


def values(span: ReadableSpan) -> dict[str, object]:
    """Its attributes, ours without their prefix."""
    return {name.removeprefix("slipstream."): value for name, value in (span.attributes or {}).items()}


def is_on() -> bool:
    with tracing.span("x") as span:
        return span.is_recording()


def is_under(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


# -- serving -------------------------------------------------------------------------------------------------------


def test_a_request_with_its_rounds_and_its_capture(seen: Seen, toy_model: Path) -> None:
    with fixed_engine(toy_model) as harness:
        app = create_app(harness.engine, settings=GatewaySettings(), registry=CollectorRegistry())
        body = {"model": "toy", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 12, "temperature": 0}

        async def ask_thrice(client: httpx.AsyncClient) -> list[httpx.Response]:
            asked = [client.post(CHAT, json=body, headers=headers) for headers in (SAMPLED, NOT_SAMPLED)]
            return [await each for each in (*asked, client.get("/health"))]

        answered, _, health = ask(app, ask_thrice)
        wait_until(lambda: len(harness.traces) == 2)
        assert health.status_code == 200
        usage = answered.json()["usage"]
        # The engine's own thread ends after both clients have their answers.
        wait_until(lambda: seen.named("capture"))
    request = seen.one("request")
    assert request.kind == SpanKind.SERVER
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.status.is_unset
    assert values(request) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "request_id": answered.headers["x-request-id"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "accepted_tokens": usage["completion_tokens_details"]["accepted_prediction_tokens"],
    }
    capture, prefills, rounds = seen.one("capture"), seen.named("prefill"), seen.named("verify")
    assert all(is_under(span, request) for span in (capture, *prefills, *rounds)), "none of the one not sampled"
    assert sum(values(span)["tokens"] for span in prefills) == usage["prompt_tokens"]
    assert values(capture)["tokens"] == harness.traces[0].num_tokens
    said = [values(span) for span in rounds]
    assert sum(each["accepted"] for each in said) == request.attributes["slipstream.accepted_tokens"]
    assert {each["draft_version"] for each in said} == {1}
    assert {(each["batch"], each["depth"], each["from_head"]) for each in said} == {(1, 3, True)}
    assert all(0 <= each["accepted"] <= each["proposed"] <= 3 for each in said)
    assert all(0 < span.end_time - span.start_time < 20e9 for span in rounds)
    assert CANARY not in seen.everything()


def test_a_failure_is_told_without_its_message(seen: Seen) -> None:
    engine = DoubleEngine(failure=RuntimeError(CANARY))
    ask(gateway(engine), lambda client: client.post(CHAT, json={"model": "double", "messages": HELLO}))
    request = seen.one("request")
    assert values(request)["http.response.status_code"] == 500
    assert not request.status.is_ok
    assert not request.status.is_unset
    assert request.events == ()
    assert CANARY not in seen.everything()


def test_a_request_that_is_refused_is_no_failure_of_the_server(seen: Seen) -> None:
    ask(gateway(DoubleEngine()), lambda client: client.post(CHAT, json={"model": "another", "messages": HELLO}))
    request = seen.one("request")
    assert values(request)["http.response.status_code"] == 404
    assert request.status.is_unset


def test_sglang_is_told_which_span_its_own_belong_to(seen: Seen) -> None:
    fake, body = FakeSglang(), {"model": MODEL, "messages": HELLO}
    talk(fake, lambda client: client.post(CHAT, json=body, headers=SAMPLED), draft=host())
    traceparent = f"00-{TRACE}-{seen.one('request').context.span_id:016x}-01"
    assert fake.headers[0]["traceparent"] == traceparent
    assert fake.bodies[0]["custom_params"]["slipstream"]["traceparent"] == traceparent, "for its scheduler"


def _custom_params(headers: dict[str, str]) -> dict[str, object]:
    """As the gateway sends them to SGLang, for a request that came with these headers."""
    parent = tracing.parent_of((name.encode(), value.encode()) for name, value in headers.items())
    with tracing.span("request", parent):
        return {"slipstream": tracing.outgoing_headers()}


def test_what_a_request_costs_in_sglangs_scheduler(seen: Seen) -> None:
    traces: list[Trace] = []
    capture, control = make_capture(traces), make_control()
    sent = [*map(_custom_params, (SAMPLED, NOT_SAMPLED)), {"slipstream": {"traceparent": 7}}, None]
    batch = [Request([1, 2, 3], custom_params=each) for each in sent]
    prefill(capture, batch)
    depths = [step(control, batch, accepts=True) for _ in range(3)]
    for request in batch:
        request.output_ids = [10]
    verify(capture, batch, [3] * 4, [[21, 22]] * 4, [1] * 4)
    for request in batch:
        end(capture, request)
    settle(capture)
    [request] = seen.named("request")
    captured, rounds = seen.one("capture"), seen.named("verify")
    assert len(traces) == 4
    assert all(is_under(span, request) for span in (captured, *rounds)), "none of those that are not sampled"
    assert values(captured) == {"tokens": traces[0].num_tokens}
    assert [values(span) for span in rounds] == [
        {"batch": 4, "depth": depth, "accepted": depth, "from_text": False, "draft_version": 1} for depth in depths
    ]


def test_a_swap_with_what_it_consists_of(seen: Seen, toy_model: Path) -> None:
    with fixed_engine(toy_model) as harness:
        harness.drafts[2] = random_draft(toy_model, seed=2)
        pointer = FakePointer()
        pointer.version = 2
        follower = DraftFollower(harness.engine, pointer, engine_id="e")
        follower.poll()
        [(_, report)] = follower.log.installed
    swap = seen.one("swap")
    assert swap.parent is None
    assert values(swap) == {"version": 2, "previous": 1, "stall_ms": report.stall_ms, "step": report.step}
    assert all(is_under(seen.one(name), swap) for name in ("stage", "install"))


# -- training ------------------------------------------------------------------------------------------------------


def test_a_step_and_a_publication(
    seen: Seen, toy_model: Path, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    stream = TraceStream(redis_client, "toy", max_bytes=10**8)
    for trace in answer_traces(toy_model, num_traces=2):
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    trainer = Trainer(config_for(toy_model, tmp_path, redis_url=redis_url), CollectorRegistry(), decide=promote)
    trainer.read(block_ms=0)
    trainer.step()
    trainer.publish()
    trainer.close()
    step, publish, gate = (seen.one(name) for name in ("train_step", "publish", "gate"))
    assert step.parent is None
    said = values(step)
    loss, tokens, traces = said.pop("loss"), said.pop("tokens"), said.pop("traces")
    assert loss > 0
    assert tokens == trainer.metrics.registry.get_sample_value("slipstream_trainer_learnt_tokens_total")
    assert 1 <= traces <= 2
    assert said == {"applied": True, "step": 1}
    assert publish.parent is None
    assert values(publish) == {"published": True, "version": 2}
    assert is_under(gate, publish)
    assert values(gate) == {"incumbent": 1, "outcome": "promote"}


# -- off, on, and away ---------------------------------------------------------------------------------------------

_OFF = """
import sys, threading
import serving.gateway.app, serving.local.engine, serving.hotswap.follower, slipstream.cli.main, trainer.loop
from speculator import tracing as spans
spans.configure_spans("test")
with spans.span("x", version=1) as span:
    assert not span.is_recording()
    assert spans.current() is None and spans.outgoing_headers() == {}
    spans.record(spans.current(), "x", 1.0)
spans.close_spans()
assert threading.active_count() == 1
# redis-py imports a part of the SDK where it is installed, for metrics of its own that nobody turns on.
assert not [name for name in sys.modules if name.startswith("opentelemetry.exporter")]
"""


def test_nothing_is_imported_or_made_when_off() -> None:
    done = subprocess.run([sys.executable, "-c", _OFF], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as (url, bodies):
        monkeypatch.setenv("SLIPSTREAM_OTEL", "1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
        tracing.configure_spans("slipstream-test")
        with tracing.span("swap", version=1):
            pass
        tracing.close_spans()
    assert not is_on()
    [body] = bodies
    for part in (b"slipstream-test", b"deployment.environment.name", b"swap", b"slipstream.version"):
        assert part in body


_SILENT = """
import os, socket, time
from speculator import tracing
with socket.create_server(("127.0.0.1", 0)) as silent:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
    tracing.configure_spans("slipstream-test")
    with tracing.span("request"):
        parent = tracing.current()
    started_s = time.monotonic()
    for _ in range(500):
        tracing.record(parent, "verify", 0.01, batch=1)
    tracing.close_spans()
    print(time.monotonic() - started_s)
"""


def test_a_collector_that_does_not_answer_holds_nobody_up() -> None:
    """In a process of its own: what still waits for the collector ends with the process, as in a service."""
    settings = {
        "SLIPSTREAM_OTEL": "1",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_MAX_QUEUE_SIZE": "64",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
    }
    process = [sys.executable, "-c", _SILENT]
    done = subprocess.run(process, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < tracing.CLOSE_S + 1


def _without_extra(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)


@pytest.mark.parametrize(
    ("value", "prepare", "says"),
    [
        ("yes", lambda patch: None, "set it to 1 or 0"),
        ("1", _without_extra, "slipstream-spec[otel]"),
        ("1", lambda patch: patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1"), "OTEL_* variable"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str, prepare: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_OTEL", value)
    prepare(monkeypatch)
    with pytest.raises(ConfigError) as refused:
        tracing.configure_spans("slipstream-test")
    assert says in str(refused.value)
    assert not is_on()


@pytest.mark.parametrize("command", [("serve",), ("train",), ("gateway", "--sglang", "http://127.0.0.1:1")])
def test_each_service_heeds_the_variable(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, refused: Callable[..., str], command: tuple[str, ...]
) -> None:
    """And closes its spans at the end."""
    monkeypatch.setenv("SLIPSTREAM_OTEL", "maybe")
    assert "SLIPSTREAM_OTEL" in refused(*command, "--model", "/nowhere")
    assert not is_on()
