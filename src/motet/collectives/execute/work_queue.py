"""FIFO queues of operations, on threads or CUDA streams, and the handles by which callers wait for one of them."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from motet.collectives.program import PeerLostError
from motet.collectives.torch_private import completed_future

Task = Callable[[], None]
Future = Any  # torch.futures.Future of a list of tensors


class WorkHandle(Protocol):
    """An operation that was started. The handles of torch.distributed fit too."""

    def wait(self) -> object:
        """Wait for the end, and raise the error if there was one. On CUDA only the current stream waits."""

    def is_completed(self) -> bool: ...


class CudaStreamWork:
    """Operations that were queued on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())


def run_on_stream(task: Task, stream: torch.cuda.Stream) -> CudaStreamWork:
    """Queue a task behind the current stream. Its tensors must live until it is waited for or records them."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        task()
        return CudaStreamWork(stream.record_event(), stream.device)


class AsyncWork(dist.Work):
    """An operation in flight. A waiter calls `progress` with the handle and the seconds it may take."""

    def __init__(
        self, progress: Callable[["AsyncWork", float | None], None], outputs: list[Any], source: int = -1
    ) -> None:
        super().__init__()
        self.progress, self.outputs, self.source = progress, outputs, source
        self.finished, self._lock = False, threading.Lock()
        self.error: BaseException | None = None
        self.future: Future = None
        self._unnotified_future: Future = None

    def complete(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.error, self.finished = error, True

    def notify_future(self) -> None:
        """Fill the future, if there is one. Its callbacks run here, and may call collectives."""
        with self._lock:
            future, self._unnotified_future = self._unnotified_future, None
        if future is not None:
            future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.finished:
            seconds = timeout.total_seconds()
            self.progress(self, seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future:
        """A future of the outputs, which torch's C++ can read.

        It takes errors from callbacks that raise them, and a list of tensors where the operation has ended. DDP's own
        float16 hook, which is written in C++, accepts nothing else.
        """
        if not self.finished and self.outputs and getattr(self.outputs[0], "dtype", None) == torch.float16:
            with contextlib.suppress(Exception):  # The error is in the future
                self.wait()
        with self._lock:
            if self.future is None and self.finished and self.error is None:
                self.future = completed_future(lambda: self.outputs)
            elif self.future is None:
                self._unnotified_future = torch.futures.Future()
                self.future = self._unnotified_future.then(self._outputs_or_error)
        if self.finished:
            self.notify_future()
        return self.future

    def _outputs_or_error(self, ended: Future) -> list[Any]:
        if self.error is not None:
            raise copy(self.error).with_traceback(None)  # Torch adds the traceback to the message
        return self.outputs

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


class CompletedWork(AsyncWork):
    """An operation that has already ended."""

    def __init__(self, outputs: list[Any] | None = None) -> None:
        super().__init__(lambda work, seconds: None, outputs or [])
        self.finished = True


class WorkQueue:
    """Tasks that run one after another, in the order in which they were submitted.

    A worker thread runs them. With `waiters_help`, whoever waits runs the tasks up to the one it waits for, which saves
    a change of threads; `on_worker_run` is called when a worker begins and ends a task.
    """

    def __init__(self, *, waiters_help: bool = False, on_worker_run: Callable[[bool], None] | None = None) -> None:
        self._waiters_help, self._on_worker_run = waiters_help, on_worker_run or (lambda is_running: None)
        self._run_lock, self._completion = threading.Lock(), threading.Condition()
        self._tasks: deque[tuple[AsyncWork, Task]] = deque()
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._idle_workers = 0

    def run(self, task: Task) -> None:
        """Run a task after those submitted before, in this thread where possible, and return when it has ended."""
        if self._waiters_help:
            self._run_lock.acquire()
        elif self._tasks or not self._run_lock.acquire(blocking=False):
            self.submit(task).wait()
            return
        self._run_with_lock(lambda: self._waiters_help and bool(self._tasks), task)

    def submit(self, task: Task, outputs: list[Any] | None = None) -> AsyncWork:
        work = AsyncWork(self._help if self._waiters_help else self._wait_for_worker, outputs or [])
        self._tasks.append((work, task))
        if not self._workers:
            self._start_worker()
        self._wakeups.put(True)
        return work

    def close(self, join_timeout_s: float = 0.0) -> None:
        """End the workers after the tasks submitted so far."""
        for _ in self._workers:
            self._wakeups.put(False)
        for worker in self._workers if join_timeout_s else ():
            worker.join(join_timeout_s)
        self._workers.clear()

    def _help(self, work: AsyncWork, seconds: float | None) -> None:
        if not self._run_lock.acquire(timeout=-1 if seconds is None else seconds):
            raise PeerLostError(f"a collective did not end within {seconds:g} s")
        self._run_with_lock(lambda: not work.finished, lambda: None)

    def _run_with_lock(self, has_more: Callable[[], bool], task: Task) -> None:
        """Run submitted tasks and then this one, with the lock held, and release it."""
        completed: list[AsyncWork] = []
        try:
            while has_more():
                completed.append(self._run_next())
            task()
        finally:
            self._run_lock.release()
            for work in completed:
                work.notify_future()

    def _wait_for_worker(self, work: AsyncWork, seconds: float | None) -> None:
        with self._completion:
            self._completion.wait_for(work.is_completed, seconds)

    def _start_worker(self) -> None:
        # A daemon, so that a program can end although another rank does not take part.
        worker = threading.Thread(target=self._run_worker, name="motet-work-queue", daemon=True)
        self._workers.append(worker)
        worker.start()

    def _run_worker(self) -> None:
        self._idle_workers += 1
        while self._wakeups.get():
            self._run_one_in_worker()

    def _run_one_in_worker(self) -> None:
        work = None
        with self._run_lock:
            self._idle_workers -= 1
            if self._tasks:
                self._on_worker_run(True)
                try:
                    work = self._run_next()
                finally:
                    self._on_worker_run(False)
            # A callback of the future may wait for a later task, which another worker has to run.
            if work is not None and work.future is not None and not self._idle_workers:
                self._start_worker()
        if work is not None:
            work.notify_future()
        with self._run_lock:
            self._idle_workers += 1

    def _run_next(self) -> AsyncWork:
        work, task = self._tasks.popleft()
        try:
            task()
        except BaseException as error:
            work.complete(error)
            if not isinstance(error, Exception):
                raise
        else:
            del task  # and its tensors, before a waiter goes on
            work.complete()
        finally:
            with self._completion:
                self._completion.notify_all()
        return work
