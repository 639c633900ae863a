"""The page's files and its data: what it is told, what it is not told, and what the browser may do with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.capture.recorder import RecorderStats
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.live.drafts import PublicDrafts
from serving.gateway.live.live import RANGES, Live
from serving.gateway.metrics import GatewayMetrics
from serving.metrics import EngineMetrics, ServingCollector
from serving.speedup import BASELINE, NOTHING_MEASURED, SUFFIX_ONLY, Speedup, SpeedupMeter
from speculator.errors import StoreError
from speculator.proposals.suffix_drafter import TextSource
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.rounds import count_round
from tests.serving.gateway import passage
from tests.serving.gateway.client import ask, error_of, gateway, serve
from tests.serving.sglang.outside.fake_sglang import MODEL, FakeSglang

PAGE = Path(__file__).parents[4] / "serving/gateway/live/page"
FILES = sorted(file for file in PAGE.rglob("*") if file.is_file())


def get(app: FastAPI, path: str) -> httpx.Response:
    return ask(app, lambda client: client.get(path))


# -- the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", *(f"/page/{file.relative_to(PAGE)}" for file in FILES if file.suffix not in (".html", ".LICENSE"))]
)
def test_files_come_with_a_policy_that_lets_in_nothing_else(path: str) -> None:
    response = get(gateway(DoubleEngine()), path)
    assert response.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert response.headers["x-content-type-options"] == "nosniff"
    text = response.text.removeprefix("/*! https://github.com/leeoniya/uPlot ").replace(
        "http://www.w3.org/2000/svg", ""
    )
    assert "://" not in text, "everything is of this origin"


def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    root = PAGE.parents[3]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str(file.relative_to(root)) for file in FILES} <= names


# -- the figures ----------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """The collectors of an engine, and rounds to count."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    meter: SpeedupMeter = field(default_factory=SpeedupMeter)
    dropped: dict[str, int] = field(default_factory=lambda: {"buffer": 2, "redis": 1})
    head: Speedup = NOTHING_MEASURED

    def __post_init__(self) -> None:
        self.metrics = EngineMetrics(self.registry)
        stats = RecorderStats(
            captured=9, appended=6, pending=0, bytes_appended=600, tokens_appended=60, dropped_by_reason=self.dropped
        )
        self.registry.register(ServingCollector(self.meter, lambda: stats, head=lambda: self.head))

    def round(
        self, *, drafted: bool, seconds: float, accepted: int, from_head: bool = True, texts: Sequence[TextSource] = ()
    ) -> None:
        """One request at depth 3."""
        count_round(
            self.metrics,
            self.meter,
            depth=3 if drafted else 0,
            seconds=seconds,
            accepted=accepted,
            from_head=from_head,
            texts=texts,
        )

    def app(self) -> FastAPI:
        return create_app(DoubleEngine(), settings=GatewaySettings(), registry=self.registry)


def test_before_any_traffic_there_is_no_figure() -> None:
    live = get(Served().app(), "/slipstream/live").json()
    assert live["speedup"] == live["end_to_end"] == dict.fromkeys(("ratio", "lower", "upper", "baseline"))
    assert live["positions"] == []
    assert live["history"][-1][1:5] == [None] * 4


def test_what_the_collectors_say() -> None:
    served = Served()
    served.round(drafted=False, seconds=0.02, accepted=0)
    served.round(drafted=True, seconds=0.03, accepted=2)
    served.round(drafted=True, seconds=0.03, accepted=1, from_head=False, texts=[TextSource.TENANT])
    live = get(served.app(), "/slipstream/live").json()
    assert live["speedup"]["baseline"] == BASELINE
    assert live["speedup"]["ratio"] == pytest.approx(0.02 / (0.06 / 5))
    assert (live["totals"]["captured"], live["totals"]["dropped"]) == (9, 3)
    assert live["model"] == "double"
    assert live["shows_tokens"] is True
    assert live["health"] == {"alive": True, "ready": True, "running": 0, "waiting": 0}


def test_accepted_tokens_are_told_by_who_proposed_them() -> None:
    served, now_s = Served(), 1000.0
    live = Live(DoubleEngine(), served.registry, shows_tokens=True, clock=lambda: now_s)
    assert not any(live.document()["sources"].values())
    for _ in range(60):
        now_s += 1
        served.round(drafted=True, seconds=0.01, accepted=2)
        texts = [TextSource.OWN, TextSource.TENANT]
        served.round(drafted=True, seconds=0.01, accepted=2, from_head=False, texts=texts)
    live.sample()
    sources = {source: count for source, count in live.document()["sources"].items() if count}
    assert sources == {"head": 120, "own": 60, "tenant": 60}


