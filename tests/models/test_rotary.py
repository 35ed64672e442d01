"""The real rotation and the complex product that runs in its place."""

from contextlib import nullcontext

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced
from torch import Tensor

from motet.models.arch.layers import RotaryEmbedding, apply_rotary
from motet.models.kernels.choice import chosen

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def rotated(name: str, heads: Tensor, rotations: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated heads and the gradient of the heads: by the plain definition, or by the product that a CPU runs."""
    leaf = heads.detach().requires_grad_()
    with kernels_forced("plain") if name == "plain" else nullcontext():
        assert chosen("rotary", heads) == name
        y = apply_rotary(leaf, rotations)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


def complex_product(heads: Tensor, rotations: Tensor) -> Tensor:
    """The definition: each pair as a complex number times exp(i angle)."""
    dims = 2 * rotations.shape[-2]
    pairs = heads[..., :dims].to(rotations.dtype).unflatten(-1, (-1, 2))
    turned = torch.complex(*pairs.unbind(-1)) * torch.complex(*rotations.unbind(-1))
    return torch.cat((torch.view_as_real(turned).flatten(-2).to(heads.dtype), heads[..., dims:]), -1)


def heads_of_all_strides(dims: int, dtype: torch.dtype) -> list[Tensor]:
    """[R, T, heads, dims]: contiguous, every other head of an odd number, and parts of odd heads at odd offsets."""
    torch.manual_seed(dims)
    return [
        torch.randn(2, 7, 3, dims).to(dtype),
        torch.randn(2, 7, 7, dims).to(dtype)[:, :, 1::2],
        torch.randn(2, 7, 3, dims + 3).to(dtype)[..., 1:-2],
        torch.randn(2, 3, 7, dims).to(dtype).transpose(1, 2),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "rotary_dims"), [(32, 32), (64, 64), (128, 128), (64, 32), (80, 64), (35, 32)])
def test_the_real_rotation_has_the_bits_of_the_complex_product(dims: int, rotary_dims: int, dtype: torch.dtype) -> None:
    table = RotaryEmbedding(rotary_dims, 10000.0).rotations_at(torch.arange(100, 107), dtype)
    assert table.dtype == torch.promote_types(dtype, torch.float32)
    for heads in heads_of_all_strides(dims, dtype):
        grad = torch.randn_like(heads)
        real, product = (rotated(name, heads, table, grad) for name in ("plain", "torch"))
        assert all(map(torch.equal, real, product))
        assert torch.equal(real[0], complex_product(heads, table)) and real[0].dtype == dtype


@pytest.mark.parametrize("dims", [2, 6, 10, 18])
def test_the_real_rotation_of_few_pairs_differs_by_one_rounding(dims: int) -> None:
    """The complex product of a CPU fuses a multiplication and an addition where pairs do not fill its vectors."""
    table = RotaryEmbedding(dims, 10000.0).rotations_at(torch.arange(7), torch.float64)
    for heads in heads_of_all_strides(dims, torch.float64):
        grad = torch.randn_like(heads)
        real, product = (rotated(name, heads, table, grad) for name in ("plain", "torch"))
        assert all(
            (a - b).abs().max() < 4e-16 * heads.abs().max() + 4e-16 * 4 for a, b in zip(real, product, strict=True)
        )
