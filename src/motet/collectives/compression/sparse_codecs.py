"""The codecs that send some of the elements: the largest ones, each with its index, or random ones.

A non-finite number counts as larger than all others, so that top-k sends at least one. Random indices follow from the
seed, so that only values travel; they may miss a non-finite number, so one such number makes all values NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from motet.collectives.compression import lazy_torch as torch
from motet.collectives.compression.codec_base import SparseCodec, element_bytes, index_bytes

_INDEX_DTYPES = {2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class TopKCodec(SparseCodec):
    """The fraction `keep` of the elements that are largest in magnitude: an index and a value for each."""

    name = "topk"

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        numel = prod(shape)
        return self.kept_elements(numel) * (index_bytes(numel) + element_bytes(dtype))

    def select(self, tensor: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """(ascending indices, values) of the largest elements."""
        flat = tensor.reshape(-1)
        indices = flat.abs().topk(self.kept_elements(flat.numel()), sorted=False).indices.sort().values
        return indices, flat[indices]

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        return pack_sparse(*self.select(tensor), tensor.numel())

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        indices, values = unpack_sparse(message, prod(shape), dtype)
        return values.new_zeros(prod(shape)).index_add_(0, indices, values).view(tuple(shape))


def pack_sparse(indices: "torch.Tensor", values: "torch.Tensor", numel: int) -> "torch.Tensor":
    """The message: all indices, then all values."""
    # An index from 2**15 up wraps to a negative int16, and back in `unpack_sparse`.
    narrow = indices.to(getattr(torch, _INDEX_DTYPES[index_bytes(numel)]))
    return torch.cat([narrow.view(torch.uint8), values.contiguous().view(torch.uint8)])


def unpack_sparse(message: "torch.Tensor", numel: int, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor]":
    """(indices, values) of a message."""
    width = index_bytes(numel)
    end = message.numel() // (width + dtype.itemsize) * width
    indices = message[:end].clone().view(getattr(torch, _INDEX_DTYPES[width])).long()
    return indices & 0xFFFF if width == 2 else indices, message[end:].clone().view(dtype)


@dataclass(frozen=True)
class RandomKCodec(SparseCodec):
    """One element at random from each of k equal parts of the tensor. All ranks draw the same: only values travel.

    `unbiased` multiplies what arrives by the length of its part. With error feedback it has to be off: the error
    would be multiplied as well, and grow.
    """

    name = "randomk"
    unbiased: bool = True

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        return self.kept_elements(prod(shape)) * element_bytes(dtype)

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        flat = tensor.reshape(-1)
        indices, _ = self._draw_indices(flat.numel(), seed, tensor.device)
        return torch.where(flat.isfinite().all(), flat[indices], torch.nan).view(torch.uint8)

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        indices, lengths = self._draw_indices(prod(shape), seed, message.device)
        values = message.clone().view(dtype)
        values = values * lengths if self.unbiased else values
        return values.new_zeros(prod(shape)).index_add_(0, indices, values).view(tuple(shape))

    def _draw_indices(self, numel: int, seed: int, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
        """(ascending indices, lengths of the parts that they stand for), drawn on the CPU: the same for all devices."""
        kept = self.kept_elements(numel)
        bounds = torch.arange(kept + 1) * numel // max(kept, 1)
        lengths = bounds.diff()
        draws = torch.rand(kept, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (bounds[:-1] + (draws * lengths).long()).to(device), lengths.to(device)
