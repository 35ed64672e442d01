"""The window of rows that the host reads from files, without files: the order of reads, and the memory of buffers."""

from collections.abc import Iterator
from dataclasses import dataclass

from motet.core.direct_io import padded_bytes


def row_buffer_bytes(padded_numel: int, width: int) -> int:
    """The memory for the rows of one parameter, with their padding and that of direct IO."""
    return padded_bytes(padded_numel * width)


@dataclass(frozen=True)
class WindowUnit:
    """Parameters that are gathered together."""

    memory_bytes: int  # A buffer for all rows; 0 without rows
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
        forward = [*self.order_from(0, in_backward=False)]
        backward = [*self.order_from(len(self.units) - 1, in_backward=True)]
        following = forward if self.turns and microbatches > 1 else []  # The next micro-batch, known in a backward
        starts = [forward[start:] for start in range(len(forward))]
        starts += [backward[start:] + following for start in range(len(backward))]
        windows = (order[: self.ahead + 1] for order in starts)
        return max((sum(self.units[index].memory_bytes for index in window) for window in windows), default=0)
