"""A Program carried out here: is the result right, what did each rank send, and how long did it take."""

import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from motet.collectives.lower import extents, laid
from motet.collectives.run import run
from motet.collectives.score import Program
from motet.core import trace
from motet.core.errors import MotetError

DTYPE = torch.float32


@dataclass(frozen=True)
class Measured:
    """What the ranks of a group found out together."""

    dtype: str
    size: int
    """S in bytes: what was asked for, rounded up to whole numbers for every chunk."""
    seconds: tuple[float, ...]
    """Of each repeat, the slowest rank's."""
    largest_error: float
    allowed_error: float
    """What rounding may come to, with the terms added in any order; 0 where data is only moved."""
    sent_bytes: tuple[int, ...]
    messages: tuple[int, ...]
    """Of each rank."""


def measure(program: Program, group: dist.ProcessGroup, size: int, repeats: int) -> Measured:
    """Carry it out once to see that it is right, then so many times against the clock. All ranks call it."""
    rank = dist.get_rank(group)
    each = -(-size // (DTYPE.itemsize * program.whole))
    elements = each * sum(program.sizes)
    expected, allowed = _expected(program, rank, elements)
    given = _held(program, rank, _contribution(rank, elements))
    output = torch.full_like(expected, torch.nan, dtype=DTYPE)
    counted = _Counted()
    with trace.install_sink(counted):
        run(program, output, given, group)
    error = (output.double() - expected).abs()
    if not bool((error <= allowed).all()):
        raise MotetError(f"{program}: rank {rank} has a wrong result; the largest error is {float(error.max())}")
    seconds = torch.tensor([_timed(program, output, given, group) for _ in range(repeats)], dtype=torch.float64)
    worst = torch.tensor([_largest(error), _largest(allowed)], dtype=torch.float64)
    for tensor in (seconds, worst):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    mine = torch.tensor([counted.found["sent_bytes"], counted.found["messages"]], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(program.ranks)]
    dist.all_gather(every, mine, group=group)
    return Measured(
        str(DTYPE).removeprefix("torch."),
        each * program.whole * DTYPE.itemsize,
        tuple(seconds.tolist()),
        *worst.tolist(),
        *(tuple(int(row[column]) for row in every) for column in (0, 1)),
    )


class _Counted:
    """What the trace tells."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_count(self, name: str, value: float) -> None:
        self.found[name] += int(value)

    def on_span(self, action: str, start_s: float, duration_s: float, depth: int) -> None:
        """Spans are of no interest here."""


def _contribution(rank: int, elements: int) -> Tensor:
    """What a rank has, for all chunks: every rank can make that of every other."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank), dtype=DTYPE)


def _held(program: Program, rank: int, contribution: Tensor) -> Tensor:
    """The chunks that the rank starts with, one after another."""
    pieces = contribution.split(list(extents(program, contribution.numel())))
    return torch.cat([contribution.new_empty(0), *(pieces[chunk] for chunk in sorted(program.initial[rank]))])


def _expected(program: Program, rank: int, elements: int) -> tuple[Tensor, Tensor]:
    """The rank's result in float64, and how far float32 may be from it: (n - 1) u times the sum of the magnitudes."""
    lengths = extents(program, elements)
    homes = laid("output", program.final[rank], lengths)
    total, magnitude = torch.zeros(2, sum(home.elements for home in homes.values()), dtype=torch.float64)
    for source in range(program.ranks):
        pieces = _contribution(source, elements).double().split(list(lengths))
        for chunk, home in homes.items():
            times = program.final[rank][chunk].count(source)
            if times:
                place = slice(home.start, home.stop)
                total[place] += times * pieces[chunk]
                magnitude[place] += times * pieces[chunk].abs()
    unit = torch.finfo(DTYPE).eps / 2
    for chunk, home in homes.items():
        additions = len(program.final[rank][chunk]) - 1
        magnitude[home.start : home.stop] *= additions * unit / (1 - additions * unit)
    return total, magnitude


def _timed(program: Program, output: Tensor, given: Tensor, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    start_s = time.perf_counter()
    run(program, output, given, group, check=False)
    return time.perf_counter() - start_s


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
