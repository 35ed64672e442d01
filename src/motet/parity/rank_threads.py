"""Ranks as threads of this process, for computations that are too small for processes.

Rank processes are forked from this one, so that they have the caller's functions, wherever these were defined.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Barrier, BrokenBarrierError
from typing import Literal, TypeVar

import torch
from torch import Tensor

from motet.core.errors import InputError, MotetError, RankFailedError, check_input
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.train.launch.rank_process import exit_with_parent

_Result = TypeVar("_Result")


class RankThreads:
    """A number of ranks that call one function, and reduce tensors with one another."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks)
        self._tensors = [torch.empty(0)] * ranks

    def run(self, function: Callable[[int], _Result]) -> list[_Result]:
        """The results of the function, called with each rank; raises the error of the first rank that fails."""

        def call(rank: int) -> _Result:
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()  # Others wait for this rank
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(call, rank) for rank in range(self.ranks)]
        self._barrier.reset()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def all_reduce(self, rank: int, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Reduce in place over all ranks, each of which calls this, without a gradient."""
        self._tensors[rank] = tensor.detach()
        self._barrier.wait()
        stacked = torch.stack(self._tensors)
        self._barrier.wait()
        return tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))


TIMEOUT_S = 1800.0
GRACE_S = 20.0  # Time for ranks that wait for a failed one
GroupFunction = Callable[[RankGroup], None]


@dataclass(frozen=True)
class ForkedRankPool:
    """Processes that wait for work. They are forked before this process computes, since a fork copies no threads."""

    workers: list[tuple[BaseProcess, Connection]]

    def run(self, world: int, name: str) -> None:
        """Call the function of this name on the first ranks. If a rank raises, others fail too; then all wait again."""
        with tempfile.TemporaryDirectory(prefix="motet-store-") as folder:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
            for pipe, rank in waiting.items():
                pipe.send((name, RankEnvironment(rank, world, rank, world, 0, f"file://{folder}/store")))
            errors = list[MotetError]()
            while waiting:
                limit_s = GRACE_S if errors else TIMEOUT_S
                ready = wait(list(waiting), timeout=limit_s)
                if not ready:
                    raise next(
                        iter(errors), RankFailedError(f"rank {min(waiting.values())} did not end in {limit_s:g} s")
                    )
                for pipe in [each for each in waiting if each in ready]:
                    rank = waiting.pop(pipe)
                    try:
                        error = pipe.recv()
                    except EOFError:
                        raise RankFailedError(f"the process of rank {rank} ended") from None
                    errors += [] if error is None else [error]
            for error in sorted(errors, key=lambda each: isinstance(each, RankFailedError)):  # Others follow from it
                raise error


@contextmanager
def fork_rank_pool(ranks: int, functions: Mapping[str, GroupFunction]) -> Iterator[ForkedRankPool]:
    """Fork processes that call the functions by name."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    check_input(can_fork, f"verify: {sys.platform} cannot fork this process into ranks; use Linux")
    context = multiprocessing.get_context("fork")
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(ranks):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, functions, os.getpid())
            process: BaseProcess = context.Process(target=_serve_requests, args=arguments, daemon=True)
            process.start()
            child_end.close()
            workers.append((process, parent_end))
        yield ForkedRankPool(workers)
    finally:
        for process, pipe in workers:
            pipe.close()
            process.kill()  # The caller's program may handle other signals
            process.join()


def _serve_requests(pipe: Connection, functions: Mapping[str, GroupFunction], parent: int) -> None:
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C, and ends this process
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # Stage 3; nothing writes to the view
    while True:
        name, rank_env = pipe.recv()
        try:
            with start_process_group(rank_env, "cpu", TIMEOUT_S) as group:
                functions[name](group)
            pipe.send(None)
        except InputError as error:
            pipe.send(error)
        except Exception as error:  # noqa: BLE001  # the parent raises it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            pipe.send(RankFailedError(f"rank {rank_env.rank} failed: {message}"))
