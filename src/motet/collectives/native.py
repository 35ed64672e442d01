"""The collectives that a backend brings itself, asked for in one way."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.arithmetic import OPERATORS, Operator
from motet.collectives.lane import Done, Work

_OPERATORS = {name: getattr(dist.ReduceOp, name.upper()) for name in OPERATORS}

# torch 2.13 has given these names that 2.11 does not know yet.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Wanted:
    """A collective on this rank's tensors."""

    collective: str
    output: Tensor | None
    input: Tensor | None
    root: int | None = None
    sizes: tuple[tuple[int, ...], ...] | None = None
    """All-to-all: elements that rank i has for rank j, where they are not all the same."""


def native(wanted: Wanted, group: dist.ProcessGroup, op: Operator, async_op: bool) -> Work | None:
    """The backend's own; None if it is none that is asked of backends here."""
    output, input = wanted.output, wanted.input
    if output is None or input is None:
        return None
    # What only moves goes as bytes, since backends do not know all dtypes.
    raw_output, raw_input = (tensor.detach().view(-1).view(torch.uint8) for tensor in (output, input))
    match wanted.collective:
        case "all-reduce":
            work = dist.all_reduce(output, _OPERATORS[op], group, async_op)
        case "reduce":
            work = dist.reduce(output, op=_OPERATORS[op], group=group, async_op=async_op, group_dst=wanted.root)
        case "broadcast":
            work = dist.broadcast(raw_output, group=group, async_op=async_op, group_src=wanted.root)
        case "reduce-scatter":
            work = _REDUCE_SCATTER(output, input, _OPERATORS[op], group, async_op)
        case "all-gather":
            work = _ALL_GATHER(raw_output, raw_input, group, async_op)
        case "all-to-all":
            rank, sizes, width = dist.get_rank(group), wanted.sizes, input.itemsize
            received = [row[rank] * width for row in sizes] if sizes else None
            sent = [size * width for size in sizes[rank]] if sizes else None
            work = dist.all_to_all_single(raw_output, raw_input, received, sent, group, async_op)
        case _:
            return None
    return work or Done()
