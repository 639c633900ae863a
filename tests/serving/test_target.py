"""Who may move the target where to, and what is counted and told."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from serving.engine import TargetReport
from serving.metrics import TargetMetrics
from serving.target import TargetUpdater
from speculator.errors import EngineBusyError, RequestError, SlipstreamError, TargetError


@dataclass
class Host:
    """Moves when told, or fails."""

    target_version: int = 0
    failure: Exception | None = None
    moves: list[tuple[int, Path | None]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def update_target(self, version: int, folder: Path | None) -> TargetReport:
        self.reached.set()
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        self.moves.append((version, folder))
        previous, self.target_version = self.target_version, version
        return TargetReport(version=version, previous=previous, stall_ms=40.0)


@dataclass
class Scene:
    host: Host
    desk: TargetUpdater
    registry: CollectorRegistry

    def changes(self) -> tuple[float | None, float | None]:
        name = "slipstream_target_moves_total"
        return (
            self.registry.get_sample_value(name, {"outcome": "installed"}),
            self.registry.get_sample_value(name, {"outcome": "refused"}),
        )


def scene(folder: Path | None = None) -> Scene:
    host, registry = Host(), CollectorRegistry()
    host.gate.set()
    desk = TargetUpdater(host, TargetMetrics(registry), folder=folder)
    return Scene(host, desk, registry)


def test_a_version_comes_into_service(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    here = scene(tmp_path)
    assert here.desk.announce(7, "step-7").previous == 0
    assert here.desk.announce(9, str(tmp_path / "step-7")).previous == 7
    assert here.host.moves == [(7, tmp_path / "step-7"), (9, tmp_path / "step-7")]
    assert here.changes() == (2, 0)
    assert here.registry.get_sample_value("slipstream_target_version") == 9
    assert here.registry.get_sample_value("slipstream_target_stall_seconds_sum") == pytest.approx(0.08)


@pytest.mark.parametrize("version", [1, 4])
def test_versions_only_count_up(version: int) -> None:
    here = scene()
    here.desk.announce(5, None)
    with pytest.raises(TargetError, match="not newer than 5"):
        here.desk.announce(version, None)
    assert (here.host.target_version, here.changes()) == (5, (1, 1))


def test_the_version_in_service_may_be_said_twice_without_weights(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    here = scene(tmp_path)
    here.desk.announce(5, None)
    assert here.desk.announce(5, None) == TargetReport(version=5, previous=5, stall_ms=0.0)
    assert here.changes() == (1, 0), "it has not moved again"
    with pytest.raises(TargetError, match="not newer than 5"):
        here.desk.announce(5, "step")
    assert here.host.moves == [(5, None)]


@pytest.mark.parametrize(
    "path", ["..", "../other", "/etc", "file", "missing", "link", "a\0b", "x" * 5000, "step/../.."]
)
def test_only_folders_below_the_allowed_one_are_read(tmp_path: Path, path: str) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "step").mkdir(parents=True)
    other.mkdir()
    (allowed / "file").write_text("")
    (allowed / "link").symlink_to(other)
    here = scene(allowed)
    with pytest.raises(RequestError, match="folder below") as refusal:
        here.desk.announce(1, path)
    assert (refusal.value.param, here.host.moves, here.changes()) == ("path", [], (0, 1))


def test_no_path_is_taken_where_none_is_allowed(tmp_path: Path) -> None:
    here = scene()
    with pytest.raises(RequestError, match="SLIPSTREAM_GATEWAY_TARGETS_DIR"):
        here.desk.announce(1, str(tmp_path))
    assert here.host.moves == []


def test_what_the_engine_refuses_is_counted_and_told_to_nobody() -> None:
    here = scene()
    here.host.failure = TargetError("not finite")
    with pytest.raises(SlipstreamError):
        here.desk.announce(1, None)
    assert here.changes() == (0, 1)


def test_one_change_at_a_time() -> None:
    here = scene()
    here.host.gate.clear()
    first = threading.Thread(target=here.desk.announce, args=(1, None))
    first.start()
    assert here.host.reached.wait(20)
    with pytest.raises(EngineBusyError):
        here.desk.announce(2, None)
    here.host.gate.set()
    first.join()
    assert here.desk.announce(2, None).previous == 1
