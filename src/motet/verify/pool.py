"""Rank processes that are copies of this one, so that they have the caller's functions, wherever these were defined."""

import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from motet.core.errors import InputError, RankError
from motet.parallel.group import Group, start_group
from motet.parallel.place import Place

TIMEOUT_S = 300.0
Work = Callable[[Group], Any]


@dataclass(frozen=True)
class Pool:
    """They are made before this process computes anything, and wait: who has computed should not be copied."""

    workers: list[tuple[BaseProcess, Connection]]

    def run(self, world: int, name: str) -> list[Any]:
        """Work of this name on the first ranks; what each gives."""
        with tempfile.TemporaryDirectory(prefix="motet-store-") as folder:
            places = [Place(rank, world, rank, world, 0, f"file://{folder}/store") for rank in range(world)]
            for place, (_, pipe) in zip(places, self.workers, strict=False):
                pipe.send((name, place))
            return self._collect(world)

    def _collect(self, world: int) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                raise RankError(f"rank {min(waiting.values())} did not end within {TIMEOUT_S:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    error, found[rank] = pipe.recv()
                except EOFError:
                    raise RankError(f"the process of rank {rank} ended") from None
                if error is not None:
                    raise error
        return [found[rank] for rank in range(world)]


@contextmanager
def started(ranks: int, works: Mapping[str, Work]) -> Iterator[Pool]:
    """`works`: by the names by which they are asked for."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InputError(f"verify: ranks are copies of this process, which {sys.platform} cannot make; use Linux")
    context = multiprocessing.get_context("fork")
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(ranks):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs, works), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        yield Pool(workers)
    finally:
        for process, pipe in workers:
            pipe.close()
            process.terminate()
            process.join()


def _serve(pipe: Connection, works: Mapping[str, Work]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # of stage 3; nobody writes to it here
    while True:
        try:
            name, place = pipe.recv()
        except EOFError:
            return
        try:
            with start_group(place, "cpu", TIMEOUT_S) as group:
                pipe.send((None, works[name](group)))
        except InputError as error:
            pipe.send((error, None))
            return
        except Exception as error:  # noqa: BLE001  # told by the process that asked
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"rank {place.rank} failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            pipe.send((RankError(said), None))
            return
