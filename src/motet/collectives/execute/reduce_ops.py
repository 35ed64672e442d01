"""The reduction operators, each for every dtype that supports it.

The terms of one step are added in the order of the list. Terms of 16 bits are added in float32 and rounded once at the
end of the step. Messages, and sums between steps, have the dtype of the tensor: a sum is rounded once in each step that
adds to it. Averages are sums that are divided at the end. Integers round towards zero, and wrap around.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from motet.core.errors import check_input
from motet.core.units import dtype_name

ReduceOpName = Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
REDUCE_OP_NAMES: tuple[str, ...] = get_args(ReduceOpName)

_HALF_PRECISION = (torch.float16, torch.bfloat16)
# Torch cannot add these; sums and products have the same bits as signed ones. Numpy compares them.
_SIGNED_VIEWS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDENED_ELEMENTS = 1 << 16  # Widened together, so that they stay in the cache

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
        """Whether each operation in this dtype loses bits that float32 keeps."""
        return self.dtype in _HALF_PRECISION and self.operator in ("sum", "avg", "product")

    def accumulate(self, target: Tensor, local: Tensor, received: Iterable[Tensor], *, divisor: int = 1) -> None:
        """Reduce `local` and then each received tensor into `target`, which may be one of them, and divide."""
        if self.needs_wide_accumulation:
            received = list(received)
            if len(received) > 1:
                self._accumulate_in_float32(target, [local, *received], divisor)
                return
        for other in received:
            self._apply(target, local, other)
            local = target
        if divisor > 1:
            self.divide(target, divisor)

    def _accumulate_in_float32(self, target: Tensor, terms: list[Tensor], divisor: int) -> None:
        for out, first, *others in zip(*(tensor.split(_WIDENED_ELEMENTS) for tensor in (target, *terms)), strict=True):
            total = first.float()
            for other in others:
                _TORCH_FUNCTIONS[self.operator](total, other, out=total)
            out.copy_(total.div_(divisor) if divisor > 1 else total)

    def _apply(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        if self.dtype in _SIGNED_VIEWS and self.operator in _NUMPY_FUNCTIONS:
            _NUMPY_FUNCTIONS[self.operator](a.numpy(), b.numpy(), out=target.numpy())
            return
        if self.dtype in _SIGNED_VIEWS or self.dtype == torch.bool:  # whose bytes are 0 and 1
            bits = _SIGNED_VIEWS.get(self.dtype, torch.uint8)
            target, a, b = target.view(bits), a.view(bits), b.view(bits)
        _TORCH_FUNCTIONS[self.operator](a, b, out=target)

    def divide(self, tensor: Tensor, count: int) -> None:
        """Turn a sum into an average, in place."""
        if self.dtype in _SIGNED_VIEWS:
            np.floor_divide(tensor.numpy(), count, out=tensor.numpy())
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            tensor.div_(count)
        else:
            tensor.div_(count, rounding_mode="trunc")


def make_reduce_op(operator: str, dtype: torch.dtype, device: torch.device) -> DtypeReduceOp:
    """The operator for a dtype, or an InputError if the dtype does not support it."""
    check_input(operator in REDUCE_OP_NAMES, f"op {operator!r} is unknown; use one of {', '.join(REDUCE_OP_NAMES)}")
    is_number = dtype.is_floating_point or dtype.is_complex
    is_small, is_bits = is_number and not dtype.is_complex and dtype.itemsize == 1, operator in ("band", "bor", "bxor")
    problems = {
        ": it can be moved but not reduced; reduce in bfloat16 or float32": is_small,
        ": use max for any, or min for all; or convert it to an integer": dtype == torch.bool and operator == "avg",
        ": complex numbers have no order; use sum, avg or product": dtype.is_complex and operator in ("min", "max"),
        ": only integers have bits to combine; use sum, product, min or max": is_number and is_bits,
        f" on {device.type}: torch cannot; convert it to int64": dtype in _SIGNED_VIEWS and device.type != "cpu",
    }
    for problem, applies in problems.items():
        check_input(not applies, f"{operator} of {dtype_name(dtype)}{problem}")
    if dtype == torch.bool and operator == "sum":
        operator = "max"  # A number that is not zero is true
    return DtypeReduceOp(cast(ReduceOpName, operator), dtype)
