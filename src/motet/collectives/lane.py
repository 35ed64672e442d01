"""Operations that are carried out one after another, and the handle by which somebody waits for one of them."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Task = Callable[[], None]


class Work(Protocol):
    """An operation that was started. Those of torch.distributed fit too."""

    def wait(self) -> object:
        """Until it is done; raises what went wrong. On CUDA the current stream waits, and the host goes on."""

    def is_completed(self) -> bool: ...


class Done:
    """Nothing is left to wait for."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class Pending:
    """An operation that a thread carries out."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self, task: Task) -> None:
        self.end(_outcome(task))

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._ended.is_set()


class Lane:
    """Carries out tasks in the order in which they are given: at once where it can, or on a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Task, Pending] | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._turn = threading.Lock()
        self._unfinished = 0
        self._started = False

    def do(self, task: Task) -> None:
        """Returns when it is done; it is done here, if nothing is before it."""
        with self._changing:
            alone = self._unfinished == 0
            if alone:
                self._unfinished = 1
                self._turn.acquire()
        if not alone:
            self.start(task).wait()
            return
        try:
            task()
        finally:
            self._turn.release()
            self._finished()

    def start(self, task: Task) -> Pending:
        """Returns at once."""
        pending = Pending()
        with self._changing:
            self._unfinished += 1
            self._queue.put((task, pending))
            if not self._started:
                self._started = True
                # A daemon, so that a program can end although another rank is not coming.
                threading.Thread(target=self._serve, name="motet-lane", daemon=True).start()
        return pending

    def close(self) -> None:
        """The thread ends after what it was given."""
        self._queue.put(None)

    def _serve(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            task, pending = item
            with self._turn:
                error = _outcome(task)
                self._finished()
            del item, task  # and the tensors with it, before anybody hears of the end
            pending.end(error)
            del pending

    def _finished(self) -> None:
        with self._changing:
            self._unfinished -= 1


def _outcome(task: Task) -> BaseException | None:
    """What went wrong, to be raised where somebody waits."""
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - see above
        return error
    return None
