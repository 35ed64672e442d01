"""PowerSGD: a matrix M [rows, columns] as P Q', by one step of power iteration from Q of the training step before.

P = orthonormal(M Q), Q = M' P. Both are linear in M but for the orthonormalisation, so that ranks sum them by two
all-reduces. P and Q are float32. A non-finite number makes all of the result NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.compression.byte_messages import dtype_name, read_numbers
from motet.collectives.compression.codec_options import PowerSGDCodecOptions


def as_matrix(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """In float32. Its layout in memory is always the same, since that may decide the last bits of a product."""
    return tensor.reshape(rows, columns).to(torch.float32).contiguous()


def initial_basis(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """A random Q, drawn on the CPU: the same for all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(device)


def orthonormalize(tall: Tensor) -> Tensor:
    """Columns that span those of `tall`; all NaN if one of its elements is not finite."""
    finite = tall.isfinite()
    basis: Tensor = torch.linalg.qr(torch.where(finite, tall, 0))[0]
    return torch.where(finite.all(), basis, torch.nan)


def encode(codec: PowerSGDCodecOptions, tensor: Tensor, seed: int) -> Tensor:
    factors = codec.factor_shape(tensor.shape, dtype_name(tensor.dtype))
    if factors is None:
        return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    rows, columns, rank = factors
    matrix = as_matrix(tensor, rows, columns)
    left = orthonormalize(matrix @ initial_basis((columns, rank), seed, tensor.device))
    return torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).view(torch.uint8)


def decode(codec: PowerSGDCodecOptions, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    factors = codec.factor_shape(shape, dtype_name(dtype))
    if factors is None:
        return read_numbers(message, 0, message.numel(), dtype).view(tuple(shape))
    rows, columns, rank = factors
    left, right = read_numbers(message, 0, message.numel(), torch.float32).split([rows * rank, columns * rank])
    product: Tensor = left.view(rows, rank) @ right.view(columns, rank).T
    return product.view(tuple(shape)).to(dtype)
