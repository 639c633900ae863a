"""Several engines behind a router, seen as one: their reports on a real Redis, the router a stand-in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest
from redis.exceptions import NoPermissionError
from structlog.testing import capture_logs

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.live.live import Live
from serving.gateway.upstream import Upstream
from serving.metrics import TargetMetrics
from serving.request_metadata import HEADER, OTHER_TARGET
from serving.sglang.gateway_metrics import PoolCollector, SglangCollector
from serving.sglang.outside.pool import PoolClient, check_routers, list_servers
from serving.sglang.outside.weights import update_weights
from serving.sglang.report import MOST_SILENT, EngineReport, Pool, most_common
from serving.target import TargetUpdater
from speculator.errors import ConfigError, EngineDeadError, EngineError, StreamError, TargetError
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import POOL_METRICS_TTL_S, DraftPointer
from tests.serving.gateway.client import serve
from tests.serving.sglang.outside.fake_sglang import MODEL, FakeSglang, flat_error, in_background
from tests.serving.sglang.outside.rollout_server import RolloutServer

TARGET = "5f" * 32
Report = dict[str, str | int | float]


def report(process: str, **changes: str | int | float) -> Report:
    served: Report = {"model": MODEL, "context_length": 4096, "target_version": 0}
    counts: Report = {"version": 4, "swaps": 2, "captured": 10, "rounds": "speculative=5,control=1", "pending": 3}
    return {**served, **counts, "running": 2, "process": process, **changes}


@dataclass
class Scene:
    fake: FakeSglang
    pointer: DraftPointer
    client: PoolClient

    def engine(self, name: str, **changes: str | int | float) -> None:
        self.pointer.report_engine(name, report(f"{name}:1", **changes))


AWAY = "http://127.0.0.1:9"


@pytest.fixture
def scene(redis_client: redis.Redis) -> Iterator[Scene]:
    fake = FakeSglang()
    url, stop = in_background(fake)
    pointer = DraftPointer(redis_client, "target-abc")
    for name in ("a", "b", "c"):
        pointer.report_engine(name, report(f"{name}:1"))
    client = PoolClient((AWAY, url), pointer, draft_version=1, poll_s=0.02, target_timeout_s=10)
    yield Scene(fake, pointer, client)
    client.stop()
    stop()


def registry_of(client: PoolClient) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SglangCollector(lambda: client.exported, lambda: client.draft_version, lambda: client.exports))
    registry.register(PoolCollector(lambda: client.num_engines, lambda: client.num_on_version))
    return registry


def metrics_of(client: PoolClient) -> list[str]:
    return generate_latest(registry_of(client)).decode().splitlines()


def page_of(client: PoolClient) -> dict[str, Any]:
    figures = SglangCollector(lambda: client.report, lambda: client.draft_version)
    return Live(client, registry_of(client), shows_tokens=False, engine_figures=figures).document()


def test_what_is_served_stands_in_the_reports(scene: Scene, redis_client: redis.Redis) -> None:
    info = scene.client.info
    assert (info.model, info.context_length) == (MODEL, 4096)
    with pytest.raises(EngineDeadError, match="reports"):
        PoolClient((AWAY,), DraftPointer(redis_client, "other"), draft_version=1)


def test_a_seed_has_an_effect_where_every_engine_heeds_it(scene: Scene) -> None:
    scene.client.poll()
    assert not scene.client.info.heeds_seed
    for name, heeds in (("a", False), ("b", False), ("c", True)):
        scene.engine(name, heeds_seed=1)
        scene.client.poll()
        assert scene.client.info.heeds_seed is heeds


def test_a_part_that_is_off_is_told_until_its_engine_is_started_again(scene: Scene) -> None:
    line = 'slipstream_plugin_failures_total{part="capture",reason="TypeError"} 1.0'
    scene.engine("a", failures="capture:TypeError=1")
    scene.client.poll()
    assert line in metrics_of(scene.client)
    scene.pointer.report_engine("a", report("a:2"))
    scene.client.poll()
    assert line not in metrics_of(scene.client)


def test_counts_are_summed_and_the_commonest_version_is_the_pools(scene: Scene) -> None:
    scene.client.poll()
    assert "slipstream_traces_captured_total 0.0" in metrics_of(scene.client), "a counter begins at zero"
    more: Report = {"captured": 20, "rounds": "speculative=10,control=2", "swaps": 4}
    scene.engine("a", **more)
    scene.engine("c", version=5, speedup=1.5, **more)
    scene.engine("b", speedup=1.1, **more)
    scene.client.poll()
    assert scene.client.draft_version == 4
    assert scene.client.health().num_running == 6
    lines = metrics_of(scene.client)
    for line in (
        "slipstream_draft_version 4.0",
        "slipstream_pool_engines 3.0",
        "slipstream_pool_same_version_engines 2.0",
        'slipstream_swaps_total{outcome="installed"} 6.0',
        "slipstream_traces_captured_total 30.0",
        "slipstream_traces_pending 9.0",
        'slipstream_rounds_total{batch="all",mode="speculative"} 15.0',
        'slipstream_speedup_measured_ratio{baseline="depth0_same_batch"} 1.3',
    ):
        assert line in lines, line


CAPTURED = "slipstream_traces_captured_total"


def captured(*gateways: PoolClient) -> list[str]:
    """What each exports of the pool's count."""
    for gateway in gateways:
        gateway.poll()
    return [line for gateway in gateways for line in metrics_of(gateway) if line.startswith(f"{CAPTURED} ")]


