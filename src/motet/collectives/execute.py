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
from motet.collectives.choose import cheapest
from motet.collectives.lane import Done, Work
from motet.collectives.library import program
from motet.collectives.lower import Same
from motet.collectives.native import Wanted, native
from motet.collectives.promise import shortfall
from motet.collectives.prove import prove
from motet.collectives.run import Manner, run
from motet.collectives.score import Program
from motet.core import trace
from motet.core.errors import InputError

__all__ = [
    "Call",
    "Ranks",
    "Work",
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


class Ranks(Protocol):
    """The ranks that take part. `process_group` is None when there is only one."""

    @property
    def world(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None: ...


class Call(Manner, total=False):
    """How a collective is to be done. `check` and `timeout_s` are for Programs; a backend has its own."""

    algorithm: str | Program | None
    cluster: Cluster
    """For "auto"."""


AnyRanks = Ranks | dist.ProcessGroup

_COMMON = {"gather": "tree", "scatter": "tree", "barrier": "dissemination"}
"""What is taken where no backend is asked."""


def all_reduce(tensor: Tensor, ranks: AnyRanks, **call: Unpack[Call]) -> Work:
    """Everybody gets the sum over the ranks (or `op`), in place."""
    return _do(Wanted("all-reduce", tensor, tensor), ranks, call)


def reduce(tensor: Tensor, ranks: AnyRanks, root: int = 0, **call: Unpack[Call]) -> Work:
    """The root gets the sum, in place. With a Program, the others keep what they have."""
    return _do(Wanted("reduce", tensor, tensor, root), ranks, call)


def broadcast(tensor: Tensor, ranks: AnyRanks, root: int = 0, **call: Unpack[Call]) -> Work:
    """Everybody gets the root's values, in place."""
    return _do(Wanted("broadcast", tensor, tensor, root), ranks, call)


def reduce_scatter(output: Tensor, input: Tensor, ranks: AnyRanks, **call: Unpack[Call]) -> Work:
    """Rank i gets part i of the sum of the inputs."""
    return _do(Wanted("reduce-scatter", output, input), ranks, call)


def all_gather(output: Tensor, input: Tensor, ranks: AnyRanks, **call: Unpack[Call]) -> Work:
    """Everybody gets the inputs of all ranks one after another."""
    return _do(Wanted("all-gather", output, input), ranks, call)


def gather(output: Tensor | None, input: Tensor, ranks: AnyRanks, root: int = 0, **call: Unpack[Call]) -> Work:
    """The root gets the inputs of all ranks one after another; the others give no output."""
    return _do(Wanted("gather", output, input, root), ranks, call)


def scatter(output: Tensor, input: Tensor | None, ranks: AnyRanks, root: int = 0, **call: Unpack[Call]) -> Work:
    """Rank i gets part i of the root's input; the others give none."""
    return _do(Wanted("scatter", output, input, root), ranks, call)


def all_to_all(
    output: Tensor,
    input: Tensor,
    ranks: AnyRanks,
    sizes: Sequence[Sequence[int]] | None = None,
    **call: Unpack[Call],
) -> Work:
    """Rank j gets from each rank the part that is meant for it.

    Parts are equal, or rank i has `sizes[i][j]` elements for rank j; then every rank has to know all sizes.
    """
    matrix = None if sizes is None else tuple(map(tuple, sizes))
    return _do(Wanted("all-to-all", output, input, sizes=matrix), ranks, call)


def barrier(ranks: AnyRanks, device: torch.device | str = "cpu", **call: Unpack[Call]) -> Work:
    """Nobody goes on before everybody has come."""
    group = group_of(ranks)
    world = 1 if group is None else dist.get_world_size(group)
    tokens = torch.zeros(world + 1, dtype=torch.uint8, device=device)
    return _do(Wanted("barrier", tokens[1:], tokens[:1]), ranks, call)


def sum_scalars(values: list[float], ranks: Ranks, device: torch.device) -> list[float]:
    """Sum a few numbers over the ranks in float64, which is exact for counts."""
    if ranks.world == 1:
        return values
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    all_reduce(packed, ranks)
    summed: list[float] = packed.tolist()
    return summed


def group_of(ranks: AnyRanks) -> dist.ProcessGroup | None:
    """None for a rank alone."""
    group = ranks if isinstance(ranks, dist.ProcessGroup) else ranks.process_group
    return None if group is None or dist.get_world_size(group) == 1 else group


def _do(wanted: Wanted, ranks: AnyRanks, call: Call) -> Work:
    group = group_of(ranks)
    if group is None:
        return _alone(wanted)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = _size(wanted, world)
    trace.count(f"{wanted.collective.replace('-', '_')}_bytes", size)
    algorithm = call.get("algorithm")
    if algorithm is None:
        work = native(wanted, group, call.get("op", "sum"), call.get("async_op", False))
        if work is not None:
            return work
    chosen = _program(wanted, algorithm or _COMMON[wanted.collective], world, size, call)
    output = wanted.output if chosen.final[rank] else None
    input = wanted.input if chosen.initial[rank] else None
    manner = Manner(
        op=call.get("op", "sum"),
        async_op=call.get("async_op", False),
        check=call.get("check", True),
        timeout_s=call.get("timeout_s"),
    )
    return run(chosen, output, input, group, **manner)


def _alone(wanted: Wanted) -> Work:
    if wanted.output is not None and wanted.input is not None and wanted.output is not wanted.input:
        wanted.output.detach().view(-1).copy_(wanted.input.detach().view(-1))
    return Done()


def _size(wanted: Wanted, world: int) -> int:
    """S, in bytes: the larger of what a rank gives and gets, the same on all ranks."""
    if wanted.collective in ("gather", "scatter"):
        part = wanted.input if wanted.collective == "gather" else wanted.output
        return 0 if part is None else part.nbytes * world
    return max(tensor.nbytes for tensor in (wanted.output, wanted.input) if tensor is not None)


def _program(wanted: Wanted, algorithm: str | Program, world: int, size: int, call: Call) -> Program:
    if isinstance(algorithm, Program):
        return _own(Same(algorithm), wanted.collective, wanted.root, wanted.sizes)
    options: tuple[tuple[str, object], ...] = ()
    if algorithm == "auto":
        if "cluster" not in call:
            raise InputError(f"algorithm 'auto': give cluster=, on which {wanted.collective} is to be cheap, or a name")
        found = cheapest(wanted.collective, max(size, 1), call["cluster"])
        algorithm, options = found.algorithm, found.options
    if wanted.root is not None:
        options = (*options, ("root", wanted.root))
    return _named(wanted.collective, algorithm, world, options, wanted.sizes)


Sizes = tuple[tuple[int, ...], ...] | None


@lru_cache(maxsize=256)
def _named(
    collective: str, algorithm: str, world: int, options: tuple[tuple[str, object], ...], sizes: Sizes
) -> Program:
    return _sized(program(collective, algorithm, world, **dict(options)), sizes)


@lru_cache(maxsize=256)
def _own(key: Same, collective: str, root: int | None, sizes: Sizes) -> Program:
    """A Program of the caller's, if it is one for this and does what it promises."""
    own = key.program
    if own.collective != collective:
        raise InputError(f"{own} is no Program for {collective}; give one of that collective")
    ends = own.initial if collective in ("broadcast", "scatter") else own.final
    roots = [rank for rank, held in enumerate(ends) if held]
    if root is not None and roots != [root]:
        raise InputError(f"{own} has root {', '.join(map(str, roots))}, not {root}; give root= as the Program has it")
    lacking = shortfall(own)
    if lacking:
        raise InputError(f"{own} promises less than {collective}: {lacking}; mend its final")
    prove(own)
    return _sized(own, sizes)


def _sized(program: Program, sizes: Sizes) -> Program:
    if sizes is None:
        return program
    if len(sizes) != program.ranks or any(len(row) != program.ranks or min(row) < 0 for row in sizes):
        raise InputError(
            f"sizes: {program} needs {program.ranks} rows of {program.ranks} counts of elements, 0 or more"
        )
    return replace(program, sizes=tuple(size for row in sizes for size in row))
