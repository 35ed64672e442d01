"""Training with compiled blocks computes the numbers of blocks that run as written, with each technique."""

from functools import cache
from pathlib import Path

import pytest
import torch

from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from ranks import Ranks
from train.compiled_runs import CompiledRun, train_compiled
from train.runs import Trained, worst_difference
from train.tensor_parallel_runs import job_of_model, train_and_reassemble

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
STEPS = 3
TOLERANCE = 1e-12
ADAPTERS = "model.adapters={rank=4, targets=['*qkv', '*output', '*up']}"
# Name -> model, ranks, settings, and the graphs of a rank.
CASES: dict[str, tuple[str, int, list[str], int]] = {
    "stage 0": ("decoder", 2, ["layout.zero=0"], 1),
    "stage 1": ("decoder", 2, ["layout.zero=1"], 1),
    "stage 2": ("gpt2-like", 2, ["layout.zero=2", "layout.microbatches=2"], 1),
    "stage 3": ("grouped decoder", 2, ["layout.zero=3"], 1),
    "tp": ("gpt2-like", 2, ["layout.tp=2"], 1),
    "tp with sp": ("gpt2-like", 2, ["layout.tp=2", "layout.sp=true"], 1),
    "tp of other sizes": ("grouped decoder", 3, ["layout.tp=3"], 1),
    "pp": ("decoder", 2, ["layout.pp=2", "layout.microbatches=4", "model.layers=4"], 1),
    "split backward": (
        "decoder",
        2,
        ["layout.pp=2", "layout.microbatches=4", "layout.schedule=zb-v", "layout.chunks=2", "model.layers=4"],
        1,
    ),
    "recomputation": ("decoder", 1, ["memory.recompute=full"], 1),
    "adapters": ("decoder", 2, [ADAPTERS, "layout.tp=2", "layout.sp=true"], 2),
    "all": (
        "grouped decoder",
        8,
        [
            "layout.tp=2",
            "layout.sp=true",
            "layout.pp=2",
            "layout.zero=3",
            "layout.microbatches=2",
            "memory.recompute=full",
        ],
        1,
    ),
    "encoder": ("bert", 2, ["layout.tp=2"], 1),
    "encoder and decoder": ("t5", 2, ["layout.tp=2", "layout.sp=true"], 2),
    "gathered again": ("decoder", 2, ["layout.zero=2", "communication.compress_gradients=int8"], 1),
    "numerics monitor": ("decoder", 2, ["layout.tp=2", "monitor.numerics_every=2"], 1),
    "replica checks": ("decoder", 2, ["layout.zero=0", "monitor.replica_check_every=2"], 1),
    "host": ("decoder", 2, ["layout.zero=3", "memory.parameters=host", "memory.optimizer=host"], 1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def job_of_case(folder: Path, name: str, *more: str) -> Job:
    model, _, settings, _ = CASES[name]
    return job_of_model(folder, model, *settings, *more)


@cache
def as_written(ranks: Ranks, folder: Path, name: str) -> Trained:
    trained: Trained = ranks.run(CASES[name][1], train_and_reassemble, job_of_case(folder, name), STEPS)[0]
    return trained


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_compute_the_same(ranks: Ranks, folder: Path, name: str) -> None:
    job, count = job_of_case(folder, name, "run.compile=blocks"), CASES[name][1]
    runs: list[CompiledRun] = ranks.run(count, train_compiled, job, STEPS, timeout_s=300)
    assert [run.reason for run in runs] == [None] * count
    assert [run.graphs for run in runs] == [CASES[name][3]] * count
    assert runs[0].trained is not None
    assert worst_difference(runs[0].trained, as_written(ranks, folder, name)) < TOLERANCE
