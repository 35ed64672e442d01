"""Rows of parameters in files, of which the host has those of a few units.

The rows of a unit are read by direct IO, in threads, before the unit is gathered: in the order of the units in forward,
and in reverse in backward. When they have travelled to the device, other units get their memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.core.direct_io import aligned_buffer
from motet.memory.tiers.file_tensors import FileTensors, state_file_errors
from motet.memory.tiers.window_layout import WindowLayout, WindowUnit, row_buffer_bytes
from motet.models.torch_private import is_in_backward


@dataclass(frozen=True)
class FileRows:
    """The rows of a parameter, as a slice of a file. With zeros they have `padded` elements."""

    files: FileTensors
    kind: str
    index: int
    padded: int
    dtype: torch.dtype

    @property
    def memory_bytes(self) -> int:
        """The bytes of a buffer for them."""
        return row_buffer_bytes(self.padded, self.dtype.itemsize)


@dataclass(frozen=True)
class RowUnit:
    """Parameters that are gathered together."""

    rows: Sequence[FileRows]
    reads_again: bool  # Whether backward gathers them again

    @property
    def memory_bytes(self) -> int:
        """The bytes of a buffer for all of them."""
        return sum(rows.memory_bytes for rows in self.rows)


class RowBuffer:
    """Aligned memory of the host, which is pinned for a GPU."""

    def __init__(self, byte_count: int, device: torch.device) -> None:
        self.size, self._device = byte_count, device
        self._sent: torch.cuda.Event | None = None  # After the last copy to the device
        self.bytes = (
            torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)
            if device.type == "cuda"
            else torch.frombuffer(aligned_buffer(byte_count), dtype=torch.uint8, count=byte_count)
        )

    def leave(self) -> None:
        """Note that the device has been given all copies."""
        if self._device.type == "cuda":
            self._sent = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Wait until the copies have been made."""
        if self._sent is not None:
            self._sent.synchronize()


class _UnitRead:
    """The rows of a unit, which are read or being read."""

    def __init__(self, index: int, unit: RowUnit, buffer: RowBuffer) -> None:
        self.index, self.buffer, self._unit = index, buffer, unit
        self.left = set(range(len(unit.rows)))  # Rows that have not travelled yet
        self._futures, self._tensors, start = list[Future[None]](), list[Tensor](), 0
        memory = buffer.bytes.numpy().data
        for rows in unit.rows:
            end = start + rows.memory_bytes
            self._futures += rows.files.start_read(rows.kind, rows.index, memory[start:end])
            self._tensors.append(buffer.bytes[start:end].view(rows.dtype)[: rows.padded])
            start = end

    def finish(self) -> None:
        """Wait for the reads; raise the first error of one."""
        if not self._futures:
            return
        futures, self._futures = self._futures, []
        wait(futures)
        for future in futures:
            with state_file_errors("read"):
                future.result()
        for rows, tensor in zip(self._unit.rows, self._tensors, strict=True):
            tensor[rows.files.layout.lengths[rows.index] :] = 0

    def abandon(self) -> None:
        """Wait for the reads, whether they fail or not."""
        wait(self._futures)

    def take(self, position: int) -> Tensor:
        """The rows of one parameter."""
        self.left.discard(position)
        return self._tensors[position]


class RowWindow:
    """The rows of the units of an engine, of which at most `ahead` and the one that is gathered are on the host."""

    def __init__(self, units: Sequence[RowUnit], device: torch.device, *, ahead: int, turns: bool) -> None:
        """`units` are in the order of a forward. With `turns`, the backward of a forward follows it."""
        sizes = (WindowUnit(unit.memory_bytes, unit.reads_again) for unit in units)
        self.layout = WindowLayout(tuple(sizes), ahead, turns)
        self._units, self._device = units, device
        self._reading = deque[_UnitRead]()
        self._upcoming: Iterator[int] = iter(())
        self._free, self._forward_follows = list[RowBuffer](), False
        self.records_gradients = True  # Whether the forward that runs has a backward

    def fetch(self, unit: int, position: int, send: Callable[[Tensor], Tensor]) -> Tensor:
        """The rows of a parameter as `send` copies them to the device, with zeros as padding."""
        if not self._reading or self._reading[0].index != unit or position not in self._reading[0].left:
            self._predict_from(unit)
        self._read_ahead()
        read = self._reading[0]
        read.finish()
        sent = send(read.take(position))
        if not read.left:
            self._reading.popleft()
            read.buffer.leave()
            self._free.append(read.buffer)
        return sent

    def expect_forward(self) -> None:
        """Called before a backward after which another forward follows in this step."""
        self._forward_follows = self.layout.turns

    def _predict_from(self, unit: int) -> None:
        in_backward = is_in_backward()
        follows = self._forward_follows and in_backward
        self.drop()
        self._upcoming = self.layout.order_from(unit, in_backward=in_backward, has_backward=self.records_gradients)
        self._forward_follows = follows

    def drop(self) -> None:
        """Forget what was read ahead and what follows, since files are going to change."""
        self._upcoming, self._forward_follows = iter(()), False
        while self._reading:
            read = self._reading.popleft()
            read.abandon()
            self._free.append(read.buffer)

    def _read_ahead(self) -> None:
        while len(self._reading) <= self.layout.ahead and (index := self._next_unit()) is not None:
            unit = self._units[index]
            self._reading.append(_UnitRead(index, unit, self._take_buffer(unit.memory_bytes)))

    def _next_unit(self) -> int | None:
        index = next(self._upcoming, None)
        if index is None and self._forward_follows:
            self._forward_follows = False
            self._upcoming = self.layout.order_from(0, in_backward=False)
            index = next(self._upcoming, None)
        return index

    def _take_buffer(self, byte_count: int) -> RowBuffer:
        """A free buffer of this size, or a new one for which free ones of other sizes are given up."""
        buffer = next((each for each in self._free if each.size == byte_count), None)
        if buffer is None:
            self._free.clear()
            return RowBuffer(byte_count, self._device)
        self._free.remove(buffer)
        buffer.wait()
        return buffer
