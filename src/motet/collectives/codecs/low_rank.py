"""PowerSGD: a matrix M [rows, columns] as P Q', by one step of power iteration from Q of the training step before.

P = orthonormal(M Q), Q = M' P. Both are linear in M but for the orthonormalisation, so that ranks sum them by two
all-reduces. P and Q are float32. A non-finite number makes all of the result NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives.codecs.wire import name_of, take
from motet.collectives.compress import PowerSGD


def as_matrix(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """In float32. Its layout in memory is always the same, since that may decide the last bits of a product."""
    return tensor.reshape(rows, columns).to(torch.float32).contiguous()


def first_basis(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """A random Q, drawn on the CPU: the same for all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(device)


def orthonormal(tall: Tensor) -> Tensor:
    """Columns that span those of `tall`; all NaN if one of its elements is not finite."""
    finite = tall.isfinite()
    basis: Tensor = torch.linalg.qr(torch.where(finite, tall, 0))[0]
    return torch.where(finite.all(), basis, torch.nan)


def encode(codec: PowerSGD, tensor: Tensor, seed: int) -> Tensor:
    factors = codec.factors(tensor.shape, name_of(tensor.dtype))
    if factors is None:
        return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    rows, columns, rank = factors
    matrix = as_matrix(tensor, rows, columns)
    left = orthonormal(matrix @ first_basis((columns, rank), seed, tensor.device))
    return torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).view(torch.uint8)


def decode(codec: PowerSGD, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    factors = codec.factors(shape, name_of(dtype))
    if factors is None:
        return take(message, 0, message.numel(), dtype).view(tuple(shape))
    rows, columns, rank = factors
    left, right = take(message, 0, message.numel(), torch.float32).split([rows * rank, columns * rank])
    product: Tensor = left.view(rows, rank) @ right.view(columns, rank).T
    return product.view(tuple(shape)).to(dtype)