def test_one_of_two_gateways_exports_the_pool(scene: Scene, redis_client: redis.Redis) -> None:
    """The boards sum over gateways. The other goes on from zero: Prometheus takes that for a counter's new start."""
    router = scene.client._routers[1]
    other = PoolClient((router,), scene.pointer, draft_version=1)
    assert captured(scene.client, other) == [f"{CAPTURED} 0.0"]
    scene.engine("a", captured=30)
    assert captured(other, scene.client) == [f"{CAPTURED} 20.0"]
    assert "slipstream_pool_engines 3.0" in metrics_of(other)
    lease = RedisKeys(model_key="target-abc").pool_metrics
    assert 0 < redis_client.ttl(lease) <= POOL_METRICS_TTL_S
    redis_client.expire(lease, 1)
    scene.client.poll()
    assert redis_client.ttl(lease) > 1, "who holds it renews it"
    redis_client.delete(lease)  # as once the first has ended
    assert captured(other, scene.client) == [f"{CAPTURED} 0.0"]
    scene.engine("b", captured=12)
    assert captured(scene.client, other) == [f"{CAPTURED} 2.0"]
    assert other.report is not None
    assert other.report.captured == 22, "the page goes on from its own start"
    other.stop()


def test_the_page_of_every_gateway_has_the_pools_figures(scene: Scene) -> None:
    """Also where the other exports them, and each counted once where this one does."""
    other = PoolClient((scene.client._routers[1],), scene.pointer, draft_version=1)
    assert captured(scene.client, other) == [f"{CAPTURED} 0.0"]
    scene.engine("a", captured=30, speedup=1.5)
    assert captured(scene.client, other) == [f"{CAPTURED} 20.0"]
    for shown in map(page_of, (scene.client, other)):
        assert (shown["speedup"]["ratio"], shown["totals"]["captured"]) == (1.5, 20)
    other.stop()


