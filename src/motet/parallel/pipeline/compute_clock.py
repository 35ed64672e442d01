"""The time in which a rank computes, without the time in which it waits for other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from motet.cluster.devices.device_clock import DeviceClock


class ComputeClock:
    """Adds up the time of blocks of code, on a CUDA device that of what they start there."""

    def __init__(self, device: torch.device) -> None:
        self._clock, self._blocks = DeviceClock(device), list[tuple[Any, Any]]()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of what is computed inside."""
        start = self._clock.now()
        yield
        self._blocks.append((start, self._clock.now()))

    @property
    def total_s(self) -> float:
        """The sum so far; on a CUDA device it waits for the last block."""
        return sum((self._clock.seconds(*block) for block in self._blocks), 0.0)
