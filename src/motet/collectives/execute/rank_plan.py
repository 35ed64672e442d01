"""A Program lowered to the steps of one rank: the chunks that it sends, and those it replaces or adds to.

A RankPlan needs no tensor and has no addresses. `buffer_plan` places its chunks in flat buffers, for messages over
torch.distributed; `slot_plan` places them in shared memory.

A RankPlan placed in flat buffers: each message, copy and reduction of a rank with its addresses.

`input` holds the initial chunks of the rank and is never written. `output` holds its final chunks, `scratch` everything
in between. A received chunk lands in the output directly where nothing there is still needed. A chunk that is reduced
for the first time is read from the input, so that a sum needs no scratch but its own.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeVar

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
    sources: tuple[int, ...]  # Sources in the order of the Program


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
    rank_steps: list[list[list[ChunkTransfer]]] = [[[] for _ in program.steps] for _ in range(program.ranks)]
    for step_id, step in enumerate(program.steps):
        for t in step:
            for rank in {t.src, t.dst}:
                rank_steps[rank][step_id].append(t)
    return [_lower(steps, rank) for rank, steps in enumerate(rank_steps)]


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
    """The number of elements of all chunks together, from the tensors of one rank; None if it takes no part.

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
        expected = sum(lengths[chunk] for chunk in chunks)
        check_input(numel == expected, f"{program}: the {name} of rank {rank} has {numel} elements; give {expected}")
    takes_part = relative_size or any(rank in (t.src, t.dst) for step in program.steps for t in step)
    return total_numel if takes_part else None


Key = TypeVar("Key", bound=Hashable)
Buffer = Literal["input", "output", "scratch"]


