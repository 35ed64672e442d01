"""The bytes of its device that a rank may use, and the memory of its host, which does not count.

A CPU rank has a device in miniature: a storage tracker counts the tensors of the rank, and ends it in the kernel that
would pass the limit. On CUDA the allocator of torch keeps the limit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from motet.memory.storage_tracker import StorageTracker, count_moved, kernels_of_host, mark_storages_of_host
from motet.models.torch_private import tree_leaves


def host_memory(device: torch.device | None = None) -> AbstractContextManager[None]:
    """A context in which kernels make tensors of the host, that no tracker counts. `device` is that of the rank: on
    CUDA, where tensors name their own device, nothing is done."""
    kind = "cpu" if device is None else device.type
    return nullcontext() if kind == "cuda" else kernels_of_host(on_meta=kind == "meta")


def mark_as_host(tensors: Iterable[Tensor]) -> None:
    """Mark tensors whose storages never count: they are memory of the host. One on CUDA is none."""
    mark_storages_of_host(tensor for tensor in tensors if tensor.device.type != "cuda")


def count_batch(batch: object) -> None:
    """Count the tensors of a batch, in any nested containers, as moved to the device, for all active trackers."""
    count_moved(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu")


class DeviceLimit:
    """A limit of one rank, which holds between `start` and `stop`."""

    def __init__(self, limit: int, device: torch.device, *, known: Callable[[], Iterable[Tensor]]) -> None:
        """`known` returns the tensors that the rank has between steps."""
        self._limit, self._device, self._known = limit, device, known
        self._tracker = StorageTracker(limit=limit) if device.type == "cpu" else None
        self._is_active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the limit holds."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Let the limit hold from here on, in this thread. Storages that are known already keep their history."""
        if self._is_active:
            return
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit / total), self._device)
        if self._tracker is not None:
            self._tracker.follow(self._known())
            self._tracker.check_limit()
            self._tracker.start()
        self._is_active = True

    def stop(self) -> None:
        """Let the limit hold no longer on a CPU rank; on CUDA it is that of the process."""
        if self._is_active and self._tracker is not None:
            self._tracker.stop()
        self._is_active = False

    def live(self) -> int:
        """The bytes that are alive."""
        return torch.cuda.memory_allocated(self._device) if self._tracker is None else self._tracker.live()

    def peak(self) -> int:
        """The most bytes that were alive while the limit held."""
        return torch.cuda.max_memory_allocated(self._device) if self._tracker is None else self._tracker.peak()


def device_limit_of_run(
    limit: int | None, device: torch.device, *, known: Callable[[], Iterable[Tensor]]
) -> AbstractContextManager[None]:
    """A context in which the limit of a job holds; without one, nothing is done."""
    return nullcontext() if limit is None else DeviceLimit(limit, device, known=known).active()
