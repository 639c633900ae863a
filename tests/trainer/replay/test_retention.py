"""What the trainer forgets: an erased tenant's traces, old ones; and whom its versions were learnt from."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from speculator.errors import StreamError
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import DraftPointer, machine_id
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.lifecycle import VersionState
from speculator.versions.lineage import MAX_TENANTS, TenantCounts, counts_of, joined_counts
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send, with_header
from tests.trainer.examples import metric, promote, record
from tests.trainer.stored import stored_of
from tests.trainer.trainers import MakeTrainer
from trainer import throttle
from trainer.loop import Trainer
from trainer.metrics import TrainerMetrics
from trainer.replay import admission
from trainer.replay.admission import RetentionPolicy
from trainer.replay.trace_source import trace_folder
from trainer.throttle import LONGEST_REST_S

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "POLL_S", 0.0)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What Redis's clock says, by which traces age."""
    now_s = [time.time()]
    monkeypatch.setattr(ErasureOrders, "time_ms", lambda _: int(1000 * now_s[0]))
    return now_s


def mixed(traces: list[Trace], created_s: float | None = None) -> list[Trace]:
    """Of two tenants in turn."""
    created_ms = int(1000 * (time.time() if created_s is None else created_s))
    return [
        with_header(trace, tenant=("anna", "bo")[index % 2], created_ms=created_ms)
        for index, trace in enumerate(traces)
    ]


def kept(trainer: Trainer) -> set[str]:
    replay, admission = trainer.replay, trainer.admission
    return {*replay.members, *replay.waiting_trace_ids, *admission.held_out.trace_ids, *admission.golden.trace_ids}


def ids(traces: list[Trace], tenant: str) -> set[str]:
    return {trace.header.trace_id for trace in traces if trace.header.tenant == tenant}


class Erasures:
    """Orders, and a clock, that Redis may not tell."""

    def __init__(self) -> None:
        self.is_away, self.now_ms = False, 0
        self.ordered = dict[str, int]()

    def orders(self) -> dict[str, int]:
        if self.is_away:
            raise StreamError("Redis is away")
        return self.ordered

    def time_ms(self) -> int:
        return self.now_ms

    def report(self, *_: object) -> None:
        self.orders()


def policy_of(erasures: Erasures, metrics: TrainerMetrics, *, ttl_s: float = 0) -> RetentionPolicy:
    return RetentionPolicy(erasures, None, name="t", ttl_s=ttl_s, metrics=metrics)  # type: ignore[arg-type]


def test_an_outage_of_redis_is_a_line_however_long_it_lasts() -> None:
    erasures, metrics = Erasures(), TrainerMetrics(CollectorRegistry())
    policy = policy_of(erasures, metrics)
    with capture_logs() as logs:
        for is_away in (True, True, False, True, True):
            erasures.is_away = is_away
            assert policy.poll()
            policy.report()
    assert len(logs) == 2
    assert metrics.stream_errors.labels("erasures")._value.get() == 8


def test_what_comes_right_after_a_long_outage_is_not_old_by_the_clock_of_before() -> None:
    erasures = Erasures()
    policy = policy_of(erasures, TrainerMetrics(CollectorRegistry()), ttl_s=HOUR_S)
    new = stored_of("new", created_ms=int(2000 * HOUR_S)).provenance
    policy.poll()
    assert policy.reason(new) == "expired"
    erasures.is_away = True
    policy.poll()
    assert policy.reason(new) is None


def test_once_an_order_is_carried_out_newer_traces_of_the_tenant_are_welcome() -> None:
    erasures = Erasures()
    policy = policy_of(erasures, TrainerMetrics(CollectorRegistry()))
    policy.poll()
    erasures.ordered = {"anna": 5}
    policy.poll()
    new = stored_of("new", tenant="anna", created_ms=6).provenance
    assert policy.reason(new) == "erased", "the clock of its engine may be ahead"
    policy.report()
    assert policy.reason(new) is None


