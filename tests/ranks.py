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
    process: subprocess.Popen[bytes]
    pipe: Connection
    output: Path

    @classmethod
    def start(cls, folder: Path, number: int) -> "Worker":
        ours, theirs = Pipe()
        output, handle = folder / f"worker-{number}.txt", theirs.fileno()
        paths = [str(TESTS), str(TESTS.parent / "scripts")]
        code = f"import sys; sys.path[:0] = {paths!r}; import rank_worker; rank_worker.serve({handle})"
        with output.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[handle], env=uncounted(), **streams)
        theirs.close()
        return cls(process, ours, output)

    def wait_until_ready(self) -> None:
        try:
            self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"a rank process could not start:\n{self.tail()}") from None

    def stands(self) -> str:
        before = self.output.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.output.read_bytes()[before:].decode(errors="replace").strip()

    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class Ranks:
    """A pool that grows to the largest world that a test has asked for."""

    backend: CpuBackend = "auto"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="motet-ranks-")
        self._workers: list[Worker] = []
        self._ready: list[Worker] = []
        self._numbers = count(1)

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
            worker.end()
        self._folder.cleanup()

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

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
            if worker.process.poll() is not None:
                self._replace(rank)
        while len(self._workers) < world:
            self._workers.append(self._start())
        for worker in self._workers[:world]:
            if worker not in self._ready:
                worker.wait_until_ready()
                self._ready.append(worker)

    def _start(self) -> Worker:
        return Worker.start(Path(self._folder.name), next(self._numbers))

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
        code = worker.process.wait()
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
        self._workers[rank].end()
        self._workers[rank] = self._start()
