"""Training over tensor-parallel ranks computes the numbers of one device, for every pair of what a job may combine."""

from functools import cache
from pathlib import Path

import pytest
import torch

from covering_array import Case, covering_array, uncovered_pairs
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from train.runs import Trained, worst_difference
from train.tensor_parallel_runs import MODELS, STEPS, job_of_model, train_and_reassemble

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
MAX_RANKS = 8
TOLERANCE = 1e-12
# Ranks of data parallelism -> what they shard.
FACTORS = {
    "model": MODELS,
    "tp": (2, 3, 4),
    "sp": ("false", "true"),
    "data": (
        "dp=1",
        "dp=2 zero=0",
        "dp=2 zero=1",
        "dp=2 zero=2",
        "dp=2 zero=3",
        "dp=4 zero=1 shard_group=2",
        "dp=4 zero=3 shard_group=2",
        "dp=4 zero=3 secondary_group=2",
        "dp=2 zero=2 overlap=forward",
    ),
    "microbatches": (1, 2),
    "dropout": (0.0, 0.1),
}


def ranks_of(case: Case) -> int:
    return int(case["tp"]) * int(case["data"].removeprefix("dp=")[0])


def is_possible(case: Case) -> bool:
    return ranks_of(case) <= MAX_RANKS


CASES = covering_array(FACTORS, is_possible)
# A handful for `make test`, in which every stage stands, both kinds of stream, and every degree.
QUICK: list[Case] = [
    {"model": "gpt2-like", "tp": 2, "sp": "true", "data": "dp=2 zero=3", "microbatches": 2, "dropout": 0.1},
    {"model": "grouped decoder", "tp": 3, "sp": "false", "data": "dp=1", "microbatches": 1, "dropout": 0.0},
    {"model": "bert", "tp": 4, "sp": "true", "data": "dp=1", "microbatches": 1, "dropout": 0.1},
    {"model": "t5", "tp": 2, "sp": "false", "data": "dp=2 zero=1", "microbatches": 1, "dropout": 0.0},
]


def layout_settings(case: Case) -> list[str]:
    words = [*case["data"].split(), f"tp={case['tp']}", f"sp={case['sp']}", f"microbatches={case['microbatches']}"]
    return [f"communication.{word}" if word.startswith("overlap") else f"layout.{word}" for word in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@cache
def alone(folder: Path, model: str, dropout: float) -> Trained:
    """The same job on one device."""
    trained = train_and_reassemble(ALONE, job_of_model(folder, model, dropout=dropout))
    assert trained is not None and trained.losses[-1] < trained.losses[0]
    return trained


def name_of(case: Case) -> str:
    return " ".join(str(value).replace(" ", ",") for value in case.values())


def trained_on(ranks: Ranks, folder: Path, case: Case, *overrides: str, steps: int = STEPS) -> Trained:
    job = job_of_model(folder, case["model"], *layout_settings(case), *overrides, dropout=case["dropout"])
    first, *_ = ranks.run(ranks_of(case), train_and_reassemble, job, steps, timeout_s=300)
    assert first is not None
    return first


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.proof) for case in CASES)], ids=lambda c: name_of(c)
)
def test_ranks_train_as_one_device(ranks: Ranks, folder: Path, case: Case) -> None:
    """Loss, norm, all gradients, and parameters after ten steps; a replica check finds no different copies."""
    # Without dropout, attention with a trained table of positions has other bits where no gradient is needed.
    checks = () if (case["model"], case["dropout"]) == ("t5", 0.0) else ("monitor.replica_check_every=5",)
    found = trained_on(ranks, folder, case, *checks)
    assert worst_difference(found, alone(folder, case["model"], case["dropout"])) < TOLERANCE


ADAPTERS = "model.adapters={rank=3, targets=['*q_proj', '*v_proj', '*o_proj', '*up_proj', '*down_proj']}"


@pytest.mark.parametrize(
    "layout",
    ["tp=2 dp=2 zero=3 sp=true", *(pytest.param(x, marks=pytest.mark.proof) for x in ("tp=2", "tp=4 sp=true"))],
)
def test_adapters_train_as_on_one_device(ranks: Ranks, folder: Path, layout: str) -> None:
    job = job_of_model(folder, "llama", ADAPTERS, *(f"layout.{word}" for word in layout.split()))
    found, *_ = ranks.run(job.layout.dims.ranks, train_and_reassemble, job)
    expected = train_and_reassemble(ALONE, job_of_model(folder, "llama", ADAPTERS))
    assert expected is not None and {name.rpartition(".")[2] for name in expected.gradients} == {
        "adapter_a",
        "adapter_b",
    }
    assert worst_difference(found, expected) < TOLERANCE


def test_the_cases_cover_every_possible_pair() -> None:
    uncovered = uncovered_pairs(FACTORS, CASES)
    assert [pair for pair in uncovered if pair.keys() != {"tp", "data"} or ranks_of(pair) <= MAX_RANKS] == []
    assert len(CASES) < 120


# Codecs round, so numbers are others; but ranks with copies must round alike, and training goes on.
CODECS = [
    ("compress_gradients=int8", "dp=2 zero=0"),
    ("compress_gradients=powersgd:rank=2", "dp=2 zero=1"),
    ("compress_gradients=topk:keep=0.2", "dp=2 zero=2"),
    ("compress_gradients=int4", "dp=2 zero=3"),
    ("compress_parameters=int8", "dp=2 zero=3"),
]


CODEC_CASES = [(*each, recipe) for each in CODECS for recipe in ("fp64", "fp32", "bf16")]


@pytest.mark.proof
@pytest.mark.parametrize(("codec", "data", "recipe"), CODEC_CASES)
def test_codecs_and_recipes_keep_copies_equal(ranks: Ranks, folder: Path, codec: str, data: str, recipe: str) -> None:
    case = {"model": "llama", "tp": 2, "sp": "false", "data": data, "microbatches": 2, "dropout": 0.0}
    overrides = (f"communication.{codec}", f"precision.recipe={recipe}", "monitor.replica_check_every=1")
    found = trained_on(ranks, folder, case, *overrides)
    assert found.losses[-1] < found.losses[0] and torch.tensor(found.norms).isfinite().all()
