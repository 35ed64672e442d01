"""The time that work takes on a device: on a CUDA device that of its stream, by events, elsewhere that of the host."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceClock:
    """A clock whose times are marks; the difference of two is known once the device has reached both."""

    device: "torch.device"

    def now(self) -> "float | torch.cuda.Event":
        """A mark in the work of this thread's current stream, without waiting for the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def wait(mark: "float | torch.cuda.Event") -> None:
        """Wait until the device has reached a mark."""
        if not isinstance(mark, float):
            mark.synchronize()

    @staticmethod
    def seconds(start: "float | torch.cuda.Event", stop: "float | torch.cuda.Event") -> float:
        """The time between two marks of one clock; waits until the device has reached the second."""
        if isinstance(start, float) and isinstance(stop, float):
            return stop - start
        assert not isinstance(start, float) and not isinstance(stop, float), "marks of two clocks"
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3
