"""The time in which a rank computes, without the time in which it waits for other ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ComputeClock:
    """Adds up the time of blocks of code, on a CUDA device that of what they start there."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._host_s = device.type == "cuda", 0.0
        self._device_events = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of what is computed inside."""
        if self._is_cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._device_events.append((start, stop))
            start.record()
            yield
            stop.record()
        else:
            start_s = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - start_s

    @property
    def total_s(self) -> float:
        """The sum so far; on a CUDA device it waits for the last block."""
        if self._device_events:
            self._device_events[-1][1].synchronize()
        device_ms: float = sum(start.elapsed_time(stop) for start, stop in self._device_events)
        return self._host_s + device_ms / 1e3
