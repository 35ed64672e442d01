"""Cross-entropy of rows of logits in Triton, which may overwrite the logits with their errors.

A program computes a row: the largest logit and the sum of exponentials in a first pass over its columns, the errors in
a second one. Large programs keep few rows under way, so that the second pass finds its row in the cache of the device.
Sums are in float32, in float64 for logits of float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH, _WARP_WIDTH = 8192, 256  # Columns that a program and a warp of it read together; assumed


@triton.jit
def row_logsumexp(row, size, wide: tl.constexpr, width: tl.constexpr):
    """The log of the sum of exponentials of a row; -inf for a row without columns."""
    minus_infinity = float("-inf")
    largest = tl.full((), minus_infinity, wide)
    total = tl.full((), 0.0, wide)
    for start in range(0, size, width):
        column = start + tl.arange(0, width)
        x = tl.load(row + column, mask=column < size, other=minus_infinity).to(wide)
        raised = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(raised == minus_infinity, 0.0, raised)  # Nothing but -inf so far
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = raised
    return largest + tl.log(tl.where(total == 0.0, 1.0, total))


@triton.jit
def target_logit(row, target, size, missing, wide: tl.constexpr):
    """The logit of a row at its target, or `missing` where the target is no column."""
    is_here = (target >= 0) & (target < size)
    return tl.where(is_here, tl.load(row + target, mask=is_here, other=0.0).to(wide), missing)


@triton.jit
def write_row_errors(row, out, logsumexp, target, scale, size, wide: tl.constexpr, width: tl.constexpr):
    """Probabilities minus 1 at the target, times the scale."""
    for start in range(0, size, width):
        column = start + tl.arange(0, width)
        x = tl.load(row + column, mask=column < size, other=float("-inf")).to(wide)
        error = tl.exp(x - logsumexp) - tl.where(column == target, 1.0, 0.0).to(wide)
        tl.store(out + column, (error * scale).to(out.dtype.element_ty), mask=column < size)


@triton.jit
def cross_entropy_rows(
    logits, targets, losses, stride, size, overwrites: tl.constexpr, wide: tl.constexpr, width: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row, target = logits + index * stride, tl.load(targets + index)
    at_target = target_logit(row, target, size, float("nan"), wide)  # Before the barriers of sums: errors overwrite it
    logsumexp = row_logsumexp(row, size, wide, width)
    tl.store(losses + index, logsumexp - at_target)
    if overwrites:
        write_row_errors(row, row, logsumexp, target, 1.0, size, wide, width)


@triton.jit
def row_statistics(logits, targets, logsumexp, at_target, stride, size, wide: tl.constexpr, width: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    tl.store(logsumexp + index, row_logsumexp(row, size, wide, width))
    tl.store(at_target + index, target_logit(row, tl.load(targets + index), size, 0.0, wide))


@triton.jit
def error_rows(
    logits, targets, logsumexp, scales, out, out_stride, stride, size,
    scaled: tl.constexpr, wide: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + index).to(wide) if scaled else 1.0
    row, out_row, target = logits + index * stride, out + index * out_stride, tl.load(targets + index)
    write_row_errors(row, out_row, tl.load(logsumexp + index), target, scale, size, wide, width)


def _launch(kernel: Any, logits: Tensor, *arguments: Any, **constants: Any) -> None:
    """Start a kernel with a program for each row."""
    if len(logits):
        wide, size = tl.float64 if logits.dtype == torch.float64 else tl.float32, logits.shape[1]
        width = min(_WIDTH, triton.next_power_of_2(max(1, size)))
        constants |= {"wide": wide, "width": width, "num_warps": max(4, width // _WARP_WIDTH)}
        kernel[(len(logits),)](logits, *arguments, logits.stride(0), size, **constants)


def _new_column(logits: Tensor) -> Tensor:
    return logits.new_empty(len(logits), 1, dtype=torch.promote_types(logits.dtype, torch.float32))


def losses_of_rows(logits: Tensor, targets: Tensor, *, overwrites: bool) -> Tensor:
    """[N, 1], the cross-entropies of logits [N, V] at targets [N], NaN for a target that is no entry. Rows are
    contiguous; with `overwrites` they become their errors."""
    losses = _new_column(logits)
    _launch(cross_entropy_rows, logits, targets.contiguous(), losses, overwrites=overwrites)
    return losses


def statistics_of_rows(logits: Tensor, column: Tensor, is_here: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row, and its logit at a column, 0 where this is not here; all [N, 1]."""
    logsumexp, at_target = _new_column(logits), _new_column(logits)
    _launch(row_statistics, logits, column.where(is_here, -1), logsumexp, at_target)
    return logsumexp, at_target


def write_errors(
    logits: Tensor, logsumexp: Tensor, column: Tensor, *, is_here: Tensor, output: Tensor, scale: Tensor | None
) -> None:
    """Write probabilities [N, V] minus 1 at the column of each row that is here, times the scale of the row. Other
    tensors are [N, 1]; the output may be the logits."""
    scales = logsumexp if scale is None else scale.contiguous()
    tensors = column.where(is_here, -1), logsumexp.contiguous(), scales, output
    _launch(error_rows, logits, *tensors, output.stride(0), scaled=scale is not None)
