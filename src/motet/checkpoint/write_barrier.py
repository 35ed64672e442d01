"""The values of a save that are not on disk yet, and the barrier that keeps them from the next update.

Masters and moments do not change between updates, so the thread that writes a checkpoint reads them in place. An update
of a slice whose values are not written waits here until they are copied. Values on a GPU always travel through copies
in pinned memory, and those in files are not copied: an update of them waits until they are written.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from threading import Condition

import torch
from torch import Tensor

from motet.checkpoint.safetensors_header import DataBox
from motet.memory.tiers.host_link import HAS_ARRIVED, Arrival, HostLink, ImmediateLink, link_of


class _Progress(Enum):
    WAITING = auto()
    BEING_READ = auto()  # In place
    COPIED = auto()  # Or on the way from the device
    WRITTEN = auto()


@dataclass(eq=False)
class BoxToWrite:
    """A box of a tensor, and the slice of the optimizer whose update changes it; None if no update does."""

    box: DataBox
    values: Tensor
    slice_index: int | None = None
    progress: _Progress = _Progress.WAITING
    arrival: Arrival = HAS_ARRIVED


class WriteBarrier:
    """The boxes that a rank writes in one save. One thread reads them in order; others update slices."""

    def __init__(
        self, boxes: Sequence[BoxToWrite], device: torch.device, *, staging_bytes: int, in_files: bool
    ) -> None:
        """`staging_bytes` limits the copies of values of a GPU. With `in_files`, slices of the optimizer lie there."""
        self.boxes, self._condition = boxes, Condition()
        self._staging_bytes, self._in_files = staging_bytes, in_files
        self._host_link: HostLink = ImmediateLink(device)
        self._device_link = link_of(device) if device.type == "cuda" else self._host_link
        self._held_bytes, self.copied_bytes, self.stall_s = 0, 0, 0.0
        self._left = Counter(box.slice_index for box in boxes if box.slice_index is not None)
        self._by_slice: dict[int, list[BoxToWrite]] = {}
        for box in boxes:
            if box.slice_index is not None:
                self._by_slice.setdefault(box.slice_index, []).append(box)

    # --- the thread that writes -----------------------------------------------------------------------------

    @contextmanager
    def reading(self, box: BoxToWrite) -> Iterator[Tensor]:
        """Inside, the values of a box are there to be read and do not change. Afterwards they are written."""
        with self._condition:
            if box.progress is _Progress.WAITING and not _is_on_host(box.values):
                self._copy(box)
            elif box.progress is _Progress.WAITING:
                box.progress = _Progress.BEING_READ
            values = box.values
        try:
            box.arrival.wait_on_host()
            yield values
        finally:
            with self._condition:
                self._let_go(box)

    def open(self) -> None:
        """Let all updates pass, since nothing more is written."""
        with self._condition:
            for box in self.boxes:
                self._let_go(box)

    def _let_go(self, box: BoxToWrite) -> None:
        if box.progress is _Progress.COPIED:
            self._held_bytes -= box.values.nbytes
        if box.progress is not _Progress.WRITTEN and box.slice_index is not None:
            self._left[box.slice_index] -= 1
        box.progress, box.values = _Progress.WRITTEN, box.values.new_empty(0)  # A view would hold the copy
        self._condition.notify_all()

    # --- threads that update --------------------------------------------------------------------------------

    def before_update(self, slices: Collection[int]) -> None:
        """Wait until the values of these slices are written or copied. The kernels that follow in this thread wait for
        copies that are on their way from the device."""
        if not any(self._left[index] for index in slices):
            return
        start_s = time.perf_counter()
        with self._condition:
            boxes = [box for index in slices for box in self._by_slice.get(index, ())]
            for box in boxes if not self._in_files else ():
                self._save_values(box)
            for box in boxes:  # After all copies, or this thread would follow the other one from box to box
                self._wait_for(box)
        self.stall_s += time.perf_counter() - start_s

    def _save_values(self, box: BoxToWrite) -> None:
        if box.progress is _Progress.WAITING and not _is_on_host(box.values):
            self._condition.wait_for(lambda: box.progress is not _Progress.WAITING or self._has_room(box))
        if box.progress is _Progress.WAITING:
            self.copied_bytes += box.values.nbytes
            self._copy(box)

    def _wait_for(self, box: BoxToWrite) -> None:
        if box.progress is _Progress.COPIED:
            box.arrival.let_device_wait()
        else:
            self._condition.wait_for(lambda: box.progress is _Progress.WRITTEN)

    def _has_room(self, box: BoxToWrite) -> bool:
        return not self._held_bytes or self._held_bytes + box.values.nbytes <= self._staging_bytes

    def _copy(self, box: BoxToWrite) -> None:
        link = self._host_link if _is_on_host(box.values) else self._device_link
        (box.values,), box.arrival = link.to_host([box.values], may_be_freed=False)
        box.progress = _Progress.COPIED
        self._held_bytes += box.values.nbytes


def _is_on_host(values: Tensor) -> bool:
    return values.device.type == "cpu"
