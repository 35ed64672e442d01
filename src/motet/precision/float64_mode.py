"""The recipe fp64: every request for float32 becomes one for float64.
Many models cast to float32 inside norms, softmax and rotary embeddings, so that `model.double()` is exact only to 1e-9.
Inside this mode, with float64 as the default dtype, their results are exact to rounding in float64."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from motet.precision.torch_private import GROUPED_PRODUCT, active_function_modes


def _grouped_product(x: Tensor, weights: Tensor, offs: Tensor | None = None, **more: Any) -> Tensor:
    """Groups of rows, each multiplied by its matrix: `offs` are the ends of groups, which a run without memory may not
    know. The usual kernel has no float64."""
    if x.dtype != torch.float64 or offs is None or offs.is_meta:
        return cast(Tensor, GROUPED_PRODUCT(x, weights, offs, **more))
    stops = offs.tolist()
    groups = (x[start:stop] @ weight for start, stop, weight in zip([0, *stops], stops, weights, strict=False))
    return torch.cat([*groups, x.new_zeros(len(x) - stops[-1], weights.shape[-1])])


_FLOAT64_EQUIVALENTS: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.float32: torch.float64,
    "torch.FloatTensor": "torch.DoubleTensor",
    GROUPED_PRODUCT: _grouped_product,
}


class _Float32ToFloat64Mode(TorchFunctionMode):
    """Replaces float32 in the arguments of every torch function, and `.float()` by `.double()`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.view:  # It gives bytes a type, and computes nothing
            return func(*args, **(kwargs or {}))
        func = _FLOAT64_EQUIVALENTS.get(func, func)
        return func(*map(_to_float64, args), **{key: _to_float64(value) for key, value in (kwargs or {}).items()})


def _to_float64(value: Any) -> Any:
    return _FLOAT64_EQUIVALENTS.get(value, value) if isinstance(value, torch.dtype | str) else value


@contextmanager
def use_float64() -> Iterator[None]:
    """Inside, everything is computed in float64, except for requests of 16 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # A device's thread of autograd would not have the mode.
        with torch.autograd.set_multithreading_enabled(False), _Float32ToFloat64Mode():
            yield
    finally:
        torch.set_default_dtype(before)


def float32_zero(device: torch.device) -> Tensor:
    """A zero in float32, also inside of the mode: fused optimizers on CUDA read the count of steps in this format."""
    return torch.from_numpy(np.zeros((), dtype=np.float32)).to(device)


def repeatable_float64() -> Callable[[], AbstractContextManager[object]]:
    """The context, made before a forward, in which recomputation is in float64 if that forward was. PyTorch suspends
    modes in `backward`, and a device's thread of autograd has none."""
    mode = next((each for each in active_function_modes() if isinstance(each, _Float32ToFloat64Mode)), None)

    def repeat() -> AbstractContextManager[object]:
        return nullcontext() if mode is None or mode in active_function_modes() else mode

    return repeat
