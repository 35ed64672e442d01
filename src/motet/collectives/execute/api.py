"""The collectives that ranks call, in the style of torch.distributed: they fill tensors and return a handle.

`algorithm` None leaves the choice to the backend (NCCL, say). A name or a Program is executed message by message. A
group of one rank moves nothing. The trace counts the size of each
collective and, for a Program, the messages and bytes that this rank sends, in the step that calls it. The backend
`motet` counts the bytes of its collectives the same way: a chunk that k ranks get from this one counts k times.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.algorithms import build
from motet.collectives.execute.program_runner import ProgramExecutionOptions, run_program
from motet.collectives.execute.reduce_ops import REDUCE_OP_NAMES, ReduceOpName
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle
from motet.collectives.program import Program
from motet.collectives.prove.program_checker import missing_postcondition, prove_program
from motet.core import trace
from motet.core.errors import check_input


class RankGroupLike(Protocol):
    """The ranks that take part. `process_group` is None for a single rank."""

    @property
    def world(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


class CollectiveOptions(ProgramExecutionOptions, total=False):
    """The options of a collective. `check` and `timeout_s` apply to Programs alone."""

    algorithm: str | Program | None


RanksLike = RankGroupLike | dist.ProcessGroup
AllToAllSizes = Sequence[Sequence[int]] | None  # Elements of rank i for rank j, if not all equal

_COMPLETED_WORK = CompletedWork()
_COMMON_DTYPES = (torch.float32, torch.float64)  # Every backend knows them
_TORCH_REDUCE_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCE_OP_NAMES}

# Names of torch 2.13 that 2.11 does not have.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveTensors(NamedTuple):
    """A collective and the tensors of this rank."""

    collective: str
    output: Tensor
    input: Tensor
    root: int | None = None
    sizes: AllToAllSizes = None


def all_reduce(tensor: Tensor, ranks: RanksLike, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Sum over the ranks (or reduce by `op`), in place."""
    return _dispatch(CollectiveTensors("all-reduce", tensor, tensor), ranks, options)


