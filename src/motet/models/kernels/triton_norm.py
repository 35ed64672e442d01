"""RMS norms in Triton, with or without the addition before them: each element is read and written once.

    total = x + y
    out = total / sqrt(mean(total^2) + eps) * weight

A program computes a tile of whole rows. In backward each program goes through several tiles and keeps its sum for the
gradient of the weight, so that the order of additions does not depend on timing.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet.models.kernels.autograd_backward import single_backward

_TILE = 4096  # Elements of a tile of short rows; assumed
_PROGRAMS = 512  # In backward: each has a row of sums; two to four for each multiprocessor of a GPU; assumed


@triton.jit
def rms_norm_forward(
    x, y, weight, total, out, rstd, rows, size, eps: tl.constexpr, height: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * height + tl.arange(0, height)
    column = tl.arange(0, width)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    at = row[:, None].to(tl.int64) * size + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    if y is not None:
        wide_sum = value.to(rstd.dtype.element_ty) + tl.load(y + at, mask=inside, other=0.0).to(rstd.dtype.element_ty)
        value = wide_sum.to(total.dtype.element_ty)  # The norm of the rounded sum, which others read
        tl.store(total + at, value, mask=inside)
    wide = value.to(rstd.dtype.element_ty)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 1) / size + eps)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(rstd.dtype.element_ty)
    tl.store(out + at, (wide * scale[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def rms_norm_backward(
    grad, grad_total, x, weight, rstd, grad_x, sums, rows, size, height: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, width)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(rstd.dtype.element_ty)
    partial = tl.zeros((width,), dtype=rstd.dtype.element_ty)
    for tile in range(program, tl.cdiv(rows, height), programs):
        row = tile * height + tl.arange(0, height)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        at = row[:, None].to(tl.int64) * size + column[None, :]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(rstd.dtype.element_ty) * scale
        wide = tl.load(grad + at, mask=inside, other=0.0).to(rstd.dtype.element_ty)
        scaled = wide * factor[None, :]
        result = (scaled - normed * (tl.sum(scaled * normed, 1) / size)[:, None]) * scale
        if grad_total is not None:
            result += tl.load(grad_total + at, mask=inside, other=0.0).to(rstd.dtype.element_ty)
        tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
        if sums is not None:
            partial += tl.sum(wide * normed, 0)
    if sums is not None:
        tl.store(sums + program * size + column, partial, mask=column < size)


def _tile_options(rows: int, size: int) -> dict[str, int]:
    """The size of the tiles that cover a matrix, and the warps that a tile takes."""
    width = triton.next_power_of_2(size)
    height = max(1, min(_TILE // width, triton.next_power_of_2(rows)))
    return {"height": height, "width": width, "num_warps": min(16, max(4, height * width // 1024))}


class _TritonRMSNorm(torch.autograd.Function):
    """(x, y or None, weight, eps) -> (total, or None without y, and out)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, Tensor]:
        x, y, weight, eps = inputs
        x, y, weight = x.contiguous(), None if y is None else y.contiguous(), weight.contiguous()
        size = x.shape[-1]
        rows, wide = x.numel() // size, torch.promote_types(x.dtype, torch.float32)
        total = None if y is None else torch.empty_like(x)
        out, rstd = torch.empty_like(x), torch.empty(rows, dtype=wide, device=x.device)
        options = _tile_options(rows, size)
        if rows:
            grid = (triton.cdiv(rows, options["height"]),)
            rms_norm_forward[grid](x, y, weight, total, out, rstd, rows, size, eps=eps, **options)
        ctx.save_for_backward(x if total is None else total, weight, rstd)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @single_backward
    def backward(
        ctx: Any, grad_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad is None:
            return grad_total, grad_total, None, None
        x, weight, rstd = ctx.saved_tensors
        rows, size = rstd.numel(), x.shape[-1]
        options, needs_sums = _tile_options(rows, size), ctx.needs_input_grad[2]
        programs = min(triton.cdiv(rows, options["height"]), _PROGRAMS)
        grad, grad_total = grad.contiguous(), None if grad_total is None else grad_total.contiguous()
        grad_x = torch.empty_like(x)
        sums = torch.empty(programs, size, dtype=rstd.dtype, device=x.device) if needs_sums else None
        if rows:
            tensors = grad, grad_total, x, weight, rstd, grad_x, sums
            rms_norm_backward[(programs,)](*tensors, rows, size, **options)
        grad_y = grad_x if ctx.needs_input_grad[1] else None
        return grad_x, grad_y, None if sums is None else sums.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dim."""
    return cast(Tensor, _TritonRMSNorm.apply(x, None, weight, eps)[1])  # type: ignore[no-untyped-call]  # untyped in torch


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm over the last dim."""
    return cast(tuple[Tensor, Tensor], _TritonRMSNorm.apply(x, y, weight, eps))  # type: ignore[no-untyped-call]  # untyped in torch
