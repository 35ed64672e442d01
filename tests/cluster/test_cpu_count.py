"""Cores by affinity and by the quotas of control groups, in both versions."""

import os
from pathlib import Path

import pytest

from motet.cluster.cpu_count import usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    (tmp_path / "own").write_text("0::/pod/box\n")
    (tmp_path / "groups").mkdir()
    return tmp_path


def cores(machine: Path) -> int:
    return usable_cores(machine / "groups", machine / "own")


def write(machine: Path, path: str, text: str) -> None:
    file = machine / "groups" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_here_there_is_at_least_one() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_affinity_alone_and_a_container_that_sees_only_its_root(machine: Path) -> None:
    assert cores(machine) == 16
    assert usable_cores(machine / "groups", machine / "no such file") == 16
    (machine / "own").write_text("0::/../../other/path\n")
    write(machine, "cpu.max", "400000 100000")
    assert cores(machine) == 4


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16), ("", 16)],
)
def test_a_quota_rounds_down_to_at_least_one(machine: Path, quota: str, expected: int) -> None:
    write(machine, "pod/box/cpu.max", quota)
    assert cores(machine) == expected


def test_the_smallest_quota_on_the_way_up_counts(machine: Path) -> None:
    write(machine, "pod/box/cpu.max", "800000 100000")
    write(machine, "pod/cpu.max", "300000 100000")
    write(machine, "cpu.max", "max 100000")
    assert cores(machine) == 3


def test_version_one(machine: Path) -> None:
    (machine / "own").write_text("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    write(machine, "cpu,cpuacct/a/cpu.cfs_quota_us", "500000\n")
    write(machine, "cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
    write(machine, "memory/a/cpu.max", "100000 100000")  # of another controller
    assert cores(machine) == 5
    write(machine, "cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n")
    assert cores(machine) == 16
