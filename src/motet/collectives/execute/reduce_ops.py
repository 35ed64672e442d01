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

ReduceOpName = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
REDUCE_OP_NAMES: tuple[str, ...] = get_args(ReduceOpName)

_HALF_PRECISION = (torch.float16, torch.bfloat16)
# Torch cannot add these; the bits of sums and products are those of signed numbers. Their order is numpy's to say.
_SIGNED_VIEWS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDENED_ELEMENTS = 1 << 16  # Elements that are widened at a time: they stay in the cache

_TORCH_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_NUMPY_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, slots=True)
class DtypeReduceOp:
    """One operator on tensors of one dtype."""

    operator: ReduceOpName
    dtype: torch.dtype

    @property
    def needs_wide_accumulation(self) -> bool:
        """Whether each joining in this dtype loses bits that float32 keeps."""
        return self.dtype in _HALF_PRECISION and self.operator in ("sum", "avg", "product")

    def accumulate(self, target: Tensor, local: Tensor, received: Iterable[Tensor], divisor: int = 1) -> None:
        """`own` with all that arrives, in order, into `target`, which may be one of them; and divided."""
        if self.needs_wide_accumulation:
            terms = [local, *received]
            if len(terms) > 2:
                self._accumulate_in_float32(target, terms, divisor)
                return
            received = terms[1:]
        for other in received:
            self._apply(target, local, other)
            local = target
        if divisor > 1:
            self.divide(target, divisor)

    def _accumulate_in_float32(self, target: Tensor, terms: list[Tensor], divisor: int) -> None:
        for slices in zip(
            target.split(_WIDENED_ELEMENTS), *(part.split(_WIDENED_ELEMENTS) for part in terms), strict=True
        ):
            total = slices[1].float()
            for term_slice in slices[2:]:
                _TORCH_FUNCTIONS[self.operator](total, term_slice, out=total)
            slices[0].copy_(total.div_(divisor) if divisor > 1 else total)

    def _apply(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        if self.dtype in _SIGNED_VIEWS and self.operator in _NUMPY_FUNCTIONS:
            _NUMPY_FUNCTIONS[self.operator](a.numpy(), b.numpy(), out=target.numpy())
            return
        if self.dtype in _SIGNED_VIEWS or self.dtype == torch.bool:  # whose bytes are 0 and 1
            bits = _SIGNED_VIEWS.get(self.dtype, torch.uint8)
            target, a, b = target.view(bits), a.view(bits), b.view(bits)
        _TORCH_FUNCTIONS[self.operator](a, b, out=target)

    def divide(self, tensor: Tensor, count: int) -> None:
        """Make an average of a sum of so many, in place."""
        if self.dtype in _SIGNED_VIEWS:
            np.floor_divide(tensor.numpy(), count, out=tensor.numpy())
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            tensor.div_(count)
        else:
            tensor.div_(count, rounding_mode="trunc")


def make_reduce_op(operator: str, dtype: torch.dtype, device: torch.device) -> DtypeReduceOp:
    """How to reduce; a sentence for what cannot be."""
    name = str(dtype).removeprefix("torch.")
    for known in get_args(ReduceOpName):
        if operator == known:
            break
    else:
        raise InputError(f"op {operator!r} is unknown; it is one of {', '.join(REDUCE_OP_NAMES)}")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise InputError(f"{operator} of {name}: it can be moved but not reduced; reduce in bfloat16 or float32")
    if dtype == torch.bool and operator in ("sum", "avg"):
        raise InputError(f"{operator} of bool: use max for any, or min for all; or convert it to an integer")
    if dtype.is_complex and operator in ("min", "max"):
        raise InputError(f"{operator} of {name}: complex numbers have no order; use sum, avg or product")
    if (dtype.is_complex or dtype.is_floating_point) and operator in ("band", "bor", "bxor"):
        raise InputError(f"{operator} of {name}: only integers have bits to combine; use sum, product, min or max")
    if dtype in _SIGNED_VIEWS and device.type != "cpu":
        raise InputError(f"{operator} of {name} on {device.type}: torch cannot; convert it to int64")
    return DtypeReduceOp(known, dtype)
