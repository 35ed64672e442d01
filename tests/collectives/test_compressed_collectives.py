"""Compressed sums over real ranks: nearly the sum, the same bits everywhere, losses known, bytes counted."""

import math

import pytest
import torch
from torch import Tensor

from motet.collectives.compression import compressed_collectives as collectives
from motet.collectives.compression.codecs import (
    BlockwiseCodec,
    PowerSGDCodec,
    all_reduce_traffic,
    parse_codec,
    rank_slices,
)
from motet.core import trace
from motet.core.errors import InputError
from motet.core.units import dtype_name
from motet.parallel.process.process_group import RankGroup
from on_ranks import Counter
from ranks import Ranks

TEXTS = [
    *("int8", "int8:block=7,rounding=stochastic", "int4:levels=quantile", "float8", "float8:format=e5m2", "sign"),
    *("topk:keep=0.05", "topk:keep=0.7", "randomk:keep=0.2", "randomk:keep=0.2,unbiased=false", "powersgd:rank=2"),
]
SHAPES = [(0,), (), (1,), (2,), (5,), (1001,), (40, 30), (30, 4, 5)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LIMITS = {"int8": 0.02, "int4": 0.3, "float8": 0.1}
"""Largest relative error (2-norm) of the total; sums of what two encodings of the widest kind lose."""


def given_by(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_of(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([given_by(rank, shape, dtype).double() for rank in range(world)]).sum(0)


Result = tuple[Tensor, Tensor, dict[str, float]]


def reduce_all(group: RankGroup, cases: list[tuple[str, tuple[int, ...], torch.dtype]]) -> list[Result]:
    """(total, error, bytes counted) of each case."""
    results = []
    for text, shape, dtype in cases:
        tensor = given_by(group.rank, shape, dtype)
        kept, counters = tensor.clone(), Counter()
        with trace.install_sink(counters):
            reduced = collectives.all_reduce(tensor, parse_codec(text), group, seed=4)
        assert torch.equal(tensor, kept)
        results.append((reduced.total, reduced.error, dict(counters.counts)))
    return results


def check(text: str, shape: tuple[int, ...], dtype: torch.dtype, results: list[Result]) -> None:
    codec, world, exact = parse_codec(text), len(results), sum_of(len(results), shape, dtype)
    total, error, _ = results[0]
    assert (total.shape, total.dtype) == (exact.shape, dtype)
    assert (error.shape, error.dtype) == (exact.shape, torch.float64 if dtype == torch.float64 else torch.float32)
    for other, _, counted in results:
        assert torch.equal(other, total), "ranks got different bits"
        assert counted == all_reduce_traffic(codec, shape, dtype_name(dtype), world)
    lost = torch.stack([error.double() for _, error, _ in results]).sum(0)
    if exact.numel():  # a total that is no message itself is rounded to its dtype
        largest = total.abs().max().item() + sum(given_by(rank, shape).abs().max().item() for rank in range(world))
        rounding = 2 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(total.double() + lost, exact, rtol=0.0, atol=rounding * largest)
    if codec.name in LIMITS and exact.numel():
        assert (total.double() - exact).norm() <= LIMITS[codec.name] * exact.norm()


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.proof)])
def test_nearly_the_sum(ranks: Ranks, world: int) -> None:
    cases = [(text, shape, dtype) for text in TEXTS for shape in SHAPES for dtype in DTYPES]
    for case, *rank_results in zip(cases, *ranks.run(world, reduce_all, cases), strict=True):
        check(*case, rank_results)


def alone(group: RankGroup) -> None:
    tensor = given_by(0, (10,), torch.bfloat16)
    for text in TEXTS:
        (total, error, counted), *_ = reduce_all(group, [(text, (10,), torch.bfloat16)])
        assert torch.equal(total, tensor) and torch.equal(error, torch.zeros(10)) and counted == {}


