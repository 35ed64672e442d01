"""Copies between a device and its host: sums, values, rows of parameters and activations travel by the same classes.

A CPU rank, whose device is simulated, copies when it is asked. On CUDA each link has a stream for each direction, with
pinned memory on the host. A copy waits for the kernels that its caller has queued, and others wait for its arrival.
Sums and values have another link than activations, since a copy waits for all copies before it on its stream.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from motet.core.direct_io import aligned_buffer
from motet.memory.tiers.device_limit import host_memory

_STAGED_BYTES = 16 << 20  # Each of the two pinned buffers from which values travel


class Arrival(Protocol):
    """The end of copies that may be under way."""

    def let_device_wait(self) -> None:
        """Let the kernels that follow wait. Memory of the copies may be freed afterwards."""

    def wait_on_host(self) -> None:
        """Let this thread wait."""


class _HasArrived:
    """The end of copies that are complete."""

    def let_device_wait(self) -> None:
        """Nothing to do."""

    def wait_on_host(self) -> None:
        """Nothing to do."""


HAS_ARRIVED: Arrival = _HasArrived()


class HostLink(ABC):
    """The link between one device and its host, which counts the bytes that travel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = torch.device("meta" if device.type == "meta" else "cpu")  # A rehearsal knows no values
        self.sent_to_host = self.sent_to_device = 0  # Bytes since the run began
        self._lock = Lock()  # A thread that updates masters sends values while another one fetches rows

    def count(self, *, to_host: int = 0, to_device: int = 0) -> None:
        """Count bytes that travelled; FSDP2 copies some itself."""
        with self._lock:
            self.sent_to_host += to_host
            self.sent_to_device += to_device

    def to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool = True) -> tuple[list[Tensor], Arrival]:
        """Copies on the host, and their arrival. Until then nobody may change the tensors. If they may not be freed
        either, the caller lets the device wait before it frees them, and their memory is free afterwards."""
        self.count(to_host=sum(tensor.nbytes for tensor in tensors))
        return self._to_host(tensors, may_be_freed=may_be_freed)

    def fetch(self, source: Tensor) -> tuple[Tensor, Arrival]:
        """A copy on the device in the same dtype, and its arrival, for which kernels that use or free it must wait.
        Until then nobody may change the source."""
        self.count(to_device=source.nbytes)
        return self._fetch(source)

    def to_device(self, target: Tensor, values: Tensor) -> Arrival:
        """Give a flat tensor of the device these values of the host, which are cast on the host. The values may change
        when the call returns. The device must have ended all uses of the target: nothing waits for them here."""
        self.count(to_device=target.nbytes)
        return self._to_device(target, values)

    @abstractmethod
    def rows(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, from which `fetch` copies with the speed of the link."""

    @abstractmethod
    def _to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool) -> tuple[list[Tensor], Arrival]: ...

    @abstractmethod
    def _fetch(self, source: Tensor) -> tuple[Tensor, Arrival]: ...

    @abstractmethod
    def _to_device(self, target: Tensor, values: Tensor) -> Arrival: ...


class ImmediateLink(HostLink):
    """Copies that are made when they are asked for, between memory that a CPU rank has on its simulated device and on
    its host, or on the meta device."""

    def rows(self, numel: int, dtype: torch.dtype) -> Tensor:
        with host_memory(self.device):
            return torch.zeros(numel, dtype=dtype, device=self.host)

    def _to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool) -> tuple[list[Tensor], Arrival]:
        with host_memory(self.device):
            return [tensor.clone() for tensor in tensors], HAS_ARRIVED

    def _fetch(self, source: Tensor) -> tuple[Tensor, Arrival]:
        return source.clone(), HAS_ARRIVED

    def _to_device(self, target: Tensor, values: Tensor) -> Arrival:
        with host_memory(self.device):
            cast = values.to(target.dtype)
        target.copy_(cast)
        return HAS_ARRIVED


class CudaLink(HostLink):
    """Copies on two streams.

    Torch's allocator of pinned memory keeps freed blocks, and gives one to another tensor when the copies from and to
    it have ended. So only the first step pays for page-locking. Blocks have the next power of two of bytes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staging: tuple[_Staging, _Staging] | None = None
        self._rows = list[Tensor]()
        weakref.finalize(self, _unlock_pages, self._rows).atexit = False

    def rows(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The same on page-locked memory of exactly these bytes; torch would take the next power of two for good."""
        if not numel:
            return torch.zeros(0, dtype=dtype)
        memory = aligned_buffer(numel * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(cuda.cudaHostRegister(tensor.data_ptr(), len(memory), 0))
        self._rows.append(tensor)
        return tensor

    def _to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool) -> tuple[list[Tensor], Arrival]:
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        arrival = self._copy(self._down, copies, tensors)
        for tensor in tensors if may_be_freed else ():
            tensor.record_stream(self._down)
        return copies, arrival

    def _fetch(self, source: Tensor) -> tuple[Tensor, Arrival]:
        # Memory of the stream of the caller, whose earlier kernels may still use it: the copy waits for them
        copy = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        return copy, self._copy(self._up, [copy], [source])

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Tensor], sources: Sequence[Tensor]) -> Arrival:
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream), torch.no_grad():
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            return _CudaArrival(stream.record_event(), caller)

    def _to_device(self, target: Tensor, values: Tensor) -> Arrival:
        if self._staging is None:  # Links of activations need none
            self._staging = (_Staging(), _Staging())
        count = _STAGED_BYTES // target.itemsize
        for start in range(0, target.numel(), count):
            elements = slice(start, min(start + count, target.numel()))
            staging, other = self._staging
            staged = staging.take(values[elements], target.dtype)
            with torch.cuda.stream(self._up):
                target[elements].copy_(staged, non_blocking=True)
                staging.sent.record(self._up)
            self._staging = (other, staging)
        return _CudaArrival(self._up.record_event(), torch.cuda.current_stream(self.device))


class _Staging:
    """A pinned buffer in which values are cast."""

    def __init__(self) -> None:
        self._memory = torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()

    def take(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in another dtype, when its earlier values have left it."""
        self.sent.synchronize()
        staged = self._memory[: values.numel() * dtype.itemsize].view(dtype)
        return staged.copy_(values)


class _CudaArrival:
    """An event behind copies, and the stream whose memory they use."""

    def __init__(self, event: torch.cuda.Event, caller: torch.cuda.Stream) -> None:
        self._event, self._caller = event, caller

    def let_device_wait(self) -> None:
        # Another thread may free the memory, which kernels of the caller's stream get next
        for stream in {self._caller, torch.cuda.current_stream(self._caller.device)}:
            stream.wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


def _unlock_pages(tensors: list[Tensor]) -> None:
    """Unlock the memory of tensors, which is not freed before."""
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()


def link_of(device: torch.device) -> HostLink:
    """A link of a device."""
    return CudaLink(device) if device.type == "cuda" else ImmediateLink(device)
