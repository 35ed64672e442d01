"""The collectives of the backends themselves, behind one function."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.execute.reduce_ops import REDUCE_OP_NAMES, ReduceOpName
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle

_TORCH_REDUCE_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCE_OP_NAMES}

# Names of torch 2.13 that 2.11 does not have.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class CollectiveArguments:
    """A collective and the tensors of this rank."""

    collective: str
    output: Tensor | None
    input: Tensor | None
    root: int | None = None
    sizes: tuple[tuple[int, ...], ...] | None = None  # All-to-all: elements of rank i for rank j, if not all equal


def call_backend(
    arguments: CollectiveArguments, group: dist.ProcessGroup, *, op: ReduceOpName, async_op: bool
) -> WorkHandle | None:
    """Call the backend; None for a collective that motet leaves to Programs."""
    output, input, root, torch_op = arguments.output, arguments.input, arguments.root, _TORCH_REDUCE_OPS[op]
    if output is None or input is None:
        return None
    # Bytes where nothing is reduced, since backends do not know all dtypes.
    raw_output, raw_input = (tensor.detach().view(-1).view(torch.uint8) for tensor in (output, input))
    match arguments.collective:
        case "all-reduce":
            work = dist.all_reduce(output, torch_op, group, async_op)
        case "reduce":
            work = dist.reduce(output, op=torch_op, group=group, async_op=async_op, group_dst=root)
        case "broadcast":
            work = dist.broadcast(raw_output, group=group, async_op=async_op, group_src=root)
        case "reduce-scatter":
            work = _REDUCE_SCATTER(output, input, torch_op, group, async_op)
        case "all-gather":
            work = _ALL_GATHER(raw_output, raw_input, group, async_op)
        case "all-to-all":
            rank, sizes, width = dist.get_rank(group), arguments.sizes, input.itemsize
            received = [row[rank] * width for row in sizes] if sizes else None
            sent = [size * width for size in sizes[rank]] if sizes else None
            work = dist.all_to_all_single(raw_output, raw_input, received, sent, group, async_op)
        case _:
            return None
    return work or CompletedWork()
