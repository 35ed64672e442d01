"""The masters and moments of an optimizer in the memory of the host or in files, and the copies to and from the device.

Gradients travel to the host when they are reduced; the host updates the masters, perhaps while the device computes; and
the values with which the device computes travel back.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.direct_io import IoTraffic
from motet.memory.policy_choice import MemorySettings
from motet.memory.tiers.background_updates import BackgroundUpdates
from motet.memory.tiers.device_limit import host_memory, mark_as_host
from motet.memory.tiers.file_tensors import FileTensors, PieceFunction
from motet.memory.tiers.host_link import Arrival, link_of
from motet.memory.tiers.row_window import FileRows, RowUnit, RowWindow
from motet.memory.tiers.scratch_folder import run_subfolder

MASTER, FROZEN = "master", "frozen"


class Target(NamedTuple):
    """A flat tensor that gets the values of a slice: the device computes with it, or fetches it from the host."""

    tensor: Callable[[], Tensor]
    is_on_host: bool = False


class FetchedUnit(NamedTuple):
    """The rows of parameters that an engine gathers together."""

    rows: Sequence[Tensor]
    reads_again: bool  # Whether backward gathers them again


FetchRows = Callable[[], Tensor]  # A copy of the rows of a parameter on the device, with padding


class HostStates:
    """The states of all slices of a rank that an optimizer updates, away from the device."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, delays: bool = False, overlaps: bool = False
    ) -> None:
        """`dtype` is that of the masters. With `delays` the gradients of a step update masters during the next one;
        with `overlaps` values arrive while the next forward computes, and the host may still update others."""
        self.device, self._master = device, dtype
        self.delays, self.overlaps = delays, overlaps
        self.masters = list[Tensor]()  # All slices, in the order in which engines have allocated them
        self._targets = list[Target | None]()  # By slice
        self._staged = dict[int, Tensor]()
        self._sums, self._values = dict[int, Arrival](), dict[int, Arrival]()  # By slice
        self.link = link_of(device)
        is_real = device.type != "meta"
        self.updates = BackgroundUpdates(device if (delays or overlaps) and is_real else None)
        self._sends = BackgroundUpdates(device if delays and overlaps and is_real else None)  # Those of staged values

    def allocate(self, lengths: Sequence[int]) -> list[Tensor]:
        """Masters of further slices, which are zero."""
        made = [self.host_tensor(length, self._master) for length in lengths]
        self.masters += made
        return made

    def host_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros on the host, which the device does not read."""
        with host_memory(self.device):
            return torch.zeros(numel, dtype=dtype, device=self.link.host)

    def allocate_rows(self, lengths: Sequence[int], padded: Sequence[int]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Rows of parameters on the host, which are padded to other lengths, and masters of further slices. Here the
        rows without padding are the masters themselves (None)."""
        rows = [self.link.rows(length, self._master) for length in padded]
        self.masters += [each[:length] for each, length in zip(rows, lengths, strict=True)]
        return rows, None

    def allocate_frozen_rows(self, lengths: Sequence[int], padded: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Rows of parameters that nothing updates, which are padded to other lengths."""
        return [self.link.rows(length, dtype) for length in padded]

    def fetches(self, units: Sequence[FetchedUnit], *, turns: bool) -> list[list[FetchRows]]:
        """The copies of the rows of units, which are in the order of a forward. With `turns`, the backward of a forward
        follows it."""
        return [[partial(self.fetch, rows) for rows in unit.rows] for unit in units]

    def before_forward(self) -> None:
        """Called before the forward of a unit."""

    def before_backward(self, *, is_last: bool) -> None:
        """Called before the backward of a micro-batch, the last one or not."""

    def moments(self, index: int, kinds: Sequence[str]) -> dict[str, Tensor]:
        """The moments of a slice, which are zero."""
        with host_memory(self.device):
            return {kind: torch.zeros_like(self.masters[index]) for kind in kinds}

    @property
    def sent_to_host(self) -> int:
        """Bytes of sums since the run began."""
        return self.link.sent_to_host

    @property
    def sent_to_device(self) -> int:
        """Bytes of values and rows since the run began."""
        return self.link.sent_to_device

    def to_host(self, sums: Sequence[Tensor], slices: Sequence[int] = ()) -> list[Tensor]:
        """Copies of reduced gradients on the host, which have arrived inside of `updating` of their slices."""
        copies, arrival = self.link.to_host(sums)
        self._sums |= dict.fromkeys(slices, arrival)
        return copies

    def fetch(self, rows: Tensor) -> Tensor:
        """A copy of rows of parameters on the device, in their dtype."""
        copy, arrival = self.link.fetch(rows)
        arrival.let_device_wait()
        return copy

    def set_targets(self, targets: Sequence[Target | None]) -> None:
        """Name the tensors that get the values of the slices which were allocated last; a master that is read itself
        has none."""
        self._targets += targets

    def send(self, index: int, elements: slice, masters: Tensor) -> None:
        """Let the device compute with elements of a slice, cast on the host to the dtype that the device has."""
        target = self._targets[index]
        if target is not None and target.is_on_host:
            target.tensor()[elements].copy_(masters)
        elif target is not None:
            self._to_device(index, target.tensor()[elements], masters)

    def stage(self, index: int, elements: slice, masters: Tensor) -> None:
        """Keep such elements on the host until `send_staged`."""
        self._sends.wait([index])
        self._staged[index][elements] = masters

    def make_room_to_stage(self) -> None:
        """Reserve the memory of `stage`."""
        for index, target in enumerate(self._targets):
            assert target is not None and not target.is_on_host, "a delayed update sends values to the device"
            if index not in self._staged:
                values = target.tensor()
                self._staged[index] = self.host_tensor(values.numel(), values.dtype)

    def send_staged(self, order: Sequence[int]) -> None:
        """Send the elements that were kept, slice by slice; `wait_for_arrival` waits for them."""
        self._sends.start(order, lambda index, _: self.send(index, slice(None), self._staged[index]))

    def _to_device(self, index: int, target: Tensor, values: Tensor) -> None:
        self._values[index] = self.link.to_device(target, values)  # Earlier elements arrive earlier

    def wait_for_arrival(self, slices: Iterable[int]) -> None:
        """Wait until the host has updated these slices, and let the device wait until their values have arrived."""
        slices = [*slices]
        (self._sends if self.delays else self.updates).wait(slices)
        for index in slices:
            if (arrival := self._values.pop(index, None)) is not None:
                arrival.let_device_wait()

    @contextmanager
    def updating(self, slices: Iterable[int]) -> Iterator[None]:
        """Inside, the sums of these slices have arrived, and this thread updates slices on the host."""
        for index in slices:
            if (arrival := self._sums.pop(index, None)) is not None:
                arrival.wait_on_host()
        with host_memory(self.device), torch.no_grad():
            yield

    def close(self) -> None:
        """End the updates that are under way, and the use of files."""
        self.updates.end()
        self._sends.end()

    def refresh(self) -> None:
        """Let masters and moments, which may be views of files, have the values of the last update, and be changed."""
        self.updates.wait()


class FileStates(HostStates):
    """The same in files, which the host reads, updates and writes piece by piece."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        folder: Path,
        moments: Sequence[str],
        rows_ahead: int | None = None,
        **when: bool,
    ) -> None:
        """The files lie in a new subfolder of `folder`, and have these kinds of moments. Rows of parameters lie in them
        too if the host reads those of a number of units ahead. `when` are `delays` and `overlaps`."""
        super().__init__(device, dtype, **when)
        self._kinds = dict.fromkeys((MASTER, *moments), dtype)
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(run_subfolder(folder))
        self._parts = list[FileTensors]()  # One for the slices of each engine
        self._place_of_slice = list[tuple[FileTensors, int]]()
        self._rows_ahead = rows_ahead
        self._rows = dict[int, FileRows]()  # By the identity of a view, which the engine keeps
        self._windows = list[RowWindow]()
        weakref.finalize(self, self._stack.close)  # At the end of the process, too

    def allocate(self, lengths: Sequence[int]) -> list[Tensor]:
        files, made = self._make_files(self._kinds, lengths)
        self._place_of_slice += [(files, index) for index in range(len(lengths))]
        self.masters += made
        return made

    def _make_files(self, kinds: Mapping[str, torch.dtype], lengths: Sequence[int]) -> tuple[FileTensors, list[Tensor]]:
        """Files of further slices, and views of the first kind."""
        folder = self._folder / f"part-{len(self._parts)}"
        folder.mkdir()
        files = self._stack.enter_context(FileTensors(folder, kinds, lengths))
        self._parts.append(files)
        made = files.tensors(next(iter(kinds)))
        mark_as_host(made)
        return files, made

    def allocate_rows(self, lengths: Sequence[int], padded: Sequence[int]) -> tuple[list[Tensor], list[Tensor] | None]:
        made = self.allocate(lengths)
        if self._rows_ahead is None:
            return [self.link.rows(length, self._master) for length in padded], made
        self._name_rows(made, self._parts[-1], MASTER, padded=padded)
        return made, None

    def allocate_frozen_rows(self, lengths: Sequence[int], padded: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        if self._rows_ahead is None:
            return super().allocate_frozen_rows(lengths, padded, dtype)
        files, made = self._make_files({FROZEN: dtype}, lengths)
        self._name_rows(made, files, FROZEN, padded=padded)
        return made

    def _name_rows(self, views: Sequence[Tensor], files: FileTensors, kind: str, *, padded: Sequence[int]) -> None:
        for index, (view, numel) in enumerate(zip(views, padded, strict=True)):
            self._rows[id(view)] = FileRows(files, kind, index, numel, view.dtype)

    def fetches(self, units: Sequence[FetchedUnit], *, turns: bool) -> list[list[FetchRows]]:
        if self._rows_ahead is None:
            return super().fetches(units, turns=turns)
        in_files = [RowUnit([self._rows[id(view)] for view in unit.rows], unit.reads_again) for unit in units]
        window = RowWindow(in_files, self.device, ahead=self._rows_ahead, turns=turns)
        self._windows.append(window)
        return [
            [partial(window.fetch, index, position, self.fetch) for position in range(len(unit.rows))]
            for index, unit in enumerate(units)
        ]

    def before_forward(self) -> None:
        for window in self._windows:
            window.records_gradients = torch.is_grad_enabled()

    def before_backward(self, *, is_last: bool) -> None:
        for window in () if is_last else self._windows:
            window.expect_forward()

    @contextmanager
    def updating(self, slices: Iterable[int]) -> Iterator[None]:
        self._drop_windows()
        with super().updating(slices):
            yield

    def _drop_windows(self) -> None:
        for window in self._windows:
            window.drop()

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
        super().close()
        self._stack.close()

    def refresh(self) -> None:
        super().refresh()
        self._drop_windows()
        with host_memory(self.device):
            for files in self._parts:
                files.tensors(files.kinds[0])  # Waits for writes; changes are written back before the next update

    @property
    def traffic(self) -> IoTraffic:
        """The transfers that have ended since the run began, without a wait for others. Any thread may ask."""
        return sum((files.traffic for files in self._parts), IoTraffic())

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that were read and written since the run began."""
        for files in self._parts:
            files.flush()
        return self.traffic.bytes_read, self.traffic.bytes_written


def make_states(
    settings: MemorySettings,
    dtype: torch.dtype,
    device: torch.device,
    *,
    moments: Sequence[str],
    overlaps: bool = False,
) -> HostStates | None:
    """The states of an optimizer of a rank, if they do not lie on its device. With `overlaps`, updates overlap with the
    next forward."""
    if settings.optimizer == "device":
        return None
    when = {"delays": settings.update == "delayed", "overlaps": overlaps}
    if settings.optimizer == "host" or device.type == "meta":
        return HostStates(device, dtype, **when)
    assert settings.folder is not None
    ahead = settings.window if settings.parameters == "disk" else None
    return FileStates(device, dtype, folder=Path(settings.folder), moments=moments, rows_ahead=ahead, **when)
