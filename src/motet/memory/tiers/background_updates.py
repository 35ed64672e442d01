"""Updates of slices by the host in a thread, one after the other, while the device computes."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from weakref import finalize

import torch

_KNOWN_AHEAD = 32  # Slices of which an update learns that they follow

UpdateSlice = Callable[[int, Sequence[int]], None]  # (slice, the next ones)


class BackgroundUpdates:
    """The slices that the host has yet to update. An error of an update is raised by all calls that wait."""

    def __init__(self, device: torch.device | None) -> None:
        """Updates happen in a thread that sends values to this device; without one, in the thread that starts them."""
        self._condition, self._left = Condition(), set[int]()
        self._run_in_thread: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        if device is not None:
            self._executor = ThreadPoolExecutor(1, "motet-host-update", _prepare, (device, torch.get_num_threads()))
            finalize(self, self._executor.shutdown, wait=False)

    def start(self, order: Sequence[int], update: UpdateSlice) -> None:
        """Update these slices in this order."""
        self.wait()
        self._left = set(order)
        if self._executor is None:
            self._run(order, update)
        else:
            self._run_in_thread = self._executor.submit(self._run, order, update)

    def _run(self, order: Sequence[int], update: UpdateSlice) -> None:
        try:
            for position, index in enumerate(order, 1):
                update(index, order[position : position + _KNOWN_AHEAD])
                with self._condition:
                    self._left.discard(index)
                    self._condition.notify_all()
        finally:  # After an error, nothing is left to wait for
            with self._condition:
                self._left.clear()
                self._condition.notify_all()

    def wait(self, slices: Collection[int] | None = None) -> None:
        """Wait until these slices are updated, by default all."""
        with self._condition:
            self._condition.wait_for(lambda: not (self._left if slices is None else self._left.intersection(slices)))
        is_last = slices is None or not self._left
        if self._run_in_thread is not None and is_last:
            self._run_in_thread.result()

    def end(self) -> None:
        """Wait until no update runs, whether one has failed or not."""
        if self._run_in_thread is not None:
            self._run_in_thread.exception()


def _prepare(device: torch.device, threads: int) -> None:
    """Let this thread have what a new one does not inherit: the number of its threads, and the current device, on which
    pinned memory would else start CUDA for GPU 0."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
