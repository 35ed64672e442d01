"""A Program as one rank carries it out: in each step what it puts out for others, and what it makes of what comes in.

Pure: no tensor is needed to know this. Shared memory has no ports, so steps that do not build on each other are taken
together, and a chunk that goes to several ranks is put out once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from motet.collectives.program import Program, Step, TransferOp


class PublishedChunk(NamedTuple):
    """A chunk is put out in a slot of this rank; every step and chunk has its own."""

    chunk: int
    slot: int
    is_initial_value: bool  # It is still what the rank began with
    readers: tuple[int, ...]


class ReceivedChunk(NamedTuple):
    """A chunk comes in from one rank or, in a reduction, from several."""

    chunk: int
    op: TransferOp
    # Rank and slot of each. A rank that also puts this chunk out in this step is among them, in order of rank, so that
    # all who add the same parts get the same bits.
    sources: tuple[tuple[int, int], ...]
    is_initial_value: bool
    adds_local_value: bool  # What the rank has there comes first
    is_last_contribution: bool  # With this, all contributions are there


class RankScheduleStep(NamedTuple):
    """What one rank does in one step."""

    published: tuple[PublishedChunk, ...]
    readers: tuple[int, ...]
    sources: tuple[int, ...]
    received: tuple[ReceivedChunk, ...]
    # (rank on another host, slot, chunk), in the order in which they are sent.
    socket_sends: tuple[tuple[int, int, int], ...] = ()
    socket_receives: tuple[tuple[int, int, int], ...] = ()  # The same of what comes from other hosts


@dataclass(frozen=True)
class RankSchedule:
    """What one rank does for a Program."""

    steps: tuple[RankScheduleStep, ...]
    slots: int  # The most slots that any rank needs
    unchanged_chunks: tuple[int, ...]  # Chunks that end as they began
    scratch_chunks: tuple[int, ...]  # Chunks that are worked on here and needed elsewhere
    needs_wider_dtype: bool  # Some rank passes on a partial sum, which a low precision would round on its way


def make_rank_schedule(program: Program, rank: int) -> RankSchedule:
    steps = merge_independent_steps(program.steps)
    slots = [_assign_slots(steps, other) for other in range(program.ranks)]
    complete = _completing_steps(program, steps)
    changed: set[int] = set()
    schedule_steps = []
    for number, step in enumerate(steps):
        readers: dict[int, list[int]] = {}
        incoming: dict[int, list[tuple[int, int]]] = {}
        ops: dict[int, TransferOp] = {}
        for t in step:
            for chunk in t.chunks:
                if t.src == rank:
                    readers.setdefault(chunk, []).append(t.dst)
                if t.dst == rank:
                    incoming.setdefault(chunk, []).append((t.src, slots[t.src][number, chunk]))
                    ops[chunk] = t.op
        published = [
            PublishedChunk(chunk, slots[rank][number, chunk], chunk not in changed, tuple(to))
            for chunk, to in readers.items()
        ]
        received = []
        for chunk, sources in incoming.items():
            local_slot = slots[rank].get((number, chunk))
            adds_in_rank_order = ops[chunk] == "reduce" and local_slot is not None
            ordered_sources = (
                sorted([*sources, (rank, local_slot)]) if adds_in_rank_order and local_slot is not None else sources
            )
            is_last = (number, rank, chunk) in complete
            received.append(
                ReceivedChunk(
                    chunk, ops[chunk], tuple(ordered_sources), chunk not in changed, not adds_in_rank_order, is_last
                )
            )
        changed.update(incoming)
        all_readers = sorted({reader for put in published for reader in put.readers})
        origins = sorted({src for sources in incoming.values() for src, _ in sources})
        schedule_steps.append(RankScheduleStep(tuple(published), tuple(all_readers), tuple(origins), tuple(received)))
    final = set(program.final[rank])
    return RankSchedule(
        tuple(schedule_steps),
        max(map(len, slots)),
        unchanged_chunks=tuple(sorted(final - changed)),
        scratch_chunks=tuple(sorted(changed - final)),
        needs_wider_dtype=_forwards_partial_sums(steps),
    )


def use_host_local_ranks(schedule: RankSchedule, local: Mapping[int, int]) -> RankSchedule:
    """Ranks of this host by their numbers there; other ranks, as sources, by the complement of their rank."""
    return replace(schedule, steps=tuple(_step_with_local_ranks(part, local) for part in schedule.steps))


def _step_with_local_ranks(step: RankScheduleStep, local: Mapping[int, int]) -> RankScheduleStep:
    socket_sends = [
        (reader, put.slot, put.chunk) for put in step.published for reader in put.readers if reader not in local
    ]
    received = [
        arrival._replace(sources=tuple((local.get(rank, ~rank), slot) for rank, slot in arrival.sources))
        for arrival in step.received
    ]
    socket_receives = [
        (rank, slot, arrival.chunk) for arrival in step.received for rank, slot in arrival.sources if rank not in local
    ]
    return step._replace(
        readers=tuple(local[reader] for reader in step.readers if reader in local),
        sources=tuple(local[source] for source in step.sources if source in local),
        received=tuple(received),
        socket_sends=tuple(socket_sends),
        socket_receives=tuple(sorted(socket_receives)),
    )


def merge_independent_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps joined with those before them unless they read, or replace, what changes there."""
    merged: list[list[Step]] = []
    changed: dict[tuple[int, int], TransferOp] = {}
    for step in steps:
        clash = any(
            (t.src, chunk) in changed or (t.op, changed.get((t.dst, chunk), "reduce")) != ("reduce", "reduce")
            for t in step
            for chunk in t.chunks
            if (t.src, chunk) in changed or (t.dst, chunk) in changed
        )
        if clash or not merged:
            merged.append([])
            changed = {}
        merged[-1].append(step)
        changed.update({(t.dst, chunk): t.op for t in step for chunk in t.chunks})
    return tuple(tuple(t for step in group for t in step) for group in merged)


def _assign_slots(steps: tuple[Step, ...], rank: int) -> dict[tuple[int, int], int]:
    """The slot of each (step, chunk) that a rank puts out."""
    slot_of: dict[tuple[int, int], int] = {}
    for number, step in enumerate(steps):
        for t in step:
            if t.src == rank:
                for chunk in t.chunks:
                    slot_of.setdefault((number, chunk), len(slot_of))
    return slot_of


def _completing_steps(program: Program, steps: tuple[Step, ...]) -> set[tuple[int, int, int]]:
    """(step, rank, chunk) where the last of all contributions is added."""
    contributions_needed = {chunk: len(ranks) for held in program.final for chunk, ranks in held.items()}
    counts = {(rank, chunk): 1 for rank, held in enumerate(program.initial) for chunk in held}
    completing: set[tuple[int, int, int]] = set()
    for number, step in enumerate(steps):
        before = dict(counts)
        for t in step:
            for chunk in t.chunks:
                counted = counts.get((t.dst, chunk), 0) if t.op == "reduce" else 0
                counts[t.dst, chunk] = counted + before[t.src, chunk]
                if t.op == "reduce" and counts[t.dst, chunk] == contributions_needed[chunk]:
                    completing.add((number, t.dst, chunk))
    return completing


def _forwards_partial_sums(steps: tuple[Step, ...]) -> bool:
    """Whether a chunk is added to in one step and again in a later one, anywhere."""
    added: set[int] = set()
    for step in steps:
        now = {chunk for t in step if t.op == "reduce" for chunk in t.chunks}
        if now & added:
            return True
        added |= now
    return False
