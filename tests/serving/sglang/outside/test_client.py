"""SGLang seen from the gateway: its health, what the plugin reports, and what it is asked, on a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest

from serving.sglang.gateway_metrics import SglangCollector
from serving.sglang.outside import client as client_module
from serving.sglang.outside.client import SglangClient
from serving.sglang.report import EngineReport
from serving.target import read_layout
from speculator.errors import EngineDeadError, EngineError, StreamError, TargetError
from speculator.redis.control_plane import DraftPointer
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.outside.fake_sglang import CONTEXT_LENGTH, MODEL, FakeSglang, in_background

ENGINE = "host-1"
REPORT: dict[str, str | int | float] = {
    "version": 7,
    "swaps": 3,
    "swap_failures": 1,
    "last_stall_ms": 1.25,
    "steps": 900,
    "depth": 2,
    "verifications": 100,
    "verified_tokens": 170,
    "rounds": "speculative=98,control=2",
    "decode_ms": "speculative=2500,control=40",
    "round_tokens": "speculative=170,control=2",
    "proposals": "1=100,2=98",
    "accepted": "1=50,2=20",
    "text_proposals": "1=40,16=9",
    "text_accepted": "1=30,16=4",
    "accepted_text": "own=30,group=4,tenant=0",
    "text_tokens": 5000,
    "text_evicted": 2,
    "group_text": "published=40,fetched=30,closed=0",
    "group_texts_evicted": 4,
    "group_texts_unreadable": 5,
    "captured": 9,
    "appended": 7,
    "pending": 1,
    "dropped": 1,
    "dropped_by_reason": "buffer_full=1,closed=0",
    "branch_rows": "kept=5,budget=2",
    "trace_bytes": 1000,
    "trace_tokens": 80,
    "acked": 6,
    "speedup": 1.31,
    "baseline_ms_per_token": 12.5,
    "speedup_lower": 1.2,
    "speedup_upper": 1.42,
    "speedup_estimated": 1.4,
    "failures": "capture:OutOfMemoryError=1",
    "watched": 7,
    "role": "canary",
    "draft_accept_length": 2.25,
    "verdicts": "promoted=4,rolled_back=1,withdrawn=0",
    "last_verdict": "version 6 rolled back: accepts less than the incumbent",
}


@dataclass
class Scene:
    fake: FakeSglang
    pointer: DraftPointer
    client: SglangClient
    alive: list[bool]


@pytest.fixture
def scene(redis_client: redis.Redis) -> Iterator[Scene]:
    fake, alive = FakeSglang(), [True]
    url, stop = in_background(fake)
    pointer = DraftPointer(redis_client, "target-abc")
    client = SglangClient(
        url,
        pointer,
        engine_id=ENGINE,
        draft_version=4,
        is_process_alive=lambda: alive[0],
        poll_s=0.02,
        target_timeout_s=10,
    )
    yield Scene(fake, pointer, client, alive)
    client.stop()
    stop()


def metrics_of(client: SglangClient) -> str:
    registry = CollectorRegistry()
    registry.register(SglangCollector(lambda: client.report, lambda: client.draft_version))
    return generate_latest(registry).decode()


def test_what_sglang_serves(scene: Scene) -> None:
    info = scene.client.info
    assert (info.model, info.context_length) == (MODEL, CONTEXT_LENGTH)


def test_whether_seeds_have_an_effect_stands_in_the_report(scene: Scene) -> None:
    assert not scene.client.info.heeds_seed, "nobody has said so yet"
    for said, heeds in ((1, True), (0, False)):
        scene.pointer.report_engine(ENGINE, {**REPORT, "heeds_seed": said})
        scene.client.poll()
        assert scene.client.info.heeds_seed is heeds


def test_nothing_there(redis_client: redis.Redis) -> None:
    with pytest.raises(EngineDeadError):
        SglangClient(
            "http://127.0.0.1:9",
            DraftPointer(redis_client, "x"),
            engine_id=ENGINE,
            draft_version=1,
            is_process_alive=lambda: True,
        )


# -- health --------------------------------------------------------------------------------------------------------


def test_health_counts_requests_and_notices_the_end_of_the_process(scene: Scene) -> None:
    assert scene.client.health().alive
    scene.fake.loads = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}
    scene.client.poll()
    state = scene.client.health()
    assert (state.alive, state.ready, state.num_running, state.num_waiting) == (True, True, 2, 1)
    scene.alive[0] = False
    state = scene.client.health()
    assert (state.alive, state.ready, state.detail) == (False, False, "SGLang has ended")


def test_a_target_that_somebody_has_moved_is_in_service_once_the_plugin_says_so(scene: Scene) -> None:
    reports: dict[str, str | int | float] = {**REPORT, "target_version": 4, "target_label": 4}
    scene.pointer.report_engine(ENGINE, reports)
    scene.client.poll()
    assert scene.client.least_target_version == 4
    threading.Timer(
        0.3, lambda: scene.pointer.report_engine(ENGINE, {**reports, "target_version": 6, "target_label": 6})
    ).start()
    report = scene.client.update_target(6, None)
    assert (report.version, report.previous, scene.client.target_version) == (6, 4, 6)
    assert scene.client.least_target_version == 6


def test_new_weights_go_to_the_server_if_they_are_like_those_in_service(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[str], int, Path]] = []

    def update(urls: list[str], version: int, folder: Path, *, timeout_s: float) -> tuple[float, dict[str, str]]:
        given.append((urls, version, folder))
        scene.pointer.report_engine(ENGINE, {**REPORT, "target_version": version})
        return 12.5, ({urls[0]: "no room"} if version == 8 else {})

    monkeypatch.setattr(client_module, "update_weights", update)
    scene.pointer.report_engine(ENGINE, {**REPORT, "target_version": 4})
    model = make_toy_model(tmp_path / "model")
    other = make_toy_model(tmp_path / "other", hidden_size=48)
    scene.client.target_layout = lambda: read_layout(model)
    with pytest.raises(TargetError, match=r"other: config\.json is of another architecture"):
        scene.client.update_target(6, other)
    (other / "config.json").unlink()
    with pytest.raises(TargetError, match="shape"):
        scene.client.update_target(6, other)
    (other / "model.safetensors").write_bytes(b"half")
    with pytest.raises(TargetError, match="other"):
        scene.client.update_target(6, other)
    assert given == []
    report = scene.client.update_target(6, model)
    assert report.stall_ms == 12.5
    assert [(version, folder) for _, version, folder in given] == [(6, model)]
    with pytest.raises(EngineError, match=r"version 8 is not on http://127.0.0.1:\d+: no room"):
        scene.client.update_target(8, model)


def test_a_target_that_nobody_takes_is_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.client, "_target_timeout_s", 0.2)
    with pytest.raises(EngineError, match="no engine reports"):
        scene.client.update_target(6, None)
    scene.pointer.report_engine(ENGINE, {**REPORT, "target_version": 5})
    with pytest.raises(EngineError, match=r"did not take target version 6, .*weight_version"):
        scene.client.update_target(6, None)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the client's clock on by seconds."""
    late_s = [0.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0]))

    def passes(seconds: float) -> None:
        late_s[0] += seconds

    return passes


