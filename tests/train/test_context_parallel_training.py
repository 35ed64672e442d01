"""Training over ranks that split sequences computes the numbers of one device, for every pair of settings."""

from functools import cache
from pathlib import Path

import pytest
import torch

from covering_array import Case, covering_array, uncovered_pairs
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks
from train.runs import Trained, worst_difference
from train.tensor_parallel_runs import STEPS, job_of_model, train_and_reassemble

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
MAX_RANKS = 8
TOLERANCE = 1e-12
PACKED, WINDOW = "data.restart_documents=true", "model.sliding_window=7"
FACTORS = {
    "model": ("decoder", "grouped decoder", "gpt2-like", "bert", "llama", "llama of two key heads", "qwen3", "gpt2"),
    "context": (
        "cp=2",
        "cp=3 cp_order=contiguous",
        "cp=2 cp_order=contiguous",
        "cp=3 cp_kind=ring",
        "cp=4 cp_kind=ring cp_inner=2",
        "cp=2 cp_kind=all-to-all",
        "cp=4 cp_kind=all-to-all",
    ),
    "others": ("", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "tp=2 sp=true", "pp=2", "zero=3"),
    "microbatches": (1, 2),
    "length": (24, 17),
    "dropout": (0.0, 0.1),
    "job": ("", PACKED, "memory.recompute=full", "precision.recipe=fp32"),
}


def ranks_of(case: Case) -> int:
    sizes = dict(word.split("=") for word in f"{case['context']} {case['others']}".split())
    return int(sizes["cp"]) * int(sizes.get("dp", 1)) * int(sizes.get("tp", 1)) * int(sizes.get("pp", 1))


def is_possible(case: Case) -> bool:
    splits_tokens = "sp" in case["others"] and (case["length"] % 2 or "cp=3" in case["context"])
    return ranks_of(case) <= MAX_RANKS and not splits_tokens


CASES = covering_array(FACTORS, is_possible)
# Three for `make test`, with every kind of exchange.
QUICK: list[Case] = [
    {
        "model": "gpt2-like", "context": "cp=2", "others": "dp=2 zero=3", "microbatches": 2, "length": 17,
        "dropout": 0.1, "job": PACKED,
    },
    {
        "model": "grouped decoder", "context": "cp=4 cp_kind=ring cp_inner=2", "others": "", "microbatches": 1,
        "length": 17, "dropout": 0.0, "job": "memory.recompute=full",
    },
    {
        "model": "llama of two key heads", "context": "cp=4 cp_kind=all-to-all", "others": "", "microbatches": 1,
        "length": 24, "dropout": 0.1, "job": "",
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context-parallel")


def settings_of(case: Case) -> tuple[str, ...]:
    return (*filter(None, [case["job"]]), f"data.sequence_length={case['length']}")


@cache
def alone(folder: Path, model: str, dropout: float, settings: tuple[str, ...]) -> Trained:
    """The same job on one device."""
    trained = train_and_reassemble(ALONE, job_of_model(folder, model, *settings, dropout=dropout))
    assert trained is not None and trained.losses[-1] < trained.losses[0]
    return trained


def name_of(case: Case) -> str:
    return " ".join(str(value).replace(" ", ",") for value in case.values())


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.proof) for case in CASES)], ids=lambda c: name_of(c)
)
def test_ranks_train_as_one_device(ranks: Ranks, folder: Path, case: Case) -> None:
    """Loss, norm, all gradients, and parameters after ten steps; a replica check finds no different copies."""
    words = f"{case['context']} {case['others']} microbatches={case['microbatches']}".split()
    layout = [f"layout.{word}" for word in words]
    settings = settings_of(case)
    job = job_of_model(
        folder, case["model"], *layout, *settings, "monitor.replica_check_every=5", dropout=case["dropout"]
    )
    trained, *_ = ranks.run(ranks_of(case), train_and_reassemble, job, STEPS, timeout_s=300)
    assert trained is not None
    expected = alone(folder, case["model"], case["dropout"], settings)
    assert worst_difference(trained, expected) < (1e-4 if "precision.recipe=fp32" in settings else TOLERANCE)


def test_the_cases_have_every_pair() -> None:
    missing = uncovered_pairs(FACTORS, CASES)
    assert all(not is_possible({**CASES[0], **pair}) or "sp=true" in str(pair) for pair in missing), missing
