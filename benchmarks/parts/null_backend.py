"""The torch.distributed backend `null`: its collectives end immediately, and nothing is sent.

With it a rank goes through every line of a distributed step but the communication. The data of other ranks is replaced
by that of this rank, so that numbers stay finite; they mean nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from motet.collectives.execute.work_queue import AsyncWork, CompletedWork

_RECEIVED = 0.02  # About the size of initial weights


class NullProcessGroup(dist.ProcessGroup):
    """A group whose ranks never hear of each other."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802  (torch's names)
        return "null"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> AsyncWork:
        return CompletedWork(tensors)

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> AsyncWork:
        if opts is not None and opts.rootRank != self._rank:  # Parameters are received into memory that holds anything
            for tensor in (each for each in tensors if each.is_floating_point()):
                tensor.fill_(_RECEIVED)
        return CompletedWork(tensors)

    def barrier(self, opts: Any = None) -> AsyncWork:
        return CompletedWork([])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> AsyncWork:
        for parts, given in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(given)
        return CompletedWork(outputs)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AsyncWork:
        parts = output.view(-1).view(self._size, given.numel())
        for part in parts:  # in place, too: stage 3 gathers into memory that holds anything
            if part.data_ptr() != given.data_ptr():
                part.copy_(given.view(-1))
        return CompletedWork([output])

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> AsyncWork:
        part = given.view(-1).view(self._size, output.numel())[self._rank]
        if part.data_ptr() != output.data_ptr():
            output.view(-1).copy_(part)
        return CompletedWork([output])

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> AsyncWork:
        assert not output_sizes and not input_sizes, "only equal parts"
        output.copy_(given)
        return CompletedWork([output])

    all_to_all_single = alltoall_base


def register_null_backend() -> None:
    """Make `dist.new_group(backend="cpu:null")` possible."""
    if "null" not in dist.Backend.backend_list:
        dist.Backend.register_backend("null", NullProcessGroup, devices="cpu")


@contextmanager
def as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """A context in which it is the default group, whose backend new groups have. Torch has no public name for that."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)
