"""Products in float32 that are rounded once equal those of the native 16-bit kernels, forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from motet.precision.numerics import float32_products

DTYPES = [torch.bfloat16, torch.float16]


class MultipliedDtypes(TorchDispatchMode):
    """The dtypes in which matrices are multiplied inside."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "attention", "linear", "mv")):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def ulps(left: Tensor, right: Tensor) -> Tensor:
    """How many numbers of the format are between two of them."""
    bits = [t.detach().contiguous().view(torch.int16).int() for t in (left, right)]
    ordered = [torch.where(b < 0, -(b & 0x7FFF), b) for b in bits]
    return (ordered[0] - ordered[1]).abs()


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def without_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.flatten(0, 1), weight) + 0 * bias


def batched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(x, weight.T.expand(len(x), -1, -1).contiguous()) + 0 * bias


def attention(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    heads = x.view(4, 6, 2, 24).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True) + 0 * weight.sum() + 0 * bias.sum()


def results(compute: Any, dtype: torch.dtype) -> list[Tensor]:
    inputs = [numbers(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(4, 6, 48), (32, 48), (32,)])]
    output = compute(*inputs)
    output.backward(numbers(*output.shape, dtype=dtype, seed=9).detach())
    return [output, *(each.grad for each in inputs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", [layer, without_bias, batched, attention])
def test_products_are_those_of_the_native_kernel(compute: Any, dtype: torch.dtype) -> None:
    """One unit in the last place, where float32 sums in another order round to another side; attention rounds its
    probabilities in the native kernel, too."""
    native = results(compute, dtype)
    with float32_products(dtype):
        emulated = results(compute, dtype)
    for ours, theirs in zip(emulated, native, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        if compute is attention:
            scale = theirs.float().abs().max()
            assert (ours.float() - theirs.float()).abs().max() <= 2 * torch.finfo(dtype).eps * scale
        else:
            apart = ulps(ours, theirs)
            assert apart.max() <= 1 and (apart == 0).float().mean() >= 0.97


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_emulated_product_is_the_exact_one_rounded_once(dtype: torch.dtype) -> None:
    """Sums of 16-bit integers are exact in float32, so that each order of additions has the same bits."""
    x, w = (torch.randint(-9, 9, (40, 64), generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    exact = (x.double() @ w.double().T).to(dtype)
    into = torch.ones(40, 40, dtype=dtype)
    with float32_products(dtype):
        assert torch.equal(x @ w.T, exact)
        assert torch.equal(torch.mm(x, w.T, out=into.clone()), exact)
        added = into.addmm_(x, w.T)
        with torch.inference_mode():
            assert torch.equal(F.linear(x, w), exact)
    assert added is into and torch.equal(into, (x.double() @ w.double().T + 1).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_multiplied_in_16_bits(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(dtype)
    x = torch.ones(3, 8, dtype=dtype)
    with MultipliedDtypes() as counted, float32_products(dtype):
        module(x).sum().backward()
        results(attention, dtype)
    assert counted.dtypes == {torch.float32}
    with MultipliedDtypes() as counted:
        module(x).sum().backward()
    assert counted.dtypes == {dtype}


def test_other_dtypes_are_left_alone() -> None:
    x = torch.rand(5, 5, dtype=torch.float64)
    with float32_products(torch.bfloat16):
        assert torch.equal(x @ x, torch.mm(x, x)) and (x @ x).dtype == torch.float64
        assert (x.half() @ x.half()).dtype == torch.float16