def test_figures_of_the_engines_stand_in_for_those_of_the_registry() -> None:
    """Of several gateways only one exports them, and the page of that one counts nothing twice."""
    served = Served()
    live = Live(DoubleEngine(), served.registry, shows_tokens=True, engine_figures=served.registry)  # type: ignore[arg-type]
    live.sample()
    assert live.document()["totals"]["captured"] == 9


def test_a_gateway_that_is_started_again_has_no_history() -> None:
    time_ms = 1000
    live = Live(DoubleEngine(), Served().registry, shows_tokens=True, clock_ms=lambda: time_ms)
    live.sample()

    async def restart() -> list[Any]:
        async with live.lifespan():
            assert live.document()["started_ms"] == 2000
            return live.document()["history"]  # type: ignore[no-any-return]

    time_ms = 2000
    assert [point.at_ms for point in asyncio.run(restart())] == [2000]


def test_what_the_head_adds_is_that_of_the_engines_own_ab() -> None:
    served = Served(head=Speedup(1.3, None, 9, 9, lower=1.2, upper=1.4))
    added = get(served.app(), "/slipstream/live").json()["head_added"]
    assert added == {"ratio": 1.3, "lower": 1.2, "upper": 1.4, "baseline": SUFFIX_ONLY}


def test_rates_are_of_the_last_seconds() -> None:
    served, now_s = Served(), 1000.0
    host = DoubleEngine()
    live = Live(host, served.registry, shows_tokens=True, clock=lambda: now_s)

    def newest() -> tuple[float | None, float | None, int]:
        """Accept length, tokens a second and draft version."""
        point = live.document()["history"][-1]
        return point.accept_length, point.tokens_per_s, point.draft_version

    live.sample()
    assert newest()[0] is None
    for _ in range(10):
        served.round(drafted=True, seconds=0.01, accepted=2)
    now_s += 5
    live.sample()
    assert newest()[:2] == (pytest.approx(3), pytest.approx(30 / 5))
    now_s += 100
    live.sample()
    assert newest()[0] is None, "the verifications are older than the window"
    assert [tuple(row.values()) for row in live.document()["positions"]] == [
        ("head", 1, 10, 10),
        ("head", 2, 10, 10),
        ("head", 3, 10, 0),
    ]
    now_s += 100
    live.sample()
    assert live.document()["positions"] == []


def test_the_history_of_a_range_has_means_and_an_end() -> None:
    host, served, time_ms = DoubleEngine(), Served(), 0
    live = Live(host, served.registry, shows_tokens=True, clock=lambda: time_ms / 1000, clock_ms=lambda: time_ms)
    for second in range(1, 25):
        time_ms, host.draft_version = 1000 * second, second
        live.sample()
        served.round(drafted=True, seconds=0.01, accepted=second)
    by_second = live.document()["history"]
    assert [point.at_ms for point in by_second] == [1000 * second for second in range(1, 25)]
    first, second = live.document(spans="hour")["history"]
    assert (first.at_ms, second.at_ms) == (9000, 19000)
    assert (first.draft_version, second.draft_version) == (9, 19), "the newest in the step"
    of_second = [point.accept_length for point in by_second if 10_000 <= point.at_ms <= 19_000]
    assert second.accept_length == pytest.approx(sum(of_second) / 10)
    assert live.document(9000, "hour")["history"] == [second], "only what is new"
    assert live.document(spans="hour")["newest"] == by_second[-1], "which is in no whole step yet"
    assert live.document(spans="day")["history"] == []
    for _ in range(400):
        time_ms += 240_000
        live.sample()
    for name, (_, num_points) in RANGES.items():
        points = live.document(spans=name)["history"]
        assert len(points) == num_points
        assert points[-1].at_ms >= time_ms - 240_000


def test_the_range_is_named_in_the_query() -> None:
    async def sample(path: str) -> dict[str, Any]:
        async with serve(Served().app()) as server, httpx.AsyncClient(base_url=server.url) as client:
            return (await client.get(path)).json()  # type: ignore[no-any-return]

    day = asyncio.run(sample("/slipstream/live?range=day"))
    assert day["history"] == []
    assert day["newest"][0] > 0
    assert len(asyncio.run(sample("/slipstream/live?range=century"))["history"]) == 1


