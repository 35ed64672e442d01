"""Causes are found by numbers: tensors that are made of others in some way, and what is said of them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from motet.verify.causes import Case, Share, cause

SIZES = {"dp": 4.0, "micro-batches": 2.0, "target tokens": 372.0}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHARES = [Share(rank, part, drawn(30, seed=2 * rank + part), 40.0 + rank) for rank in range(4) for part in range(2)]
TOTAL = torch.stack([share.value for share in SHARES]).sum(0)
SUM = Case(TOTAL, TOTAL, 1, SIZES, SHARES, {"what it was in the step before": drawn(30, seed=99)})


def without(rank: int, part: int | None = None) -> Tensor:
    return TOTAL - sum(s.value for s in SHARES if s.rank == rank and part in (None, s.part))


def own(rank: int) -> Tensor:
    return torch.stack([s.value for s in SHARES if s.rank == rank]).sum(0)


def means(case: Case) -> Tensor:
    counts = {rank: sum(s.targets for s in SHARES if s.rank == rank) for rank in range(4)}
    return torch.stack([s.value / counts[s.rank] for s in SHARES]).sum(0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4 * TOTAL, "it is 4 times what it should be: multiplied by 4 = dp"),
        (TOTAL / 4, "it is 1/4 times what it should be: divided by 4 = dp"),
        (2 * TOTAL, "it is 2 times what it should be: multiplied by 2 = micro-batches"),
        (TOTAL / 372, "divided by 372 = target tokens"),
        (-TOTAL, "it is -1 times what it should be"),
        (0 * TOTAL, "it is 0 throughout"),
        (own(1), "it is the share of rank 1 alone: the sum over the ranks is missing"),
        (without(2), "it lacks the share of rank 2"),
        (without(2, 0), "it lacks the share of micro-batch 0 of rank 2"),
        (TOTAL + own(3), "it has the share of rank 3 twice"),
        (means(SUM), "shares of ranks are divided by their own count of targets"),
        (drawn(30, seed=99), "it is what it was in the step before"),
        (TOTAL + 0.25 * drawn(30, seed=99), "it has 1/4 times what it was in the step before too much"),
        (TOTAL.float().double(), "it was rounded to float32"),
        (TOTAL.bfloat16().double(), "it was rounded to bfloat16"),
        (torch.where(torch.arange(30) == 4, torch.nan, TOTAL), "1 of its 30 elements are not finite"),
        (drawn(30, seed=1234), ""),
    ],
)
def test_what_a_sum_is_made_of(value: Tensor, said: str) -> None:
    found = cause(replace(SUM, value=value))
    assert (said in found) if said else not found, found


def test_what_was_updated_otherwise() -> None:
    before, after = drawn(30, seed=5), drawn(30, seed=6)
    case = Case(before, after, None, SIZES, before=before)
    assert cause(case) == "it was not updated"
    half = replace(case, value=before + 0.5 * (after - before))
    assert cause(half).startswith("it was updated by 1/2 times what it should be")


def test_rows_of_others() -> None:
    batch = drawn(8, 5)
    case = Case(batch[[0, 1]], batch[[2, 3]], 1, SIZES, batches={"the batch": batch})
    assert cause(case) == "it is of rows 0 and 1 of the batch"


@pytest.mark.parametrize("factor", [1.3, 17.0])
def test_of_a_number_not_every_factor_is_a_cause(factor: float) -> None:
    one = torch.tensor(3.0, dtype=torch.float64)
    assert not cause(Case(factor * one, one, 0, SIZES))
    assert "divided by 4 = dp" in cause(Case(one / 4, one, 0, SIZES))


def test_a_number_lacks_a_share() -> None:
    shares = [
        Share(rank, 0, torch.tensor(value, dtype=torch.float64), 1.0) for rank, value in enumerate([3.0, 5.5, 2.25])
    ]
    one = torch.tensor(10.75, dtype=torch.float64)
    assert cause(Case(one - 5.5, one, None, {}, shares)) == "it lacks the share of rank 1"
