"""Counts of the values of a tensor: by exponent, and by their loss in number formats.

A row of counts is one tensor of integers, so that the rows of ranks add up exactly, in any order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Exponents of two that have a count each; the first and the last also count values beyond them, such as float64's.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 159
_EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
_CHUNK = 1 << 20  # Elements that are counted together, so that little memory is needed


class LostValues(NamedTuple):
    """The finite values other than zero that a format does not hold as normal numbers."""

    vanished: int  # Rounded to zero
    subnormal: int  # Held with fewer digits than others
    saturated: int  # Beyond the largest number


class ValueCounts(NamedTuple):
    """A row of counts by name."""

    zeros: int
    infinite: int
    nan: int
    by_format: tuple[LostValues, ...]
    by_exponent: tuple[int, ...]  # From LOWEST_EXPONENT on: 2^e <= |value| < 2^(e+1)


def row_length(formats: int) -> int:
    """The length of a row for a number of formats."""
    return 3 + len(LostValues._fields) * formats + _EXPONENTS


@torch.no_grad()
def count_values(tensor: Tensor, formats: Sequence[torch.dtype]) -> Tensor:
    """The row of counts of a tensor, on its device."""
    flat = tensor.detach().reshape(-1)
    row = torch.zeros(row_length(len(formats)), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), _CHUNK):
        row += _count_chunk(flat[start : start + _CHUNK], formats)
    return row


def _count_chunk(values: Tensor, formats: Sequence[torch.dtype]) -> Tensor:
    is_finite, is_zero = values.isfinite(), values == 0
    counts = [is_zero.sum(), values.isinf().sum(), values.isnan().sum()]
    magnitudes = values[is_finite & ~is_zero].abs()
    for dtype in formats:
        rounded = magnitudes.to(dtype)
        is_small = rounded < torch.finfo(dtype).smallest_normal
        counts += [(rounded == 0).sum(), (is_small & (rounded != 0)).sum(), rounded.isinf().sum()]
    # frexp has its mantissa from 1/2 to 1, and no kernel for 16 bits on some devices.
    wide = magnitudes if magnitudes.dtype.itemsize > 2 else magnitudes.to(torch.float32)
    exponents = torch.frexp(wide).exponent.to(torch.int64) - 1
    bins = exponents.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    return torch.cat([torch.stack(counts), torch.bincount(bins, minlength=_EXPONENTS)])


def counts_of_row(row: Sequence[int]) -> ValueCounts:
    """The counts of a row by name."""
    zeros, infinite, nan = row[:3]
    losses = row[3 : len(row) - _EXPONENTS]
    width = len(LostValues._fields)
    by_format = tuple(LostValues(*losses[start : start + width]) for start in range(0, len(losses), width))
    return ValueCounts(zeros, infinite, nan, by_format, tuple(row[len(row) - _EXPONENTS :]))
