"""The `Work` that a caller gets, and the line in which a group's collectives are carried out one after another.

A synchronous collective runs in the thread that calls it, after what stands in line before. An asynchronous one is
taken by whoever comes first: a worker thread, or the caller when it waits.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from motet.collectives.backend.errors import CollectiveError, PeerLostError

_JOIN_S = 5.0
"""A worker that waits for a rank which does not come is left behind."""
Future = Any
"""torch.futures.Future of a list of tensors."""


class Task(dist.Work):
    """Something under way. `helper` is called by whoever waits, with the seconds it may take, and makes it go on."""

    def __init__(self, helper: Callable[["Task", float | None], None], outputs: list[Any], source: int = -1) -> None:
        super().__init__()
        self.helper = helper
        self.outputs = outputs
        self.source = source
        self.finished = False
        self.error: BaseException | None = None
        self._future: Future = None
        self._untold: Future = None
        self._lock = threading.Lock()

    def settle(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.error = error
            self.finished = True

    def tell(self) -> None:
        """Fill the future, if one was asked for. What hangs on it runs here, and may call collectives."""
        with self._lock:
            future, self._untold = self._untold, None
        if future is None:
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.finished:
            seconds = timeout.total_seconds()
            self.helper(self, seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                self._future = self._untold = torch.futures.Future()
        if self.finished:
            self.tell()
        return self._future

    @property
    def awaited(self) -> bool:
        """A future has been asked for."""
        return self._future is not None

    def is_completed(self) -> bool:
        return self.finished

    def is_success(self) -> bool:
        return self.finished and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[Any]:
        return self.outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


def completed(outputs: list[Any]) -> Task:
    task = Task(lambda task, seconds: None, outputs)
    task.finished = True
    return task


class Line:
    """Jobs in the order in which they were called."""

    def __init__(self, fail: Callable[[BaseException], None], relax: Callable[[bool], None]) -> None:
        self._fail = fail
        self._relax = relax
        """Told whether the job is run by a worker, which must not keep other threads from running."""
        self._turn = threading.Lock()
        self._jobs: deque[tuple[Task, Callable[[], None]]] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self.failure: BaseException | None = None

    def now(self, job: Callable[[], None]) -> None:
        """Run it here, after those before it."""
        settled: list[Task] = []
        try:
            with self._turn:
                while self._jobs:
                    settled.append(self._next())
                self._run(job)
        finally:
            for task in settled:
                task.tell()

    def later(self, job: Callable[[], None], outputs: list[Any]) -> Task:
        task = Task(self._help, outputs)
        self._jobs.append((task, job))
        if not self._workers:
            self._start_worker()
        self._calls.put(True)
        return task

    def close(self) -> None:
        for _ in self._workers:
            self._calls.put(False)
        for worker in self._workers:
            worker.join(_JOIN_S)
        self._workers.clear()

    def _start_worker(self) -> None:
        worker = threading.Thread(target=self._work, name="motet-collectives", daemon=True)
        self._workers.append(worker)
        worker.start()

    def _help(self, task: Task, seconds: float | None) -> None:
        if not self._turn.acquire(timeout=-1 if seconds is None else seconds):
            raise PeerLostError(f"a collective did not end within {seconds:g} s")
        settled: list[Task] = []
        try:
            while not task.finished:
                settled.append(self._next())
        finally:
            self._turn.release()
            for other in settled:
                other.tell()

    def _work(self) -> None:
        self._idle += 1
        while self._calls.get():
            task = None
            with self._turn:
                self._idle -= 1
                if self._jobs:
                    self._relax(True)
                    try:
                        task = self._next()
                    finally:
                        self._relax(False)
                # What hangs on the future may wait for a collective that comes after it, which someone has to run.
                if task is not None and task.awaited and not self._idle:
                    self._start_worker()
            if task is not None:
                task.tell()
            with self._turn:
                self._idle += 1

    def _next(self) -> Task:
        task, job = self._jobs.popleft()
        try:
            self._run(job)
        except Exception as error:  # noqa: BLE001  (it is raised in whoever waits)
            task.settle(error)
        else:
            task.settle()
        return task

    def _run(self, job: Callable[[], None]) -> None:
        if self.failure is not None:
            kind = PeerLostError if isinstance(self.failure, PeerLostError) else CollectiveError
            raise kind(f"this group has failed before: {self.failure}")
        try:
            job()
        except BaseException as error:
            self.failure = error
            self._fail(error)
            raise
