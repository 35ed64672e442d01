"""The share of peak of a run: never above 100 %, and not of a host whose cores several launches share."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.cluster.local_device import LocalDevice
from motet.monitor.events import EVENTS_FILE, WarningIssued, read_events, read_steps
from motet.monitor.summary import read_summary
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train import run_report
from motet.train.job import Job
from ranks import Ranks
from train.runs import run_job, small_job


def run_on_peak(place: RankEnvironment, job: Job, folder: Path, peak: float, launches: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        device = LocalDevice("a CPU", {"float64": HardwareNumberWithOrigin(peak, "measured")})
        patch.setattr(run_report, "discover_device", lambda *_: device)
        if launches > 1:
            place = replace(place, local_rank=0, local_world=1)
        return run_job(place, job, folder)


@pytest.mark.parametrize(
    ("peak", "launches", "reason"),
    [
        (1e15, 1, None),
        (1.0, 1, "it would be .*% of what products reached before the first step"),
        (1e15, 2, "2 ranks of several launches share this host and its cores; .*--nproc-per-node 2"),
    ],
    ids=["right", "measured while busy", "two launches"],
)
def test_a_share_that_cannot_be_right_is_left_out(
    ranks: Ranks, tmp_path: Path, peak: float, launches: int, reason: str | None
) -> None:
    ranks.run_places(2, run_on_peak, small_job(tmp_path, "run.steps=3"), tmp_path / "run", peak, launches)
    shares = [step.mfu for step in read_steps(tmp_path / "run" / EVENTS_FILE)]
    warnings = [e.text for e in read_events(tmp_path / "run" / EVENTS_FILE) if isinstance(e, WarningIssued)]
    about_peak = [text for text in warnings if "share of peak is left out" in text]
    if reason is None:
        assert all(share is not None and 0 < share < 1 for share in shares) and not about_peak
    else:
        assert shares == [None] * 3 and read_summary(tmp_path / "run").mfu is None
        assert len(about_peak) == 1 and re.search(reason, about_peak[0])


@pytest.mark.parametrize(("settings", "expected"), [("run.epochs=1", True), ("run.steps=1", False)])
def test_a_run_of_one_step_that_nobody_asked_for_warns_at_its_start(
    ranks: Ranks, tmp_path: Path, settings: str, expected: bool
) -> None:
    job = small_job(tmp_path, settings, "data.batch_sequences=2000", "data.sequence_length=4")
    ranks.run_places(1, run_job, job, tmp_path / "run")
    events = read_events(tmp_path / "run" / EVENTS_FILE)
    at_start = list(events[: [type(e).__name__ for e in events].index("StepDone")])
    warnings = [event.text for event in at_start if isinstance(event, WarningIssued)]
    assert any("the run has 1 step, since an epoch has" in text for text in warnings) == expected
