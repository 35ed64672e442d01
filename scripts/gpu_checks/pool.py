"""Processes that compute: one for most rows, several ranks for layouts. None of them can end the script."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

LAST_LINES = 6
GRACE_S = 3.0  # Time that the other ranks may take after one has failed
BROKEN_CONTEXT = "CUDA error", "Triton Error"  # A process computes nothing more after most of them


class WorkerError(Exception):
    """A worker failed, ended or took too long; the text has its last lines of output."""


def serve(connection: Connection, device: str, threads: int) -> None:
    """Say that this worker is ready, and answer a call (function, arguments), until the connection closes."""
    import torch

    torch.set_num_threads(threads)
    if device == "cuda":
        torch.zeros(1, device="cuda")  # Starts CUDA
    while True:
        connection.send((True, os.getpid()))
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException as error:  # noqa: BLE001  # The row shows the error, and the others continue
            lines = [*traceback.format_exc().strip().splitlines()[-LAST_LINES:-1], f"{type(error).__name__}: {error}"]
            answer = (False, "\n".join(lines))
            del error
        connection.send(answer)  # Before this process ends below, where the call has broken the context of CUDA
        gc.collect()  # Modules and their hooks refer to each other
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Pool:
    """Workers that share one device. Worker 0 computes rows of one rank."""

    def __init__(self, device: str, workers: int) -> None:
        self._context, self._device = multiprocessing.get_context("spawn"), device
        self._threads = max(1, (os.cpu_count() or 1) // (2 if workers > 1 else 1))
        self._workers: list[tuple[Any, Connection]] = []
        self._is_ready: list[bool] = []
        for _ in range(workers):
            self._start()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """The result of a function in worker 0."""
        return self._run([(function, arguments)], timeout_s)[0]

    def ranks(self, world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> list[Any]:
        """The results of `function(rank environment, *arguments)` on ranks that meet in a store."""
        from motet.core.token_authentication import RunToken
        from motet.parallel.process.launch_environment import RankEnvironment

        with tempfile.TemporaryDirectory(prefix="motet-store-") as folder:
            store, token = f"file://{folder}/store", RunToken("of the ranks of a check")
            places = [RankEnvironment(rank, world, rank, world, 0, store, token=token) for rank in range(world)]
            return self._run([(function, (place, *arguments)) for place in places], timeout_s)

    def keep(self, workers: int) -> None:
        """End the workers after the first ones, and free their memory on the device."""
        while len(self._workers) > workers:
            self._end(len(self._workers) - 1)
            self._workers.pop()
            self._is_ready.pop()

    def _start(self) -> None:
        self._workers.append(self._new_worker())
        self._is_ready.append(False)

    def _new_worker(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self._device, self._threads), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _end(self, index: int) -> None:
        process, connection = self._workers[index]
        connection.close()
        process.kill()
        process.join()

    def _run(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], timeout_s: float) -> list[Any]:
        while len(self._workers) < len(calls):
            self._start()
        end_s = monotonic() + timeout_s
        indices = list(range(len(calls)))
        for index in indices:
            if not self._is_ready[index]:
                self._wait_until_ready(index, end_s)
        for index, call in zip(indices, calls, strict=True):
            self._workers[index][1].send(call)
            self._is_ready[index] = False
        return self._receive(indices, end_s)

    def _wait_until_ready(self, index: int, end_s: float) -> None:
        """Wait for a worker, or for a new one in its place where it has ended after its last answer."""
        try:
            self._receive([index], end_s)
        except WorkerError:
            self._receive([index], end_s)
        self._is_ready[index] = True

    def _receive(self, indices: list[int], end_s: float) -> list[Any]:
        """One answer of each worker. Workers that failed for good, or still wait for a failed one, are replaced."""
        answers: dict[int, Any] = {}
        problem, lost = "", set[int]()
        while len({*answers} | lost) < len(indices):
            waiting = {self._workers[i][1]: i for i in indices if i not in answers and i not in lost}
            ready = wait(list(waiting), timeout=max(0.0, end_s - monotonic()))
            if not ready:
                problem, lost = problem or "took longer than it may", lost | {*waiting.values()}
            for connection in ready:
                index = waiting[connection]  # type: ignore[index]
                try:
                    is_good, answers[index] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    lost.add(index)
                    problem = problem or f"worker {index} ended with code {self._exit_code(index)}"
                    continue
                if not is_good:
                    problem, end_s = problem or answers[index], min(end_s, monotonic() + GRACE_S)
                    lost |= {index} if any(text in answers[index] for text in BROKEN_CONTEXT) else set()
        for index in lost:
            self._end(index)
            self._workers[index], self._is_ready[index] = self._new_worker(), False
        if problem:
            raise WorkerError(problem)
        return [answers[index] for index in indices]

    def _exit_code(self, index: int) -> int | None:
        process = self._workers[index][0]
        process.join(2)
        return process.exitcode  # type: ignore[no-any-return]