def test_one_rank_loses_nothing_ranks_round_independently_and_integers_are_refused(ranks: Ranks) -> None:
    ranks.run(1, alone)
    _, one, two = ranks.run(3, error_of_the_same)
    assert not torch.equal(one, two)
    sentence = "a tensor of int64 cannot be compressed; convert it to float64, float32, bfloat16, float16 first"
    assert ranks.run(2, refused) == [sentence] * 2


def finite_totals(group: RankGroup, bad: list[float]) -> list[bool]:
    """Whether all of each codec's total is finite if each rank has one bad number."""
    tensor = given_by(group.rank, (40, 30))
    tensor[17, 3] = bad[group.rank]
    totals = [collectives.all_reduce(tensor, parse_codec(text), group, seed=4).total for text in TEXTS]
    return [bool(total.isfinite().all()) for total in totals]


@pytest.mark.parametrize("bad", [[0.0, math.nan, 0.0], [0.0, math.inf, 0.0], [math.inf, -math.inf]], ids=str)
def test_what_is_not_finite_reaches_all_and_opposite_infinities_do_not_cancel(ranks: Ranks, bad: list[float]) -> None:
    assert ranks.run(len(bad), finite_totals, bad) == [[False] * len(TEXTS)] * len(bad)


def error_of_the_same(group: RankGroup) -> Tensor:
    """The error of stochastic rounding of a tensor that is equal on all ranks, in the slice that rank 0 sums."""
    codec = parse_codec("int4:rounding=stochastic")
    return collectives.all_reduce(given_by(0, (300,)), codec, group, seed=4).error[:100]


def power_iterations(group: RankGroup) -> list[float]:
    """The errors of a constant sum: from the random basis, from one of zeros, and after ten steps."""
    codec, tensor = parse_codec("powersgd:rank=2"), given_by(group.rank, (40, 30))
    exact = sum_of(group.world, (40, 30), torch.float32).float()
    starts, basis = (None, torch.zeros(30, 2)), None
    assert isinstance(codec, PowerSGDCodec)
    totals = [collectives.all_reduce_powersgd([tensor], codec, group, 4, [start])[0].total for start in starts]
    for _ in range(10):
        (reduced,) = collectives.all_reduce_powersgd([tensor], codec, group, 4, [basis])
        basis = reduced.basis
    values = torch.linalg.svdvals(exact)
    return [((total - exact).norm() / values[2:].norm()).item() for total in (*totals, reduced.total)]


def test_power_sgd_goes_on_from_its_basis(ranks: Ranks) -> None:
    for random, zeros, later in ranks.run(2, power_iterations):
        assert random == zeros > later + 0.01 and later > 1 - 1e-4


def halves(group: RankGroup) -> list[tuple[Tensor, Tensor, Tensor]]:
    results = []
    for text in ("int8", "int4:rounding=stochastic", "sign"):
        codec = parse_codec(text)
        assert isinstance(codec, BlockwiseCodec)
        mine, lost = collectives.reduce_scatter(given_by(group.rank, (5, 21)), codec, group, seed=1)
        results.append((mine, lost, collectives.all_gather(mine, codec, group, 105, seed=1)))
    return results


def test_the_two_halves_of_a_blockwise_sum(ranks: Ranks) -> None:
    exact = sum_of(3, (105,), torch.float32).float()
    for rank_results in zip(*ranks.run(3, halves), strict=True):
        scattered = torch.cat([mine for mine, _, _ in rank_results])
        lost = torch.stack([lost for _, lost, _ in rank_results]).sum(0)
        torch.testing.assert_close(scattered + lost, exact)
        assert [len(mine) for mine, _, _ in rank_results] == [stop - start for start, stop in rank_slices(105, 3)]
        assert all(torch.equal(gathered, rank_results[0][2]) for _, _, gathered in rank_results)
        assert (rank_results[0][2] - scattered).norm() < scattered.norm()


def refused(group: RankGroup) -> str:
    with pytest.raises(InputError) as raised:
        collectives.all_reduce(torch.zeros(3, dtype=torch.int64), parse_codec("int8"), group, seed=0)
    return str(raised.value)
