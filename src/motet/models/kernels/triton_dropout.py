"""Dropout in Triton whose masks are those of `dropout_mask.py`: the same hash, in forward and again in backward.

No mask is kept: backward draws it from the keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet.models.kernels.autograd_backward import single_backward

_WIDTH = 1024  # Elements of a row that a program computes; assumed


@triton.jit
def drop_elements(
    x, out, keys, indices, first, count, parts,
    smallest_kept: tl.constexpr, factor: tl.constexpr, wide: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = part.to(tl.int64) * width + tl.arange(0, width)
    inside = column < count
    index = first + column if indices is None else tl.load(indices + column, mask=inside, other=0)
    low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    hashed = index.to(tl.uint32) * 0x9E3779B1 + low
    hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D + high
    hashed = (hashed ^ (hashed >> 15)) * 0x846CA68B
    keep = hashed.to(tl.int32, bitcast=True) >= smallest_kept
    at = row.to(tl.int64) * count + column
    value = tl.load(x + at, mask=inside, other=0.0)
    kept = (value.to(wide) * keep.to(wide)) * factor  # As a product, so that what is not a number stays none
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=inside)


class CounterMask(NamedTuple):
    """The masks of rows: element i of row r is drawn from key r and index `first + i`, or `indices[i]`."""

    keys: Tensor  # [rows, 2] int32, the low and the high half
    make_indices: Callable[[], tuple[int, Tensor | None]]  # (first, indices), int64 below 2^32; not kept for backward
    smallest_kept: int
    factor: float


def _drop(x: Tensor, mask: CounterMask) -> Tensor:
    rows, (first, indices) = len(mask.keys), mask.make_indices()
    out, count = torch.empty_like(x), x.numel() // rows
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    constants = {"smallest_kept": mask.smallest_kept, "factor": mask.factor, "wide": wide, "width": _WIDTH}
    parts = triton.cdiv(count, _WIDTH)  # One dimension of programs: the others have 65,535 at most
    drop_elements[(rows * parts,)](x, out, mask.keys, indices, first, count, parts, **constants)
    return out


class _TritonDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: CounterMask) -> Tensor:
        ctx.mask = mask
        return _drop(x.contiguous(), mask)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _drop(grad.contiguous(), ctx.mask), None


def drop_by_counter(x: Tensor, mask: CounterMask) -> Tensor:
    """x with elements set to 0 and the others scaled, for rows that x holds one after another."""
    return cast(Tensor, _TritonDropout.apply(x, mask))  # type: ignore[no-untyped-call]  # untyped in torch
