"""State in files: bits of updates, coherence of views, overlap of the pipeline, and errors in the middle of a step."""

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from direct_io_refusal import refuse_direct_io
from motet.core.direct_io import DirectFile
from motet.core.errors import InputError, StateFileError
from motet.memory.tiers.file_tensors import FileTensors

PAGE = 4096
KINDS = {"master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
MIXED = {"master": torch.float32, "wide": torch.float64, "narrow": torch.bfloat16}
LENGTHS = (30_007, 0, 5, 9_000)
SMALL_PIECES = 4 * PAGE
HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
WAIT_S = 30


def adamw(state: Mapping[str, Tensor], gradient: Tensor, step: int) -> None:
    """The fused kernel of torch, as `torch.optim.AdamW(fused=True)` calls it."""
    tensors = [[state[kind]] for kind in ("master", "exp_avg", "exp_avg_sq")]
    torch._fused_adamw_(tensors[0], [gradient], *tensors[1:], [], [torch.tensor(float(step))], **HYPERPARAMETERS)


class RecordedAdamW:
    """AdamW on pieces, and the elements of all pieces in the order of their updates."""

    def __init__(self, gradient: Tensor, step: int) -> None:
        self.gradient, self.step, self.elements = gradient, step, list[int]()

    def __call__(self, elements: slice, tensors: Mapping[str, Tensor]) -> None:
        self.elements.extend(range(elements.start, elements.stop))
        adamw(tensors, self.gradient[elements], self.step)


def random_state(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {kind: torch.randn(length, generator=generator) for kind in KINDS}
    state["exp_avg_sq"].square_()
    return state


def copy_to_views(files: FileTensors, states: list[dict[str, Tensor]]) -> None:
    for kind in states[0]:
        for view, state in zip(files.tensors(kind), states, strict=True):
            view.copy_(state[kind])


def add(value: float) -> Callable[[slice, Mapping[str, Tensor]], None]:
    def function(elements: slice, tensors: Mapping[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.add_(value)

    return function


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("motet-io")]


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208


@contextmanager
def failing_descriptor(files: FileTensors, kind: str) -> Iterator[None]:
    """Lets the kernel find the disk full in each write to a file of a kind."""
    descriptor, full = files._files[kind]._descriptor, os.open("/dev/full", os.O_RDWR)
    saved = os.dup(descriptor)
    os.dup2(full, descriptor)
    os.close(full)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pipelined_update_has_the_bits_of_an_update_in_memory(threads: int, tmp_path: Path) -> None:
    states = [random_state(length, seed) for seed, length in enumerate(LENGTHS)]
    order = (3, 0, 1, 2)
    with FileTensors(tmp_path, KINDS, LENGTHS, threads=threads, piece_bytes=SMALL_PIECES) as files:
        copy_to_views(files, states)
        for step in (1, 2, 3):
            gradients = [torch.randn(length, generator=torch.Generator().manual_seed(step)) for length in LENGTHS]
            for position, index in enumerate(order):
                update = RecordedAdamW(gradients[index], step)
                files.update(index, update, following=order[position + 1 :])
                assert update.elements == list(range(LENGTHS[index]))
                if LENGTHS[index]:
                    adamw(states[index], gradients[index], step)
            for kind in KINDS:
                for view, state in zip(files.tensors(kind), states, strict=True):
                    assert torch.equal(view, state[kind]), (step, kind)
    assert io_threads() == []


def test_a_piece_that_begins_at_another_element_changes_bits() -> None:
    """The reason for the alignment: vectors of the kernel begin at the start of a tensor."""
    length = 30_007
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(9))

    def updated_in_pieces(piece: int) -> dict[str, Tensor]:
        state = random_state(length, 1)
        for start in range(0, length, piece):
            elements = slice(start, min(start + piece, length))
            adamw({kind: tensor[elements] for kind, tensor in state.items()}, gradient[elements], 3)
        return state

    undivided, aligned, shifted = map(updated_in_pieces, (length, 1024, 1001))
    assert all(torch.equal(undivided[kind], aligned[kind]) for kind in KINDS)
    if all(torch.equal(undivided[kind], shifted[kind]) for kind in KINDS):
        pytest.skip("the fused AdamW of this CPU computes an element alike in a vector and alone")


def test_the_bytes_that_travel_are_those_of_the_layout(tmp_path: Path) -> None:
    """Three reads and three writes of each padded slice, counted by hand."""
    lengths = (5000, 0, 1, 2048)
    with FileTensors(tmp_path, KINDS, lengths, piece_bytes=SMALL_PIECES) as files:
        assert (files.bytes_read, files.bytes_written) == (0, 0)
        pages = 3 * (5 + 1 + 2)  # 5000 elements have 4.9 pages
        for step in (1, 2):
            for index in range(4):
                files.update(index, add(1), following=range(index + 1, 4))
            files.flush()
            assert (files.bytes_read, files.bytes_written) == (step * pages * PAGE,) * 2
        assert files.layout.update_bytes == pages * PAGE
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == pages * PAGE
        files.read(0, lambda elements, tensors: None)
        files.flush()
        assert (files.bytes_read, files.bytes_written) == ((2 * pages + 15) * PAGE, 2 * pages * PAGE)
        assert files.traffic.busy_s > 0


@pytest.mark.parametrize("direct", [True, False])
def test_views_and_updates_see_the_changes_of_one_another(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        refuse_direct_io(monkeypatch)
    with FileTensors(tmp_path, MIXED, LENGTHS, piece_bytes=SMALL_PIECES) as files:
        if direct and not files.is_direct:
            pytest.skip("the filesystem of temporary files has no direct IO")
        assert files.is_direct == direct
        expected = 0.0
        for _ in range(4):
            for kind in MIXED:
                for view in files.tensors(kind):
                    assert (view == expected).all()
                    view.add_(1)
            for index in range(len(LENGTHS)):
                files.update(index, add(2))
            expected += 3
        held = files.tensors("master")[0]
    assert (held == expected).all()  # A view outlives the files


def test_slices_are_filled_and_read_in_pieces(tmp_path: Path) -> None:
    def fill(elements: slice, tensors: Mapping[str, Tensor]) -> None:
        for number, tensor in enumerate(tensors.values()):
            tensor.copy_(torch.arange(elements.start, elements.stop) % 200 + number)

    read = list[Tensor]()
    with FileTensors(tmp_path, MIXED, LENGTHS, piece_bytes=SMALL_PIECES) as files:
        for index in range(len(LENGTHS)):
            files.fill(index, fill)
        files.read(0, lambda elements, tensors: read.extend(tensor.clone() for tensor in tensors.values()))
        for number, kind in enumerate(MIXED):
            expected = (torch.arange(LENGTHS[0]) % 200 + number).to(MIXED[kind])
            assert torch.equal(torch.cat(read[number::3]), expected)
            assert torch.equal(files.tensors(kind)[0], expected)
        assert files.bytes_read == files.layout.slice_bytes(0)


def test_pieces_are_read_ahead_and_written_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a piece is updated the next one is read, also one of another slice, and the write of the one before may
    be under way still: here it ends only after the next update."""
    next_updated, second_read, log = threading.Event(), threading.Event(), list[str]()
    real_read, real_write = DirectFile.read, DirectFile.write

    def read(file: DirectFile, buffer: memoryview, offset: int) -> int:
        if offset:
            second_read.set()
        return real_read(file, buffer, offset)

    def write(file: DirectFile, buffer: memoryview, offset: int) -> int:
        if not offset:
            log.append("written behind" if next_updated.wait(WAIT_S) else "waited in vain")
        return real_write(file, buffer, offset)

    def first(elements: slice, tensors: Mapping[str, Tensor]) -> None:
        log.append("read ahead" if second_read.wait(WAIT_S) else "waited in vain")

    monkeypatch.setattr(DirectFile, "read", read)
    monkeypatch.setattr(DirectFile, "write", write)
    with FileTensors(tmp_path, {"master": torch.float32}, (10, 20)) as files:
        files.update(0, first, following=[1])
        files.update(1, lambda elements, tensors: next_updated.set())
        files.flush()
    assert log == ["read ahead", "written behind"]


@pytest.mark.parametrize(
    "calls",
    [
        [(1, ()), (1, ())],  # The write of the first call is under way when the second one begins to read
        [(1, (2,)), (2, (1,)), (1, ())],  # ... and when its slice could be read ahead
        [(1, (1,)), (1, ())],  # The slice that changes is not read ahead
        [(0, (1, 1)), (1, (1,)), (1, ())],  # A slice that will change is read ahead once
    ],
)
def test_a_piece_is_read_after_its_last_write_has_ended(
    calls: list[tuple[int, tuple[int, ...]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = DirectFile.write

    def write(file: DirectFile, buffer: memoryview, offset: int) -> int:
        time.sleep(0.03)
        return real_write(file, buffer, offset)

    monkeypatch.setattr(DirectFile, "write", write)
    with FileTensors(tmp_path, MIXED, (3000, 10, 20), threads=12, piece_bytes=SMALL_PIECES) as files:
        for index, following in calls:
            files.update(index, add(1), following=following)
        values = [view.unique().tolist() for view in files.tensors("wide")]
    indices = [index for index, _ in calls]
    assert values == [[indices.count(index)] for index in range(3)]


def test_pieces_that_were_read_ahead_are_dropped_if_the_caller_updates_others(tmp_path: Path) -> None:
    with FileTensors(tmp_path, KINDS, (10, 20, 30)) as files:
        files.update(0, add(1), following=[1, 2])
        files.update(2, add(1))
        files.update(2, add(1), following=[1])
        files.tensors("master")[1].fill_(5)
        files.update(1, add(1), following=[0])
        files.fill(0, lambda elements, tensors: tensors["master"].fill_(7))
        assert [view.unique().tolist() for view in files.tensors("master")] == [[7], [6], [2]]


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_a_state_without_elements(lengths: tuple[int, ...], tmp_path: Path) -> None:
    with FileTensors(tmp_path, KINDS, lengths) as files:
        for index in range(len(lengths)):
            files.update(index, add(1))
        files.flush()
        assert [view.shape for view in files.tensors("exp_avg")] == [torch.Size([0])] * len(lengths)
        assert files.bytes_read == files.bytes_written == 0


def test_a_full_disk_in_the_middle_of_a_step(tmp_path: Path) -> None:
    descriptors = open_descriptors()
    with FileTensors(tmp_path, KINDS, LENGTHS, piece_bytes=SMALL_PIECES) as files:
        with failing_descriptor(files, "exp_avg"), pytest.raises(StateFileError) as raised:
            files.update(0, add(1))
            files.flush()
        assert str(raised.value) == (
            f"could not write {tmp_path / 'exp_avg.bin'} (No space left on device): the last checkpoint is complete; "
            "make room in memory.folder, then --resume"
        )
        assert raised.value.exit_code == 5
        files.update(0, add(1))  # No buffer is lost
        files.flush()
    assert io_threads() == [] and open_descriptors() == descriptors


def test_a_file_that_becomes_shorter_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with FileTensors(tmp_path, KINDS, LENGTHS, piece_bytes=SMALL_PIECES) as files:
        os.truncate(tmp_path / "master.bin", 5 * PAGE)
        with pytest.raises(StateFileError, match=r"could not read .*master.bin \(the file ends at byte 20480\): the"):
            files.update(0, add(1))
    assert io_threads() == []


def test_a_disk_that_fails_while_views_are_written_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with FileTensors(tmp_path, KINDS, LENGTHS) as files:
        if not files.is_direct:
            pytest.skip("the filesystem of temporary files has no direct IO")
        files.tensors("master")[0].fill_(1)
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(
            StateFileError, match=r"could not write .*master.bin \(Input/output error\): .*check the disk"
        ):
            files.update(0, add(1))


@pytest.mark.parametrize("action", ["update", "fill", "read"])
def test_an_error_of_the_function_leaves_the_files_usable(action: str, tmp_path: Path) -> None:
    def failing(elements: slice, tensors: Mapping[str, Tensor]) -> None:
        if elements.start:
            raise KeyError(elements.start)

    with FileTensors(tmp_path, KINDS, LENGTHS, piece_bytes=SMALL_PIECES) as files:
        for _ in range(6):  # More often than there are buffers
            with pytest.raises(KeyError):
                getattr(files, action)(0, failing)
        files.update(0, add(1))
        assert (files.tensors("master")[0] == 1).all()


def test_a_disk_that_is_too_small_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=rf"{tmp_path} has .* free and the files need 12 PiB; make room, or set memory"
    ):
        FileTensors(tmp_path, KINDS, (2**50,))
    assert list(tmp_path.iterdir()) == [] and io_threads() == []


def test_files_that_cannot_be_made_are_one_sentence(tmp_path: Path) -> None:
    descriptors = open_descriptors()
    with pytest.raises(InputError, match=r"cannot make the files of the optimizer in .*: No such file or directory"):
        FileTensors(tmp_path / "gone", KINDS, LENGTHS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with pytest.raises(InputError, match=r"\(File too large\); make room"):
            FileTensors(tmp_path, KINDS, LENGTHS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_descriptors() == descriptors


def test_closing_twice_does_nothing_and_ignores_the_last_writes(tmp_path: Path) -> None:
    files = FileTensors(tmp_path, KINDS, LENGTHS)
    with failing_descriptor(files, "master"):
        files.update(0, add(1), following=[3])
        files.close()
    files.close()
    assert io_threads() == []
