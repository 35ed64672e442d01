"""A run warns once of a disk that is far slower than the figure of its cluster file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.core.direct_io import IoTraffic
from motet.monitor.events import EVENTS_FILE, StepDone, WarningIssued, read_events
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.forecast import disk_speed
from motet.train.forecast.disk_speed import DiskSpeed
from motet.train.job import Job
from ranks import Ranks
from train.runs import run_job, small_job

CLUSTER = """
device = "CPU"
devices_per_host = 8
inside = { kind = "bus", alpha_s = 50e-6, bandwidth_Bps = 1.5e9, bus_Bps = 4e9 }
host = { memory_bytes = 64e9, link_Bps = 4e9, update_Bps = 3e9, cores = 8, scratch_Bps = 1e18 }
"""


def traffic(read_mib: int, busy_s: float) -> IoTraffic:
    return IoTraffic(read_mib << 20, read_mib << 20, busy_s)


@pytest.mark.parametrize(
    ("planned_mib", "warns"), [(1500.0, True), (650.0, True), (550.0, False), (10.0, False), (None, False)]
)
def test_a_disk_that_is_three_times_slower_is_warned_of_once(planned_mib: float | None, warns: bool) -> None:
    """Reads and writes of 200 MiB in a second; the transfers of the first two steps do not count."""
    steps: Iterator[IoTraffic] = iter([traffic(5000, 1), *(traffic(5000 + 100 * n, 1 + n) for n in range(1, 9))])
    figure = None if planned_mib is None else (planned_mib * 2**20, "scratch_Bps = 1 of x for 2 ranks")
    speed = DiskSpeed("/scratch", lambda: next(steps), lambda: figure)
    texts = [speed.warning_after_step() for _ in range(9)]
    assert [step for step, text in enumerate(texts, 1) if text] == ([5] if warns else [])
    if warns:
        assert texts[4] is not None
        assert "memory.folder = '/scratch'" in texts[4] and "200 MiB in a second" in texts[4]
        assert "scratch_Bps = 1 of x for 2 ranks" in texts[4] and "memory.optimizer to host" in texts[4]


def test_few_bytes_have_no_speed() -> None:
    steps = iter([traffic(0, 1), *(traffic(n, n) for n in range(1, 200))])
    speed = DiskSpeed("/scratch", lambda: next(steps), lambda: (1e18, "the plan"))
    texts = [speed.warning_after_step() for _ in range(150)]
    assert [step for step, text in enumerate(texts, 1) if text] == [130]  # 128 MiB of reads and of writes behind step 2


def run_with_few_bytes(place: RankEnvironment, job: Job, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_speed, "_BYTES", 1)
        return run_job(place, job, folder)


@pytest.mark.parametrize(("has_cluster", "place"), [(True, "disk"), (True, "host"), (False, "disk")])
def test_a_run_warns_where_a_figure_is_planned(ranks: Ranks, tmp_path: Path, has_cluster: bool, place: str) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    settings = [f"communication.cluster={tmp_path}/cluster.toml"] if has_cluster else []
    settings += [f"memory.folder={tmp_path}"] if place == "disk" else []
    job = small_job(tmp_path, "run.steps=7", f"memory.optimizer={place}", *settings)
    ranks.run_places(1, run_with_few_bytes, job, tmp_path / "run")
    events = read_events(tmp_path / "run" / EVENTS_FILE)
    steps = [
        sum(isinstance(each, StepDone) for each in events[:index])
        for index, event in enumerate(events)
        if isinstance(event, WarningIssued) and "slower than the plan" in event.text
    ]
    assert steps == ([5] if has_cluster and place == "disk" else [])
