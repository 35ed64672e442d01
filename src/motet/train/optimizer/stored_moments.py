"""Moments of the shard of a parameter in fewer bits than it is updated with.

8-bit codes are numbers of a table with seven digits of range, times the scale of their block, which is the largest
absolute value in it. The table holds 1, so that values that were decoded have the same scale and codes again.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from motet.precision.moment_formats import IN_BLOCKS, block_elements

RandomBits = Callable[[], Tensor]  # 32 bits for each element, of which the upper 16 are used
# With a smaller scale, products with the smallest number of a table would be no normal numbers of float32.
_SMALLEST_SCALE = 2.0**-100


class StoredMoment(Protocol):
    """One moment of consecutive elements of a parameter."""

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        """The values of some elements, of whole blocks."""

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        """Replace them, rounded stochastically with random bits if the format asks for it, else to the nearest."""


def make_stored_moment(
    dtype: str, numel: int, *, shape: torch.Size, is_signed: bool, device: torch.device
) -> StoredMoment:
    """Zeros for `numel` elements of a parameter of this shape."""
    if dtype == IN_BLOCKS:
        return BlockwiseMoment(numel, block_elements(shape), is_signed=is_signed, device=device)
    return DtypeMoment(torch.zeros(numel, dtype=getattr(torch, dtype), device=device))


class DtypeMoment:
    """A moment in a floating-point dtype."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        return self.values[where].to(dtype)

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        if random_bits is not None and self.values.dtype == torch.bfloat16:
            values = round_stochastically(values.float(), random_bits())
        self.values[where] = values


class BlockwiseMoment:
    """A moment as one code for each element and one scale for each block."""

    def __init__(self, numel: int, block: int, *, is_signed: bool, device: torch.device) -> None:
        self._block, self._is_signed = block, is_signed
        self._table = torch.tensor(code_table(is_signed=is_signed), device=device)
        self._borders = (self._table[1:] + self._table[:-1]) / 2
        self._zero = int(self._table.eq(0).nonzero())
        self.codes = torch.full((numel,), self._zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(numel // block, device=device)

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        values = self._table[self.codes[where].int()].view(-1, self._block)
        return (values * self.scales[self._blocks(where)].unsqueeze(1)).view(-1).to(dtype)

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        """Replace them by the nearest numbers of the table. Of a second moment, what is not zero does not become it:
        the update divides by its root."""
        blocks = values.float().view(-1, self._block)
        largest = blocks.abs().amax(1, keepdim=True)
        scales = torch.where(largest >= _SMALLEST_SCALE, largest, torch.zeros_like(largest))
        codes = torch.bucketize(blocks / scales.clamp(min=_SMALLEST_SCALE), self._borders)
        if not self._is_signed:
            codes.masked_fill_((codes == self._zero) & (blocks > 0), self._zero + 1)
        self.codes[where] = torch.where(scales > 0, codes, self._zero).view(-1).to(torch.uint8)
        self.scales[self._blocks(where)] = scales.view(-1)

    def _blocks(self, where: slice) -> slice:
        return slice(where.start // self._block, where.stop // self._block)


@cache
def code_table(*, is_signed: bool) -> tuple[float, ...]:
    """The numbers of the codes, in ascending order: zero, and in each factor of ten below 1 half as many numbers, at
    equal distances, as in the one above, down to a single one."""
    decades = 7 if is_signed else 8
    numbers = sorted(
        10.0**-decade * (0.1 + 0.9 * (index + 1) / count)
        for decade in range(decades)
        for count in [2 ** (decades - 1 - decade)]
        for index in range(count)
    )
    return (*(-number for number in reversed(numbers)), 0.0, *numbers) if is_signed else (0.0, *numbers)


def round_stochastically(values: Tensor, random_bits: Tensor) -> Tensor:
    """float32 values as bfloat16: up or down with probabilities whose mean is the value.

    The lower half of the 32 bits of a value is what bfloat16 cuts off. A random number of 16 bits is added, so that
    the sum carries into the upper half in as many cases as the part that is cut off says.
    """
    carried = values.view(torch.int32) + ((random_bits >> 16) & 0xFFFF)
    rounded = (carried & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
