"""Some of the elements: the largest ones with their indices, or random ones whose indices follow from the seed.

Values travel in the tensor's dtype. Top-k counts a non-finite number as larger than all others, so that one at least
is sent. Random-k may miss it and therefore makes all its values NaN.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import read_numbers
from motet.collectives.compression.codec_options import RandomKCodecOptions, TopKCodecOptions, index_bytes

_INDEX_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def select_top_k(codec: TopKCodecOptions, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(ascending indices, values) of the largest elements."""
    flat = tensor.reshape(-1)
    indices = flat.abs().topk(codec.kept_elements(flat.numel()), sorted=False).indices.sort().values
    return indices, flat[indices]


def pack_message(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The message: all indices, then all values."""
    # An index from 2**15 up wraps to a negative int16, and back in `split`.
    narrow = indices.to(_INDEX_DTYPES[index_bytes(numel)])
    return torch.cat([narrow.view(torch.uint8), values.contiguous().view(torch.uint8)])


def unpack_message(message: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(indices, values)"""
    width = index_bytes(numel)
    end = message.numel() // (width + dtype.itemsize) * width
    indices = read_numbers(message, 0, end, _INDEX_DTYPES[width]).long()
    return indices & 0xFFFF if width == 2 else indices, read_numbers(message, end, message.numel(), dtype)


def encode_top_k(codec: TopKCodecOptions, tensor: Tensor) -> Tensor:
    return pack_message(*select_top_k(codec, tensor), tensor.numel())


def decode_top_k(message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    numel = prod(shape)
    return scatter_to_dense(*unpack_message(message, numel, dtype), numel).view(tuple(shape))


def scatter_to_dense(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """A flat tensor that is zero elsewhere. Values with the same index are added."""
    return values.new_zeros(numel).index_add_(0, indices, values)


def random_k_indices(codec: RandomKCodecOptions, numel: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ascending indices, lengths of the parts that they stand for), drawn on the CPU: the same for all devices."""
    kept = codec.kept_elements(numel)
    bounds = torch.arange(kept + 1) * numel // max(kept, 1)
    lengths = bounds.diff()
    draws = torch.rand(kept, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (bounds[:-1] + (draws * lengths).long()).to(device), lengths.to(device)


def values_at(tensor: Tensor, indices: Tensor) -> Tensor:
    """The elements at the indices; all are NaN if any of the tensor, there or elsewhere, is not finite."""
    flat = tensor.reshape(-1)
    return torch.where(flat.isfinite().all(), flat[indices], torch.nan)


def encode_random_k(codec: RandomKCodecOptions, tensor: Tensor, seed: int) -> Tensor:
    return values_at(tensor, random_k_indices(codec, tensor.numel(), seed, tensor.device)[0]).view(torch.uint8)


def decode_random_k(
    codec: RandomKCodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype, seed: int
) -> Tensor:
    indices, lengths = random_k_indices(codec, prod(shape), seed, message.device)
    values = read_numbers(message, 0, message.numel(), dtype)
    return scatter_to_dense(indices, values * lengths if codec.unbiased else values, prod(shape)).view(tuple(shape))
