"""Ranks of one device: what they send goes through copies on the CPU. Here their device is the CPU itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import pick_device, start_process_group
from motet.train.job import Job
from motet.train.launch.preflight import check_job
from ranks import Ranks
from refusals import refused
from train.runs import same_bits, small_job
from train.tensor_parallel_runs import train_and_reassemble


def results_before_and_after_waiting(place: RankEnvironment) -> dict[str, tuple[list[float], list[float]]]:
    """The tensor of each asynchronous call, before and after it is waited for."""
    with start_process_group(place, "cpu", 30.0, share_device=True):
        local, pair = torch.tensor([place.rank + 1.0]), torch.tensor([place.rank + 1.0, place.rank + 3.0])
        outputs = {name: torch.zeros(2 if name == "all-gather" else 1) for name in ("all-gather", "scatter", "receive")}
        outputs |= {"all-reduce": local.clone(), "all-to-all": torch.zeros(2)}
        works: dict[str, Any] = {
            "all-reduce": dist.all_reduce(outputs["all-reduce"], async_op=True),
            "all-gather": dist.all_gather([*outputs["all-gather"].split(1)], local, async_op=True),
            "scatter": dist.reduce_scatter(outputs["scatter"], [*pair.split(1)], async_op=True),
            "all-to-all": dist.all_to_all_single(outputs["all-to-all"], pair, async_op=True),
            "receive": dist.irecv(outputs["receive"], 1 - place.rank),
        }
        sent = dist.isend(local, 1 - place.rank)
        local.fill_(-1)  # What was sent is a copy
        dist.barrier()
        before = {name: tensor.tolist() for name, tensor in outputs.items()}
        for work in (*works.values(), sent):
            work.wait()
        return {name: (before[name], tensor.tolist()) for name, tensor in outputs.items()}


def test_every_call_works_on_copies(ranks: Ranks) -> None:
    first, second = ranks.run_places(2, results_before_and_after_waiting)
    assert first == {
        "all-reduce": ([1.0], [3.0]),
        "all-gather": ([0.0, 0.0], [1.0, 2.0]),
        "scatter": ([0.0], [3.0]),
        "all-to-all": ([0.0, 0.0], [1.0, 2.0]),
        "receive": ([0.0], [2.0]),
    }
    assert second["scatter"][1] == [7.0] and second["all-to-all"][1] == [3.0, 4.0] and second["receive"][1] == [1.0]


def train_on_a_shared_device(place: RankEnvironment, job: Job) -> Any:
    with start_process_group(place, "cpu", 60.0, share_device=True) as group:
        return train_and_reassemble(group, job, 2)


@pytest.mark.parametrize(
    "layout",
    [
        *(["layout.zero=0"], ["layout.zero=3", "layout.microbatches=2"], ["layout.tp=2", "layout.sp=true"]),
        ["layout.pp=2", "layout.microbatches=2"],
    ],
    ids=["zero 0", "zero 3", "tp and sp", "pp"],
)
def test_layouts_have_the_bits_of_the_cpu_backend(ranks: Ranks, tmp_path: Path, layout: list[str]) -> None:
    job = small_job(tmp_path, *layout, "precision.recipe=fp32", "data.batch_sequences=8")
    expected = ranks.run(2, train_and_reassemble, job, 2)[0]
    shared = ranks.run_places(2, train_on_a_shared_device, job)[0]
    assert shared.losses == expected.losses and same_bits(shared.masters, expected.masters)


def test_a_device_is_shared_in_checks_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    third = RankEnvironment(2, 4, 2, 4, 0, "tcp://x:1")
    assert pick_device("cuda", third, share_device=True) == torch.device("cuda", 0)
    refused("for the checks of scripts/gpu.py alone", check_job, small_job(tmp_path, "run.share_device=true"), 1)
