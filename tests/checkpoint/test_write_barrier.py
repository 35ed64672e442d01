"""The barrier between the thread that writes a checkpoint and the updates, with a link of a GPU that is played."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from motet.checkpoint import write_barrier
from motet.checkpoint.safetensors_header import DataBox
from motet.checkpoint.write_barrier import BoxToWrite, WriteBarrier

CPU = torch.device("cpu")


def _boxes(count: int, numel: int = 8) -> list[BoxToWrite]:
    box = DataBox("w", "float32", (count, numel), (0, 0), (1, numel))
    return [BoxToWrite(box._replace(offsets=(i, 0)), torch.full((1, numel), float(i)), i) for i in range(count)]


def _barrier(boxes: Sequence[BoxToWrite], *, staging_bytes: int = 0, in_files: bool = False) -> WriteBarrier:
    return WriteBarrier(boxes, CPU, staging_bytes=staging_bytes, in_files=in_files)


def _update(barrier: WriteBarrier, values: Tensor, index: int) -> threading.Thread:
    def run() -> None:
        barrier.before_update([index])
        values.fill_(-1.0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_values_are_read_in_place_or_copied_before_an_update() -> None:
    boxes = _boxes(3)
    originals = [each.values for each in boxes]
    barrier = _barrier(boxes)
    with barrier.reading(boxes[0]) as values:
        assert values is originals[0]
        first = _update(barrier, originals[0], 0)
        _update(barrier, originals[2], 2).join(10)
        time.sleep(0.05)
        assert first.is_alive() and values.eq(0.0).all()  # It waits until the box is read
    first.join(10)
    assert originals[0].eq(-1.0).all()
    for index in (1, 2):
        with barrier.reading(boxes[index]) as values:
            assert values.eq(float(index)).all() and (values is originals[index]) == (index == 1)
    assert barrier.copied_bytes == originals[2].nbytes and barrier.stall_s > 0.04


def test_an_update_waits_for_one_box_and_no_copy_stays() -> None:
    """The others are copied while one is read; what is written holds no memory any more."""
    boxes = _boxes(4)
    for each in boxes:
        each.slice_index = 0
    values = torch.cat([each.values for each in boxes])
    for each, part in zip(boxes, values, strict=True):
        each.values = part.unsqueeze(0)
    barrier = _barrier(boxes)
    with barrier.reading(boxes[0]):
        thread = _update(barrier, values, 0)
        deadline_s = time.monotonic() + 10
        while barrier.copied_bytes < 3 * boxes[0].values.nbytes and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert thread.is_alive() and barrier.copied_bytes == 3 * boxes[0].values.nbytes
    thread.join(10)
    assert values.eq(-1.0).all()
    for index, each in enumerate(boxes[1:], 1):
        with barrier.reading(each) as copy:
            assert copy.eq(float(index)).all()
    assert [each.values.untyped_storage().nbytes() for each in boxes] == [0] * 4


def test_slices_in_files_are_waited_for_and_not_copied() -> None:
    boxes = _boxes(1)
    values = boxes[0].values
    barrier = _barrier(boxes, in_files=True)
    thread = _update(barrier, values, 0)
    time.sleep(0.05)
    assert thread.is_alive()
    with barrier.reading(boxes[0]) as read:
        assert read.eq(0.0).all()
    thread.join(10)
    assert values.eq(-1.0).all() and barrier.copied_bytes == 0


def test_a_save_that_fails_lets_updates_pass() -> None:
    boxes = _boxes(2)
    barrier = _barrier(boxes, in_files=True)
    thread = _update(barrier, boxes[0].values, 0)
    barrier.open()
    thread.join(10)
    assert not thread.is_alive()


class _Arrival:
    def __init__(self) -> None:
        self.device_waits, self.arrived = 0, threading.Event()

    def let_device_wait(self) -> None:
        self.device_waits += 1

    def wait_on_host(self) -> None:
        assert self.arrived.wait(10)


class _Link:
    """Copies at the moment of the call, as a stream does in its order, and arrives when the test says so."""

    def __init__(self) -> None:
        self.arrivals = list[_Arrival]()

    def to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool) -> tuple[list[Tensor], _Arrival]:
        assert not may_be_freed
        self.arrivals.append(_Arrival())
        return [each.clone() for each in tensors], self.arrivals[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that lie on the device."""
    there = list[Tensor]()
    monkeypatch.setattr(write_barrier, "_is_on_host", lambda values: all(values is not each for each in there))
    return there


def test_the_update_of_a_device_waits_for_copies_and_for_room(
    device: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = _boxes(4)
    device += [each.values for each in boxes]
    barrier, link = _barrier(boxes, staging_bytes=2 * boxes[0].values.nbytes), _Link()
    monkeypatch.setattr(barrier, "_device_link", link)
    barrier.before_update([0, 1])
    assert [each.device_waits for each in link.arrivals] == [1, 1]
    for values in device[:2]:
        values.fill_(-1.0)
    third = _update(barrier, device[2], 2)  # Two copies fill the room
    time.sleep(0.05)
    assert third.is_alive() and len(link.arrivals) == 2
    link.arrivals[0].arrived.set()
    with barrier.reading(boxes[0]) as read:
        assert read.eq(0.0).all()
    third.join(10)
    assert len(link.arrivals) == 3 and device[2].eq(-1.0).all()
    for each in link.arrivals:
        each.arrived.set()
    for index in (1, 2):
        with barrier.reading(boxes[index]) as read:
            assert read.eq(float(index)).all()
    reader = threading.Thread(target=lambda: barrier.reading(boxes[3]).__enter__())  # A copy, on its way
    reader.start()
    while len(link.arrivals) < 4:
        time.sleep(0.001)
    barrier.before_update([3])
    assert link.arrivals[3].device_waits == 1 and barrier.copied_bytes == 3 * device[0].nbytes
    link.arrivals[3].arrived.set()
    reader.join(10)
