"""Micro-batches that a thread reads, while the steps of a rank compute with earlier ones.
The samples of a micro-batch depend on its step and rows alone, so a checkpoint keeps nothing of the queue."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, Self, TypeVar

T = TypeVar("T")


class Place(NamedTuple):
    """A micro-batch of a rank in a run."""

    step: int
    microbatch: int


class InputQueue(Generic[T]):
    """Calls `read` for the next micro-batches in one thread, which makes all calls of a run."""

    def __init__(
        self,
        read: Callable[[int, int], T],
        microbatches: int,
        *,
        end: int,
        depth: int,
        start_thread: Callable[[], None] | None = None,
    ) -> None:
        """Each step asks for its `microbatches` in order, as every pipeline schedule does. Up to `depth` are read
        before, and none of step `end` or a later one. `start_thread` is called in the thread first."""
        self._read, self._microbatches, self._end, self._depth = read, microbatches, end, depth
        self._thread = ThreadPoolExecutor(1, "motet-input-queue", start_thread)
        self._queued = deque[tuple[Place, Future[T]]]()
        self._following = iter(list[Place]())  # The places that are not queued yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop micro-batches that nobody asked for, and wait until the thread has ended, with the one that it reads."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int, microbatch: int) -> T:
        """A micro-batch; waits until it is read, and raises the error of its reading. After a request out of the
        order, the queue starts again from this place."""
        place = Place(step, microbatch)
        if not self._queued or self._queued[0][0] != place:
            self._start_at(place)
        _, taken = self._queued.popleft()
        self._fill(self._depth)
        return taken.result()

    def _start_at(self, place: Place) -> None:
        for _, dropped in self._queued:
            dropped.cancel()
        self._queued.clear()
        self._following = self._places_from(place)
        self._fill(1)

    def _fill(self, count: int) -> None:
        while len(self._queued) < count and (place := next(self._following, None)) is not None:
            self._queued.append((place, self._thread.submit(self._read, *place)))

    def _places_from(self, first: Place) -> Iterator[Place]:
        yield from (Place(first.step, index) for index in range(first.microbatch, self._microbatches))
        yield from (
            Place(step, index) for step in range(first.step + 1, self._end) for index in range(self._microbatches)
        )
