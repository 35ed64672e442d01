"""The sum of squares of a tensor, whatever its size: torch's norm of millions of float32 is off in the fourth digit."""

import torch
from torch import Tensor

BLOCK_ELEMENTS = 4096  # Numbers that are added in their own precision; these sums are added in float64


def squared_norm(tensor: Tensor) -> float:
    if tensor.dtype == torch.float64:  # good to its own rounding
        return float(torch.linalg.vector_norm(tensor).item() ** 2)
    flat = tensor.reshape(-1)
    blocked_numel = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    norms = torch.linalg.vector_norm(flat[:blocked_numel].view(-1, BLOCK_ELEMENTS), dim=1)
    remainder = torch.linalg.vector_norm(flat[blocked_numel:])
    return float(norms.double().square().sum() + remainder.double().square())
