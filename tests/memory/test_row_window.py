"""The host has the rows of a few units that lie in files, and reads them before they are gathered."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from motet.core.direct_io import DirectFile
from motet.core.errors import StateFileError
from motet.memory.tiers import row_window
from motet.memory.tiers.file_tensors import FileTensors
from motet.memory.tiers.row_window import FileRows, RowUnit, RowWindow
from motet.memory.tiers.window_layout import WindowLayout, WindowUnit

LENGTHS = [(5, 3000), (1500,), (2000,), (), (0, 7)]  # Elements of the rows of units, in the order of a forward
PADDING = 2


def make(files: FileTensors, *, ahead: int = 1, turns: bool = True) -> RowWindow:
    indices, units = iter(range(len(files.layout.lengths))), list[RowUnit]()
    for number, lengths in enumerate(LENGTHS):
        rows = [FileRows(files, "master", next(indices), n + PADDING, torch.float32) for n in lengths]
        units.append(RowUnit(rows, reads_again=number > 0))
    return RowWindow(units, torch.device("cpu"), ahead=ahead, turns=turns)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileTensors]:
    lengths = [length for unit in LENGTHS for length in unit]
    with FileTensors(tmp_path, {"master": torch.float32, "moment": torch.float32}, lengths) as made:
        for index, view in enumerate(made.tensors("master")):
            view[:] = torch.arange(len(view)) + 10_000 * index + 1
        yield made


def gathered(window: RowWindow, unit: int) -> list[Tensor]:
    return [window.fetch(unit, position, Tensor.clone) for position in range(len(LENGTHS[unit]))]


class Started:
    """The units whose reads have started, in their order."""

    def __init__(self) -> None:
        self.units = list[int]()

    def __call__(self, files: FileTensors, kind: str, index: int, memory: memoryview) -> object:
        unit = next(u for u in range(len(LENGTHS)) if index < sum(map(len, LENGTHS[: u + 1])))
        self.units += [unit] * (unit not in self.units[-1:] or index == sum(map(len, LENGTHS[:unit])))
        return START_READ(files, kind, index, memory)


START_READ = FileTensors.start_read


def test_units_are_read_before_they_are_gathered(files: FileTensors) -> None:
    window, started = make(files), Started()
    with patch.object(FileTensors, "start_read", lambda *args: started(*args)):
        for unit, expected in [(0, [0, 1]), (1, [2]), (2, [4]), (4, [4])]:
            gathered(window, unit)
            assert started.units == expected
            started.units.clear()
        window.expect_forward()  # Another micro-batch
        with patch.object(row_window, "is_in_backward", lambda: True):
            for unit, expected in [(4, [2]), (2, [1]), (1, [0])]:
                gathered(window, unit)
                assert started.units == expected
                started.units.clear()
        gathered(window, 0)
        assert started.units == [1]


@pytest.mark.parametrize("turns", [False, True])
def test_a_forward_without_a_backward_reads_nothing_more(files: FileTensors, turns: bool) -> None:
    window = make(files, ahead=5, turns=turns)
    window.records_gradients = not turns
    before = files.bytes_read
    for unit in range(len(LENGTHS)):
        gathered(window, unit)
    assert files.bytes_read - before == files.layout.file_bytes("master")


def test_rows_have_the_values_of_the_last_update_and_zeros_as_padding(
    files: FileTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes of the update go on when it returns."""
    write = DirectFile.write

    def slow_write(file: DirectFile, buffer: memoryview, offset: int) -> int:
        time.sleep(0.1)
        return write(file, buffer, offset)

    monkeypatch.setattr(DirectFile, "write", slow_write)
    window = make(files)
    for added in range(2):
        for unit, lengths in enumerate(LENGTHS):
            first = sum(map(len, LENGTHS[:unit]))
            for position, rows in enumerate(gathered(window, unit)):
                count, index = lengths[position], first + position
                expected = torch.zeros(count + PADDING)
                expected[:count] = torch.arange(count) + 10_000 * index + 1 + added
                assert torch.equal(rows, expected)
        window.drop()
        for index in reversed(range(len(files.layout.lengths))):
            if files.layout.lengths[index]:
                files.update(index, lambda _, tensors: tensors["master"].add_(1))


def test_another_order_than_expected_has_the_right_values(files: FileTensors) -> None:
    window = make(files)
    (rows,), (other,) = gathered(window, 2), gathered(window, 1)
    assert (rows[0], other[0]) == (30_001, 20_001)


@pytest.mark.parametrize(("ahead", "pages"), [(1, 6), (2, 8), (9, 22)])
def test_the_memory_is_that_of_the_largest_window(files: FileTensors, ahead: int, pages: int) -> None:
    """Units have 1 + 3, 2, 2, 0 and 1 + 1 pages."""
    live, peak = 0, 0

    class Counted(row_window.RowBuffer):
        def __init__(self, size: int, device: torch.device) -> None:
            nonlocal live, peak
            super().__init__(size, device)
            live, peak = live + size, max(peak, live + size)

        def __del__(self) -> None:
            nonlocal live
            live -= self.size

    window = make(files, ahead=ahead)
    with patch.object(row_window, "RowBuffer", Counted):
        for unit in (0, 1, 2, 4):
            gathered(window, unit)
        window.expect_forward()
        with patch.object(row_window, "is_in_backward", lambda: True):
            for unit in (4, 2, 1):
                gathered(window, unit)
        for unit in (0, 1, 2, 4):
            gathered(window, unit)
    assert peak == window.layout.memory_bytes(microbatches=2) == pages * 4096


def test_windows_of_no_units_and_of_stages_of_a_pipeline() -> None:
    assert WindowLayout((), 2, turns=True).memory_bytes(microbatches=2) == 0
    units = tuple(WindowUnit(size, again) for size, again in ((8, False), (3, True), (3, True)))
    sizes = [WindowLayout(units, 1, turns=turns).memory_bytes(microbatches=1) for turns in (False, True)]
    assert sizes == [11, 11]
    wide = [WindowLayout(units, 4, turns=turns).memory_bytes(microbatches=1) for turns in (False, True)]
    assert wide == [14, 20]
    assert WindowLayout(units, 4, turns=True).memory_bytes(microbatches=2) == 3 + 3 + 3 + 3 + 8


def test_an_error_of_the_disk_is_raised_where_rows_are_needed(files: FileTensors, tmp_path: Path) -> None:
    window = make(files)
    with (tmp_path / "master.bin").open("r+b") as file:
        files.read(0, lambda *_: None)  # Writes back what views have changed
        file.truncate(2 * 4096)
        with pytest.raises(StateFileError, match=r"could not read .*master.bin \(the file ends at byte 8192\): the"):
            gathered(window, 0)
        window.drop()
