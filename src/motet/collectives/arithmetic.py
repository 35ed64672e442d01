"""How contributions are joined: one operator on tensors of one dtype, for every dtype that has it.

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

Operator = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
OPERATORS: tuple[str, ...] = get_args(Operator)

_LOW = (torch.float16, torch.bfloat16)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch cannot add these; the bits of sums and products are those of signed numbers. Their order is numpy's to say."""
_PIECE = 1 << 16
"""Elements that are widened at a time: they stay in the cache."""

_TORCH: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_ORDER: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One operator on tensors of one dtype."""

    operator: Operator
    dtype: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether each joining in this dtype loses bits that float32 keeps."""
        return self.dtype in _LOW and self.operator in ("sum", "avg", "product")

    def join(self, target: Tensor, own: Tensor, arrived: Iterable[Tensor], divisor: int = 1) -> None:
        """`own` with all that arrives, in order, into `target`, which may be one of them; and divided."""
        if self.rounds:
            parts = [own, *arrived]
            if len(parts) > 2:
                self._join_wide(target, parts, divisor)
                return
            arrived = parts[1:]
        for other in arrived:
            self._both(target, own, other)
            own = target
        if divisor > 1:
            self.divide(target, divisor)

    def _join_wide(self, target: Tensor, parts: list[Tensor], divisor: int) -> None:
        for pieces in zip(target.split(_PIECE), *(part.split(_PIECE) for part in parts), strict=True):
            total = pieces[1].float()
            for piece in pieces[2:]:
                _TORCH[self.operator](total, piece, out=total)
            pieces[0].copy_(total.div_(divisor) if divisor > 1 else total)

    def _both(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        if self.dtype in _SIGNED and self.operator in _ORDER:
            _ORDER[self.operator](a.numpy(), b.numpy(), out=target.numpy())
            return
        if self.dtype in _SIGNED or self.dtype == torch.bool:  # whose bytes are 0 and 1
            bits = _SIGNED.get(self.dtype, torch.uint8)
            target, a, b = target.view(bits), a.view(bits), b.view(bits)
        _TORCH[self.operator](a, b, out=target)

    def divide(self, tensor: Tensor, count: int) -> None:
        """Make an average of a sum of so many, in place."""
        if self.dtype in _SIGNED:
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
    if (dtype.is_complex or dtype.is_floating_point) and operator in ("band", "bor", "bxor"):
        raise InputError(f"{operator} of {name}: only integers have bits to combine; use sum, product, min or max")
    if dtype in _SIGNED and device.type != "cpu":
        raise InputError(f"{operator} of {name} on {device.type}: torch cannot; convert it to int64")
    return Arithmetic(known, dtype)
