"""The tokens of complete rows, where a rank has only a part of each row.

A limit of the load of an expert in a row needs the choices of all tokens of the row. By default a tensor has them all.
While a module runs on a part of each row, an exchange between ranks is set, which gathers them.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class RowExchange(Protocol):
    """Gathers tensors of tokens from the ranks that share rows. No gradient goes through it."""

    def on_whole_rows(self, compute: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        """The part of this rank of the result of `compute`, from the tensors of complete rows."""
        ...


# Set around the forward and the backward of a module that runs on a part of each row: recomputation reads it too.
row_exchange: ContextVar[RowExchange | None] = ContextVar("row exchange", default=None)


def on_whole_rows(compute: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """The result of `compute` on complete rows [R, T, ...], for the tokens [R, t, ...] of this rank."""
    exchange = row_exchange.get()
    return compute(*parts) if exchange is None else exchange.on_whole_rows(compute, *parts)
