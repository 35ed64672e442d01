"""Random elements whose indices follow from the seed, so that only values travel.

The choice may miss a non-finite number, so one such number in the tensor makes all values NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from motet.collectives.compression.codec_base import SparseCodec, element_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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

    def encode(self, tensor: "Tensor", seed: int) -> "Tensor":
        import torch

        flat = tensor.reshape(-1)
        indices, _ = self._draw_indices(flat.numel(), seed, tensor.device)
        return torch.where(flat.isfinite().all(), flat[indices], torch.nan).view(torch.uint8)

    def decode(self, message: "Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "Tensor":
        from motet.collectives.compression.block_scaling import read_numbers

        indices, lengths = self._draw_indices(prod(shape), seed, message.device)
        values = read_numbers(message, 0, message.numel(), dtype)
        values = values * lengths if self.unbiased else values
        return values.new_zeros(prod(shape)).index_add_(0, indices, values).view(tuple(shape))

    def _draw_indices(self, numel: int, seed: int, device: "torch.device") -> "tuple[Tensor, Tensor]":
        """(ascending indices, lengths of the parts that they stand for), drawn on the CPU: the same for all devices."""
        import torch

        kept = self.kept_elements(numel)
        bounds = torch.arange(kept + 1) * numel // max(kept, 1)
        lengths = bounds.diff()
        draws = torch.rand(kept, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (bounds[:-1] + (draws * lengths).long()).to(device), lengths.to(device)
