"""How moments of the optimizer are stored: in a dtype, or as 8-bit codes in blocks of elements that share a scale."""

from collections.abc import Sequence
from math import prod
from typing import Literal

from motet.core.dtypes import DTYPE_BYTES

MomentDtype = Literal["float32", "float64", "bfloat16", "8bit"]
IN_BLOCKS = "8bit"
MAX_BLOCK_ELEMENTS, MIN_BLOCK_ELEMENTS = 256, 16
SCALE_BYTES = DTYPE_BYTES["float32"]


def block_elements(shape: Sequence[int]) -> int:
    """Elements of a parameter that share a scale, or 0 for a parameter whose moments are not stored in 8 bits.

    It is a power of two that divides the rows, so that shards of whole rows are shards of whole blocks. Vectors, and
    matrices with rows of another length, have no such blocks.
    """
    row = prod(shape[1:]) if len(shape) > 1 else 1
    block = min(row & -row, MAX_BLOCK_ELEMENTS)
    return block if block >= MIN_BLOCK_ELEMENTS else 0


def stored_bytes(dtype: str, shape: Sequence[int], numel: int) -> int:
    """Bytes of one moment of `numel` elements of a parameter, which begin with a block."""
    if dtype != IN_BLOCKS:
        return numel * DTYPE_BYTES[dtype]
    return numel + SCALE_BYTES * -(-numel // block_elements(shape))


def bytes_per_element(dtype: str) -> float:
    """Bytes of an element of a moment; in 8 bits that of a matrix whose rows are cut into the largest blocks."""
    if dtype == IN_BLOCKS:
        return stored_bytes(dtype, (1, MAX_BLOCK_ELEMENTS), MAX_BLOCK_ELEMENTS) / MAX_BLOCK_ELEMENTS
    return DTYPE_BYTES[dtype]
