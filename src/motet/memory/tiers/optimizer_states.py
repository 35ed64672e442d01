"""The masters and moments of an optimizer in the memory of the host or in files, and the copies to and from the device.

Gradients travel to the host when they are reduced; the host updates the masters; and the values with which the device
computes travel back. A copy on a CPU rank, whose device is simulated, is made at that moment; on a GPU gradients travel
on a stream while backward goes on.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from motet.memory.policy_choice import MemorySettings
from motet.memory.tiers.device_limit import host_memory, mark_as_host
from motet.memory.tiers.file_tensors import FileTensors, PieceFunction
from motet.memory.tiers.scratch_folder import run_subfolder

MASTER = "master"


class HostStates:
    """The states of all slices of a rank that an optimizer updates, away from the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the masters."""
        self.device, self._master = device, dtype
        self.masters = list[Tensor]()  # All slices, in the order in which engines have allocated them
        self.sent_to_host = self.sent_to_device = 0  # Bytes since the run began
        self._host = torch.device("meta" if device.type == "meta" else "cpu")  # A rehearsal knows no values
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def allocate(self, lengths: Sequence[int]) -> list[Tensor]:
        """Masters of further slices, which are zero."""
        made = [self.host_tensor(length, self._master) for length in lengths]
        self.masters += made
        return made

    def host_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros on the host."""
        with host_memory(self.device):
            return torch.zeros(numel, dtype=dtype, device=self._host, pin_memory=self._is_pinned)

    def allocate_rows(self, lengths: Sequence[int], padded: Sequence[int]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Rows of parameters on the host, which are padded to other lengths, and masters of further slices. Here the
        rows without padding are the masters themselves (None)."""
        rows = [self.host_tensor(length, self._master) for length in padded]
        self.masters += [each[:length] for each, length in zip(rows, lengths, strict=True)]
        return rows, None

    def moments(self, index: int, kinds: Sequence[str]) -> dict[str, Tensor]:
        """The moments of a slice, which are zero."""
        with host_memory(self.device):
            return {kind: torch.zeros_like(self.masters[index]) for kind in kinds}

    @property
    def _is_pinned(self) -> bool:
        return self.device.type == "cuda"

    def to_host(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Copies of reduced gradients on the host; `wait` before they are read."""
        with host_memory(self.device):
            made = [
                torch.empty(g.shape, dtype=g.dtype, device=self._host, pin_memory=self._is_pinned) for g in gradients
            ]
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

    def fetch(self, rows: Tensor) -> Tensor:
        """A copy of rows of parameters on the device, in their dtype."""
        self.sent_to_device += rows.nbytes
        return rows.clone() if self._stream is None else rows.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """Wait until the gradients have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, target: Tensor, master: Tensor) -> None:
        """Give the device the values of a master, cast on the host to the dtype of the target."""
        with host_memory(self.device):
            cast = master.to(target.dtype)
        target.copy_(cast)
        self.sent_to_device += cast.nbytes

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the host updates slices."""
        self.wait()
        with host_memory(self.device):
            yield

    def close(self) -> None:
        """End the use of files; memory needs no end."""

    def refresh(self) -> None:
        """Let masters and moments, which are views of files, have the values of the last update, and be changed."""


class FileStates(HostStates):
    """The same in files, which the host reads, updates and writes piece by piece."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, folder: Path, moments: Sequence[str]) -> None:
        """The files lie in a new subfolder of `folder`, and have these kinds of moments."""
        super().__init__(device, dtype)
        self._kinds = dict.fromkeys((MASTER, *moments), dtype)
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(run_subfolder(folder))
        self._parts = list[FileTensors]()  # One for the slices of each engine
        self._place_of_slice = list[tuple[FileTensors, int]]()
        weakref.finalize(self, self._stack.close)  # At the end of the process, too

    def allocate(self, lengths: Sequence[int]) -> list[Tensor]:
        folder = self._folder / f"part-{len(self._parts)}"
        folder.mkdir()
        files = self._stack.enter_context(FileTensors(folder, self._kinds, lengths))
        self._parts.append(files)
        self._place_of_slice += [(files, index) for index in range(len(lengths))]
        made = files.tensors(MASTER)
        mark_as_host(made)
        self.masters += made
        return made

    def allocate_rows(self, lengths: Sequence[int], padded: Sequence[int]) -> tuple[list[Tensor], list[Tensor] | None]:
        return [self.host_tensor(length, self._master) for length in padded], self.allocate(lengths)

    def moments(self, index: int, kinds: Sequence[str]) -> dict[str, Tensor]:
        files, local = self._place_of_slice[index]
        made = {kind: files.tensors(kind)[local] for kind in kinds}
        mark_as_host(made.values())
        return made

    def update(self, index: int, function: PieceFunction, following: Sequence[int]) -> None:
        """Let a function change the pieces of a slice; those of the following slices are read meanwhile."""
        files, local = self._place_of_slice[index]
        ahead = [i for part, i in (self._place_of_slice[other] for other in following) if part is files]
        files.update(local, function, following=ahead)

    def close(self) -> None:
        self._stack.close()

    def refresh(self) -> None:
        for files in self._parts:
            files.tensors(MASTER)  # Waits for writes; changes of views are written back before the next update

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that were read and written since the run began."""
        for files in self._parts:
            files.flush()
        return sum(each.bytes_read for each in self._parts), sum(each.bytes_written for each in self._parts)


def make_states(
    settings: MemorySettings, dtype: torch.dtype, device: torch.device, *, moments: Sequence[str]
) -> HostStates | None:
    """The states of an optimizer of a rank, if they do not lie on its device."""
    if settings.optimizer == "device":
        return None
    if settings.optimizer == "host" or device.type == "meta":
        return HostStates(device, dtype)
    assert settings.folder is not None
    return FileStates(device, dtype, folder=Path(settings.folder), moments=moments)
