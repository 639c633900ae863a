"""Cores and memory that control groups leave to this process, whichever version and layout the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculator import host

GIB = 1 << 30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 512 * GIB // 4096}.__getitem__)
    return tmp_path


def write(cgroups: Path, own: str, files: dict[str, str]) -> None:
    (cgroups / "own").write_text(own)
    for name, content in files.items():
        path = cgroups / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


CASES = [
    pytest.param("0::/\n", {"cpu.max": "200000 100000", "memory.max": str(8 * GIB)}, 2, 8, id="container"),
    pytest.param(
        "0::/system.slice/slipstream.service\n",
        {"system.slice/slipstream.service/cpu.max": "400000 100000", "system.slice/memory.max": str(16 * GIB)},
        4,
        16,
        id="systemd service in a slice",
    ),
    pytest.param(
        "11:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": str(4 * GIB),
        },
        1,
        4,
        id="version 1, container with the host's path",
    ),
    pytest.param(
        "11:memory:/batch\n4:cpu:/batch\n",
        {
            "cpu/batch/cpu.cfs_quota_us": "-1",
            "cpu/batch/cpu.cfs_period_us": "100000",
            "memory/batch/memory.limit_in_bytes": str(2**63 - 4096),
        },
        64,
        512,
        id="version 1 without limits",
    ),
    pytest.param("0::/a\n", {"a/cpu.max": "max 100000", "a/memory.max": "max"}, 64, 512, id="version 2 without limits"),
    pytest.param("0::/a\n", {"a/cpu.max": "10000 100000"}, 1, 512, id="a tenth of a core"),
    pytest.param("0::/gone\n", {}, 64, 512, id="nothing to read"),
]


@pytest.mark.parametrize(("own", "files", "cores", "gib"), CASES)
def test_limits_of_control_groups_count(cgroups: Path, own: str, files: dict[str, str], cores: int, gib: int) -> None:
    write(cgroups, own, files)
    assert (host.num_cores(), host.memory_bytes()) == (cores, gib * GIB)


def test_a_machine_without_control_groups_has_no_limits(cgroups: Path) -> None:
    assert (host.num_cores(), host.memory_bytes()) == (64, 512 * GIB)
