"""Matrix products of 16-bit tensors in float32: inputs and results are rounded to the format, sums are not.

This is what hardware with 16-bit matmuls does: products are exact in float32, and are added in it. A processor without
such hardware is often many times slower with 16-bit kernels than with float32 ones. The mode reaches linear layers,
batched products and attention, forward and backward, where autograd computes in the thread that entered the mode, as
it does on a processor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from motet.precision.torch_private import ATTENTION, ATTENTION_BACKWARD, GROUPED_KERNEL, TorchDispatchMode, tree_map

_aten = torch.ops.aten
_PRODUCTS: frozenset[Any] = frozenset(
    [
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.linear.default,
        _aten.matmul.default,
        GROUPED_KERNEL,
        ATTENTION,
        ATTENTION_BACKWARD,
    ]
)
# Kernels that write into a tensor -> the product whose rounded result is copied there.
_INTO_FIRST_ARGUMENT: dict[Any, Any] = {
    _aten.addmm_.default: _aten.addmm.default,
    _aten.baddbmm_.default: _aten.baddbmm.default,
}
_INTO_OUT: dict[Any, Any] = {
    _aten.mm.out: _aten.mm.default,
    _aten.bmm.out: _aten.bmm.default,
    _aten.addmm.out: _aten.addmm.default,
    _aten.baddbmm.out: _aten.baddbmm.default,
}
# The log of the sum of exponentials, which attention keeps for backward, is float32 in each dtype.
_FLOAT32_RESULTS = {ATTENTION: frozenset([1])}


class _Float32ProductsMode(TorchDispatchMode):
    """Widens tensors of `dtype` for products, and rounds the results to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = dtype

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, *call: Any, **named: Any) -> Any:
        """Call a kernel of torch; `call` is its positional arguments and those by name."""
        args, kwargs = call[0], dict(call[1] or {})
        if func in _PRODUCTS:
            return self._multiply(func, args, kwargs)
        if func in _INTO_FIRST_ARGUMENT and args[0].dtype == self._dtype:
            return args[0].copy_(self._multiply(_INTO_FIRST_ARGUMENT[func], args, kwargs))
        if func in _INTO_OUT and kwargs["out"].dtype == self._dtype:
            out = kwargs.pop("out")
            return out.copy_(self._multiply(_INTO_OUT[func], args, kwargs))
        return func(*args, **kwargs)

    def _multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_format = False

        def widen(value: Any) -> Any:
            nonlocal has_format
            if not isinstance(value, Tensor) or value.dtype != self._dtype:
                return value
            has_format = True
            return value.to(torch.float32)

        widened, named = tree_map(widen, args), tree_map(widen, kwargs)
        result = func(*widened, **named)
        if not has_format:
            return result
        if isinstance(result, Tensor):
            return result.to(self._dtype)
        kept = _FLOAT32_RESULTS.get(func, frozenset())
        return tuple(
            value.to(self._dtype) if isinstance(value, Tensor) and index not in kept else value
            for index, value in enumerate(result)
        )


@contextmanager
def float32_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors of `dtype` are multiplied in float32, and each result is rounded to `dtype` once."""
    with _Float32ProductsMode(dtype):
        yield
