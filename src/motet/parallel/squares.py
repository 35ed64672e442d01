"""The sum of squares of a tensor, whatever its size: torch's norm of millions of float32 is off in the fourth digit."""

import torch
from torch import Tensor

ROW = 4096
"""Numbers that are added in their own precision; these sums are added in float64."""


def squares_of(tensor: Tensor) -> float:
    if tensor.dtype == torch.float64:  # good to its own rounding
        return float(torch.linalg.vector_norm(tensor).item() ** 2)
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return float(norms.double().square().sum() + rest.double().square())
