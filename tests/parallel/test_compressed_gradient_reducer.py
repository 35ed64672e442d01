"""Error feedback of gradients: nothing is lost for good, also by a restart; it converges where compression does not."""

import pytest
import torch
from torch import Tensor

from motet.collectives.compression.codecs import parse_codec
from motet.collectives.compression.compressed_collectives import codec_numerics
from motet.collectives.execute import api
from motet.core.seeds import derive_seed
from motet.core.units import dtype_name
from motet.parallel.data_parallel.communication.communicator import CompressedGradientReducer
from motet.parallel.data_parallel.communication.powersgd_matrices import (
    MatrixView,
    ReductionBufferSpec,
    StepReductionSpecs,
)
from motet.parallel.process.process_group import RankGroup
from ranks import Ranks

TEXTS = [
    *("int8", "int8:rounding=stochastic,levels=quantile", "int4", "int4:levels=quantile", "float8", "sign:block=16"),
    *("topk:keep=0.1", "randomk:keep=0.2,unbiased=false", "powersgd:rank=1"),
]
NUMEL = 12 * 10


def gradient(step: int, rank: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(derive_seed(step, rank))
    return torch.randn(NUMEL, generator=draw, dtype=torch.float64)


def reducer_of(group: RankGroup, text: str, like: Tensor, error_feedback: bool = True) -> CompressedGradientReducer:
    buffer = ReductionBufferSpec(like.numel(), (MatrixView(0, 12, 10),) if like.numel() == NUMEL else ())
    specs = StepReductionSpecs((buffer,), dtype_name(like.dtype))
    return CompressedGradientReducer(parse_codec(text), group, [specs], shard=0, error_feedback=error_feedback)


def total_of(reducer: CompressedGradientReducer, tensor: Tensor, step: int) -> Tensor:
    total = tensor.clone()
    with codec_numerics():
        reducer.all_reduce(0, total, derive_seed(step), dense_all_reduce=api.all_reduce)
    return total


def all_reduces(group: RankGroup, text: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    given = [gradient(step, group.rank).to(dtype) for step in range(5)]
    reducer = reducer_of(group, text, given[0])
    return [total_of(reducer, tensor, step).double() for step, tensor in enumerate(given)], reducer.errors.double()


@pytest.mark.parametrize("text", [*TEXTS, "topk:keep=0.9"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_totals_plus_last_errors_are_what_was_given(ranks: Ranks, text: str, dtype: torch.dtype) -> None:
    results = ranks.run(3, all_reduces, text, dtype)
    totals = results[0][0]
    arrived = torch.stack([*totals, *(error for _, error in results)]).sum(0)
    given = torch.stack([gradient(step, rank).to(dtype).double() for step in range(5) for rank in range(3)]).sum(0)
    # A dense or low-rank total is rounded to its dtype, which no rank can give again; all else is fed back.
    rounds = dtype == torch.bfloat16 and parse_codec(text).name in ("topk", "randomk", "powersgd")
    torch.testing.assert_close(arrived, given, rtol=0.0, atol=0.2 if rounds else 2e-5)
    for other, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(other, totals, strict=True))


def resumed(group: RankGroup, text: str) -> bool:
    whole, first, second = (reducer_of(group, text, gradient(0).float()) for _ in range(3))

    def totals(reducer: CompressedGradientReducer, *steps: int) -> list[Tensor]:
        return [total_of(reducer, gradient(step, group.rank).float(), step) for step in steps]

    expected = totals(whole, *range(6))
    totals(first, 0, 1, 2)
    for name, tensor in first.state().items():
        second.state()[name].copy_(tensor)
    return all(torch.equal(a, b) for a, b in zip(totals(second, 3, 4, 5), expected[3:], strict=True))


@pytest.mark.parametrize("text", ["sign:block=16", "topk:keep=0.1", "int4:rounding=stochastic", "powersgd:rank=1"])
def test_a_resumed_run_goes_on_with_the_same_bits(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, resumed, text) == [True, True]


def after_a_bad_step(group: RankGroup, text: str) -> tuple[bool, bool]:
    reducer, bad = reducer_of(group, text, gradient(0)), gradient(1, group.rank)
    total_of(reducer, gradient(0, group.rank), 0)
    before = {name: tensor.clone() for name, tensor in reducer.state().items()}
    if group.rank == 0:
        bad[33] = float("inf")
    is_seen = not total_of(reducer, bad, 1).isfinite().all()
    return is_seen, all(torch.equal(before[name], tensor) for name, tensor in reducer.state().items())


@pytest.mark.parametrize("text", TEXTS)
def test_a_step_that_is_not_finite_leaves_the_errors_alone(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, after_a_bad_step, text) == [(True, True)] * 2


def regression(group: RankGroup, text: str, error_feedback: bool) -> float:
    """Least squares by gradient descent; each rank has rows of its own, and large gradients that cancel."""
    draw = torch.Generator().manual_seed(0)
    inputs, solution = torch.randn(group.world, 40, 20, generator=draw), torch.randn(20, generator=draw)
    local_inputs, targets = inputs[group.rank], inputs[group.rank] @ solution
    cancelling = torch.zeros(20)
    cancelling[:10] = 5.0 * (-1) ** group.rank
    weights = torch.zeros(20)
    reducer = reducer_of(group, text, weights, error_feedback)
    for step in range(300):
        grad = local_inputs.T @ (local_inputs @ weights - targets) / len(local_inputs) + cancelling
        weights -= 0.1 / (1 + step / 50) * total_of(reducer, grad, step) / group.world
    return ((weights - solution).norm() / solution.norm()).item()


@pytest.mark.parametrize("text", ["sign", "topk:keep=0.1"])
def test_it_converges_where_plain_compression_does_not(ranks: Ranks, text: str) -> None:
    assert ranks.run(2, regression, text, True)[0] < 0.1 and ranks.run(2, regression, text, False)[0] > 0.5
