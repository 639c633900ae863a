"""What an engine process lets go of: traces on their way, and text that is kept for suffix drafts."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import pytest
import torch
from structlog.testing import capture_logs

from serving.capture.recorder import ErasureWatch, TraceRecorder, memory_bytes
from serving.engine import CapturePolicy
from serving.local.request import TopK
from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.proposals import suffix_drafter
from speculator.proposals.suffix_drafter import SuffixDrafter
from speculator.redis.trace_deletion import covers
from tests.fixtures.toy import make_toy_model
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import Harness, toy_engine


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with toy_engine(make_toy_model(tmp_path_factory.mktemp("toy")), dtype="float64") as running:
        yield running


class Held:
    """A stream whose appends wait."""

    def __init__(self) -> None:
        self.max_bytes = 1 << 20
        self.gate = threading.Event()
        self.begun: list[str] = []

    def append(self, payload: bytes, *, trace_id: str) -> str:
        self.begun.append(trace_id)
        self.gate.wait(20)
        return "1-0"


def test_a_tenants_queued_traces_go_and_others_stay() -> None:
    stream = Held()
    recorder = TraceRecorder(stream, max_buffer_bytes=1 << 30)
    for number, tenant in enumerate(["anna", "anna", "bo", "anna"]):
        recorder.submit(make_trace(trace_id=str(number), tenant=tenant))
    wait_until(lambda: stream.begun == ["0"])
    forgetting = threading.Thread(target=recorder.forget, args=({"anna"},))
    forgetting.start()
    wait_until(lambda: recorder.stats().dropped == 3)
    assert forgetting.is_alive(), "one of theirs is still being written"
    stream.gate.set()
    forgetting.join(20)
    wait_until(lambda: recorder.stats().pending == 0)
    stats = recorder.stats()
    assert stream.begun == ["0", "2"]
    assert stats.dropped_by_reason == {"erased": 3}
    assert stats.captured == stats.appended + stats.dropped == 4
    recorder.submit(make_trace(trace_id="new", tenant="anna"))
    wait_until(lambda: stream.begun[-1] == "new")
    recorder.close(5)


def test_what_was_erased_leaves_its_room_to_others() -> None:
    stream = Held()
    recorder = TraceRecorder(stream, max_buffer_bytes=int(3.5 * memory_bytes(make_trace(tenant="anna"))))
    for number in range(3):
        recorder.submit(make_trace(trace_id=str(number), tenant="anna"))
    wait_until(lambda: stream.begun == ["0"])
    forgetting = threading.Thread(target=recorder.forget, args=({"anna"},))
    forgetting.start()
    wait_until(lambda: recorder.stats().dropped == 3)
    assert all(recorder.submit(make_trace(trace_id=f"new{number}", tenant="bo")) for number in range(2))
    stream.gate.set()
    forgetting.join(20)
    recorder.close(5)


def test_traces_that_waited_too_long_are_not_written() -> None:
    stream = Held()
    stream.gate.set()
    recorder = TraceRecorder(stream, max_buffer_bytes=1 << 30, ttl_s=3600)
    at_ms = now_ms()
    recorder.submit(make_trace(trace_id="old", created_ms=at_ms - 3_601_000))
    recorder.submit(make_trace(trace_id="young", created_ms=at_ms - 3_000_000))
    wait_until(lambda: recorder.stats().pending == 0)
    assert stream.begun == ["young"]
    assert recorder.stats().dropped_by_reason == {"expired": 1}
    recorder.close(5)


def test_each_order_is_carried_out_once_and_redis_may_be_away() -> None:
    orders: dict[str, int] = {}
    carried_out: list[set[str]] = []

    def ask() -> dict[str, int]:
        if not orders:
            raise StreamError("Redis is away")
        return dict(orders)

    def forget(tenants: Collection[str]) -> None:
        carried_out.append(set(tenants))

    expired: list[bool] = []
    watch = ErasureWatch(ask, [forget], expire=lambda: expired.append(True))
    with capture_logs() as logs:
        assert watch.poll() == watch.poll() == {"erased_ms": 0}
    assert len(logs) == 1, "an outage of hours must not push everything else out of a bounded log"
    orders |= {"anna": 5, "bo": 7}
    assert watch.poll() == watch.poll() == {"erased_ms": 7}
    orders["anna"] = 9
    assert watch.poll() == {"erased_ms": 9}
    assert carried_out == [{"anna", "bo"}, {"anna"}]
    assert len(expired) == 5, "what is too old goes with every look, Redis or not"


def proposals(drafter: SuffixDrafter, tenant: str) -> tuple[int, ...]:
    return drafter.start([1, 2, 3], tenant=tenant).propose(4).tree.tokens


def test_suffix_text_is_forgotten_by_tenant_and_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = SuffixDrafter()
    clock = [0.0]
    monkeypatch.setattr(suffix_drafter.time, "monotonic", lambda: clock[0])
    for tenant in ("anna", "bo"):
        drafter.start([9, 9, 9], tenant=tenant).commit([1, 2, 3, 4, 5, 6, 7])
        clock[0] += 10
    assert proposals(drafter, "anna") == proposals(drafter, "bo") == (4, 5, 6, 7)
    drafter.forget(["anna", "nobody"])
    assert proposals(drafter, "anna") == ()
    assert proposals(drafter, "bo") == (4, 5, 6, 7)
    drafter.expire(15)
    assert proposals(drafter, "bo") == (4, 5, 6, 7)
    clock[0] += 6
    drafter.expire(15)
    assert proposals(drafter, "bo") == ()


@pytest.mark.parametrize("busy", [False, True])
def test_a_running_engine_forgets_between_two_steps(harness: Harness, busy: bool) -> None:
    """Idle, and in the middle of an answer, whose text stays the same."""
    engine, policy = harness.engine, CapturePolicy(tenant="anna")
    asked = harness.request("abc abc abc", policy=policy)
    [first] = harness.ask(asked)
    assert engine.texts.drafter is not None
    assert "anna" in engine.texts.drafter._tenants
    if busy:
        [again] = harness.ask(asked, on_chunk=lambda *_: engine.forget(["anna"]))
        assert again.text == first.text
    else:
        engine.forget(["anna"])
    assert "anna" not in engine.texts.drafter._tenants
    harness.ask(harness.request("abc", policy=policy))
    engine.expire(0.0)
    assert not engine.texts.drafter._tenants
    assert harness.metric("slipstream_suffix_tokens") == 0


def test_an_engine_has_forgotten_when_the_traces_under_way_are_out(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drops them comes next. Distributions that nobody has computed yet are not waited for."""
    may_go_on, capture = threading.Event(), harness.engine.capture
    harness.engine.capture.drain()
    num_before = len(harness.traces)
    keep = capture._on_trace
    monkeypatch.setattr(capture, "_on_trace", lambda trace: may_go_on.wait(10) and keep(trace))
    harness.ask(*(harness.request(f"abc {number}", policy=CapturePolicy(tenant="anna")) for number in range(2)))
    wait_until(lambda: harness.engine.health().num_running == 0)
    hidden = torch.zeros(2, harness.engine._target.embed.shape[1], dtype=torch.float64)
    waiting = TopK.unknown(0, 2, 8)
    capture.label(waiting, hidden)
    forgetting = threading.Thread(target=harness.engine.forget, args=(["anna"],))
    forgetting.start()
    wait_until(lambda: capture.num_waiting == 3)
    assert forgetting.is_alive()
    may_go_on.set()
    forgetting.join(10)
    assert [trace.header.tenant for trace in harness.traces[num_before:]] == ["anna", "anna"]
    assert (waiting.ids == -1).all()


def test_an_order_covers_the_answers_under_way(harness: Harness) -> None:
    """Whose traces are made after it."""
    ordered_ms: list[int] = []
    harness.ask(harness.request("abc abc abc"), on_chunk=lambda *_: ordered_ms.append(now_ms()))
    trace = harness.traces[-1]
    assert covers({"default": ordered_ms[0]}, "default", trace.header.created_ms)
    assert not covers({"default": trace.header.created_ms - 1}, "default", trace.header.created_ms)


def test_a_stopped_engine_has_nothing_to_forget(harness: Harness) -> None:
    harness.engine.stop()
    forgetting = threading.Thread(target=harness.engine.forget, args=(["anna"],), daemon=True)
    forgetting.start()
    forgetting.join(10)
    assert not forgetting.is_alive(), "it waits for a thread that has ended"
