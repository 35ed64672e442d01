"""The measurement of a Program on this machine: errors, bytes and messages of each rank, and times."""

import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from motet.collectives.execute.buffer_plan import assign_offsets
from motet.collectives.execute.program_runner import run_program
from motet.collectives.execute.rank_plan import chunk_lengths
from motet.collectives.program import Program
from motet.core import trace
from motet.core.dtypes import dtype_name
from motet.core.errors import MotetError

DTYPE = torch.float32


@dataclass(frozen=True)
class CollectiveMeasurement:
    """The results that all ranks of a group share."""

    dtype: str
    size: int  # S in bytes, rounded up to whole elements in every chunk
    seconds: tuple[float, ...]  # The time of the slowest rank in each repeat
    largest_error: float
    allowed_error: float  # The bound of rounding in any order of the terms; 0 if nothing is reduced
    sent_bytes: tuple[int, ...]  # By each rank
    messages: tuple[int, ...]  # By each rank


def measure_program(program: Program, group: dist.ProcessGroup, *, size: int, repeats: int) -> CollectiveMeasurement:
    """Check the result of one execution, then time `repeats` more. All ranks must call this."""
    rank = dist.get_rank(group)
    elements_per_unit = -(-size // (DTYPE.itemsize * program.message_size_units))
    elements = elements_per_unit * sum(program.sizes)
    expected, allowed = _expected_result(program, rank, elements)
    chunks = _rank_contribution(rank, elements).split(list(chunk_lengths(program, elements)))
    input_tensor = torch.cat([torch.empty(0, dtype=DTYPE), *(chunks[chunk] for chunk in sorted(program.initial[rank]))])
    output = torch.full_like(expected, torch.nan, dtype=DTYPE)
    run_program(program, output, input_tensor, group)
    error = (output.double() - expected).abs()
    if not bool((error <= allowed).all()):
        raise MotetError(f"{program}: rank {rank} has a wrong result; the largest error is {float(error.max())}")
    seconds, counters = torch.zeros(repeats, dtype=torch.float64), _TraceCounterCollector()
    for repeat in range(repeats):
        dist.barrier(group=group)
        counters.clear()
        start_s = time.perf_counter()
        with trace.install_sink(counters):
            run_program(program, output, input_tensor, group, check=False)
        seconds[repeat] = time.perf_counter() - start_s
    max_errors = torch.stack([functional.pad(bound, (0, 1)).max() for bound in (error, allowed)])  # 0 if empty
    for tensor in (seconds, max_errors):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    local_counts = torch.tensor([counters["sent_bytes"], counters["messages"]], dtype=torch.float64)
    all_counts = [torch.empty_like(local_counts) for _ in range(program.ranks)]
    dist.all_gather(all_counts, local_counts, group=group)
    return CollectiveMeasurement(
        dtype_name(DTYPE),
        elements_per_unit * program.message_size_units * DTYPE.itemsize,
        tuple(seconds.tolist()),
        *max_errors.tolist(),
        *(tuple(int(row[column]) for row in all_counts) for column in (0, 1)),
    )


class _TraceCounterCollector(Counter[str]):
    def on_count(self, name: str, value: float) -> None:
        self[name] += int(value)

    def on_span(self, action: str, start: float, stop: float, depth: int) -> None:
        """Ignore spans."""


def _rank_contribution(rank: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank), dtype=DTYPE)


def _expected_result(program: Program, rank: int, elements: int) -> tuple[Tensor, Tensor]:
    """The result of a rank in float64, and the error bound of float32: (n - 1) u times the sum of the magnitudes."""
    lengths = chunk_lengths(program, elements)
    output_slices = assign_offsets("output", program.final[rank], lengths)
    total, magnitude = torch.zeros(2, sum(home.elements for home in output_slices.values()), dtype=torch.float64)
    for source in range(program.ranks):
        chunks = _rank_contribution(source, elements).double().split(list(lengths))
        for chunk, home in output_slices.items():
            if multiplicity := program.final[rank][chunk].count(source):
                output_range = slice(home.start, home.stop)
                total[output_range] += multiplicity * chunks[chunk]
                magnitude[output_range] += multiplicity * chunks[chunk].abs()
    for chunk, home in output_slices.items():
        rounding = (len(program.final[rank][chunk]) - 1) * torch.finfo(DTYPE).eps / 2
        magnitude[home.start : home.stop] *= rounding / (1 - rounding)
    return total, magnitude