def test_first_tokens_have_quantiles_of_the_last_minute() -> None:
    registry, now_s = CollectorRegistry(), 0.0
    metrics = GatewayMetrics(registry, "double")
    live = Live(DoubleEngine(), registry, shows_tokens=True, clock=lambda: now_s)

    def newest() -> tuple[float | None, float | None]:
        live.sample()
        point = live.document()["newest"]
        return point.first_token_median_s, point.first_token_p95_s

    metrics.observe_first_token("/v1/completions", 50)  # before the page's first look
    assert newest() == (None, None)
    for route, many, value in (("/v1/completions", 60, 0.07), ("/v1/chat/completions", 40, 0.4)):
        for _ in range(many):
            metrics.observe_first_token(route, value)
    now_s += 30
    median, slowest = newest()
    # Of 100 the 50th is in the bucket of 50 to 100 ms that has 60, the 95th in that of 250 to 500 ms that has 40.
    assert median == pytest.approx(0.05 + 0.05 * 50 / 60)
    assert slowest == pytest.approx(0.25 + 0.25 * 35 / 40)
    now_s += 30
    assert newest() == (median, slowest)
    now_s += 31
    assert newest() == (None, None), "they are older than the window"
    metrics.observe_first_token("/v1/completions", 1000)
    now_s += 1
    assert newest() == (300, 300), "beyond the last bound it is that"


def test_a_trainer_that_is_kept_is_told_of() -> None:
    status = {"running": False, "num_ended": 2, "exit_code": -9, "ended_ms": 5000, "again_ms": 7000}
    for kept in (None, status):
        told = None if kept is None else lambda: status
        app = create_app(DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry(), trainer_status=told)
        assert get(app, "/slipstream/live").json()["trainer"] == kept
        shown = passage.talk(FakeSglang(), lambda client: client.get("/slipstream/live"), trainer_status=told)
        assert shown.json()["trainer"] == kept


def test_an_engine_that_reports_late_has_figures_once_it_does() -> None:
    served, registry, now_s = Served(), CollectorRegistry(), 0.0
    live = Live(DoubleEngine(), registry, shows_tokens=True, clock=lambda: now_s)
    live.sample()
    registry.register(served.registry)  # type: ignore[arg-type]
    for _ in range(2):
        now_s += 1
        live.sample()
        served.round(drafted=True, seconds=0.01, accepted=2)
    now_s += 1
    live.sample()
    newest = live.document()["history"][-1]
    assert newest.accept_length == pytest.approx(3)
    assert newest.tokens_per_s == pytest.approx(6 / 2)


def test_after_a_silence_the_last_two_minutes_begin_with_what_was_heard_again() -> None:
    served, registry, now_s = Served(), CollectorRegistry(), 0.0
    live = Live(DoubleEngine(), registry, shows_tokens=True, clock=lambda: now_s)
    registry.register(served.registry)  # type: ignore[arg-type]
    for _ in range(9):
        served.round(drafted=True, seconds=0.01, accepted=2)
    live.sample()
    registry.unregister(served.registry)  # type: ignore[arg-type]
    for _ in range(3):
        now_s += 60
        live.sample()
    assert live.document()["positions"] is None
    registry.register(served.registry)  # type: ignore[arg-type]
    live.sample()
    assert (live.document()["positions"], live.document()["sources"]["head"]) == ([], 0)
    served.round(drafted=True, seconds=0.01, accepted=2)
    now_s += 1
    live.sample()
    assert [row["proposed"] for row in live.document()["positions"]] == [1, 1, 1]
    assert live.document()["sources"]["head"] == 2


def test_a_counter_that_begins_anew_is_no_rate() -> None:
    first, second, now_s = Served(), Served(), 0.0
    first.round(drafted=True, seconds=0.01, accepted=2)
    second.round(drafted=True, seconds=0.01, accepted=0)
    registry = CollectorRegistry()
    registry.register(first.registry)  # type: ignore[arg-type]
    live = Live(DoubleEngine(), registry, shows_tokens=True, clock=lambda: now_s)
    live.sample()
    registry.unregister(first.registry)  # type: ignore[arg-type]
    registry.register(second.registry)  # type: ignore[arg-type]
    now_s += 1
    live.sample()
    newest = live.document()["history"][-1]
    assert (newest.tokens_per_s, newest.accept_length) == (None, None)


def test_an_engine_that_begins_anew_has_accepted_nothing_less() -> None:
    first, second = Served(), Served()
    for _ in range(3):
        first.round(drafted=True, seconds=0.01, accepted=2)
    second.round(drafted=True, seconds=0.01, accepted=2)
    registry = CollectorRegistry()
    registry.register(first.registry)  # type: ignore[arg-type]
    live = Live(DoubleEngine(), registry, shows_tokens=True, clock=lambda: 0.0)
    live.sample()
    registry.unregister(first.registry)  # type: ignore[arg-type]
    registry.register(second.registry)  # type: ignore[arg-type]
    live.sample()
    figures = live.document()
    assert (figures["positions"], figures["sources"]) == ([], {"head": 0})


