"""PowerSGD: a matrix M [rows, columns] as P Q', found by one step of power iteration that starts from Q of the step before.

P = orthonormal(M Q), Q = M' P. Both are linear in M but for the orthonormalisation, so that ranks sum them by two
all-reduces. P and Q are float32. A non-finite number makes all of the result NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.collectives import execute
from motet.collectives.codecs.blocks import take
from motet.collectives.compress import PowerSGD
from motet.core.seeds import derive_seed


def first_basis(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """A random Q, drawn on the CPU: the same for all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def orthonormal(tall: Tensor) -> Tensor:
    """Columns that span those of `tall`; all NaN if one of its elements is not finite."""
    finite = tall.isfinite()
    basis: Tensor = torch.linalg.qr(torch.where(finite, tall, 0))[0]
    return torch.where(finite.all(), basis, torch.nan)


def encode(codec: PowerSGD, tensor: Tensor, name: str, seed: int) -> Tensor:
    factors = codec.factors(tensor.shape, name)
    if factors is None:
        return tensor.reshape(-1).view(torch.uint8)
    rows, columns, rank = factors
    matrix = tensor.reshape(rows, columns).to(torch.float32)
    left = orthonormal(matrix @ first_basis((columns, rank), seed, tensor.device))
    return torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).view(torch.uint8)


def decode(codec: PowerSGD, message: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    factors = codec.factors(shape, name)
    if factors is None:
        return take(message, 0, message.numel(), dtype).view(*shape)
    rows, columns, rank = factors
    left, right = take(message, 0, message.numel(), torch.float32).split([rows * rank, columns * rank])
    return (left.view(rows, rank) @ right.view(columns, rank).T).view(*shape).to(dtype)
