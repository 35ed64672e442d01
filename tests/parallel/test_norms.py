"""Sums that do not depend on order or place, against Python's exact ones."""

import math
import random
from fractions import Fraction

import pytest
import torch

from motet.parallel.process.process_group import RankGroup
from motet.parallel.reproducible.tree_reduce import HIGH_BITS, LOW_BITS, exact_squared_norm, exact_sum
from ranks import Ranks

ALONE = RankGroup(0, 1, None, torch.device("cpu"))


def exact(tensor: torch.Tensor) -> Fraction:
    return sum((Fraction(x) ** 2 for x in tensor.tolist()), Fraction(0))


def made(kind: str, dtype: torch.dtype, count: int = 3000) -> torch.Tensor:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, generator=draw, dtype=torch.float64)
    scales = {"like": 0.0, "wide": 20.0, "tiny": 3.0, "huge": 3.0}
    x = x * torch.exp(scales[kind] * torch.randn(count, generator=draw, dtype=torch.float64))
    return (x * {"tiny": 1e-30, "huge": 1e30}.get(kind, 1.0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["like", "wide", "tiny", "huge"])
def test_it_is_as_close_as_it_says(kind: str, dtype: torch.dtype) -> None:
    x = made(kind, dtype)
    x = x[x.isfinite()]
    found, right = Fraction(exact_squared_norm([x], ALONE)), exact(x)
    bound = Fraction(len(x), 2 ** (HIGH_BITS + LOW_BITS - 2)) + Fraction(1, 2**52)
    assert abs(found - right) <= bound * right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_sum_of_python_where_nothing_is_cut_off(dtype: torch.dtype) -> None:
    x = torch.randint(-1000, 1000, (5000,), generator=torch.Generator().manual_seed(1)).to(dtype) / 1024
    assert exact_squared_norm([x], ALONE) == math.fsum(v * v for v in x.tolist())


def test_neither_order_nor_cuts_nor_ranks_change_a_bit(ranks: Ranks) -> None:
    x = made("like", torch.float32)
    whole, draw = exact_squared_norm([x], ALONE), random.Random(3)
    for _ in range(5):
        shuffled = x[torch.randperm(len(x))]
        assert exact_squared_norm(shuffled.tensor_split(sorted(draw.sample(range(len(x)), 4))), ALONE) == whole
    for world in (2, 3):
        assert ranks.run(world, _norm_of_rank, x) == [whole] * world
    assert exact_squared_norm([x[1:]], ALONE) != whole


def _norm_of_rank(group: RankGroup, x: torch.Tensor) -> float:
    own = [] if group.rank == group.world - 1 else x.tensor_split([100] * (group.world > 2))[group.rank :]
    return exact_squared_norm([own[0]] if own else [], group)


@pytest.mark.parametrize(("bad", "found"), [(math.nan, math.inf), (math.inf, math.inf), (0.0, 0.0), (1e200, math.inf)])
def test_what_is_not_finite_is_told(bad: float, found: float) -> None:
    assert exact_squared_norm([torch.tensor([0.0, bad], dtype=torch.float64)], ALONE) == found


def test_losses_are_added_without_order() -> None:
    values = made("like", torch.float64).tolist()
    assert exact_sum(values) == exact_sum(sorted(values)) == float(sum(map(Fraction, values)))
    assert sum(values) != sum(sorted(values)) and math.isnan(exact_sum([1.0, math.inf, -math.inf]))
