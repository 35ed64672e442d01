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

from motet.collectives.shm_backend.errors import CollectiveError, PeerLostError

_WORKER_JOIN_TIMEOUT_S = 5.0  # A worker that waits for a rank which does not come is left behind
Future = Any  # torch.futures.Future of a list of tensors


class BackendWorkHandle(dist.Work):
    """Something under way. `helper` is called by whoever waits, with the seconds it may take, and makes it go on."""

    def __init__(
        self, progress: Callable[["BackendWorkHandle", float | None], None], outputs: list[Any], source: int = -1
    ) -> None:
        super().__init__()
        self.progress = progress
        self.outputs = outputs
        self.source = source
        self.finished = False
        self.error: BaseException | None = None
        self._future: Future = None
        self._unnotified_future: Future = None
        self._lock = threading.Lock()

    def complete(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.error = error
            self.finished = True

    def notify_future(self) -> None:
        """Fill the future, if one was asked for. What hangs on it runs here, and may call collectives."""
        with self._lock:
            future, self._unnotified_future = self._unnotified_future, None
        if future is None:
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.finished:
            seconds = timeout.total_seconds()
            self.progress(self, seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                self._future = self._unnotified_future = torch.futures.Future()
        if self.finished:
            self.notify_future()
        return self._future

    @property
    def has_future(self) -> bool:
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


def completed_work(outputs: list[Any]) -> BackendWorkHandle:
    task = BackendWorkHandle(lambda task, seconds: None, outputs)
    task.finished = True
    return task


class CollectiveJobQueue:
    """Jobs in the order in which they were called."""

    def __init__(self, on_failure: Callable[[BaseException], None], reduce_spinning: Callable[[bool], None]) -> None:
        self._on_failure = on_failure
        # Told whether the job is run by a worker, which must not keep other threads from running.
        self._reduce_spinning = reduce_spinning
        self._run_lock = threading.Lock()
        self._jobs: deque[tuple[BackendWorkHandle, Callable[[], None]]] = deque()
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._idle_workers = 0
        self.failure: BaseException | None = None

    def run_inline(self, job: Callable[[], None]) -> None:
        """Run it here, after those before it."""
        finished: list[BackendWorkHandle] = []
        try:
            with self._run_lock:
                while self._jobs:
                    finished.append(self._run_next())
                self._run(job)
        finally:
            for task in finished:
                task.notify_future()

    def submit(self, job: Callable[[], None], outputs: list[Any]) -> BackendWorkHandle:
        task = BackendWorkHandle(self._run_until_finished, outputs)
        self._jobs.append((task, job))
        if not self._workers:
            self._start_worker()
        self._wakeups.put(True)
        return task

    def close(self) -> None:
        for _ in self._workers:
            self._wakeups.put(False)
        for worker in self._workers:
            worker.join(_WORKER_JOIN_TIMEOUT_S)
        self._workers.clear()

    def _start_worker(self) -> None:
        worker = threading.Thread(target=self._worker_loop, name="motet-collectives", daemon=True)
        self._workers.append(worker)
        worker.start()

    def _run_until_finished(self, task: BackendWorkHandle, seconds: float | None) -> None:
        if not self._run_lock.acquire(timeout=-1 if seconds is None else seconds):
            raise PeerLostError(f"a collective did not end within {seconds:g} s")
        finished: list[BackendWorkHandle] = []
        try:
            while not task.finished:
                finished.append(self._run_next())
        finally:
            self._run_lock.release()
            for other in finished:
                other.notify_future()

    def _worker_loop(self) -> None:
        self._idle_workers += 1
        while self._wakeups.get():
            task = None
            with self._run_lock:
                self._idle_workers -= 1
                if self._jobs:
                    self._reduce_spinning(True)
                    try:
                        task = self._run_next()
                    finally:
                        self._reduce_spinning(False)
                # What hangs on the future may wait for a collective that comes after it, which someone has to run.
                if task is not None and task.has_future and not self._idle_workers:
                    self._start_worker()
            if task is not None:
                task.notify_future()
            with self._run_lock:
                self._idle_workers += 1

    def _run_next(self) -> BackendWorkHandle:
        task, job = self._jobs.popleft()
        try:
            self._run(job)
        except Exception as error:  # noqa: BLE001  (it is raised in whoever waits)
            task.complete(error)
        else:
            task.complete()
        return task

    def _run(self, job: Callable[[], None]) -> None:
        if self.failure is not None:
            kind = PeerLostError if isinstance(self.failure, PeerLostError) else CollectiveError
            raise kind(f"this group has failed before: {self.failure}")
        try:
            job()
        except BaseException as error:
            self.failure = error
            self._on_failure(error)
            raise
