"""Grids: ranks send only to neighbours along each dimension, which is a ring on a torus and a line on a mesh."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod

from motet.collectives.algorithms.rank_arithmetic import format_dims, grid_dims, is_composite, prime_factors
from motet.collectives.algorithms.registry import MAX_AXES, AlphaBetaGammaCost, algorithm, messages
from motet.collectives.algorithms.ring import all_gather_ring
from motet.collectives.compose import collective_program, parallel_steps, reverse, reverse_steps, steps_on_ranks
from motet.collectives.program import ChunkTransfer, Program, Step, copy_chunk
from motet.core.errors import check_input

Dims = Sequence[int] | None


def _torus_cost(axes: int | None) -> Callable[..., AlphaBetaGammaCost]:
    """The cost of d - 1 steps there and d - 1 back along each dimension, for each of the 2 n parts of the data.

    A rank sends them in turn over one port. If d = 2, both neighbours are the same rank and the two directions one
    message. The total is the traffic of one ring: 2 S (N-1) / N.
    """

    def cost(ranks: int, dims: Dims = None) -> AlphaBetaGammaCost:
        lengths = _torus_dims(ranks, dims, axes)
        starts = sum(len(lengths) * 2 * (d - 1) * (1 if d == 2 else 2) for d in lengths)
        return AlphaBetaGammaCost(starts, Fraction(2 * (ranks - 1), ranks), Fraction(ranks - 1, ranks))

    return cost


def _torus_dims(ranks: int, dims: Dims, axes: int | None) -> tuple[int, ...]:
    if axes is None and dims is None:
        return (ranks,)
    message = f"dims {format_dims(dims or ())}: a torus has at most {MAX_AXES} dimensions; give fewer"
    check_input(axes is not None or len(dims or ()) <= MAX_AXES, message)
    return grid_dims(ranks, dims, axes)


def _torus_all_reduce(name: str, ranks: int, lengths: Sequence[int]) -> Program:
    """An all-reduce in 2 n parts, each of which starts along another dimension or direction, so that all links work."""
    axes = len(lengths)
    parts = []
    for n in range(2 * axes):
        order = [(axis + n // 2) % axes for axis in range(axes)]
        parts.append(_all_gather_phases(lengths, order, n * ranks, line=all_gather_ring, backwards=n % 2 == 1))
    # The parts change dimension together, so that no two parts use the same link.
    gathered = [step for phases in zip(*parts, strict=True) for step in parallel_steps(phases)]
    ports = sum(1 if d == 2 else 2 for d in lengths)
    return _all_reduce_from_all_gather(name, gathered, ranks, chunks=2 * axes * ranks, ports=ports)


def _all_reduce_from_all_gather(name: str, gathered: Sequence[Step], ranks: int, *, chunks: int, ports: int) -> Program:
    steps = [*reverse_steps(gathered), *gathered]
    return collective_program("all-reduce", name, ranks, steps=steps, chunks=chunks, ports=ports)


def _all_gather_phases(
    lengths: Sequence[int], order: Sequence[int], offset: int, *, line: Callable[[int], Program], backwards: bool
) -> list[tuple[Step, ...]]:
    """The steps of each phase of an all-gather along one dimension after another, the last of the order first.

    A rank's chunk has the index that the rank would have if the dimensions were counted in this order. Before a phase
    the rank holds the chunks that differ from its own only in the earlier dimensions: consecutive chunks.
    """
    ranks = prod(lengths)
    phases: list[tuple[Step, ...]] = []
    width = 1
    for axis in reversed(order):
        length, stride = lengths[axis], prod(lengths[axis + 1 :])
        line_program = line(length)
        positions = [-n % length if backwards else n for n in range(length)]
        lines = []
        for rank in range(ranks):
            if _coordinate(rank, axis, lengths) == 0:
                members = [rank + n * stride for n in positions]
                first = _index_in_axis_order(rank, order, lengths) // (width * length) * width * length + offset
                firsts = [first + n * width for n in positions]
                lines.append(steps_on_ranks(line_program, members, firsts, width=width))
        phases.append(parallel_steps(lines))
        width *= length
    return phases


def _coordinate(rank: int, axis: int, lengths: Sequence[int]) -> int:
    return rank // prod(lengths[axis + 1 :]) % lengths[axis]


def _index_in_axis_order(rank: int, order: Sequence[int], lengths: Sequence[int]) -> int:
    sizes = [lengths[axis] for axis in order]
    return sum(_coordinate(rank, axis, lengths) * prod(sizes[n + 1 :]) for n, axis in enumerate(order))


@algorithm("all-reduce", "torus", cost=_torus_cost(None))
def all_reduce_torus(ranks: int, dims: Dims = None) -> Program:
    """All-reduce along one to six dimensions, `dims`, in all orders and both directions; one ring without `dims`."""
    return _torus_all_reduce("torus", ranks, _torus_dims(ranks, dims, None))


@algorithm("all-reduce", "torus-2d", cost=_torus_cost(2), supports=is_composite)
def all_reduce_torus_2d(ranks: int, dims: Dims = None) -> Program:
    """Reduce-scatter along rows and columns of a torus, all-gather back, in both orders and directions together."""
    return _torus_all_reduce("torus-2d", ranks, grid_dims(ranks, dims, 2))


@algorithm("all-reduce", "torus-3d", cost=_torus_cost(3), supports=lambda ranks: len(prime_factors(ranks)) >= 3)
def all_reduce_torus_3d(ranks: int, dims: Dims = None) -> Program:
    """All-reduce along three dimensions, with six parts of the data."""
    return _torus_all_reduce("torus-3d", ranks, grid_dims(ranks, dims, 3))


@algorithm("all-reduce", "torus-5d", cost=_torus_cost(5), supports=lambda ranks: len(prime_factors(ranks)) >= 5)
def all_reduce_torus_5d(ranks: int, dims: Dims = None) -> Program:
    """All-reduce along five dimensions, with ten parts of the data."""
    return _torus_all_reduce("torus-5d", ranks, grid_dims(ranks, dims, 5))


def _line_max_messages(length: int) -> int:
    """The messages of the busiest port: the middle rank sends to both sides in the first half of the steps."""
    return 1 if length == 2 else 2 * (length - 1) - (length - 2) // 2


def _mesh_cost(ranks: int, dims: Dims = None) -> AlphaBetaGammaCost:
    rows, columns = grid_dims(ranks, dims, 2)
    loads = _line_max_messages(rows), _line_max_messages(columns)
    sent_fraction = Fraction(loads[0], rows) + Fraction(loads[1], rows * columns)
    return AlphaBetaGammaCost(2 * sum(loads), 2 * sent_fraction, sent_fraction)


@algorithm("all-reduce", "mesh-2d", cost=_mesh_cost, supports=is_composite)
def all_reduce_mesh_2d(ranks: int, dims: Dims = None) -> Program:
    """Reduce-scatter along the rows and columns of a grid without links around it, then all-gather back."""
    lengths = grid_dims(ranks, dims, 2)
    phases = _all_gather_phases(lengths, (0, 1), 0, line=all_gather_line, backwards=False)
    gathered = [step for phase in phases for step in phase]
    return _all_reduce_from_all_gather("mesh-2d", gathered, ranks, chunks=ranks, ports=2 if max(lengths) > 2 else 1)


@algorithm("all-gather", "line", cost=lambda n: messages(_line_max_messages(n), Fraction(1, n)))
def all_gather_line(ranks: int) -> Program:
    """All-gather along a line without a link from its end to its start: chunks travel to both ends."""
    # The rank at distance d from a chunk's origin forwards it d steps later; chunks from far away are forwarded last.
    steps: list[list[ChunkTransfer]] = [[] for _ in range(ranks - 1)]
    for chunk in range(ranks):
        for rank in range(chunk, ranks - 1):
            steps[rank - chunk].append(copy_chunk(rank, rank + 1, chunk))
        for rank in range(chunk, 0, -1):
            steps[chunk - rank].append(copy_chunk(rank, rank - 1, chunk))
    return collective_program("all-gather", "line", ranks, steps=steps, ports=1 if ranks == 2 else 2)


@algorithm("reduce-scatter", "line", cost=lambda n: messages(_line_max_messages(n), Fraction(1, n), reduced=True))
def reduce_scatter_line(ranks: int) -> Program:
    """The all-gather along a line backwards: sums flow from both ends to their owners."""
    return reverse(all_gather_line(ranks), "reduce-scatter")