class BufferSlice(NamedTuple):
    """Some elements of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class BufferMessage(NamedTuple):
    """A message to or from another rank."""

    peer: int
    buffer_slice: BufferSlice


class LocalCopy(NamedTuple):
    """A copy within the rank."""

    target: BufferSlice
    source: BufferSlice


class ReceivedMessageSlice(NamedTuple):
    """Some elements of a received message."""

    receive_index: int  # Index among the receives of the step
    buffer_slice: BufferSlice


class LocalReduction(NamedTuple):
    """`target` becomes `local` plus each received slice in order; without `local` it becomes the received slice."""

    target: BufferSlice
    local: BufferSlice | None
    received: tuple[ReceivedMessageSlice, ...]
    after_sends: bool  # This step sends from the target


class BufferStep(NamedTuple):
    """The actions of one rank in one step, in the order of the fields."""

    packs: tuple[LocalCopy, ...]  # Make the chunks of one message contiguous
    receives: tuple[BufferMessage, ...]
    sends: tuple[BufferMessage, ...]
    reductions: tuple[LocalReduction, ...]


class BufferPlan(NamedTuple):
    """The part of one rank in a Program, for tensors of one length."""

    steps: tuple[BufferStep, ...]  # One for each step of the Program, even if empty
    scratch_elements: int
    final_copies: tuple[LocalCopy, ...]  # Final chunks that are not in the output yet
    contributor_counts: tuple[tuple[int, BufferSlice], ...]  # For averages: ranks that have added to final elements

    @property
    def sent_numel(self) -> int:
        """Elements in the messages to other ranks."""
        return sum(send.buffer_slice.elements for step in self.steps for send in step.sends)


@lru_cache(maxsize=1024)
def make_buffer_plan(program: Program, rank: int, elements: int, *, in_place: bool) -> BufferPlan:
    """The part of a rank; `elements` counts those of all chunks together.

    With `in_place`, chunks that are both initial and final start in the output, which is overwritten.
    """
    lengths = chunk_lengths(program, elements)
    locations = assign_offsets("input", program.initial[rank], lengths)
    outputs = assign_offsets("output", program.final[rank], lengths)
    if in_place:
        locations |= {chunk: outputs[chunk] for chunk in locations if chunk in outputs}
    planner = _BufferPlanner(lengths, outputs, locations)
    plan = lower_program(program, rank)
    needed_after = _chunks_needed_after_steps(plan, set(outputs))
    steps = tuple(planner.place_step(*pair) for pair in zip(plan.steps, needed_after, strict=True))
    filled = {chunk: target for chunk, target in outputs.items() if target.elements}
    copies = [LocalCopy(target, locations[chunk]) for chunk, target in filled.items() if locations[chunk] != target]
    counts = _merge_adjacent((len(program.final[rank][chunk]), (target,)) for chunk, target in filled.items())
    contributor_counts = tuple((ranks, target) for ranks, (target,) in counts)
    return BufferPlan(steps, planner.scratch_elements, _merge_copies(copies), contributor_counts)


def assign_offsets(buffer: Buffer, chunks: Iterable[int], lengths: Sequence[int]) -> dict[int, BufferSlice]:
    """Place chunks one after another."""
    ordered = sorted(chunks)
    return dict(zip(ordered, _consecutive_slices(buffer, 0, [lengths[chunk] for chunk in ordered]), strict=True))


def _consecutive_slices(buffer: Buffer, start: int, lengths: Iterable[int]) -> list[BufferSlice]:
    return [BufferSlice(buffer, *bounds) for bounds in pairwise(accumulate(lengths, initial=start))]


def _chunks_needed_after_steps(plan: RankPlan, needed: set[int]) -> list[set[int]]:
    needed_after: list[set[int]] = []
    for step in reversed(plan.steps):
        needed_after.append(set(needed))
        needed -= {receive.chunk for receive in step.receives if receive.op == "copy"}
        needed |= {receive.chunk for receive in step.receives if receive.op == "reduce"} | {s.chunk for s in step.sends}
    return needed_after[::-1]


@dataclass
class _BufferPlanner:
    lengths: Sequence[int]
    outputs: dict[int, BufferSlice]
    locations: dict[int, BufferSlice]
    scratch_elements: int = 0
    _used_scratch: list[BufferSlice] = field(default_factory=list)
    _outgoing: list[BufferSlice] = field(default_factory=list)

    def place_step(self, step: RankStep, needed_after: set[int]) -> BufferStep:
        incoming = {receive.chunk: receive for receive in step.receives if self.lengths[receive.chunk]}
        to_send = [(send.chunk, send.destinations) for send in step.sends if self.lengths[send.chunk]]
        self._outgoing = []
        packs: list[LocalCopy] = []
        sends = [BufferMessage(dst, self._pack(chunks, packs)) for dst, chunks in _chunks_by_peer(to_send)]
        receives: list[BufferMessage] = []
        received: dict[tuple[int, int], ReceivedMessageSlice] = {}
        for src, chunks in _chunks_by_peer((chunk, receive.sources) for chunk, receive in incoming.items()):
            message = self._direct_output_slice(src, chunks, incoming) or self._allocate_scratch(chunks)
            for chunk, chunk_slice in zip(chunks, self._split_by_chunk(message, chunks), strict=True):
                received[src, chunk] = ReceivedMessageSlice(len(receives), chunk_slice)
            receives.append(BufferMessage(src, message))
        placed = [self._place_reduction(r, [received[src, r.chunk] for src in r.sources]) for r in incoming.values()]
        reductions = self._merge_reductions([reduction for reduction in placed if reduction])
        live = (self.locations[chunk] for chunk in needed_after if self.lengths[chunk] and chunk in self.locations)
        self._used_scratch = [location for location in live if location.buffer == "scratch"]
        return BufferStep(_merge_copies(packs), tuple(receives), tuple(sends), reductions)

    def _pack(self, chunks: list[int], packs: list[LocalCopy]) -> BufferSlice:
        sources = [self.locations[chunk] for chunk in chunks]
        if contiguous := _join_contiguous(sources):
            self._outgoing.append(contiguous)
            return contiguous
        packed = self._allocate_scratch(chunks)
        packs += map(LocalCopy, self._split_by_chunk(packed, chunks), sources)
        return packed

    def _direct_output_slice(
        self, src: int, chunks: list[int], incoming: dict[int, ChunkReceive]
    ) -> BufferSlice | None:
        """The slice of the output in which all chunks of a message belong, if it can be overwritten now."""
        for chunk in chunks:
            receive = incoming[chunk]
            if chunk not in self.outputs or receive.sources[0] != src:
                return None
            if receive.op == "reduce" and self.locations[chunk].buffer != "input":
                return None
        contiguous = _join_contiguous([self.outputs[chunk] for chunk in chunks])
        return contiguous if contiguous and not self._overlaps_outgoing(contiguous) else None

    def _place_reduction(self, receive: ChunkReceive, received: list[ReceivedMessageSlice]) -> LocalReduction | None:
        """The copy or sum of the slices received for a chunk; None if the chunk is already in its location."""
        local, received_slice = self.locations.get(receive.chunk), received[0].buffer_slice
        if receive.op == "copy":
            local, received = None, received[:1]
        target = local
        if target is None or target.buffer == "input":
            target = self.outputs.get(receive.chunk, received_slice)
        self.locations[receive.chunk] = target
        is_in_place = local is None and target == received_slice
        return None if is_in_place else LocalReduction(target, local, tuple(received), after_sends=False)

    def _merge_reductions(self, reductions: list[LocalReduction]) -> tuple[LocalReduction, ...]:
        reductions.sort(key=lambda reduction: (max(r.receive_index for r in reduction.received), reduction.target))
        items = []
        for target, local, received, _ in reductions:
            slices = [target, *(r.buffer_slice for r in received), *([local] if local else [])]
            items.append((tuple(r.receive_index for r in received), slices))
        merged = []
        for indices, joined in _merge_adjacent(items):
            local_slice = joined[-1] if len(joined) > len(indices) + 1 else None
            parts = tuple(map(ReceivedMessageSlice, indices, joined[1:]))
            merged.append(LocalReduction(joined[0], local_slice, parts, self._overlaps_outgoing(joined[0])))
        return tuple(merged)

    def _overlaps_outgoing(self, span: BufferSlice) -> bool:
        return any(span.buffer == o.buffer and span.start < o.stop and o.start < span.stop for o in self._outgoing)

    def _split_by_chunk(self, span: BufferSlice, chunks: list[int]) -> list[BufferSlice]:
        return _consecutive_slices(span.buffer, span.start, [self.lengths[chunk] for chunk in chunks])

    def _allocate_scratch(self, chunks: list[int]) -> BufferSlice:
        width, start = sum(self.lengths[chunk] for chunk in chunks), 0
        for used in sorted(self._used_scratch):
            if used.start - start >= width:
                break
            start = max(start, used.stop)
        allocated = BufferSlice("scratch", start, start + width)
        self._used_scratch.append(allocated)
        self.scratch_elements = max(self.scratch_elements, allocated.stop)
        return allocated


def _chunks_by_peer(chunk_peers: Iterable[tuple[int, tuple[int, ...]]]) -> Iterable[tuple[int, list[int]]]:
    """The chunks of each message, in an order on which both ends agree."""
    by_peer: dict[int, list[int]] = {}
    for chunk, peers in sorted(chunk_peers):
        for peer in peers:
            by_peer.setdefault(peer, []).append(chunk)
    return by_peer.items()


def _join_contiguous(slices: Sequence[BufferSlice]) -> BufferSlice | None:
    is_contiguous = all((a.buffer, a.stop) == (b.buffer, b.start) for a, b in pairwise(slices))
    return slices[0]._replace(stop=slices[-1].stop) if is_contiguous else None


def _merge_copies(copies: Iterable[LocalCopy]) -> tuple[LocalCopy, ...]:
    return tuple(LocalCopy(*slices) for _, slices in _merge_adjacent((None, copy) for copy in copies))


def _merge_adjacent(items: Iterable[tuple[Key, Sequence[BufferSlice]]]) -> list[tuple[Key, Sequence[BufferSlice]]]:
    """Merge neighbours that have equal keys if every slice continues the slice of the neighbour."""
    merged: list[tuple[Key, Sequence[BufferSlice]]] = []
    for key, slices in items:
        if merged and merged[-1][0] == key and len(merged[-1][1]) == len(slices):
            joined = [span for pair in zip(merged[-1][1], slices, strict=True) if (span := _join_contiguous(pair))]
            if len(joined) == len(slices):
                merged[-1] = key, joined
                continue
        merged.append((key, slices))
    return merged
