"""The masters and moments of an optimizer in the memory of the host or in files, and the copies to and from the device.

Gradients travel to the host when they are reduced; the host updates the masters; and the values with which the device
computes travel back. A copy on a CPU rank, whose device is simulated, is made at that moment; on a GPU gradients travel
on a stream while backward goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from motet.memory.policy_choice import MemorySettings

# Gets the elements of a slice, and the tensors of its states by kind, which it changes in place.
UpdatePiece = Callable[[slice, Mapping[str, Tensor]], None]


@contextmanager
def host_memory() -> Iterator[None]:
    """Inside, tensors are those of the host."""
    yield


class HostStates:
    """The states of all slices of a rank that an optimizer updates, away from the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the masters."""
        self.device, self._master = device, dtype
        self.masters = list[Tensor]()  # All slices, in the order in which engines have allocated them
        self.sent_to_host = self.sent_to_device = 0  # Bytes since the run began
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, lengths: Sequence[int]) -> list[Tensor]:
        """Masters of further slices, which are zero."""
        with host_memory():
            made = [torch.zeros(length, dtype=self._master, pin_memory=self._is_pinned) for length in lengths]
        self.masters += made
        return made

    def moments(self, index: int, kinds: Sequence[str]) -> dict[str, Tensor]:
        """The moments of a slice, which are zero."""
        with host_memory():
            return {kind: torch.zeros_like(self.masters[index]) for kind in kinds}

    @property
    def _is_pinned(self) -> bool:
        return self.device.type == "cuda"

    def to_host(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Copies of reduced gradients on the host; `wait` before they are read."""
        with host_memory():
            made = [torch.empty(g.shape, dtype=g.dtype, pin_memory=self._is_pinned) for g in gradients]
        if self._stream is None:
            for copy, gradient in zip(made, gradients, strict=True):
                copy.copy_(gradient)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for copy, gradient in zip(made, gradients, strict=True):
                    copy.copy_(gradient, non_blocking=True)
                    gradient.record_stream(self._stream)
        self.sent_to_host += sum(gradient.nbytes for gradient in gradients)
        return made

    def wait(self) -> None:
        """Wait until the gradients have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, target: Tensor, master: Tensor) -> None:
        """Give the device the values of a master, cast on the host to the dtype of the target."""
        with host_memory():
            cast = master.to(target.dtype)
        target.copy_(cast)
        self.sent_to_device += cast.nbytes

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the host updates slices."""
        self.wait()
        with host_memory():
            yield

    def close(self) -> None:
        """Do nothing: memory needs no end."""


def make_states(settings: MemorySettings, dtype: torch.dtype, device: torch.device) -> HostStates | None:
    """The states of an optimizer of a rank, if they do not lie on its device."""
    return None if settings.optimizer == "device" else HostStates(device, dtype)
