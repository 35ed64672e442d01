"""Modules whose rows ranks share in a custom loop."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet import parallelize, verify
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.precision.float64_mode import use_float64
from parallel.context_parallel.attention_modules import ENTRIES, AttentionDecoder, Kind
from ranks import RankFailureError, Ranks

STEPS, TOKENS = 3, 31
Batch = dict[str, Tensor]


def batch_of(step: int, rank: int, ranks: int, tokens: int = TOKENS) -> Batch:
    """Four rows, of which a data-parallel rank has its share."""
    values = torch.randint(ENTRIES, (4, tokens + 1), generator=torch.Generator().manual_seed(step))[rank::ranks]
    positions = torch.arange(tokens).expand(len(values), -1)
    return {
        "tokens": values[:, :-1],
        "targets": values[:, 1:],
        "positions": positions,
        "row": torch.arange(len(values)),
    }


def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = module(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()


def train(_: RankGroup, layout: str) -> list[tuple[float, float]]:
    with use_float64():
        torch.manual_seed(7)
        settings: dict[str, Any] = {"precision": "fp64", "optimizer": {"learning_rate": 0.01}}
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # Of layers that stay whole
            engine = parallelize(AttentionDecoder().double(), layout, loss=loss, example=batch_of(0, 0, 1), **settings)
        micro = 2 if "microbatches=2" in layout else 1
        done = [
            engine.step(
                *(batch_of(step, engine.data_rank * micro + i, engine.data_ranks * micro) for i in range(micro))
            )
            for step in range(STEPS)
        ]
        return [(step.loss, step.grad_norm) for step in done]


@pytest.mark.parametrize(
    ("layout", "ranks_needed"),
    [
        pytest.param("cp=2", 2, marks=pytest.mark.proof),
        ("cp=2 cp_kind=ring dp=2 zero=2", 4),
        pytest.param("cp=2 cp_kind=all-to-all zero=1", 2, marks=pytest.mark.proof),
        pytest.param("cp=3 cp_order=contiguous", 3, marks=pytest.mark.proof),
        pytest.param("cp=2 tp=2 require_split=0.2", 4, marks=pytest.mark.proof),
        pytest.param("cp=2 pp=2 microbatches=2", 4, marks=pytest.mark.proof),
    ],
)
def test_steps_of_ranks_that_share_rows_are_those_of_one_rank(ranks: Ranks, layout: str, ranks_needed: int) -> None:
    (alone,) = ranks.run(1, train, "")
    for rank_numbers in ranks.run(ranks_needed, train, layout):
        for numbers, expected in zip(rank_numbers, alone, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-12)


def mean_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["tokens"], batch["positions"]).flatten(0, 1), batch["targets"].flatten())


def counts_rows(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return loss(module, batch)[0], len(batch["tokens"])


def refused(group: RankGroup, case: str) -> None:
    kind: Kind = "counts" if case == "positions" else "dropout" if case == "dropout" else "plain"
    module, example, chosen = AttentionDecoder(kind), batch_of(0, 0, 1), loss
    if case == "dropout":
        module.drop = nn.Dropout(0.1)
    if case == "other lengths":
        example["mask"] = torch.ones(4, 7)
    functions = {"mean": mean_loss, "counts": counts_rows}
    engine = parallelize(module, "cp=2", loss=functions.get(case, chosen), example=example, precision="fp32")
    if case == "by hand":
        engine.begin_step()
    engine.step(batch_of(group.rank, 0, 1))  # Another batch on each rank


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("mean", "layout.cp = 2 cannot split the rows of AttentionDecoder.* losses of parts do not add up"),
        ("counts", "the losses of parts do not add up to that of the whole"),
        ("positions", r"positions \(Embedding\) gets other indices"),
        ("dropout", "has dropout, which in a custom loop is PyTorch's"),
        ("other lengths", r"tensors of the shapes .*\[2, 7\].*; give tensors \[rows, tokens, ...\] alone"),
        ("by hand", r"begin_step: ranks that share rows .* give complete batches to step"),
        ("other batches", "ranks that share rows, or the blocks of a module, have different batches"),
    ],
)
def test_what_cannot_share_rows_is_refused(ranks: Ranks, case: str, sentence: str) -> None:
    with pytest.raises((RankFailureError, InputError), match=sentence):
        ranks.run(2, refused, case)


def test_a_verification_of_a_module_refuses_rows_that_ranks_share() -> None:
    with pytest.raises(InputError, match=r"layout 'cp=2': motet.verify does not know the tokens of a batch"):
        verify(AttentionDecoder, ["cp=2"], batch_of(0, 0, 1), loss=loss)