def reduce(tensor: Tensor, ranks: RanksLike, root: int = 0, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Sum into the root, in place. A Program leaves the tensors of the other ranks unchanged."""
    return _dispatch(CollectiveTensors("reduce", tensor, tensor, root), ranks, options)


def broadcast(tensor: Tensor, ranks: RanksLike, root: int = 0, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Copy the values of the root to all ranks, in place."""
    return _dispatch(CollectiveTensors("broadcast", tensor, tensor, root), ranks, options)


def reduce_scatter(output: Tensor, input: Tensor, ranks: RanksLike, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Give rank i part i of the sum of the inputs."""
    return _dispatch(CollectiveTensors("reduce-scatter", output, input), ranks, options)


def all_gather(output: Tensor, input: Tensor, ranks: RanksLike, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Give every rank the inputs of all ranks one after another."""
    return _dispatch(CollectiveTensors("all-gather", output, input), ranks, options)


def all_to_all(
    output: Tensor, input: Tensor, ranks: RanksLike, sizes: AllToAllSizes = None, **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """Give rank j part j of each input. Parts are equal, or all ranks pass all `sizes[i][j]`, of rank i for rank j."""
    size_matrix = None if sizes is None else tuple(map(tuple, sizes))
    return _dispatch(CollectiveTensors("all-to-all", output, input, sizes=size_matrix), ranks, options)


def sum_scalars(values: list[float] | Tensor, ranks: RankGroupLike, device: torch.device) -> list[float]:
    """Sum a few numbers over the ranks in float64, which is exact for counts. Numbers of a step are on the device
    until then, and this is the one time that the host waits for it."""
    if not isinstance(values, Tensor):
        if ranks.world == 1:
            return values
        values = torch.tensor(values, dtype=torch.float64, device=device)
    sums = values.clone()
    all_reduce(sums, ranks)
    return copy_scalars_to_host(sums)


def copy_scalars_to_host(values: Tensor) -> list[float]:
    """The numbers of a tensor of one dimension. On the meta device, which has no numbers, each is 0: a step of shapes
    has a finite loss and norm, is not stopped, and is applied."""
    return [0.0] * len(values) if values.is_meta else list(values.tolist())


def needs_compute_cores(ranks: RanksLike) -> bool:
    """Whether the cores that compute also move the data, so that there is little to overlap: the backend `motet`, for
    ranks of one host."""
    return bool(getattr(_process_group(ranks), "is_on_one_host", False))


def _process_group(ranks: Any) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = getattr(ranks, "process_group", ranks)
    return group


def _dispatch(arguments: CollectiveTensors, ranks: RanksLike, options: CollectiveOptions) -> WorkHandle:
    group = _process_group(ranks)
    world = 1 if group is None else group.size()
    if group is None or world == 1:
        if arguments.output is not arguments.input:
            arguments.output.detach().view(-1).copy_(arguments.input.detach().view(-1))
        return _COMPLETED_WORK
    # The size S of the message: the larger of the two buffers, the same on all ranks.
    size = max(arguments.output.nbytes, arguments.input.nbytes)
    trace.count(f"{arguments.collective.replace('-', '_')}_bytes", size)
    op, async_op, algorithm = options.get("op", "sum"), options.get("async_op", False), options.get("algorithm")
    if algorithm is None:
        work: WorkHandle | None = _call_backend(arguments, group, op=op, async_op=async_op)
        return work or _COMPLETED_WORK
    rank, program = group.rank(), _select_program(arguments, algorithm, world)
    output = arguments.output if program.final[rank] else None
    input = arguments.input if program.initial[rank] else None
    check, timeout_s = options.get("check", True), options.get("timeout_s")
    return run_program(program, output, input, group, op=op, async_op=async_op, check=check, timeout_s=timeout_s)


def _call_backend(arguments: CollectiveTensors, group: dist.ProcessGroup, *, op: ReduceOpName, async_op: bool) -> Any:
    """Call the backend, and return torch's handle, or None after a synchronous call."""
    output, input, root = arguments.output, arguments.input, arguments.root
    torch_op = _TORCH_REDUCE_OPS[op]
    match arguments.collective:
        case "all-reduce":
            return dist.all_reduce(output, torch_op, group, async_op)
        case "reduce":
            return dist.reduce(output, op=torch_op, group=group, async_op=async_op, group_dst=root)
        case "broadcast":
            return dist.broadcast(_flat_values(output), group=group, async_op=async_op, group_src=root)
        case "reduce-scatter":
            return _REDUCE_SCATTER(output, input, torch_op, group, async_op)
        case "all-gather":
            return _ALL_GATHER(_flat_values(output), _flat_values(input), group, async_op)
        case _:
            rank, sizes, flat = group.rank(), arguments.sizes, (_flat_values(output), _flat_values(input))
            width = input.itemsize // flat[1].itemsize
            received = [row[rank] * width for row in sizes] if sizes else None
            sent = [size * width for size in sizes[rank]] if sizes else None
            return dist.all_to_all_single(*flat, received, sent, group, async_op)


def _flat_values(tensor: Tensor) -> Tensor:
    """Flat, and as bytes where nothing is reduced, since backends do not know all dtypes."""
    flat = (tensor.detach() if tensor.requires_grad else tensor).view(-1)
    return flat if flat.dtype in _COMMON_DTYPES else flat.view(torch.uint8)


def _select_program(arguments: CollectiveTensors, algorithm: str | Program, world: int) -> Program:
    collective, root, sizes = arguments.collective, arguments.root, arguments.sizes
    if isinstance(algorithm, Program):
        return _check_user_program(algorithm, collective, root, sizes=sizes)
    return _build_program(collective, algorithm, world, root=root, sizes=sizes)


@lru_cache(maxsize=256)
def _build_program(collective: str, algorithm: str, world: int, *, root: int | None, sizes: AllToAllSizes) -> Program:
    options = {} if root is None else {"root": root}
    return _with_sizes(build(collective, algorithm, world, **options), sizes)


@lru_cache(maxsize=256)
def _check_user_program(program: Program, collective: str, root: int | None, *, sizes: AllToAllSizes) -> Program:
    right_collective = program.collective == collective
    check_input(right_collective, f"{program} is not a Program for {collective}; give one of that collective")
    chunks_by_rank = program.initial if collective == "broadcast" else program.final
    roots = [rank for rank, held in enumerate(chunks_by_rank) if held]
    problem = f"{program} has root {', '.join(map(str, roots))}, not {root}; give root= as the Program has it"
    check_input(root is None or roots == [root], problem)
    missing = missing_postcondition(program)
    check_input(not missing, f"{program} promises less than {collective}: {missing}; correct its final chunks")
    prove_program(program)
    return _with_sizes(program, sizes)


def _with_sizes(program: Program, sizes: AllToAllSizes) -> Program:
    if sizes is None:
        return program
    ranks = program.ranks
    fits = len(sizes) == ranks and all(len(row) == ranks and min(row) >= 0 for row in sizes)
    check_input(fits, f"sizes: {program} needs {ranks} rows of {ranks} counts of elements, 0 or more")
    return replace(program, sizes=tuple(size for row in sizes for size in row))