def test_a_reading_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.gateway.live.live.SAMPLE_S", 0.0)
    num_reads = 0

    class Failing(Collector):
        def collect(self) -> list[Metric]:
            nonlocal num_reads
            num_reads += 1
            raise OSError("no descriptor is free")

    async def run() -> None:
        registry = CollectorRegistry()
        registry.register(Failing())
        async with Live(DoubleEngine(), registry, shows_tokens=True).lifespan():
            while num_reads < 3:  # noqa: ASYNC110 - the task's own
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert num_reads >= 3


def test_the_server_reads_on_by_itself_and_tells_only_what_is_new() -> None:
    async def run() -> None:
        async with serve(Served().app()) as server, httpx.AsyncClient(base_url=server.url) as client:
            seen: list[Any] = []
            while len(seen) < 3:
                since = seen[-1][0] if seen else 0
                new = (await client.get("/slipstream/live", params={"since": since})).json()["history"]
                assert all(point[0] > since for point in new)
                seen += new
                await asyncio.sleep(0.1)
            assert [point[0] for point in seen] == sorted({point[0] for point in seen})

    asyncio.run(asyncio.wait_for(run(), 20))


def test_behind_sglang_what_is_not_known_is_null() -> None:
    async def sample(client: httpx.AsyncClient) -> dict[str, Any]:
        return (await client.get("/slipstream/live")).json()

    live = passage.talk(FakeSglang(), sample)
    assert live["model"] == MODEL
    assert live["shows_tokens"] is False
    assert live["speedup"] == live["end_to_end"] == dict.fromkeys(("ratio", "lower", "upper", "baseline"))
    assert live["positions"] is None
    assert set(live["totals"].values()) == {None}
    assert live["history"][-1][1:6] == [None] * 5


# -- versions and events ---------------------------------------------------------------------------------------------


@dataclass
class DeskDouble:
    """An overview and events with everything in them that is not for everyone."""

    failure: Exception | None = None
    num_reads: int = 0

    def overview(self) -> dict[str, Any]:
        self.num_reads += 1
        if self.failure is not None:
            raise self.failure
        fresh = {"num_traces": 24, "candidate_length": 2.2, "incumbent_length": 2.0, "change": 0.1}
        gate = {"outcome": "promote", "fresh": {**fresh, "lower": 0.05, "upper": 0.15, "secret": "tenant-a"}}
        row = {
            "state": "live",
            "parent": 1,
            "created_ms": 5,
            "damage": "",
            "is_last_good": False,
            "is_published": True,
            "is_pinned": False,
        }
        return {
            "drafts": [
                {**row, "version": number, "gate": gate, "engines": ["secret-host-1"]} for number in range(1, 61)
            ],
            "published": 60,
            "pinned": None,
            "trainer_rests": True,
            "engines": [
                {"engine_id": f"secret-host-{role}", "version": 60, "role": role}
                for role in ("canary", "waiting", "settled")
            ],
            "no_redis": "redis://:secret@host:6379 does not answer",
        }

    def events(self, count: int) -> list[dict[str, Any]]:
        numbers = {"accept_change": -0.2}
        told = "cannot read /secret/drafts/3 or secret/3.safetensors: see redis://secret:6379/0 and secret.host:6379"
        refused = {"version": 3, "reason": told, "numbers": {}}
        typed = {"version": 2, "desired": 2, "reason": "tenant secret-name complains"}
        return [
            {"at_ms": 0, "kind": "scored", "actor": "trainer", "fields": {"version": 2}},
            {"at_ms": 1, "kind": "gate", "actor": "trainer", "fields": {"outcome": "hold", "change": 0.01}},
            {"at_ms": 2, "kind": "quarantined", "actor": "engine:secret-host-1", "fields": refused},
            {
                "at_ms": 3,
                "kind": "rolled_back",
                "actor": "engine:secret-host-1",
                "fields": {"version": 4, "reason": "accepts less than the incumbent", "numbers": numbers},
            },
            {"at_ms": 4, "kind": "pin", "actor": "operator:secret-name", "fields": typed},
        ]