def test_a_gateway_exports_the_pool_where_redis_denies_the_key_or_is_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules may be of an older release; and that no engine reports must be seen."""

    def denied(_: str) -> bool:
        raise StreamError("denied") from NoPermissionError()

    monkeypatch.setattr(scene.pointer, "hold_pool_metrics", denied)
    assert captured(scene.client) == [f"{CAPTURED} 0.0"]

    def away(*_: object) -> bool:
        raise StreamError("away") from ConnectionError()

    monkeypatch.setattr(scene.pointer, "hold_pool_metrics", away)
    assert captured(scene.client) == [f"{CAPTURED} 0.0"], "who exports them goes on"
    monkeypatch.setattr(scene.pointer, "engines", away)
    scene.client._reported_s = float("-inf")
    assert captured(scene.client) == []
    assert "slipstream_engine_report_fresh 0.0" in metrics_of(scene.client)


def test_sums_do_not_fall_when_an_engine_ends_or_starts_again() -> None:
    pool = Pool()

    def parsed(process: str, captured: int) -> EngineReport:
        return EngineReport.parse({"process": process, "captured": str(captured), "pending": "1", "version": "1"})

    first, second = parsed("a:1", 10), parsed("b:1", 5)
    both = pool.merge({"a": first, "b": second})
    gone = pool.merge({"b": second})
    again = pool.merge({"a": parsed("a:2", 1), "b": second})
    assert both is not None
    assert gone is not None
    assert again is not None
    assert [each.captured for each in (both, gone, again)] == [0, 0, 1]
    assert [each.pending for each in (both, gone, again)] == [2, 1, 2]
    assert pool.merge({}) is None


def test_sums_do_not_fall_when_a_container_starts_again_under_its_old_host_and_pid() -> None:
    pool = Pool()
    sums = [
        pool.merge({"a": EngineReport.parse({"process": "pod:1", "captured": str(captured), "steps": str(steps)})})
        for captured, steps in ((10, 100), (12, 120), (0, 3), (4, 30), (1, 9))
    ]
    assert [each.captured for each in sums if each is not None] == [0, 2, 2, 6, 7]


def test_counters_of_a_gateway_that_starts_again_begin_at_zero() -> None:
    """From any other value Prometheus would take all of it for new: an old rollback would raise its alert again."""

    def parsed(captured: int, rolled_back: int) -> EngineReport:
        verdicts = f"promoted=3,rolled_back={rolled_back}"
        return EngineReport.parse({"process": "a:1", "captured": str(captured), "verdicts": verdicts})

    for pool in (Pool(), Pool()):
        first, later = pool.merge({"a": parsed(10, 2)}), pool.merge({"a": parsed(13, 3)})
        assert first is not None
        assert later is not None
        assert (first.captured, first.verdicts) == (0, {"promoted": 0, "rolled_back": 0})
        assert (later.captured, later.verdicts) == (3, {"promoted": 0, "rolled_back": 1})


def test_engines_that_come_and_go_leave_their_counts_and_nothing_else() -> None:
    """As pods do, each under a name of its own."""
    pool, both = Pool(), None
    kept = EngineReport.parse({"process": "kept:1", "captured": "0"})
    for number in range(3 * MOST_SILENT):
        for captured in ("0", "2"):
            pod = EngineReport.parse({"process": f"pod-{number}:1", "captured": captured})
            both = pool.merge({"kept": kept, f"pod-{number}": pod})
    assert both is not None
    assert both.captured == 6 * MOST_SILENT
    assert len(pool._last) == MOST_SILENT + 2


def test_what_one_engine_says_of_itself_is_not_said_of_the_pool(scene: Scene) -> None:
    scene.engine("a", version=5, role="canary", draft_accept_length=3.0, capture_share=0.2)
    scene.engine("b", role="waiting", draft_accept_length=1.5, capture_share=1.0, acked=70)
    scene.engine("c", role="waiting", draft_accept_length=2.5, capture_share=0.6, acked=69)
    scene.client.poll()
    lines = metrics_of(scene.client)
    assert not [line for line in lines if line.startswith("slipstream_engine_role{")]
    assert "slipstream_draft_accept_length 2.0" in lines, "of the version that most run"
    assert "slipstream_capture_share_ratio 0.6" in lines
    assert "slipstream_stream_acked_traces 70.0" in lines, "all engines count those of one stream"


def test_commonest() -> None:
    assert most_common([4, 5, 4]) == 4
    assert most_common([4, 5]) == 5
    assert most_common([]) is None


def test_a_pool_is_ready_while_one_of_its_routers_is(redis_client: redis.Redis) -> None:
    first, second = FakeSglang(), FakeSglang()
    (one, stop_one), (other, stop_other) = in_background(first), in_background(second)
    pointer = DraftPointer(redis_client, "target-abc")
    pointer.report_engine("a", report("a:1"))
    client = PoolClient((one, other), pointer, draft_version=1)

    def poll(*statuses: int) -> tuple[bool, list[tuple[str, str]]]:
        """Whether it was found to serve, and what was said of which router."""
        first.status, second.status = statuses
        client._answered_s = float("-inf")
        with capture_logs() as logs:
            client.poll()
        return client.health().ready, [(line["event"], line["router"]) for line in logs if "router" in line]

    away, back = "router away, or without an engine", "router back"
    assert poll(200, 200) == (True, [])
    assert poll(503, 200) == (True, [(away, one)])
    assert poll(503, 503) == (False, [(away, other)])
    assert poll(503, 503) == (False, [])
    assert poll(200, 503) == (True, [(back, one)])
    assert poll(200, 503) == (True, [])
    assert poll(503, 503) == (False, [(away, one)])
    client.stop()
    stop_one()
    stop_other()


def test_a_gateway_without_engines_lives_and_says_when_to_ask_again(redis_client: redis.Redis) -> None:
    """Kubernetes asks for /health: an answer of 503 there would end the gateway, and clients would be refused."""
    fakes = [FakeSglang(status=503, refusal=flat_error(503, "no workers")) for _ in range(2)]
    with ExitStack() as opened:
        urls = []
        for fake in fakes:
            url, stop = in_background(fake)
            opened.callback(stop)
            urls.append(url)
        pointer = DraftPointer(redis_client, "target-abc")
        pointer.report_engine("a", report("a:1"))
        client = PoolClient((urls[0], urls[1]), pointer, draft_version=1)
        opened.callback(client.stop)
        client._answered_s = float("-inf")
        client.poll()

        async def ask() -> tuple[httpx.Response, ...]:
            upstream = Upstream(*urls)
            app = create_passthrough_app(client, upstream, settings=GatewaySettings(), registry=CollectorRegistry())
            async with serve(app) as server, httpx.AsyncClient(base_url=server.url) as http:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
                answers = await http.get("/health"), await http.get("/ready")
                chat = await http.post("/v1/chat/completions", json=body)
            await upstream.close()
            return *answers, chat

        health, ready, chat = asyncio.run(ask())
    assert (health.status_code, ready.status_code, chat.status_code) == (200, 503, 503)
    assert "SGLang does not answer" in ready.text
    assert int(chat.headers["retry-after"]) > 0


def test_the_engine_that_does_not_take_a_target_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.client, "_target_timeout_s", 0.3)
    scene.engine("a", target_version=8)
    scene.engine("b", target_version=8)
    with pytest.raises(EngineError, match=r"^c did not take target version 8"):
        scene.client.update_target(8, None)


def test_new_weights_go_to_every_server_that_a_router_lists(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = RolloutServer(20), RolloutServer(20, refuses_weights="no room"), RolloutServer(20)
    with ExitStack() as opened:
        urls = []
        for server in servers:
            url, stop = in_background(server)
            opened.callback(stop)
            urls.append(url)
        monkeypatch.setattr(scene.fake, "workers", urls)
        with pytest.raises(EngineError, match=rf"version 6 is not on {urls[1]}: no room\. Repeat the update"):
            scene.client.update_target(6, tmp_path)
        assert [server.label for server in servers] == ["6", "default", "6"]
        assert all(server.calls[-1] == "/continue_generation" and not server.is_paused for server in servers)
        for name, label in (("a", 6), ("b", 0), ("c", 6)):
            scene.engine(name, target_version=label, target_label=label)
        scene.client.poll()
        assert (scene.client.target_version, scene.client.least_target_version) == (0, 6)
        servers[1].refuses_weights = ""
        threading.Timer(0.3, lambda: scene.engine("b", target_version=6, target_label=6)).start()
        moved = scene.client.update_target(6, tmp_path)
        assert (moved.version, moved.previous, servers[1].label) == (6, 0, "6")
        updates = [server.calls.count("/update_weights_from_disk") for server in servers]
        assert updates == [1, 2, 1], "who has them is not given them again"
        assert moved.stall_ms > 0
    scene.fake.workers = []
    with pytest.raises(EngineError, match="no router"):
        scene.client.update_target(7, tmp_path)


def test_an_update_whose_flush_a_server_refused_may_be_repeated(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RolloutServer(20, refuses_weights="the cache was not flushed")
    url, stop = in_background(server)
    monkeypatch.setattr(scene.fake, "workers", [url])
    updater = TargetUpdater(scene.client, TargetMetrics(CollectorRegistry()), folder=tmp_path)
    (tmp_path / "step").mkdir()
    with pytest.raises(EngineError, match=r"flushed\. Repeat the update"):
        updater.announce(6, "step")
    for name in ("a", "b", "c"):
        # The plugin counts the version from then on, and SGLang's HTTP server keeps the old label.
        scene.engine(name, target_version=6, target_label=6)
    scene.client.poll()
    assert (scene.client.target_version, server.label) == (6, "default")
    server.refuses_weights = ""
    assert updater.announce(6, "step").version == 6
    assert server.label == "6"
    with pytest.raises(TargetError, match="5 is not newer than 6"):
        updater.announce(5, "step")
    stop()


def test_a_router_that_has_just_started_hides_no_servers() -> None:
    workers = {"new": [], "old": [{"url": "http://a:1/"}]}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"workers": workers[request.url.host]})

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        assert list_servers(http, ["http://new", "http://old"]) == ["http://a:1"]
        assert list_servers(http, ["http://new"]) == []


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    down = RolloutServer(20, is_down=True)
    url, stop = in_background(down)
    _, failed = update_weights([url, AWAY], 3, tmp_path, timeout_s=5)
    stop()
    assert set(failed) == {url, AWAY}
    assert "503" in failed[url]
    assert down.label == "default"


# -- what the router lets through ----------------------------------------------------------------------------------


def test_a_router_that_keeps_the_header_is_taken() -> None:
    fake = FakeSglang(heeds_marks=True)
    url, stop = in_background(fake)
    check_routers((url,), MODEL, TARGET)
    stop()
    assert f'"capture":false,"target":"{TARGET}"' in fake.headers[0][HEADER]


def test_an_engine_of_another_target_is_refused_at_the_start() -> None:
    url, stop = in_background(FakeSglang(refusal=flat_error(503, OTHER_TARGET)))
    with pytest.raises(ConfigError, match=f"{url} serves another target"):
        check_routers((url,), MODEL, TARGET)
    stop()


def test_a_router_that_is_away_is_let_be_where_another_answers() -> None:
    url, stop = in_background(FakeSglang(heeds_marks=True))
    with capture_logs() as logs:
        check_routers((AWAY, url), MODEL, TARGET)
    stop()
    assert [(line["log_level"], AWAY in line["reason"]) for line in logs] == [("warning", True)]
    with pytest.raises(EngineDeadError):
        check_routers((AWAY, url), MODEL, TARGET)


def test_every_router_that_answers_is_tried() -> None:
    (good, stop_good), (bad, stop_bad) = in_background(FakeSglang(heeds_marks=True)), in_background(FakeSglang())
    with pytest.raises(ConfigError, match=f"{bad} loses"):
        check_routers((good, bad), MODEL, TARGET)
    stop_good()
    stop_bad()
