"""Runs with a parameter server: its processes are ranks of the pool."""

from pathlib import Path
from typing import Any

import pytest
import torch

from motet.checkpoint.settings import CheckpointSettings
from motet.core.errors import InputError, PeerFailedError
from motet.monitor.events import CheckpointSaved, EvaluationDone, StepDone, read_events, read_steps
from motet.monitor.sinks import Callback
from motet.parallel.parameter_server import server_settings
from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy
from motet.parallel.parameter_server.server_settings import ParameterServerSettings
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.parameter_server.process_roles import build_handshake, build_partition
from motet.train.parameter_server.role_main import ServerUpdateStepTracker, run_parameter_server_rank
from ranks import Ranks
from train.runs import run_job, saved_tensors, small_job

SERVED = "layout.data=parameter_server"


def serve(place: RankEnvironment, job: Job, folder: Path) -> int:
    return run_parameter_server_rank(job, place, folder, StopFlag()).completed_steps


def losses(folder: Path) -> list[float]:
    events = [e for e in read_events(folder / "events.jsonl") if isinstance(e, StepDone | EvaluationDone)]
    return [x for e in events for x in ([e.loss, e.grad_norm or 0.0] if isinstance(e, StepDone) else [e.loss])]


def close(found: list[float], wanted: list[float]) -> bool:
    return all(abs(f - w) <= 1e-12 * max(1.0, abs(w)) for f, w in zip(found, wanted, strict=True))


COLOCATED = ["layout.server.placement=colocated", "layout.server.count=2"]
SYNCHRONOUS = {
    "decoder": (2, "decoder", ["layout.microbatches=3"]),
    "bert": (1, "bert", []),
    "servers on workers": (3, "classify", COLOCATED),
    "recomputed dropout": (2, "recomputed", []),
}
QUICK = (SYNCHRONOUS["servers on workers"],)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.proof) for case in SYNCHRONOUS.values()],
    ids=SYNCHRONOUS,
)
def test_synchronous_training_is_that_of_one_rank(ranks: Ranks, tmp_path: Path, case: Any) -> None:
    workers, model, more = case
    judged = ["monitor.evaluate_every=7", "monitor.evaluate_batches=2", "checkpoint.every=5"]
    steps = 8 if model == "classify" else 20
    ranks.run_places(1, run_job, small_job(tmp_path, *judged, model=model), tmp_path / "alone")
    apart = small_job(tmp_path, SERVED, "layout.server.slice_mib=0.02", *judged, *more, model=model)
    world = workers + server_settings.extra_process_count(apart.layout.server)
    assert ranks.run_places(world, serve, apart, tmp_path / "served")[0] == steps
    assert close(losses(tmp_path / "served"), losses(tmp_path / "alone"))
    found, wanted = saved_tensors(tmp_path / "served"), saved_tensors(tmp_path / "alone")
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-12) for name in wanted)


def test_checkpoints_are_those_of_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    whole, first = small_job(tmp_path), small_job(tmp_path, "run.stop_at=9")
    ranks.run_places(1, run_job, whole, tmp_path / "whole")
    ranks.run_places(3, serve, small_job(tmp_path, SERVED, "run.stop_at=9"), tmp_path / "before")
    ranks.run_places(1, run_job, whole, tmp_path / "before")
    ranks.run_places(1, run_job, first, tmp_path / "after")
    ranks.run_places(3, serve, small_job(tmp_path, SERVED), tmp_path / "after")
    for run in "before", "after":
        assert close(losses(tmp_path / run), losses(tmp_path / "whole"))


@pytest.mark.parametrize(
    "mode",
    [
        ["mode=bounded", "staleness=2", "compress_pushes=int4", "learning_rate_scaling=by-staleness"],
        ["mode=first-k", "first_k=1", "compress_pulls=int8", "copies=2", "count=2", "slice_mib=0.05"],
        ["mode=async", "compress_pushes='topk:keep=0.1'", "delay_compensation=0.04", "work_items_per_step=3"],
    ],
    ids=lambda mode: mode[0],
)
def test_every_mode_learns(ranks: Ranks, tmp_path: Path, mode: list[str]) -> None:
    job = small_job(tmp_path, SERVED, *(f"layout.server.{setting}" for setting in mode))
    assert ranks.run_places(4, serve, job, tmp_path / "run")[0] == 20
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5
    work = [step.server for step in read_steps(tmp_path / "run" / "events.jsonl")]
    latest = {"mode=bounded": 2, "mode=first-k": 0}.get(mode[0], 60)
    assert all(step and len(step.steps_behind_histogram) - 1 <= latest for step in work)
    # Without what its coordinator sends, which has no gradients
    assert sum(step.received_bytes for step in work if step) > 10_000 < sum(step.sent_bytes for step in work if step)