def test_an_sglang_without_load_figures_is_healthy(scene: Scene, pass_time: Callable[[float], None]) -> None:
    scene.fake.loads = {"detail": "Not Found"}
    pass_time(1000)
    assert not scene.client.health().ready
    scene.client.poll()
    assert scene.client.health().ready


def test_health_lasts_over_a_pause_and_not_for_ever(scene: Scene, pass_time: Callable[[float], None]) -> None:
    scene.fake.status = 503
    scene.client.poll()
    assert scene.client.health().ready
    pass_time(client_module._ANSWER_LASTS_S)
    scene.client.poll()
    assert scene.client.health().detail == "SGLang does not answer"
    scene.fake.status = 200
    assert not scene.client.health().ready
    assert scene.client.health().alive, "the process has not ended"
    scene.client.poll()
    assert scene.client.health().ready


def test_a_thread_looks_by_itself(scene: Scene) -> None:
    scene.client.start()
    scene.pointer.report_engine(ENGINE, REPORT)
    wait_until(lambda: scene.client.draft_version == 7)
    scene.client.stop()


# -- reports -------------------------------------------------------------------------------------------------------


def test_no_report_yet(scene: Scene) -> None:
    scene.client.poll()
    assert scene.client.report is None
    assert scene.client.draft_version == 4
    text = metrics_of(scene.client)
    assert "slipstream_draft_version 4.0" in text
    assert "slipstream_engine_report_fresh 0.0" in text
    assert "slipstream_traces" not in text


def test_a_report_without_a_version_leaves_the_one_that_is_known(scene: Scene) -> None:
    scene.pointer.report_engine(ENGINE, {name: value for name, value in REPORT.items() if name != "version"})
    scene.client.poll()
    assert scene.client.report is not None
    assert scene.client.draft_version == 4


