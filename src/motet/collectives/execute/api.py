"""The collectives that ranks call, in the manner of torch.distributed: tensors are filled, and a Work is returned.

`algorithm` says how: None leaves it to the backend (NCCL's own, say), a name or a Program is carried out message by
message, and "auto" takes the cheapest on a `cluster`. The trace is told the size of each collective and, of a Program,
every message and byte that a rank sends. A group of one rank moves nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import build
from motet.collectives.cost.cheapest_algorithm import cheapest
from motet.collectives.execute.backend_calls import CollectiveArguments, call_backend
from motet.collectives.execute.program_runner import CollectiveProgramOptions, run_program
from motet.collectives.execute.rank_plan import CollectiveProgramKey
from motet.collectives.execute.work_queue import CompletedWork, WorkHandle
from motet.collectives.program import Program
from motet.collectives.prove.postconditions import missing_postcondition
from motet.collectives.prove.program_checker import prove_program
from motet.core import trace
from motet.core.errors import InputError

__all__ = [
    "CollectiveOptions",
    "RankGroupLike",
    "WorkHandle",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sum_scalars",
]


class RankGroupLike(Protocol):
    """The ranks that take part. `process_group` is None when there is only one."""

    @property
    def world(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


class CollectiveOptions(CollectiveProgramOptions, total=False):
    """How a collective is to be done. `check` and `timeout_s` are for Programs; a backend has its own."""

    algorithm: str | Program | None
    cluster: Cluster  # For "auto"


RankGroupOrProcessGroup = RankGroupLike | dist.ProcessGroup

# What is taken where no backend is asked.
_DEFAULT_ALGORITHM = {"gather": "tree", "scatter": "tree", "barrier": "dissemination"}


def all_reduce(tensor: Tensor, ranks: RankGroupOrProcessGroup, **options: Unpack[CollectiveOptions]) -> WorkHandle:
    """Everybody gets the sum over the ranks (or `op`), in place."""
    return _dispatch(CollectiveArguments("all-reduce", tensor, tensor), ranks, options)


def reduce(
    tensor: Tensor, ranks: RankGroupOrProcessGroup, root: int = 0, **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """The root gets the sum, in place. With a Program, the others keep what they have."""
    return _dispatch(CollectiveArguments("reduce", tensor, tensor, root), ranks, options)


def broadcast(
    tensor: Tensor, ranks: RankGroupOrProcessGroup, root: int = 0, **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """Everybody gets the root's values, in place."""
    return _dispatch(CollectiveArguments("broadcast", tensor, tensor, root), ranks, options)