def test_how_far_behind_a_version_is() -> None:
    """Two work items a step; the first of step 1 is there before the last of step 0."""
    whole = ServerUpdateStepTracker(ConsistencyPolicy(2, 9, 1, 1, has_per_item_updates=True), first_step=0)
    for number, work_item in enumerate([0, 2, 1, 3, 5, 4]):
        whole.add_update(number, [work_item])
    assert [whole.completed_steps(updates) for updates in range(7)] == [0, 0, 0, 1, 2, 2, 3]
    first = ServerUpdateStepTracker(ConsistencyPolicy(3, 9, 2, 0), first_step=4)
    first.add_update(4, [12, 14])
    assert [first.completed_steps(updates) for updates in (4, 5)] == [4, 5]


def test_what_modes_ask_for() -> None:
    for settings, policy in (
        ({}, (3, 7, 3, 0, False)),
        ({"mode": "bounded", "staleness": 2}, (3, 7, 1, 2, True)),
        ({"mode": "bounded", "staleness": 0}, (3, 7, 3, 0, False)),
        ({"mode": "first-k", "first_k": 2}, (3, 7, 2, 0, False)),
        ({"mode": "async"}, (3, 7, 1, None, True)),
    ):
        assert server_settings.consistency_policy(ParameterServerSettings(**settings), 3, 7) == policy


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "first-k"}, "layout.server.mode = 'first-k' needs a number of work items"),
        ({"mode": "bounded"}, "layout.server.mode = 'bounded' needs a bound"),
        ({"mode": "first-k", "first_k": 3}, "layout.server.first_k = 3 of 2 work items; set it to 2 at most"),
        ({"copies": 2}, "layout.server.copies = 2, but there is 1 server"),
        ({"compress_pushes": "zip"}, "layout.server.compress_pushes = 'zip': .* there is no codec 'zip'"),
        ({"compress_pushes": "powersgd"}, "needs unsharded matrices, and servers have slices"),
        ({"compress_pushes": "randomk"}, "error feedback would make its errors grow"),
        ({"compress_pulls": "topk"}, "layout.server.compress_pulls = 'topk' would leave most of a param"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        server_settings.check_server_settings(ParameterServerSettings(**settings), 2)


class StopsAfter(Callback):
    def __init__(self, step: int) -> None:
        self.stop, self.step = StopFlag(), step

    def on_step(self, event: StepDone) -> None:
        if event.step == self.step:
            self.stop.request()


def serve_until(place: RankEnvironment, job: Job, folder: Path, step: int) -> int:
    callback = StopsAfter(step)
    return run_parameter_server_rank(job, place, folder, callback.stop, [callback]).completed_steps


@pytest.mark.parametrize(
    "mode",
    [["mode=sync"], pytest.param(["mode=bounded", "staleness=3"], marks=pytest.mark.proof)],
    ids=lambda mode: mode[0],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(ranks: Ranks, tmp_path: Path, mode: list[str]) -> None:
    job = small_job(tmp_path, SERVED, *(f"layout.server.{setting}" for setting in mode))
    assert 7 <= ranks.run_places(4, serve_until, job, tmp_path / "run", 6)[0] <= 11
    assert ranks.run_places(4, serve, job, tmp_path / "run")[0] == 20
    if mode == ["mode=sync"]:
        ranks.run_places(1, run_job, small_job(tmp_path), tmp_path / "alone")
        assert close(losses(tmp_path / "run"), losses(tmp_path / "alone"))


def test_the_clock_of_the_coordinator_saves(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, SERVED, "run.steps=4")
    job = job.model_copy(update={"checkpoint": CheckpointSettings(every_minutes=1e-9)})
    assert ranks.run_places(4, serve, job, tmp_path / "run")[0] == 4
    saved = [e.step for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, CheckpointSaved)]
    assert saved[-1] == 4 and len(saved) > 1


def with_other_data(place: RankEnvironment, job: Job, folder: Path) -> str:
    data = job.data.model_copy(update={"restart_documents": place.rank != 2})
    try:
        run_parameter_server_rank(job.model_copy(update={"data": data}), place, folder, StopFlag())
    except (InputError, PeerFailedError) as error:
        return str(error)
    return "nothing"


def test_a_worker_of_another_bound_does_not_belong(tmp_path: Path) -> None:
    """The bound decides whether updates are made of single work items or of steps."""
    apart = [small_job(tmp_path, SERVED, "layout.server.mode=bounded", f"layout.server.staleness={s}") for s in (0, 2)]
    module = torch.nn.Linear(2, 2)
    one, other = (build_handshake(job, module, build_partition(module, job)) for job in apart)
    assert one["model"] == other["model"] and one["layout"] != other["layout"]


def test_other_data_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run_places(3, with_other_data, small_job(tmp_path, SERVED, "run.timeout_s=3"), tmp_path / "run")
    assert said[2].startswith("the data of w0 is not that of the coordinator")
    assert "has heard nothing for 3 s" in said[0] and "has been without the coordinator for 3 s" in said[1]
