"""Results that recomputation keeps: code that computes one asks here, and `memory` decides."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class KeptResults(Protocol):
    """Keeps results in a forward, and returns them in its recomputation."""

    is_paused: bool  # Inside of a result that it keeps

    def product(self, compute: Callable[[], Tensor]) -> Tensor:
        """The result of `compute`; in recomputation, the result of the forward."""
        ...


results_in_use: ContextVar[KeptResults | None] = ContextVar("kept results", default=None)


def is_result_pending() -> bool:
    """Whether `keep_result` runs, so that only its result is kept."""
    results = results_in_use.get()
    return results is not None and results.is_paused


def keep_result(compute: Callable[[], Tensor]) -> Tensor:
    """A product with the operations on it, such as a sum over ranks: selective recomputation repeats neither."""
    results = results_in_use.get()
    if results is None or results.is_paused:
        return compute()
    results.is_paused = True
    try:
        return results.product(compute)
    finally:
        results.is_paused = False