def test_a_report_becomes_metrics(scene: Scene) -> None:
    scene.pointer.report_engine("another", {"version": 99})
    scene.pointer.report_engine(ENGINE, REPORT)
    scene.client.poll()
    text = metrics_of(scene.client)
    for line in (
        "slipstream_draft_version 7.0",
        "slipstream_engine_report_fresh 1.0",
        'slipstream_swaps_total{outcome="installed"} 3.0',
        'slipstream_swaps_total{outcome="failed"} 1.0',
        "slipstream_last_swap_stall_seconds 0.00125",
        "slipstream_depth 2.0",
        "slipstream_verifications_total 100.0",
        "slipstream_verified_tokens_total 170.0",
        'slipstream_rounds_total{batch="all",mode="control"} 2.0',
        'slipstream_round_seconds_total{batch="all",mode="speculative"} 2.5',
        'slipstream_round_tokens_total{batch="all",mode="speculative"} 170.0',
        'slipstream_proposals_total{position="2",source="head"} 98.0',
        'slipstream_accepted_total{position="2",source="head"} 20.0',
        'slipstream_proposals_total{position="16",source="suffix"} 9.0',
        'slipstream_accepted_total{position="16",source="suffix"} 4.0',
        'slipstream_accepted_text_total{text="group"} 4.0',
        "slipstream_suffix_tokens 5000.0",
        "slipstream_suffix_evicted_total 2.0",
        'slipstream_group_text_tokens_total{outcome="published"} 40.0',
        "slipstream_group_texts_evicted_total 4.0",
        "slipstream_group_texts_unreadable_total 5.0",
        "slipstream_traces_captured_total 9.0",
        "slipstream_traces_appended_total 7.0",
        'slipstream_traces_dropped_total{reason="buffer_full"} 1.0',
        "slipstream_traces_pending 1.0",
        'slipstream_capture_branch_rows_total{outcome="kept"} 5.0',
        'slipstream_capture_branch_rows_total{outcome="budget"} 2.0',
        'slipstream_capture_branch_rows_total{outcome="cut"} 0.0',
        "slipstream_trace_bytes_total 1000.0",
        "slipstream_trace_tokens_total 80.0",
        "slipstream_stream_acked_traces 6.0",
        'slipstream_speedup_measured_ratio{baseline="depth0_same_batch"} 1.31',
        "slipstream_baseline_seconds_per_token 0.0125",
        'slipstream_plugin_failures_total{part="capture",reason="OutOfMemoryError"} 1.0',
    ):
        assert line in text.splitlines(), line


def test_what_the_watch_says_is_in_the_report(scene: Scene) -> None:
    scene.pointer.report_engine(ENGINE, REPORT)
    scene.client.poll()
    report = scene.client.report
    assert report is not None
    assert (report.role, report.draft_accept_length) == ("canary", 2.25)
    assert (report.watched, report.verdicts) == (7, {"promoted": 4, "rolled_back": 1, "withdrawn": 0})
    assert report.last_verdict == "version 6 rolled back: accepts less than the incumbent"
    assert (report.speedup_lower, report.speedup_upper, report.speedup_estimated) == (1.2, 1.42, 1.4)


def test_a_report_of_another_version_of_the_plugin_is_read_as_far_as_it_goes(scene: Scene) -> None:
    scene.pointer.report_engine(ENGINE, {"version": 8, "swaps": "many", "speedup": "nan?", "heeds_seed": 0, "new": "x"})
    scene.client.poll()
    report = scene.client.report
    assert report is not None
    assert (report.version, report.swaps, report.speedup, report.heeds_seed) == (8, None, None, False)
    text = metrics_of(scene.client)
    assert "slipstream_depth 0" not in text
    # Digits that are no numbers.
    assert EngineReport.parse({"steps": "²", "verdicts": "promoted=²"}) == EngineReport.parse({})


def test_a_look_that_fails_is_not_the_last_one(scene: Scene, redis_client: redis.Redis) -> None:
    scene.pointer.report_engine(ENGINE, REPORT)
    redis_client.hset(scene.pointer._keys.engine(ENGINE), "version", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        scene.client.poll()
    scene.client.start()
    wait_until(lambda: scene.client.health().num_running == 3)
    scene.fake.loads = {"loads": [{"num_running_reqs": 5, "num_waiting_reqs": 0}]}
    wait_until(lambda: scene.client.health().num_running == 5)
    scene.pointer.report_engine(ENGINE, REPORT)
    wait_until(lambda: scene.client.draft_version == 7)


def test_a_report_that_expired_is_none(scene: Scene, redis_client: redis.Redis) -> None:
    scene.pointer.report_engine(ENGINE, REPORT)
    scene.client.poll()
    redis_client.delete(scene.pointer._keys.engine(ENGINE))
    scene.client.poll()
    assert scene.client.report is None
    assert scene.client.draft_version == 7
    assert scene.client.health().alive


def test_while_redis_is_away_the_last_report_stands_until_it_would_have_expired(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.pointer.report_engine(ENGINE, REPORT)
    scene.client.poll()

    def away() -> dict[str, dict[str, str]]:
        raise StreamError("Redis cannot be reached")

    monkeypatch.setattr(scene.pointer, "engines", away)
    scene.client.poll()
    assert scene.client.report is not None
    monkeypatch.setattr(client_module, "ENGINE_TTL_S", 0.0)
    scene.client.poll()
    assert scene.client.report is None
    assert scene.client.health().ready
