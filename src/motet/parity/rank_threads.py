"""Ranks as threads of this process: for a computation that is too small for processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Literal, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class RankThreads:
    """A number of ranks that call one function, and reduce tensors with one another."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks)
        self._tensors = [torch.empty(0)] * ranks

    def run(self, function: Callable[[int], _Result]) -> list[_Result]:
        """The results of the function, called with each rank; raises what the first rank that fails raises."""

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
