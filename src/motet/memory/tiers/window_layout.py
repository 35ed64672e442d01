"""The window of rows that the host reads from files, without files: the order of the reads, and the memory of buffers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from motet.core.direct_io import padded_bytes


def row_buffer_bytes(padded_numel: int, width: int) -> int:
    """The memory for the rows of one parameter, with their padding and that of direct IO."""
    return padded_bytes(padded_numel * width)


@dataclass(frozen=True)
class WindowUnit:
    """Parameters that are gathered together."""

    memory_bytes: int  # Of a buffer for all rows; 0 without rows
    reads_again: bool  # Whether backward gathers them again


@dataclass(frozen=True)
class WindowLayout:
    """The units of an engine, in the order of a forward; the host has the rows of `ahead` units and one more."""

    units: tuple[WindowUnit, ...]
    ahead: int
    turns: bool  # Whether the backward of a forward follows it

    def order_from(self, unit: int, *, in_backward: bool, has_backward: bool = True) -> Iterator[int]:
        """The units that are gathered from this one on, in forward or backward."""
        again = [index for index in reversed(range(len(self.units))) if self.units[index].reads_again]
        if in_backward:
            order = [index for index in again if index <= unit]
        else:
            order = [*range(unit, len(self.units)), *(again if self.turns and has_backward else [])]
        return (index for index in order if self.units[index].memory_bytes)

    def memory_bytes(self, *, microbatches: int) -> int:
        """The most bytes of all buffers in a step."""
        forward, backward = (
            [*self.order_from(unit, in_backward=bool(unit))] for unit in (0, len(self.units) - 1)
        )
        orders = [forward + forward * (self.turns and microbatches > 1), backward]
        return max((self._bytes_of(window) for order in orders for window in self._windows(order)), default=0)

    def _windows(self, order: list[int]) -> Iterator[list[int]]:
        return (order[start : start + self.ahead + 1] for start in range(len(order)))

    def _bytes_of(self, window: Iterable[int]) -> int:
        return sum(self.units[index].memory_bytes for index in window)