@pytest.mark.parametrize(
    "how",
    [{}, {"golden_traces": 4}, {"holdout_share": 0.5, "holdout_traces": 20}],
    ids=["replay", "golden", "held out"],
)
def test_an_erased_tenant_is_forgotten_wherever_its_traces_are(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, how: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    asked = mixed(traces[:8])
    send(stream, asked)
    trainer = start(**how)
    trainer.read(block_ms=0)
    trainer.step()
    assert kept(trainer) == ids(asked, "anna") | ids(asked, "bo")
    erasures = ErasureOrders(redis_client, "toy")
    at_ms = erasures.order("anna")
    trainer.read(block_ms=0)
    assert kept(trainer) == ids(asked, "bo")
    assert len(list(trace_folder(tmp_path / "state").glob("*.trace"))) == 4
    report = erasures.trainers()["trainer-0"]
    assert (report.erased_ms, report.removed) == (at_ms, {"anna": 4})
    assert metric(trainer, "forgotten_traces_total", reason="erased") == 4
    while trainer.has_work and trainer.replay.num_waiting:
        trainer.step()
    trainer.checkpoint()
    trainer.ack()
    assert stream.lag().acked == 8
    trainer.close()
    assert erasures.trainers() == {}
    again = start(**how)
    assert kept(again) == ids(asked, "bo")
    again.close()


def test_a_review_does_not_decode_what_was_erased_while_it_waited(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    asked = mixed(traces[:3])
    trainer = start(decide=promote)
    send(stream, asked[:2])
    trainer.read(block_ms=0)
    trainer.step()
    trainer.publish()
    DraftStore(tmp_path / "store").lifecycle.move(2, VersionState.LIVE, actor="engine:0")
    trainer.review.take_turn()
    send(stream, asked[2:])
    trainer.read(block_ms=0)
    assert trainer.review.has_work
    ErasureOrders(redis_client, "toy").order("anna")
    trainer.read(block_ms=0)
    assert not trainer.review.has_work
    trainer.close()


def test_a_trainer_that_rests_beside_a_busy_engine_forgets_and_reports_meanwhile(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked, erasures = mixed(traces[:4]), ErasureOrders(redis_client, "toy")
    send(stream, asked)
    trainer = start(busy_share=0.01)
    trainer.read(block_ms=0)
    DraftPointer(redis_client, "toy").report_engine("engine", {"machine": machine_id(), "busy": "1.0"})
    stop, waits = threading.Event(), list[float]()

    def wait(pause_s: float) -> None:
        """No time passes. The order comes in the first second of the rest."""
        if not waits:
            erasures.order("anna")
        waits.append(pause_s)
        if len(waits) == 3:
            assert kept(trainer) == ids(asked, "bo")
            assert erasures.trainers()["trainer-0"].removed == {"anna": 2}

    monkeypatch.setattr(stop, "wait", wait)
    trainer.throttle.rest(60.0, stop)
    assert sum(waits) == pytest.approx(LONGEST_REST_S)
    trainer.close()


def test_traces_from_before_the_order_are_refused_and_later_ones_learnt(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis
) -> None:
    at_ms = ErasureOrders(redis_client, "toy").order("anna")
    trainer = start()
    trainer.read(block_ms=0)  # with the search of the stream that every start makes
    before, after = (
        with_header(trace, tenant="anna", created_ms=at_ms + difference)
        for trace, difference in zip(traces[:2], (0, 1), strict=True)
    )
    send(stream, [before, after])
    trainer.read(block_ms=0)
    assert kept(trainer) == {after.header.trace_id}
    assert metric(trainer, "traces_total", outcome="erased") == 1
    trainer.step()
    trainer.checkpoint()
    trainer.ack()
    assert (stream.lag().acked, stream.lag().length) == (2, 2)
    trainer.read(block_ms=0)
    assert stream.lag().length == 1, "nor is it left in the stream"
    trainer.close()


def test_an_order_from_before_the_start_covers_nothing_that_was_made_after_it(redis_client: redis.Redis) -> None:
    erasures, remover = ErasureOrders(redis_client, "toy"), TraceRemover(redis_client, "toy")
    at_ms = erasures.order("anna")
    policy = RetentionPolicy(erasures, remover, name="t", ttl_s=0, metrics=TrainerMetrics(CollectorRegistry()))
    policy.poll()
    made = [stored_of("t", tenant="anna", created_ms=created_ms).provenance for created_ms in (at_ms, at_ms + 1)]
    assert [policy.reason(one) for one in made] == ["erased", None]


def test_an_order_covers_all_that_has_come_from_an_engine_whose_clock_is_ahead(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis
) -> None:
    asked = mixed(traces[:4], time.time() + 60)
    send(stream, asked)
    trainer = start()
    trainer.read(block_ms=0)
    at_ms = ErasureOrders(redis_client, "toy").order("anna")
    trainer.read(block_ms=0)
    assert kept(trainer) == ids(asked, "bo")
    assert ErasureOrders(redis_client, "toy").trainers()["trainer-0"].removed == {"anna": 2}
    later = with_header(traces[4], tenant="anna", created_ms=at_ms + 1)
    send(stream, [later])
    trainer.read(block_ms=0)
    assert kept(trainer) == ids(asked, "bo") | {later.header.trace_id}
    trainer.close()


def test_a_trace_from_the_future_is_not_kept_for_ever(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], now_s: list[float]
) -> None:
    """The clock of an engine may be years ahead (Tr3kkR/Yuzu#2510)."""
    send(stream, mixed(traces[:1], now_s[0] + HOUR_S / 2) + mixed(traces[1:2], now_s[0] + 1e9))
    trainer = start(trace_ttl_hours=1.0)
    trainer.read(block_ms=0)
    assert kept(trainer) == {traces[0].header.trace_id}
    assert metric(trainer, "traces_total", outcome="expired") == 1
    now_s[0] += 2 * HOUR_S
    trainer.read(block_ms=0)
    assert kept(trainer) == set()
    trainer.close()


def test_old_traces_go_from_everywhere(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], now_s: list[float], tmp_path: Path
) -> None:
    send(stream, mixed(traces[:6], now_s[0]))
    how = {"golden_traces": 2, "holdout_share": 0.5, "holdout_traces": 20, "trace_ttl_hours": 1.0}
    trainer = start(**how)
    trainer.read(block_ms=0)
    assert len(kept(trainer)) == 6
    now_s[0] += HOUR_S / 2
    send(stream, [with_header(traces[7], created_ms=int(1000 * now_s[0]))])
    trainer.read(block_ms=0)
    assert len(kept(trainer)) == 7
    trainer.checkpoint()
    now_s[0] += HOUR_S / 2 + 1
    trainer.read(block_ms=0)
    assert kept(trainer) == {traces[7].header.trace_id}
    assert len(list(trace_folder(tmp_path / "state").glob("*.trace"))) == 1
    assert metric(trainer, "forgotten_traces_total", reason="expired") == 6
    trainer.close()
    now_s[0] += HOUR_S
    again = start(**how)
    again.read(block_ms=0)
    assert kept(again) == set()
    assert list(trace_folder(tmp_path / "state").glob("*.trace")) == []
    again.close()


def test_while_redis_is_away_nothing_is_too_old(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], now_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Redis's clock can be trusted with what cannot be had again."""
    send(stream, mixed(traces[:2], now_s[0]))
    trainer = start(trace_ttl_hours=1.0)
    trainer.read(block_ms=0)
    now_s[0] += 2 * HOUR_S

    def away(_: ErasureOrders) -> dict[str, int]:
        raise StreamError("Redis is away")

    with monkeypatch.context() as patched:
        patched.setattr(ErasureOrders, "orders", away)
        trainer.read(block_ms=0)
    assert len(kept(trainer)) == 2
    trainer.read(block_ms=0)
    assert kept(trainer) == set()
    trainer.close()


def test_a_wrong_clock_of_the_trainer_ages_nothing(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(stream, mixed(traces[:2]))
    trainer = start(trace_ttl_hours=1.0, clock=lambda: 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 1.0)
        trainer.read(block_ms=0)
    assert len(kept(trainer)) == 2
    trainer.close()


def test_an_operators_golden_recording_is_no_exception(
    start: MakeTrainer, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    path = record(tmp_path / "golden.rec", mixed(traces[:4]))
    ErasureOrders(redis_client, "toy").order("anna")
    trainer = start(golden=path, golden_traces=4)
    assert set(trainer.admission.golden.trace_ids) == ids(mixed(traces[:4]), "bo")
    ErasureOrders(redis_client, "toy").order("bo")
    trainer.read(block_ms=0)
    assert trainer.admission.golden.trace_ids == []
    trainer.close()
    start(golden=path, golden_traces=4).close()


def test_an_operators_golden_recording_may_be_as_old_as_the_operator_likes(
    start: MakeTrainer, traces: list[Trace], now_s: list[float], tmp_path: Path
) -> None:
    old = mixed(traces[:4], now_s[0] - 2 * HOUR_S)
    path = record(tmp_path / "golden.rec", old)
    trainer = start(golden=path, golden_traces=4, trace_ttl_hours=1.0)
    for _ in range(2):
        assert set(trainer.admission.golden.trace_ids) == {trace.header.trace_id for trace in old}
        now_s[0] += HOUR_S
        trainer.read(block_ms=0)
    trainer.close()


def test_a_version_says_whom_it_was_learnt_from(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    """Over a restart with and without the checkpoint, and back to an older version's weights."""
    how = {"decide": promote, "publish_min_tokens": 1, "publish_interval_s": 0}
    store = DraftStore(tmp_path / "store")
    asked = mixed(traces[:4])
    send(stream, asked[:1])
    trainer = start(**how)
    trainer.read(block_ms=0)
    trainer.step()
    trainer.publish()
    [second] = [version for version in store.versions() if version > 1]
    learnt = counts_of(store.manifest(second).info)
    assert learnt.tokens == {"anna": trainer.training.learnt_tokens}
    assert counts_of(store.manifest(1).info).learnt_from("anna") == 0
    send(stream, asked[1:2])
    trainer.read(block_ms=0)
    trainer.step()
    assert set(trainer.training.tenants.tokens) == {"anna", "bo"}
    trainer.checkpoint()
    trainer.close()
    resumed = start(**how)
    assert resumed.training.tenants == trainer.training.tenants
    resumed.training.restart_from(second)
    assert resumed.training.tenants == learnt
    resumed.close()
    (tmp_path / "state" / "trainer.safetensors").unlink()
    from_store = start(**how)
    assert from_store.training.tenants == learnt
    from_store.close()


def test_counts_are_bounded_and_say_what_they_do_not_know() -> None:
    counts = TenantCounts()
    for number in range(MAX_TENANTS + 5):
        counts.add(f"t{number}", 2)
    counts.add("t0", 3)
    assert len(counts.tokens) == MAX_TENANTS
    assert (counts.others, counts.learnt_from("t0"), counts.learnt_from("t9999")) == (10, 5, None)
    known, unknown = TenantCounts(tokens={"a": 1}), TenantCounts(tokens={"a": 2}, complete=False)
    assert known.learnt_from("b") == 0
    whole = joined_counts([known, unknown])
    assert (whole.learnt_from("a"), whole.learnt_from("b")) == (3, None)
    assert counts_of({"origin": "fresh"}).learnt_from("a") == 0
    assert counts_of({"num_steps": 5}).learnt_from("a") is None
    assert counts_of({"tenants": "?"}).learnt_from("a") is None


def test_what_could_not_be_taken_out_of_the_stream_is_taken_out_later(
    start: MakeTrainer,
    stream: TraceStream,
    traces: list[Trace],
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StreamError("Redis is away")

    ErasureOrders(redis_client, "toy").order("anna")
    trainer = start()
    trainer.read(block_ms=0)  # with the search of the stream that every start makes
    send(stream, mixed(traces[:2], created_s=1.0))
    trainer.read(block_ms=0)
    with monkeypatch.context() as patched:
        patched.setattr(TraceRemover, "remove", away)
        trainer.read(block_ms=0)
    assert stream.lag().length == 2
    trainer.read(block_ms=0)
    assert stream.lag().length == 1
    trainer.close()


def test_while_redis_refuses_writes_engines_whose_reports_expire_stay_busy(
    start: MakeTrainer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StreamError("Redis is out of memory")

    def share() -> float:
        trainer.read(block_ms=0)
        trainer.throttle.rest(0.0, threading.Event())
        return metric(trainer, "time_share_ratio")

    monkeypatch.setattr(throttle, "POLL_S", 0.0)
    trainer = start(busy_share=0.25)
    DraftPointer(redis_client, "toy").report_engine("engine", {"machine": machine_id(), "busy": 1.0})
    assert share() == 0.25
    with monkeypatch.context() as patched, capture_logs() as told:
        patched.setattr(ErasureOrders, "report", full)
        share()
        redis_client.delete(RedisKeys(model_key="toy").engine("engine"))
        assert share() == 0.25
    assert len(told) == 1
    assert share() == 1.0
    trainer.close()


def test_the_stream_is_searched_for_erased_tenants_and_not_for_what_is_old(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceRemover, "remove", lambda *_, **__: pytest.fail("every entry of the stream is read"))
    trainer = start(trace_ttl_hours=1.0)
    send(stream, mixed(traces[:2], created_s=1.0))
    for _ in range(2):
        trainer.read(block_ms=0)
    assert metric(trainer, "traces_total", outcome="expired") == 2
    trainer.close()


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_was_refused_before_a_restart_is_taken_out_of_the_stream_after_it(
    start: MakeTrainer,
    stream: TraceStream,
    traces: list[Trace],
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    is_readable: bool,
) -> None:
    """Also where Redis could not be asked for the orders at that start."""

    def away(_: ErasureOrders) -> dict[str, int]:
        raise StreamError("Redis is away")

    ErasureOrders(redis_client, "toy").order("anna")
    first = start()
    first.read(block_ms=0)
    send(stream, mixed(traces[:2], created_s=1.0))
    first.read(block_ms=0)
    first.checkpoint()
    first.ack()
    first.close()
    assert stream.lag().length == 2
    with monkeypatch.context() as patched:
        if not is_readable:
            patched.setattr(ErasureOrders, "orders", away)
        again = start()
    again.read(block_ms=0)
    assert stream.lag().length == 1
    again.close()


def test_what_others_write_among_the_orders_is_an_error_that_names_the_place(redis_client: redis.Redis) -> None:
    erasures, keys = ErasureOrders(redis_client, "toy"), RedisKeys(model_key="toy")
    at_ms = erasures.order("anna")
    for field, value in (("bo", "soon"), (b"\xff", "5")):
        redis_client.hset(keys.erasures, field, value)
        for act in (erasures.orders, lambda: erasures.order("bo")):
            with pytest.raises(StreamError, match=keys.erasures):
                act()
        redis_client.hdel(keys.erasures, field)
    assert erasures.orders() == {"anna": at_ms}
    redis_client.hset(keys.trainers, "trainer-0", "here")
    with pytest.raises(StreamError, match=keys.trainers):
        erasures.trainers()
