"""How contributions are joined: sum, average, minimum, maximum and product of every dtype that has them.

What arrives in one step is added in the order of the list. Numbers of 16 bits are added in float32 and rounded once at
the end of the step. What travels, and what a rank keeps from one step to the next, is in the dtype of the tensor, so
that a sum is rounded once per step that adds to it; a single sum of two is the same either way. Averages are sums that
are divided at the end; integers are rounded towards zero, and wrap around as everywhere in torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from motet.core.errors import InputError

Operator = Literal["sum", "avg", "min", "max", "product"]
OPERATORS: tuple[str, ...] = get_args(Operator)

_LOW = (torch.float16, torch.bfloat16)
_NUMPY_ONLY = (torch.uint16, torch.uint32, torch.uint64)
_PIECE = 1 << 16
"""Elements that are widened at a time: they stay in the cache."""

_TORCH: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


@dataclass(frozen=True)
class Arithmetic:
    """One operator on tensors of one dtype."""

    operator: Operator
    dtype: torch.dtype

    def join(self, target: Tensor, own: Tensor, arrived: Iterable[Tensor]) -> None:
        """`own` with all that arrives, in order, into `target`, which may be one of them."""
        if self.dtype not in _LOW:
            for other in arrived:
                self._both(target, own, other)
                own = target
            return
        parts = [own, *arrived]
        if len(parts) == 2:
            self._both(target, *parts)
            return
        for pieces in zip(target.split(_PIECE), *(part.split(_PIECE) for part in parts), strict=True):
            total = pieces[1].float()
            for piece in pieces[2:]:
                _TORCH[self.operator](total, piece, out=total)
            pieces[0].copy_(total)

    def _both(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        if self.dtype in _NUMPY_ONLY:
            _NUMPY[self.operator](a.numpy(), b.numpy(), out=target.numpy())
        elif self.dtype == torch.bool:  # as bytes of 0 and 1
            _TORCH[self.operator](a.view(torch.uint8), b.view(torch.uint8), out=target.view(torch.uint8))
        else:
            _TORCH[self.operator](a, b, out=target)

    def divide(self, tensor: Tensor, count: int) -> None:
        """Make an average of a sum of so many, in place."""
        if self.dtype in _NUMPY_ONLY:
            np.floor_divide(tensor.numpy(), count, out=tensor.numpy())
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            tensor.div_(count)
        else:
            tensor.div_(count, rounding_mode="trunc")


def arithmetic(operator: str, dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """How to reduce; a sentence for what cannot be."""
    name = str(dtype).removeprefix("torch.")
    for known in get_args(Operator):
        if operator == known:
            break
    else:
        raise InputError(f"op {operator!r} is unknown; it is one of {', '.join(OPERATORS)}")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise InputError(f"{operator} of {name}: it can be moved but not reduced; reduce in bfloat16 or float32")
    if dtype == torch.bool and operator in ("sum", "avg"):
        raise InputError(f"{operator} of bool: use max for any, or min for all; or convert it to an integer")
    if dtype.is_complex and operator in ("min", "max"):
        raise InputError(f"{operator} of {name}: complex numbers have no order; use sum, avg or product")
    if dtype in _NUMPY_ONLY and device.type != "cpu":
        raise InputError(f"{operator} of {name} on {device.type}: torch cannot; convert it to int64")
    return Arithmetic(known, dtype)
