"""Copies between a device and its host.

A CPU rank, whose device is simulated, copies when it is asked. On CUDA both directions have a stream: sums travel while
the device computes, and values are cast on the host into pinned memory, from which they travel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from motet.memory.tiers.device_limit import host_memory

_PINNED_BYTES = 16 << 20  # Each of the two buffers from which values travel


WaitForArrival = Callable[[], None]  # Lets the device wait until values have arrived on it


class HostLink(Protocol):
    """The link between one device and its host."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the host, which `wait_for_host` waits for."""

    def wait_for_host(self) -> None:
        """Let this thread wait until all copies have arrived on the host."""

    def to_device(self, target: Tensor, values: Tensor) -> WaitForArrival:
        """Give a flat tensor of the device these values of the host, which are cast on the host. They may change when
        the call returns."""

    def fetch(self, rows: Tensor) -> Tensor:
        """A copy on the device, in the same dtype, for the kernels that follow."""


class ImmediateLink:
    """Copies that are made when they are asked for, between memory that a CPU rank has on its simulated device and on
    its host, or on the meta device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with host_memory(self._device):
            return [tensor.clone() for tensor in tensors]

    def wait_for_host(self) -> None:
        """Nothing to do."""

    def to_device(self, target: Tensor, values: Tensor) -> WaitForArrival:
        with host_memory(self._device):
            cast = values.to(target.dtype)
        target.copy_(cast)
        return _has_arrived

    def fetch(self, rows: Tensor) -> Tensor:
        return rows.clone()


def _has_arrived() -> None:
    """Nothing to wait for."""


class CudaLink:
    """Copies on two streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._down, self._up = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._buffers = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._down)
        return copies

    def wait_for_host(self) -> None:
        self._down.synchronize()

    def to_device(self, target: Tensor, values: Tensor) -> WaitForArrival:
        count = _PINNED_BYTES // target.itemsize
        for start in range(0, target.numel(), count):
            elements = slice(start, min(start + count, target.numel()))
            buffer, sent = self._buffers[self._next], self._sent[self._next]
            sent.synchronize()  # The values that it held before have left it
            cast = buffer[: (elements.stop - start) * target.itemsize].view(target.dtype)
            cast.copy_(values[elements])
            with torch.cuda.stream(self._up):
                target[elements].copy_(cast, non_blocking=True)
                sent.record(self._up)
            self._next = 1 - self._next
        arrived = self._up.record_event()
        return partial(self._let_device_wait, arrived)

    def fetch(self, rows: Tensor) -> Tensor:
        return rows.to(self._device, non_blocking=True)

    def _let_device_wait(self, arrived: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(arrived)


def link_of(device: torch.device) -> HostLink:
    """The link of a device."""
    return CudaLink(device) if device.type == "cuda" else ImmediateLink(device)
