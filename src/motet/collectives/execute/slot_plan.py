"""A RankPlan placed in shared memory: each chunk that a rank publishes has a slot, which all its readers read.

Shared memory has no ports, so steps that do not depend on each other are merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from motet.collectives.algorithms import build
from motet.collectives.execute.rank_plan import RankStep, lower_for_all_ranks, merge_independent_steps
from motet.collectives.program import Program, TransferOp
from motet.core.units import DTYPE_BYTES

# Up to this size, an all-reduce within one host takes one step, in which every rank adds everything.
ONE_STEP_ALL_REDUCE_MAX_BYTES = 256 << 10
_CHUNK_ALIGNMENT = 16  # Elements

HostOfRank = tuple[int, ...]  # The index of the host of each rank


class PublishedChunk(NamedTuple):
    """A chunk that this rank writes to one of its slots; every step and chunk has another slot."""

    chunk: int
    slot: int
    is_initial_value: bool  # No step before has changed the chunk
    reader_count: int  # Ranks that get the chunk, on this host and on others


class ChunkReadFromSlots(NamedTuple):
    """A chunk that this rank reads from one slot or, in a reduction, from several."""

    chunk: int
    op: TransferOp
    # (rank, slot) of each. The rank itself is one of them if it also publishes the chunk in this step. The sum then
    # goes in order of rank, so that all ranks that add the same values get the same bits.
    sources: tuple[tuple[int, int], ...]
    is_initial_value: bool
    adds_local_value: bool  # The local value comes first, and is in no slot
    is_last_contribution: bool  # This step adds the last contributions


class OtherHostSlot(NamedTuple):
    """A slot that is sent to, or received from, a rank of another host."""

    rank: int
    slot: int
    chunk: int


class SlotStep(NamedTuple):
    """The actions of one rank in one step."""

    published: tuple[PublishedChunk, ...]
    readers: tuple[int, ...]
    sources: tuple[int, ...]
    received: tuple[ChunkReadFromSlots, ...]
    socket_sends: tuple[OtherHostSlot, ...] = ()
    socket_receives: tuple[OtherHostSlot, ...] = ()


@dataclass(frozen=True)
class SlotPlan:
    """The part of one rank in a Program."""

    chunks: int
    steps: tuple[SlotStep, ...] = ()
    slots: int = 0  # The most slots that any rank needs
    unchanged_chunks: tuple[int, ...] = ()  # Final chunks that no step changes
    scratch_chunks: tuple[int, ...] = ()  # Chunks that change here and are final elsewhere
    needs_wider_dtype: bool = False  # Some rank passes on a partial sum, which low precision would round

    def sent_numel(self, chunk_numels: Sequence[int]) -> int:
        """Elements that cross from this rank to others: those of a published chunk, once for each of its readers."""
        return sum(chunk_numels[chunk.chunk] * chunk.reader_count for step in self.steps for chunk in step.published)


def make_slot_plan(program: Program, rank: int, local_index: Mapping[int, int]) -> SlotPlan:
    """The part of a rank. Ranks of its host appear as their `local_index`, other sources as the complement ~rank."""
    program = replace(program, steps=merge_independent_steps(program.steps))
    plans = lower_for_all_ranks(program)
    sends = ([(i, send.chunk) for i, step in enumerate(plan.steps) for send in step.sends] for plan in plans)
    slots = [{key: slot for slot, key in enumerate(keys)} for keys in sends]  # Slots by step and chunk
    complete = _completing_steps(program)

    def local_ranks(messages: list[tuple[int, int, int]]) -> tuple[int, ...]:
        return tuple(local_index[peer] for peer in sorted({m[0] for m in messages}) if peer in local_index)

    def place_step(step_id: int, step: RankStep) -> SlotStep:
        own_slots = {send.chunk: slots[rank][step_id, send.chunk] for send in step.sends}
        sent = [(reader, own_slots[send.chunk], send.chunk) for send in step.sends for reader in send.destinations]
        read, received = [], []
        for chunk, is_initial_value, op, source_ranks in step.receives:
            sources = [(src, slots[src][step_id, chunk]) for src in source_ranks]
            read += [(src, slot, chunk) for src, slot in sources]
            adds_local_value = op != "reduce" or chunk not in own_slots
            if not adds_local_value:
                sources = sorted([*sources, (rank, own_slots[chunk])])
            placed = tuple((local_index.get(src, ~src), slot) for src, slot in sources)
            is_last = (step_id, rank, chunk) in complete
            received.append(ChunkReadFromSlots(chunk, op, placed, is_initial_value, adds_local_value, is_last))
        return SlotStep(
            tuple(PublishedChunk(c, own_slots[c], is_initial, len(readers)) for c, is_initial, readers in step.sends),
            local_ranks(sent),
            local_ranks(read),
            tuple(received),
            tuple(OtherHostSlot(*message) for message in sent if message[0] not in local_index),
            tuple(sorted(OtherHostSlot(*message) for message in read if message[0] not in local_index)),
        )

    final, changed = set(program.final[rank]), plans[rank].changed_chunks
    steps = tuple(place_step(*pair) for pair in enumerate(plans[rank].steps))
    unchanged, scratch = tuple(sorted(final - changed)), tuple(sorted(changed - final))
    return SlotPlan(program.chunks, steps, max(map(len, slots)), unchanged, scratch, _forwards_partial_sums(program))


def _completing_steps(program: Program) -> set[tuple[int, int, int]]:
    """(step, rank, chunk) of each reduction that adds the last contributions."""
    contributions_needed = {chunk: len(ranks) for held in program.final for chunk, ranks in held.items()}
    counts = {(rank, chunk): 1 for rank, held in enumerate(program.initial) for chunk in held}
    completing: set[tuple[int, int, int]] = set()
    for step_id, step in enumerate(program.steps):
        before = dict(counts)
        for t in step:
            for chunk in t.chunks:
                count = counts.get((t.dst, chunk), 0) if t.op == "reduce" else 0
                counts[t.dst, chunk] = count + before[t.src, chunk]
                if t.op == "reduce" and counts[t.dst, chunk] == contributions_needed[chunk]:
                    completing.add((step_id, t.dst, chunk))
    return completing


def _forwards_partial_sums(program: Program) -> bool:
    """Whether a chunk is added to in one step and again in a later one, on any rank."""
    reduced = [{chunk for t in step if t.op == "reduce" for chunk in t.chunks} for step in program.steps]
    return sum(map(len, reduced)) > len(set().union(*reduced))


@lru_cache(maxsize=256)
def slot_plan_for(collective: str, rank: int, hosts: HostOfRank, *, is_small: bool, root: int = 0) -> SlotPlan:
    """The plan of a rank for a collective; `hosts` is the host of each rank."""
    if len(hosts) == 1:
        return SlotPlan(chunks=1, unchanged_chunks=(0,))
    local_ranks = [other for other in range(len(hosts)) if hosts[other] == hosts[rank]]
    program = select_program(collective, hosts, is_small=is_small, root=root)
    return make_slot_plan(program, rank, {other: index for index, other in enumerate(local_ranks)})


def chunk_numels(collective: str, numel: int, chunks: int, *, ranks: int) -> tuple[int, ...]:
    """Elements of each chunk; `numel` are those of the tensor that a rank gives, or gets from a scatter."""
    if collective == "all-to-all":
        return (numel // ranks,) * chunks
    if collective not in ("all-reduce", "reduce", "broadcast") or chunks == 1:
        return (numel,) * chunks
    chunk_numel = -(-numel // chunks // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
    return tuple(max(0, min(chunk_numel, numel - i * chunk_numel)) for i in range(chunks))


def backend_sent_bytes(collective: str, numel: int, dtype: str, *, rank: int, hosts: HostOfRank) -> int:
    """Bytes that a rank sends in a collective of the backend, for `numel` as in `chunk_numels`; the root is rank 0."""
    width = DTYPE_BYTES[dtype]
    plan = slot_plan_for(collective, rank, hosts, is_small=width * numel <= ONE_STEP_ALL_REDUCE_MAX_BYTES)
    if plan.needs_wider_dtype and dtype in ("bfloat16", "float16"):
        width = DTYPE_BYTES["float32"]
    return width * plan.sent_numel(chunk_numels(collective, numel, plan.chunks, ranks=len(hosts)))


def select_program(collective: str, hosts: HostOfRank, *, is_small: bool, root: int) -> Program:
    """The Program of a collective, by size and by the placement of ranks on hosts.

    Within a host, a published chunk is read by all ranks, so the Programs with the fewest steps are the fastest. The
    crossover was measured (benchmarks/collectives.py). Across hosts the traffic over the network counts.
    """
    ranks, spans_hosts = len(hosts), len(set(hosts)) > 1
    match collective:
        case "barrier":
            return build("all-gather", "direct", ranks)
        case "broadcast" | "reduce":
            return build(collective, "tree" if spans_hosts else "flat", ranks, root=root)
        case "gather" | "scatter":
            return build(collective, "flat", ranks, root=root)
        case "all-to-all":
            return build(collective, "pairwise", ranks)
    is_all_reduce = collective == "all-reduce"
    if not spans_hosts:
        return build(collective, "naive" if is_all_reduce and is_small else "direct", ranks)
    names = dict.fromkeys(hosts)
    per_host = ranks // len(names)
    if per_host > 1 and hosts == tuple(name for name in names for _ in range(per_host)):  # Equally many, consecutive
        return build(collective, "hierarchical-sharded" if is_all_reduce else "hierarchical", ranks, hosts=len(names))
    return build(collective, "ring" if is_all_reduce else "direct", ranks)
