"""Training with splits written by hand on tensor-parallel ranks, in float64, is that of one process."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from motet.parallel.process.process_group import RankGroup
from motet.train.job import Job
from parallel.split_decoders import (
    GPT2_LIKE,
    SplitRun,
    decoder_sharding,
    huggingface_gpt2_sharding,
    llama_sharding,
    train_split,
    worst_difference,
)
from ranks import Ranks
from train.runs import small_job

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
DROPOUT = "model.dropout=0.1"
BATCH = ("data.batch_sequences=4", "data.sequence_length=16")


@lru_cache
def alone(folder: Path, model: str, *overrides: str) -> SplitRun:
    return train_split(ALONE, small_job(folder, *BATCH, *overrides, model=model), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


CASES = {
    "decoder with dropout": ("decoder", [DROPOUT], decoder_sharding()),
    "GPT-2-like with dropout": ("decoder", [*GPT2_LIKE, DROPOUT], decoder_sharding(4, 1)),
    "transformers' GPT-2": ("gpt2", [], huggingface_gpt2_sharding()),
    "transformers' Llama": ("llama", [], llama_sharding()),
}


def worst(ranks: Ranks, folder: Path, case: str, *layout: str) -> float:
    model, overrides, sharding = CASES[case]
    job: Job = small_job(folder, *BATCH, *overrides, *(f"layout.{each}" for each in layout), model=model)
    runs = ranks.run(job.layout.dims.ranks, train_split, job, sharding)
    return worst_difference(runs, alone(folder, model, *overrides), rates=0.03)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_one(ranks: Ranks, folder: Path, case: str) -> None:
    assert worst(ranks, folder, case, "tp=2") < 1e-12


@pytest.mark.parametrize("zero", [0, 2])
def test_four_ranks_train_as_one(ranks: Ranks, folder: Path, zero: int) -> None:
    assert worst(ranks, folder, "GPT-2-like with dropout", "tp=2", "dp=2", f"zero={zero}") < 1e-12
