"""PowerSGD: a matrix M [rows, columns] as P Q', by one power iteration from Q of the previous training step.

P = orthonormal(M Q), Q = M' P. Both are linear in M except for the orthonormalisation, so that ranks sum them by two
all-reduces. P and Q are float32. A non-finite number makes all of the result NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from motet.collectives.compression import lazy_torch as torch
from motet.collectives.compression.codec_base import SCALE_BYTES, Codec, element_bytes
from motet.core.dtypes import dtype_name


@dataclass(frozen=True)
class PowerSGDCodec(Codec):
    """A matrix as the product of two thin ones (arXiv:1905.13727), or uncompressed if the product is not smaller."""

    name = "powersgd"
    rank: int = 4

    def factor_shape(self, shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
        """(rows, columns, rank), or None if the product is not smaller. The first dim gives the rows."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], prod(shape[1:])
        rank = min(self.rank, rows, columns)
        is_smaller = rank * (rows + columns) * SCALE_BYTES < rows * columns * element_bytes(dtype)
        return (rows, columns, rank) if is_smaller else None

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        rows, columns, rank = self.factor_shape(shape, dtype) or (0, 0, 0)
        return rank * (rows + columns) * SCALE_BYTES if rank else prod(shape) * element_bytes(dtype)

    def encode(self, tensor: "torch.Tensor", seed: int) -> "torch.Tensor":
        factors = self.factor_shape(tensor.shape, dtype_name(tensor.dtype))
        if factors is None:
            return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        rows, columns, rank = factors
        matrix = as_matrix(tensor, rows, columns)
        left = orthonormalize(matrix @ initial_basis((columns, rank), seed, tensor.device))
        return torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).view(torch.uint8)

    def decode(self, message: "torch.Tensor", shape: Sequence[int], dtype: "torch.dtype", seed: int) -> "torch.Tensor":
        factors = self.factor_shape(shape, dtype_name(dtype))
        if factors is None:
            return message.clone().view(dtype).view(tuple(shape))
        rows, columns, rank = factors
        left, right = message.clone().view(torch.float32).split([rows * rank, columns * rank])
        product: torch.Tensor = left.view(rows, rank) @ right.view(columns, rank).T
        return product.view(tuple(shape)).to(dtype)


def as_matrix(tensor: "torch.Tensor", rows: int, columns: int) -> "torch.Tensor":
    """The tensor as a contiguous float32 matrix, since strides may decide the last bits of a product."""
    return tensor.reshape(rows, columns).to(torch.float32).contiguous()


def initial_basis(shape: tuple[int, int], seed: int, device: "torch.device") -> "torch.Tensor":
    """A random Q, drawn on the CPU: the same for all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(device)


def orthonormalize(tall: "torch.Tensor") -> "torch.Tensor":
    """Columns that span those of `tall`; all NaN if one of its elements is not finite."""
    finite = tall.isfinite()
    basis: torch.Tensor = torch.linalg.qr(torch.where(finite, tall, 0))[0]
    return torch.where(finite.all(), basis, torch.nan)
