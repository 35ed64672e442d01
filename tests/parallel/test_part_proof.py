"""The engine of proofs: right proposals pass, and a mistake is named with its module, tensor and distance."""

from contextlib import nullcontext
from dataclasses import replace
from math import inf, isnan, nan

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.parallel.model_sharding import TENSOR_DIMENSION, BoundaryComm, DimensionSplit
from motet.parallel.proof.comparison import ProofMismatchError, distance, is_close
from motet.parallel.proof.module_calls import record_calls
from motet.parallel.proof.part_proof import PartProof, PartProposal
from motet.parallel.proof.proof_values import random_values


class Gated(nn.Module):
    """A norm, and two products with one weight each, whose gates and values are interleaved in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.scale = nn.LayerNorm(6), nn.Linear(6, 16), nn.Parameter(torch.ones(1))
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.gelu(gate) * value * self.scale_of(gate))

    def scale_of(self, gate: Tensor) -> Tensor:
        return self.scale


class WidthInScale(Gated):
    """Divides the gradient of its scale by its width."""

    def scale_of(self, gate: Tensor) -> Tensor:
        return self.scale.detach() + (self.scale - self.scale.detach()) / gate.shape[-1]


def split(dim: int, *parts: int) -> DimensionSplit:
    return DimensionSplit(dim, TENSOR_DIMENSION, parts)


RIGHT = PartProposal(
    (
        BoundaryComm("up", "input", 0, "copy", TENSOR_DIMENSION),
        BoundaryComm("down", "output", 0, "sum", TENSOR_DIMENSION),
    ),
    {"up.weight": split(0, 8, 8), "up.bias": split(0, 8, 8), "down.weight": split(1)},
    added_once=("down.bias",),
)


def compared(proposal: PartProposal, kind: type[Gated] = Gated, **options: tuple[int, ...]) -> frozenset[str]:
    module = kind()
    with random_values(module):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(2, length, 6, dtype=torch.float64, generator=generator) for length in (3, 5)]
        proof = PartProof(module, [lambda x=x: module(x) for x in inputs], 2, nullcontext)
        return proof.compare(proposal, **options)


@pytest.mark.parametrize("options", [{}, {"stop_after": (1, 1)}])
def test_a_right_proposal_passes(options: dict[str, tuple[int, ...]]) -> None:
    """Each rank uses the scale for its part."""
    assert compared(RIGHT, **options) == {"scale"}


def test_without_a_copy_norms_have_parts_of_sums() -> None:
    """The forward is right, and a caller would have to add these gradients."""
    assert compared(replace(RIGHT, borders=RIGHT.borders[1:])) == {"scale", "norm.weight", "norm.bias"}


MISTAKES: dict[str, tuple[PartProposal, tuple[str, str], str]] = {
    "the fused halves as one part": (
        replace(RIGHT, splits={**RIGHT.splits, "up.weight": split(0), "up.bias": split(0)}),
        ("down", "output"),
        "do not add up to its output",
    ),
    "a bias that all ranks add": (replace(RIGHT, added_once=()), ("down", "output"), "do not add up to its output"),
    "an input that is a piece": (
        replace(RIGHT, borders=(BoundaryComm("up", "input", 0, "gather", TENSOR_DIMENSION, 1), RIGHT.borders[1])),
        ("up", "input"),
        "has another shape on a shard: [2, 3, 6] in place of [2, 2, 6]",
    ),
    "no sum": (replace(RIGHT, borders=RIGHT.borders[:1]), ("up", ""), "result depends on something that a shard"),
    "another dimension": (
        replace(RIGHT, splits={**RIGHT.splits, "down.weight": split(0)}),
        ("up", ""),
        "self.scale_of(gate))` (RuntimeError",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    proposal, (module, tensor), text = MISTAKES[name]
    with pytest.raises(ProofMismatchError) as caught:
        compared(proposal)
    assert (caught.value.module, caught.value.tensor) == (module, tensor) and text in str(caught.value)
    assert caught.value.distance is None or caught.value.distance > 1e-3


def test_a_gradient_that_is_neither_equal_nor_a_part_of_the_sum_is_named() -> None:
    with pytest.raises(ProofMismatchError, match="neither equal to that of the whole nor parts of its sum") as caught:
        compared(RIGHT, WidthInScale)
    assert caught.value.tensor == "scale" and caught.value.distance is not None and caught.value.distance > 1e-6


def test_distances_of_infinities_and_nan() -> None:
    ones, masked = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, -inf, 1.0], dtype=torch.float64)
    assert distance(masked, masked) == 0 and distance(masked * 1.5, masked) == pytest.approx(0.5)
    assert not is_close(ones, masked) and not is_close(masked, ones)
    assert isnan(distance(ones * nan, ones)) and not is_close(ones * nan, ones * nan)
    assert is_close(ones * nan, ones * nan, nan_is_equal=True) and not is_close(ones * nan, ones, nan_is_equal=True)
    assert is_close(ones + 1e-14, ones) and not is_close(ones + 1e-11, ones) and is_close(ones + 1e-11, ones, 1e3)
    assert not is_close(ones.float(), ones) and not is_close(ones[:2], ones) and not is_close(None, ones)
    assert is_close(torch.arange(3), torch.arange(3)) and not is_close(torch.arange(3), torch.arange(3) + 1)


class CatchesFailure(nn.Module):
    """Calls a layer with an input that the layer refuses, and then with another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.layer(x)
        except RuntimeError:
            x = self.layer(x[..., :4])
        return self.last(x)


def test_records_have_values_as_they_were() -> None:
    """Copies are made of values that later code writes to, and a call that raised something has no output."""
    module = CatchesFailure()
    with record_calls(dict(module.named_modules())) as calls:
        result = module(torch.randn(3, 5))
    failed, ended = calls["layer"]
    assert failed.output is None and ended.output is calls["last"][0].arguments[0]
    assert torch.equal(F.relu(ended.output_values), result) and bool((ended.output_values < 0).any())
    assert calls[""][0].place[0] < failed.place[0] < ended.place[0] < ended.place[1] < calls[""][0].place[1]
