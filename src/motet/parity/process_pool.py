"""Rank processes forked from this one, so that they have the caller's functions, wherever these were defined."""

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from motet.core.errors import InputError, RankFailedError, check_input
from motet.parallel.process.launch_environment import RankEnvironment
from motet.parallel.process.process_group import RankGroup, start_process_group
from motet.train.launch.rank_process import exit_with_parent

TIMEOUT_S = 1800.0
GroupFunction = Callable[[RankGroup], None]


@dataclass(frozen=True)
class ForkedRankPool:
    """Processes that wait for work. They are forked before this process computes, since a fork copies no threads."""

    workers: list[tuple[BaseProcess, Connection]]

    def run(self, world: int, name: str) -> None:
        """Call the function of this name on the first ranks."""
        with tempfile.TemporaryDirectory(prefix="motet-store-") as folder:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
            for pipe, rank in waiting.items():
                pipe.send((name, RankEnvironment(rank, world, rank, world, 0, f"file://{folder}/store")))
            while waiting:
                ready = wait(list(waiting), timeout=TIMEOUT_S)
                if not ready:
                    raise RankFailedError(f"rank {min(waiting.values())} did not end within {TIMEOUT_S:g} s")
                for pipe in [each for each in waiting if each in ready]:
                    rank = waiting.pop(pipe)
                    try:
                        error = pipe.recv()
                    except EOFError:
                        raise RankFailedError(f"the process of rank {rank} ended") from None
                    if error is not None:
                        raise error


@contextmanager
def fork_rank_pool(ranks: int, functions: Mapping[str, GroupFunction]) -> Iterator[ForkedRankPool]:
    """Fork processes that call the functions by name."""
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    check_input(can_fork, f"verify: ranks are copies of this process, which {sys.platform} cannot make; use Linux")
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
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # Of stage 3; nothing writes to the view
    while True:
        name, rank_env = pipe.recv()
        try:
            with start_process_group(rank_env, "cpu", TIMEOUT_S) as group:
                functions[name](group)
            pipe.send(None)
        except InputError as error:
            pipe.send(error)
            return
        except Exception as error:  # noqa: BLE001  # the parent raises it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            pipe.send(RankFailedError(f"rank {rank_env.rank} failed: {message}"))
            return
