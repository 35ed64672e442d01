"""The tokens of complete rows, where a rank has only a part of each row.

A limit of the load of an expert in a row needs the choices of all tokens of the row. By default a tensor has them all.
While a module runs on a part of each row, an exchange between ranks is set, which gathers them.
"""

from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class RowExchange(Protocol):
    """Gathers tensors of tokens from the ranks that share rows. Neither direction has a gradient."""

    def whole_rows(self, part: Tensor) -> Tensor:
        """[R, t, ...] of the tokens of this rank -> [R, T, ...] of all tokens, in the order of the row."""
        ...

    def part_of_rows(self, rows: Tensor) -> Tensor:
        """[R, T, ...] of all tokens -> [R, t, ...] of the tokens of this rank."""
        ...


# Set around the forward and the backward of a module that runs on a part of each row: recomputation reads it too.
row_exchange: ContextVar[RowExchange | None] = ContextVar("row exchange", default=None)


def whole_rows(part: Tensor) -> Tensor:
    """[R, t, ...] of the tokens of this rank -> [R, T, ...] of all tokens of the rows."""
    exchange = row_exchange.get()
    return part if exchange is None else exchange.whole_rows(part)


def part_of_rows(rows: Tensor) -> Tensor:
    """[R, T, ...] of all tokens of the rows -> [R, t, ...] of the tokens of this rank."""
    exchange = row_exchange.get()
    return rows if exchange is None else exchange.part_of_rows(rows)
