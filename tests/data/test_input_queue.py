"""The input queue: order, bounds, errors and the end of its thread."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from corpora import SMALL, settings

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.data.corpus.prepare import prepare_data
from motet.data.samples.input_queue import InputQueue
from motet.data.samples.loader import BatchLoader
from waiting import until

COUNT = 3  # Micro-batches of a step


class Source:
    """Records what is read, by which threads; reading of `blocked` waits for `goes_on`."""

    def __init__(self, blocked: tuple[int, int] | None = None, fails: tuple[int, int] | None = None) -> None:
        self.read_places, self.threads = list[tuple[int, int]](), set[int]()
        self.goes_on, self._blocked, self._fails = threading.Event(), blocked, fails

    def __call__(self, step: int, microbatch: int) -> str:
        self.read_places.append((step, microbatch))
        self.threads.add(threading.get_ident())
        if (step, microbatch) == self._blocked:
            assert self.goes_on.wait(10)
        if (step, microbatch) == self._fails:
            raise InputError(f"step {step} is damaged")
        return f"{step}/{microbatch}"


def places(steps: range) -> list[tuple[int, int]]:
    return [(step, index) for step in steps for index in range(COUNT)]


def settled(source: Source) -> list[tuple[int, int]]:
    """The places that are read, once nothing more is read for 50 ms."""
    seen = -1
    while len(source.read_places) != seen:
        seen = len(source.read_places)
        time.sleep(0.05)
    return source.read_places


def queue_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("motet-input-queue")]


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_micro_batches_come_in_order_and_none_of_the_end_is_read(depth: int) -> None:
    source = Source()
    with InputQueue(source, range(2, 5), COUNT, depth=depth) as queue:
        for number, place in enumerate(places(range(2, 5))):
            assert queue.take(*place) == "{}/{}".format(*place)
            ahead = len(settled(source)) - (number + 1)
            assert ahead == min(depth, 9 - (number + 1))
    assert source.read_places == places(range(2, 5))
    assert len(source.threads) == 1 and threading.get_ident() not in source.threads
    assert queue_threads() == []


def test_a_request_out_of_order_is_refused() -> None:
    """The micro-batch of another place would train with other samples than without a queue."""
    source = Source()
    with InputQueue(source, range(9), COUNT, depth=2) as queue:
        assert queue.take(0, 0) == "0/0"
        assert settled(source) == [(0, 0), (0, 1), (0, 2)]
        with pytest.raises(AssertionError, match=r"\(0, 2\) was requested, and \(0, 1\) is next"):
            queue.take(0, 2)


def test_an_error_is_raised_at_its_micro_batch_with_its_message() -> None:
    source = Source(fails=(1, 1))
    with InputQueue(source, range(9), COUNT, depth=3) as queue:
        for place in [*places(range(1)), (1, 0)]:
            assert queue.take(*place) == "{}/{}".format(*place)
        assert (1, 1) in settled(source)
        with pytest.raises(InputError, match=r"^step 1 is damaged$"):
            queue.take(1, 1)
        assert queue.take(1, 2) == "1/2"


def test_the_end_waits_for_the_read_under_way_and_drops_the_rest() -> None:
    source = Source(blocked=(0, 1))

    def fail(queue: InputQueue[str]) -> None:
        queue.take(0, 0)
        until(lambda: len(source.read_places) == 2)
        threading.Timer(0.05, source.goes_on.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), InputQueue(source, range(9), COUNT, depth=100) as queue:
        fail(queue)
    assert source.read_places == [(0, 0), (0, 1)] and queue_threads() == []


def test_the_thread_is_prepared_before_it_reads() -> None:
    prepared = list[int]()
    source = Source()
    prepare: Callable[[], None] = lambda: prepared.append(threading.get_ident())  # noqa: E731
    with InputQueue(source, range(1), COUNT, depth=1, start_thread=prepare) as queue:
        queue.take(0, 0)
    assert prepared == [*source.threads]


def test_evaluation_reads_the_same_loader_while_the_thread_reads(tmp_path: Path) -> None:
    given = settings(tmp_path, source=str(SMALL), validation_fraction=0.2)
    prepared = prepare_data(given)
    quiet, busy = (BatchLoader(prepared, given, 0) for _ in range(2))
    rows = range(given.batch_sequences)
    expected = [quiet.batch(step, rows) for step in range(60)]
    batches = quiet.evaluation_batches("validation")
    held_out = [quiet.evaluation_batch("validation", index, rows) for index in range(batches)]
    with InputQueue(lambda step, _: busy.batch(step, rows), range(60), 1, depth=60) as queue:
        for step in range(60):
            assert is_same(queue.take(step, 0), expected[step])
            index = step % batches
            assert is_same(busy.evaluation_batch("validation", index, rows), held_out[index])


def is_same(batch: Batch, other: Batch) -> bool:
    tensors, others = batch.tensors(), other.tensors()
    return [*tensors] == [*others] and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_all_tensors_that_move_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = list[int]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:  # As torch does, which needs a GPU for it
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    tokens, rows = torch.arange(6).view(2, 3), torch.tensor([4, 5])
    batch = Batch(tokens, tokens + 1, torch.ones(2, 3), rows, documents=torch.zeros_like(tokens), row_tokens=9)
    copy = batch.pinned()
    assert is_same(copy, batch) and copy.row_tokens == 9 and copy.rows is rows
    assert {tensor.data_ptr() for name, tensor in copy.tensors().items() if name != "rows"} == {*pinned}
    assert len(pinned) == 4
