"""A Program lowered to the steps of one rank: the chunks that it sends, and those it replaces or adds to.

A RankPlan needs no tensor and has no addresses. `buffer_plan` places its chunks in flat buffers, for messages over
torch.distributed; `slot_plan` places them in shared memory.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from motet.collectives.program import ChunkTransfer, Program, Step, TransferOp
from motet.core.errors import check_input


class ChunkSend(NamedTuple):
    """A chunk that a rank sends to one or more ranks."""

    chunk: int
    is_initial_value: bool  # No step before has changed the chunk
    destinations: tuple[int, ...]


class ChunkReceive(NamedTuple):
    """A chunk that a rank receives from one rank or, in a reduction, from several."""

    chunk: int
    is_initial_value: bool
    op: TransferOp
    sources: tuple[int, ...]  # In the order of the Program


class RankStep(NamedTuple):
    """The transfers of one step that concern one rank. All reads come before all writes."""

    sends: tuple[ChunkSend, ...]
    receives: tuple[ChunkReceive, ...]


class RankPlan(NamedTuple):
    """The part of one rank in a Program."""

    steps: tuple[RankStep, ...]  # One for each step of the Program, even if empty
    changed_chunks: frozenset[int]


def lower_program(program: Program, rank: int) -> RankPlan:
    """The part of a rank in a Program."""
    return _lower([[t for t in step if rank in (t.src, t.dst)] for step in program.steps], rank)


def lower_for_all_ranks(program: Program) -> list[RankPlan]:
    """The part of each rank in a Program."""
    of_rank: list[list[list[ChunkTransfer]]] = [[[] for _ in program.steps] for _ in range(program.ranks)]
    for step_id, step in enumerate(program.steps):
        for t in step:
            for rank in {t.src, t.dst}:
                of_rank[rank][step_id].append(t)
    return [_lower(steps, rank) for rank, steps in enumerate(of_rank)]


def _lower(steps_of_rank: Sequence[Sequence[ChunkTransfer]], rank: int) -> RankPlan:
    changed: frozenset[int] = frozenset()
    steps = []
    for step in steps_of_rank:
        destinations: dict[int, list[int]] = {}
        sources: dict[int, list[int]] = {}
        ops: dict[int, TransferOp] = {}
        for src, dst, first, last, op in step:
            for chunk in range(first, last + 1):
                if src == rank:
                    destinations.setdefault(chunk, []).append(dst)
                if dst == rank:
                    sources.setdefault(chunk, []).append(src)
                    ops[chunk] = op
        sends = (ChunkSend(chunk, chunk not in changed, tuple(to)) for chunk, to in destinations.items())
        receives = (ChunkReceive(chunk, chunk not in changed, ops[chunk], tuple(of)) for chunk, of in sources.items())
        steps.append(RankStep(tuple(sends), tuple(receives)))
        changed = changed.union(sources)
    return RankPlan(tuple(steps), changed)


def merge_independent_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Join each step with the steps before it, unless it reads or replaces a chunk that these change."""
    merged: list[list[Step]] = []
    changed: dict[tuple[int, int], TransferOp] = {}
    for step in steps:
        depends = any(
            (t.src, chunk) in changed or ((t.dst, chunk) in changed and not t.op == changed[t.dst, chunk] == "reduce")
            for t in step
            for chunk in t.chunks
        )
        if depends or not merged:
            merged.append([])
            changed = {}
        merged[-1].append(step)
        changed.update({(t.dst, chunk): t.op for t in step for chunk in t.chunks})
    return tuple(tuple(t for step in group for t in step) for group in merged)


def chunk_lengths(program: Program, elements: int) -> tuple[int, ...]:
    """The number of elements of each chunk, in proportion to the sizes and as even as possible."""
    before = list(accumulate(program.sizes, initial=0))
    boundaries = [elements * weight // before[-1] if before[-1] else 0 for weight in before]
    return tuple(stop - start for start, stop in pairwise(boundaries))


def elements_sent(program: Program, rank: int, elements: int) -> int:
    """The number of elements that a rank sends when all chunks together have `elements`."""
    before = [0, *accumulate(chunk_lengths(program, elements))]
    return sum(before[t.last + 1] - before[t.first] for step in program.steps for t in step if t.src == rank)


def total_elements(program: Program, rank: int, input_numel: int, output_numel: int) -> int | None:
    """The number of elements of all chunks together, from what one rank gives; None if it takes no part.

    A rank without input and output that passes on chunks takes their sizes as numbers of elements.
    """
    total = sum(program.sizes)
    ends = (("input", program.initial[rank], input_numel), ("output", program.final[rank], output_numel))
    relative_size, numel = max((sum(program.sizes[chunk] for chunk in chunks), numel) for _, chunks, numel in ends)
    total_numel, remainder = divmod(numel * total, relative_size) if relative_size else (total, 0)
    problem = f"{numel} elements on rank {rank} cannot be {relative_size} of {total} equal parts"
    check_input(not remainder, f"{program}: {problem}; give it a multiple of {relative_size}")
    lengths = chunk_lengths(program, total_numel)
    for name, chunks, numel in ends:
        must = sum(lengths[chunk] for chunk in chunks)
        check_input(numel == must, f"{program}: the {name} of rank {rank} has {numel} elements; it must have {must}")
    takes_part = relative_size or any(rank in (t.src, t.dst) for step in program.steps for t in step)
    return total_numel if takes_part else None