def reduce_scatter(
    output: Tensor, input: Tensor, ranks: RankGroupOrProcessGroup, **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """Rank i gets part i of the sum of the inputs."""
    return _dispatch(CollectiveArguments("reduce-scatter", output, input), ranks, options)


def all_gather(
    output: Tensor, input: Tensor, ranks: RankGroupOrProcessGroup, **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """Everybody gets the inputs of all ranks one after another."""
    return _dispatch(CollectiveArguments("all-gather", output, input), ranks, options)


def gather(
    output: Tensor | None,
    input: Tensor,
    ranks: RankGroupOrProcessGroup,
    root: int = 0,
    **options: Unpack[CollectiveOptions],
) -> WorkHandle:
    """The root gets the inputs of all ranks one after another; the others give no output."""
    return _dispatch(CollectiveArguments("gather", output, input, root), ranks, options)


def scatter(
    output: Tensor,
    input: Tensor | None,
    ranks: RankGroupOrProcessGroup,
    root: int = 0,
    **options: Unpack[CollectiveOptions],
) -> WorkHandle:
    """Rank i gets part i of the root's input; the others give none."""
    return _dispatch(CollectiveArguments("scatter", output, input, root), ranks, options)


def all_to_all(
    output: Tensor,
    input: Tensor,
    ranks: RankGroupOrProcessGroup,
    sizes: Sequence[Sequence[int]] | None = None,
    **options: Unpack[CollectiveOptions],
) -> WorkHandle:
    """Rank j gets from each rank the part that is meant for it.

    Parts are equal, or rank i has `sizes[i][j]` elements for rank j; then every rank has to know all sizes.
    """
    size_matrix = None if sizes is None else tuple(map(tuple, sizes))
    return _dispatch(CollectiveArguments("all-to-all", output, input, sizes=size_matrix), ranks, options)


def barrier(
    ranks: RankGroupOrProcessGroup, device: torch.device | str = "cpu", **options: Unpack[CollectiveOptions]
) -> WorkHandle:
    """Nobody goes on before everybody has come."""
    group = process_group_of(ranks)
    world = 1 if group is None else dist.get_world_size(group)
    tokens = torch.zeros(world + 1, dtype=torch.uint8, device=device)
    return _dispatch(CollectiveArguments("barrier", tokens[1:], tokens[:1]), ranks, options)


def sum_scalars(values: list[float], ranks: RankGroupLike, device: torch.device) -> list[float]:
    """Sum a few numbers over the ranks in float64, which is exact for counts."""
    if ranks.world == 1:
        return values
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce(packed, ranks)
    summed: list[float] = packed.tolist()
    return summed


def process_group_of(ranks: RankGroupOrProcessGroup) -> dist.ProcessGroup | None:
    """None for a rank alone."""
    group = ranks if isinstance(ranks, dist.ProcessGroup) else ranks.process_group
    return None if group is None or dist.get_world_size(group) == 1 else group


def _dispatch(
    arguments: CollectiveArguments, ranks: RankGroupOrProcessGroup, call_options: CollectiveOptions
) -> WorkHandle:
    group = process_group_of(ranks)
    if group is None:
        return _copy_on_single_rank(arguments)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = _message_bytes(arguments, world)
    trace.count(f"{arguments.collective.replace('-', '_')}_bytes", size)
    algorithm = call_options.get("algorithm")
    if algorithm is None:
        work = call_backend(arguments, group, call_options.get("op", "sum"), call_options.get("async_op", False))
        if work is not None:
            return work
    selected = _select_program(
        arguments, algorithm or _DEFAULT_ALGORITHM[arguments.collective], world, size, call_options
    )
    output = arguments.output if selected.final[rank] else None
    input = arguments.input if selected.initial[rank] else None
    run_options = CollectiveProgramOptions(
        op=call_options.get("op", "sum"),
        async_op=call_options.get("async_op", False),
        check=call_options.get("check", True),
        timeout_s=call_options.get("timeout_s"),
    )
    return run_program(selected, output, input, group, **run_options)


def _copy_on_single_rank(arguments: CollectiveArguments) -> WorkHandle:
    if arguments.output is not None and arguments.input is not None and arguments.output is not arguments.input:
        arguments.output.detach().view(-1).copy_(arguments.input.detach().view(-1))
    return CompletedWork()


def _message_bytes(arguments: CollectiveArguments, world: int) -> int:
    """S, in bytes: the larger of what a rank gives and gets, the same on all ranks."""
    if arguments.collective in ("gather", "scatter"):
        part = arguments.input if arguments.collective == "gather" else arguments.output
        return 0 if part is None else part.nbytes * world
    return max(tensor.nbytes for tensor in (arguments.output, arguments.input) if tensor is not None)


def _select_program(
    arguments: CollectiveArguments, algorithm: str | Program, world: int, size: int, call_options: CollectiveOptions
) -> Program:
    if isinstance(algorithm, Program):
        return _check_user_program(
            CollectiveProgramKey(algorithm), arguments.collective, arguments.root, arguments.sizes
        )
    options: tuple[tuple[str, object], ...] = ()
    if algorithm == "auto":
        if "cluster" not in call_options:
            raise InputError(
                f"algorithm 'auto': give cluster=, on which {arguments.collective} is to be cheap, or a name"
            )
        cheapest_algorithm = cheapest(arguments.collective, max(size, 1), call_options["cluster"])
        algorithm, options = cheapest_algorithm.algorithm, cheapest_algorithm.options
    if arguments.root is not None:
        options = (*options, ("root", arguments.root))
    return _build_program(arguments.collective, algorithm, world, options, arguments.sizes)


AllToAllSizes = tuple[tuple[int, ...], ...] | None


@lru_cache(maxsize=256)
def _build_program(
    collective: str, algorithm: str, world: int, options: tuple[tuple[str, object], ...], sizes: AllToAllSizes
) -> Program:
    return _with_sizes(build(collective, algorithm, world, **dict(options)), sizes)


@lru_cache(maxsize=256)
def _check_user_program(key: CollectiveProgramKey, collective: str, root: int | None, sizes: AllToAllSizes) -> Program:
    """A Program of the caller's, if it is one for this and does what it promises."""
    user_program = key.program
    if user_program.collective != collective:
        raise InputError(f"{user_program} is no Program for {collective}; give one of that collective")
    chunks_by_rank = user_program.initial if collective in ("broadcast", "scatter") else user_program.final
    roots = [rank for rank, held in enumerate(chunks_by_rank) if held]
    if root is not None and roots != [root]:
        raise InputError(
            f"{user_program} has root {', '.join(map(str, roots))}, not {root}; give root= as the Program has it"
        )
    missing = missing_postcondition(user_program)
    if missing:
        raise InputError(f"{user_program} promises less than {collective}: {missing}; mend its final")
    prove_program(user_program)
    return _with_sizes(user_program, sizes)


def _with_sizes(program: Program, sizes: AllToAllSizes) -> Program:
    if sizes is None:
        return program
    if len(sizes) != program.ranks or any(len(row) != program.ranks or min(row) < 0 for row in sizes):
        raise InputError(
            f"sizes: {program} needs {program.ranks} rows of {program.ranks} counts of elements, 0 or more"
        )
    return replace(program, sizes=tuple(size for row in sizes for size in row))
