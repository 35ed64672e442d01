"""Rank processes for tests: started once, reused by every test, each test with a process group of its own.
`Ranks.run(world, function, *args)` calls `function(group, *args)` on so many ranks and returns their results in order.
The first cause of a failure is raised with its rank, its assertion and its traceback; ranks that hang are stopped by a
time limit which says where each of them stands; a rank process that died is replaced."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from environment import uncounted
from motet.core.token_authentication import RunToken
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import CpuBackend
from motet.train.launch.failures import RankExitRecord, root_cause

TESTS = Path(__file__).parent
GRACE_S = 2.0
"""How long the others may take to notice that a rank has failed."""

TOKEN = RunToken("of the ranks of a test")


class RankFailureError(AssertionError):
    pass


@dataclass(frozen=True)
class Call:
    """A call that a rank is asked to make. The function goes by file and name: test modules cannot be imported."""

    file: str
    module: str
    name: str
    arguments: bytes
    place: RankEnvironment
    with_group: bool
    backend: CpuBackend
    timeout_s: float
    test: str


@dataclass(frozen=True)
class Worker:
    pid: int
    pipe: Connection
    output: Path

    def stands(self) -> str:
        before = self.output.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.output.read_bytes()[before:].decode(errors="replace").strip()

    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])


class WorkerForker:
    """A process that imports once what ranks need, and forks them: an import takes each of them seconds otherwise."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count(1)
        self._output = folder / "forker.txt"
        self._pipe, theirs = Pipe()
        handle = theirs.fileno()
        paths = [str(TESTS), str(TESTS.parent / "scripts")]
        code = f"import sys; sys.path[:0] = {paths!r}; import rank_worker; rank_worker.fork_workers({handle})"
        with self._output.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[handle], env=uncounted(), **streams
            )
        theirs.close()

    def start(self) -> Worker:
        output = self._folder / f"worker-{next(self._numbers)}.txt"
        ours, theirs = Pipe()
        try:
            self._pipe.send(output)
            send_handle(self._pipe, theirs.fileno(), self._process.pid)
            pid = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"no rank process could start:\n{self._output.read_text(errors='replace')}") from None
        theirs.close()
        return Worker(pid, ours, output)

    def exit_code(self, worker: Worker, *, wait: bool) -> int | None:
        """None for a process that lives, unless it is waited for."""
        self._pipe.send((worker.pid, wait))
        code: int | None = self._pipe.recv()
        return code

    def end(self, worker: Worker) -> None:
        worker.pipe.close()
        if self.exit_code(worker, wait=False) is None:
            os.kill(worker.pid, signal.SIGKILL)
            self.exit_code(worker, wait=True)

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()


class Ranks:
    """A pool that grows to the largest world that a test has asked for."""

    backend: CpuBackend = "auto"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="motet-ranks-")
        self._workers: list[Worker] = []
        self.forker = WorkerForker(Path(self._folder.name))

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`function(group, *args)` on every rank of a fresh group."""
        return self._run(world, function, args, timeout_s, True)

    def run_places(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`function(place, *args)` on every rank, for code that starts the group itself."""
        return self._run(world, function, args, timeout_s, False)

    __call__ = run

    def on(self, backend: CpuBackend) -> "Ranks":
        """The same pool, with groups on this backend."""
        same = copy(self)
        same.backend = backend
        return same

    def close(self) -> None:
        for worker in self._workers:
            self.forker.end(worker)
        self.forker.close()
        self._folder.cleanup()

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def wait_for_death(self, rank: int) -> int | None:
        """The exit code of its process."""
        return self.forker.exit_code(self._workers[rank], wait=True)

    def _run(self, world: int, function: Callable[..., Any], args: Any, limit_s: float, with_group: bool) -> list[Any]:
        self._grow(world)
        file, given = sys.modules[function.__module__].__file__, pickle.dumps(args)
        assert file is not None
        names = file, function.__module__, function.__qualname__
        with tempfile.TemporaryDirectory(prefix="motet-store-") as folder:
            for rank, worker in enumerate(self._workers[:world]):
                place = RankEnvironment(
                    rank, world, rank, world, attempt=0, rendezvous=f"file://{folder}/store", token=TOKEN
                )
                test = os.environ.get("PYTEST_CURRENT_TEST", "")
                worker.pipe.send(Call(*names, given, place, with_group, self.backend, limit_s, test))
            return self._collect(world, limit_s)

    def _grow(self, world: int) -> None:
        """Have so many living processes that have imported torch: no test's time limit pays for that."""
        for rank, worker in enumerate(self._workers):
            if self.forker.exit_code(worker, wait=False) is not None:
                self._replace(rank)
        while len(self._workers) < world:
            self._workers.append(self.forker.start())

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[RankExitRecord] = []
        deadline, waiting = time.monotonic() + timeout_s, set(range(world))
        while waiting and time.monotonic() < deadline:
            ready = wait([self._workers[rank].pipe for rank in waiting], timeout=deadline - time.monotonic())
            for rank in [rank for rank in waiting if self._workers[rank].pipe in ready]:
                waiting.discard(rank)
                answer = self._answer(rank)
                if isinstance(answer, RankExitRecord):
                    failures.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    results[rank] = pickle.loads(answer)
        if waiting or failures:
            raise self._failure(failures, sorted(waiting), timeout_s)
        return [results[rank] for rank in range(world)]

    def _answer(self, rank: int) -> bytes | RankExitRecord:
        with contextlib.suppress(EOFError, ConnectionError):
            answer: bytes | RankExitRecord = self._workers[rank].pipe.recv()
            return answer
        worker = self._workers[rank]
        code = self.wait_for_death(rank)
        self._replace(rank)
        return RankExitRecord(rank, time.time(), 3, f"the process ended with code {code}", worker.tail())

    def _failure(self, failures: list[RankExitRecord], stuck: list[int], timeout_s: float) -> RankFailureError:
        stands = [f"--- rank {rank} stands here\n{self._workers[rank].stands()}" for rank in stuck]
        for rank in stuck:
            self._replace(rank)
        if failures:
            cause = root_cause(failures)
            return RankFailureError(f"rank {cause.rank} failed: {cause.error_message}\n{cause.traceback}")
        names = " and ".join(map(str, stuck))
        return RankFailureError("\n".join([f"rank {names} did not end within {timeout_s} s", *stands]))

    def _replace(self, rank: int) -> None:
        self.forker.end(self._workers[rank])
        self._workers[rank] = self.forker.start()
