"""Sketches of large tensors: sums of their elements with pseudo-random signs.

Sketching is linear, so sums of tensors have the sums of their sketches, and it keeps norms approximately.
"""

from functools import lru_cache

import torch
from torch import Tensor

# A shard with more elements than the first gets a sketch of the second size.
MAX_SHARD_NUMEL, SHARD_SKETCH_WIDTH = 2**18, 4096
# The same for one row of an activation.
MAX_ROW_NUMEL, ROW_SKETCH_WIDTH = 2048, 512


def sketch_shard(values: Tensor, start: int) -> Tensor:
    """The sketch of a shard that begins at `start`; the sketches of all shards sum to that of the tensor."""
    return values if values.numel() <= MAX_SHARD_NUMEL else _sketch(values.view(1, -1), start, SHARD_SKETCH_WIDTH)[0]


def sketch_rows(tensor: Tensor) -> Tensor:
    """The sketch of each row by itself; rows are the first dimension."""
    if tensor.ndim < 2 or tensor.shape[0] == 0 or tensor[0].numel() <= MAX_ROW_NUMEL:
        return tensor
    return _sketch(tensor.reshape(tensor.shape[0], -1), 0, ROW_SKETCH_WIDTH)


def _sketch(rows: Tensor, start: int, width: int) -> Tensor:
    count = rows.shape[1]
    signs = _random_signs(start, count)
    padding_before, padding_after = start % width, -(start + count) % width
    signed = torch.nn.functional.pad(rows.double() * signs, (padding_before, padding_after))
    return signed.view(rows.shape[0], -1, width).sum(1)


@lru_cache(maxsize=16)
def _random_signs(start: int, count: int) -> Tensor:
    return (1 - 2 * (_hash_indices(torch.arange(start, start + count)) & 1)).to(torch.int8)


def _hash_indices(indices: Tensor) -> Tensor:
    """Bits that look random (the finaliser of SplitMix64, with arithmetic shifts)."""
    hashed = indices * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        hashed = (hashed ^ (hashed >> shift)) * factor
    return (hashed ^ (hashed >> 31)) >> 17
