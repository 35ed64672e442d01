"""Micro-batches that a thread reads, while the steps of a rank compute with earlier ones.
The samples of a micro-batch depend on its step and rows alone, so a checkpoint keeps nothing of the queue."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class InputQueue(Generic[T]):
    """Calls `read(step, microbatch)` for the next micro-batches in one thread, which makes all calls of a run."""

    def __init__(
        self,
        read: Callable[[int, int], T],
        steps: range,
        microbatches: int,
        *,
        depth: int,
        start_thread: Callable[[], None] | None = None,
    ) -> None:
        """Read up to `depth` micro-batches of these steps before they are asked for, from the first request on. The
        thread calls `start_thread` first."""
        self._read, self._depth = read, depth
        self._places = ((step, index) for step in steps for index in range(microbatches))  # That are not queued yet
        self._thread = ThreadPoolExecutor(1, "motet-input-queue", start_thread)
        self._queued = deque[tuple[tuple[int, int], Future[T]]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop micro-batches that nobody asked for, and wait until the thread has ended, with the one that it reads."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int, microbatch: int) -> T:
        """A micro-batch; waits until it is read, and raises the error of its reading. Every pipeline schedule asks for
        the micro-batches of a step in order."""
        for place in islice(self._places, self._depth + 1 - len(self._queued)):
            self._queued.append((place, self._thread.submit(self._read, *place)))
        place, taken = self._queued.popleft()
        assert place == (step, microbatch), f"{(step, microbatch)} was requested, and {place} is next"
        return taken.result()