@pytest.mark.parametrize(("num_engines", "has_canary"), [(1, False), (2, True)])
def test_a_canary_is_marked_where_there_are_other_engines(num_engines: int, has_canary: bool) -> None:
    engines = [
        {"engine_id": "a", "version": 60, "role": "canary"},
        {"engine_id": "b", "version": 59, "role": "waiting"},
    ]

    class Desk(DeskDouble):
        def overview(self) -> dict[str, Any]:
            return {**super().overview(), "engines": engines[:num_engines]}

    app = create_app(
        DoubleEngine(),
        settings=GatewaySettings(),
        registry=CollectorRegistry(),
        drafts=Desk(),  # type: ignore[arg-type]
    )
    newest = get(app, "/slipstream/drafts").json()["versions"][0]
    assert (newest["num_engines"], newest["has_canary"]) == (1, has_canary)


def test_versions_and_events_without_a_key_and_without_secrets() -> None:
    app = create_app(
        DoubleEngine(),
        settings=GatewaySettings(),
        registry=CollectorRegistry(),
        drafts=DeskDouble(),  # type: ignore[arg-type]
    )
    response = get(app, "/slipstream/drafts")
    assert "secret" not in response.text
    board = response.json()
    assert (board["available"], board["knows_engines"], board["num_versions"]) == (True, False, 60)
    assert board["trainer_rests"] is True
    assert [row["version"] for row in board["versions"]] == list(range(60, 10, -1))
    newest = board["versions"][0]
    assert (newest["num_engines"], newest["is_desired"], newest["gate"]["change"]) == (1, True, 0.1)
    assert [row["has_canary"] for row in board["versions"][:2]] == [True, False]
    pinned, rolled_back, quarantined, judged = board["events"]
    assert (pinned["kind"], pinned["by"], pinned["version"]) == ("pin", "operator", 2)
    assert (rolled_back["reason"], rolled_back["change"], rolled_back["upper"]) == (
        "accepts less than the incumbent",
        -0.2,
        None,
    )
    assert quarantined["reason"] == "cannot read … or …: see … and …"
    assert (judged["outcome"], judged["change"], judged["lower"]) == ("hold", 0.01, None)
    assert get(app, "/admin/drafts").status_code == 403, "acting, and the rest, need the key"


def test_many_readers_are_one_reader_of_the_store() -> None:
    desk, now_s = DeskDouble(), 0.0
    board = PublicDrafts(desk, clock=lambda: now_s)  # type: ignore[arg-type]

    async def read() -> None:
        nonlocal now_s
        for num_reads in (1, 2):
            now_s += 2.0
            await asyncio.gather(*(board.document() for _ in range(20)))
            await board.document()
            assert desk.num_reads == num_reads

    asyncio.run(read())


def test_a_store_that_cannot_be_read() -> None:
    desk = DeskDouble(failure=StoreError("cannot use /secret/drafts"))
    app = create_app(DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry(), drafts=desk)  # type: ignore[arg-type]
    response = get(app, "/slipstream/drafts")
    assert response.status_code == 503
    assert error_of(response)["code"] == "drafts_unavailable"
    assert "secret" not in response.text


def test_without_a_desk_it_says_so() -> None:
    assert get(gateway(DoubleEngine()), "/slipstream/drafts").json() == {
        "available": False,
        "versions": [],
        "events": [],
    }


def test_a_pinned_version_is_the_one_that_engines_should_run() -> None:
    class Desk(DeskDouble):
        def overview(self) -> dict[str, Any]:
            return {**super().overview(), "pinned": 42}

    board = asyncio.run(PublicDrafts(Desk()).document())  # type: ignore[arg-type]
    assert [row["version"] for row in board["versions"] if row["is_desired"]] == [42]


def test_steps_before_the_gate_push_no_event_off_the_page() -> None:
    class Desk(DeskDouble):
        def events(self, count: int) -> list[dict[str, Any]]:
            steps = [{"at_ms": 9, "kind": "scored", "actor": "trainer", "fields": {}} for _ in range(100)]
            return [*super().events(count), *steps][-count:]

    board = asyncio.run(PublicDrafts(Desk()).document())  # type: ignore[arg-type]
    assert [event["kind"] for event in board["events"]] == ["pin", "rolled_back", "quarantined", "gate"]


def test_a_reader_that_leaves_takes_nothing_from_those_who_wait_with_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Desk(DeskDouble):
        def overview(self) -> dict[str, Any]:
            begun.set()
            may_end.wait(10)
            return super().overview()

    async def read() -> dict[str, Any]:
        board = PublicDrafts(Desk())  # type: ignore[arg-type]
        leaving, staying = asyncio.create_task(board.document()), asyncio.create_task(board.document())
        await asyncio.to_thread(begun.wait, 10)
        leaving.cancel()
        await asyncio.wait((leaving,))
        may_end.set()
        return await staying

    assert asyncio.run(read())["available"]
