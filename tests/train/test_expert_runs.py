"""Runs of mixtures: loads in checkpoints, events and on resuming; none of them in an export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from motet.checkpoint.reader import open_checkpoint
from motet.export.hf_folder import ExportSettings, export_to_hf
from motet.monitor.events import ExpertsMeasured, read_events, read_steps
from motet.parallel.process.launch_environment import RankEnvironment
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import run_rank
from motet.train.state import newest_checkpoint
from ranks import Ranks
from train.mixture_runs import job_of_family
from train.runs import StopAt, same_bits, saved_tensors

BALANCE = "kind='bias', weight=0.1, speed=0.02"


def run(place: RankEnvironment, job: Job, folder: Path, stop: int | None = None) -> int:
    return run_rank(job, place, folder, StopFlag() if stop is None else StopAt(stop)).completed_steps


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_resumed_run_has_the_same_loads_and_an_export_has_none(ranks: Ranks, tmp_path: Path, world: int) -> None:
    job = job_of_family(tmp_path, "deepseek_v3", BALANCE, "run.steps=5", "monitor.every=2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ranks.run_places(world, run, job, whole, timeout_s=120)
    ranks.run_places(world, run, job, cut, 2, timeout_s=120)
    assert ranks.run_places(world, run, job, cut, timeout_s=120) == [5] * world
    saved = saved_tensors(whole)
    assert same_bits(saved, saved_tensors(cut))
    check_events(whole, saved)
    checkpoint = newest_checkpoint(whole / "checkpoints")
    assert checkpoint is not None
    export_to_hf(job, open_checkpoint(checkpoint), tmp_path / "hf", settings=ExportSettings(), log=lambda _: None)
    exported = {name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    assert any(name.endswith("e_score_correction_bias") for name in exported)
    assert not any(name.endswith(".load") for name in exported)


def check_events(folder: Path, saved: dict[str, torch.Tensor]) -> None:
    events, steps = read_events(folder / "events.jsonl"), read_steps(folder / "events.jsonl")
    measured = [event for event in events if isinstance(event, ExpertsMeasured)]
    assert [event.step for event in measured] == [step.step for step in steps] == [1, 2, 4, 5]
    assert all(step.balance_loss and 0 < step.balance_loss < step.loss for step in steps)
    for layer in measured[-1].layers:
        assert saved[f"buffer/{layer.name}.gate.load"].tolist() == list(layer.loads)
        assert layer.max_over_mean == max(layer.loads) * len(layer.loads) / sum(layer.loads)
        assert 0 < layer.entropy <= torch.tensor(float(len(layer.loads))).log() and not layer.dropped
