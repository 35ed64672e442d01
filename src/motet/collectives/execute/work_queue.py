"""Operations that are carried out one after another, and the handle by which somebody waits for one of them."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Task = Callable[[], None]


class WorkHandle(Protocol):
    """An operation that was started. Those of torch.distributed fit too."""

    def wait(self) -> object:
        """Until it is done; raises what went wrong. On CUDA the current stream waits, and the host goes on."""

    def is_completed(self) -> bool: ...


class CompletedWork:
    """Nothing is left to wait for."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class ThreadWork:
    """An operation that a thread carries out."""

    def __init__(self) -> None:
        self._completed = threading.Event()
        self._error: BaseException | None = None

    def run(self, task: Task) -> None:
        self.complete(_run_and_catch(task))

    def complete(self, error: BaseException | None) -> None:
        self._error = error
        self._completed.set()

    def wait(self) -> None:
        self._completed.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._completed.is_set()


class FifoWorkQueue:
    """Carries out tasks in the order in which they are given: at once where it can, or on a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Task, ThreadWork] | None] = SimpleQueue()
        self._state_lock = threading.Lock()
        self._run_lock = threading.Lock()
        self._unfinished = 0
        self._has_thread = False

    def run_and_wait(self, task: Task) -> None:
        """Returns when it is done; it is done here, if nothing is before it."""
        with self._state_lock:
            is_idle = self._unfinished == 0
            if is_idle:
                self._unfinished = 1
                self._run_lock.acquire()
        if not is_idle:
            self.submit(task).wait()
            return
        try:
            task()
        finally:
            self._run_lock.release()
            self._mark_finished()

    def submit(self, task: Task) -> ThreadWork:
        """Returns at once."""
        work = ThreadWork()
        with self._state_lock:
            self._unfinished += 1
            self._queue.put((task, work))
            if not self._has_thread:
                self._has_thread = True
                # A daemon, so that a program can end although another rank is not coming.
                threading.Thread(target=self._run_worker, name="motet-lane", daemon=True).start()
        return work

    def close(self) -> None:
        """The thread ends after what it was given."""
        self._queue.put(None)

    def _run_worker(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            task, work = item
            with self._run_lock:
                error = _run_and_catch(task)
                self._mark_finished()
            del item, task  # and the tensors with it, before anybody hears of the end
            work.complete(error)
            del work

    def _mark_finished(self) -> None:
        with self._state_lock:
            self._unfinished -= 1


def _run_and_catch(task: Task) -> BaseException | None:
    """What went wrong, to be raised where somebody waits."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - see above
        return error
    return None
