"""The collectives that ranks call. Every one tells the trace what it moved; a group of one rank moves nothing."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core import trace


class Ranks(Protocol):
    """The ranks that take part. `process_group` is None when there is only one."""

    @property
    def world(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


def all_reduce(tensor: Tensor, ranks: Ranks) -> None:
    """Sum over the ranks, in place."""
    if ranks.process_group is not None and ranks.world > 1:
        trace.count("all_reduce_bytes", tensor.nbytes)
        dist.all_reduce(tensor, group=ranks.process_group)


def sum_scalars(values: list[float], ranks: Ranks, device: torch.device) -> list[float]:
    """Sum a few numbers over the ranks in float64, which is exact for counts."""
    if ranks.world == 1:
        return values
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce(packed, ranks)
    summed: list[float] = packed.tolist()
    return summed


def broadcast(tensor: Tensor, ranks: Ranks) -> None:
    """Everyone gets the first rank's values, in place."""
    if ranks.process_group is not None and ranks.world > 1:
        trace.count("broadcast_bytes", tensor.nbytes)
        wire = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # Gloo has no bool
        dist.broadcast(wire, group=ranks.process_group, group_src=0)
