"""The recipe fp64 made true: every request for float32 becomes one for float64.

Many models cast to float32 inside norms, softmax and rotary embeddings, so that `model.double()` alone is only good
to 1e-9. Inside this mode, with float64 as the default dtype, their numbers are good to rounding in float64.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALIASES: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.float32: torch.float64,
    "torch.FloatTensor": "torch.DoubleTensor",
}


class _Promote(TorchFunctionMode):
    """Replaces float32 in the arguments of every torch function, and `.float()` by `.double()`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = _ALIASES.get(func, func)
        return func(*map(_promoted, args), **{key: _promoted(value) for key, value in (kwargs or {}).items()})


def _promoted(value: Any) -> Any:
    return _ALIASES[value] if isinstance(value, torch.dtype | str) and value in _ALIASES else value


@contextmanager
def float64_mode() -> Iterator[None]:
    """Everything computed inside is computed in float64 (but for what is asked for in 16 bits)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote():
            yield
    finally:
        torch.set_default_dtype(before)
