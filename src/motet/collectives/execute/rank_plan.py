"""A Program as one rank plays it on tensors: what it sends and receives in each step, from where to where, and how much
scratch that takes.

There are three buffers. The `input` holds the rank's first chunks, one after another, and is never written; the
`output` holds those that it must have at the end; what is underway lives in `scratch`. What arrives lands where it
belongs, if nothing is in its way there. A chunk of a sum that is still in the input is added to what arrived, so that
even a sum on its way to another rank takes no room but its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeVar

from motet.collectives.program import ChunkTransfer, Program, Step, TransferOp, group_by_pair
from motet.core.errors import InputError

T = TypeVar("T")
Buffer = Literal["input", "output", "scratch"]


class BufferSlice(NamedTuple):
    """Some elements of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class PlannedPeerMessage(NamedTuple):
    """What goes to, or comes from, another rank at once."""

    peer: int
    buffer_slice: BufferSlice


class ReceivedSlice(NamedTuple):
    """Some elements of what was received."""

    receive_index: int  # Its number among the step's receives
    buffer_slice: BufferSlice


class LocalCopy(NamedTuple):
    """A copy within the rank."""

    target: BufferSlice
    source: BufferSlice


class LocalReduction(NamedTuple):
    """`target` becomes `own` with all that has arrived added in this order; without `own` it becomes what arrived."""

    target: BufferSlice
    local: BufferSlice | None
    received: tuple[ReceivedSlice, ...]
    after_sends: bool  # The target is being sent in this step


class ContributorCount(NamedTuple):
    """How many ranks' contributions are in a part of the output at the end."""

    buffer_slice: BufferSlice
    ranks: int


@dataclass(frozen=True)
class RankCollectiveStep:
    """What one rank does in one step, in this order."""

    packs: tuple[LocalCopy, ...]  # Bring together what is one message and does not lie together
    receives: tuple[PlannedPeerMessage, ...]
    sends: tuple[PlannedPeerMessage, ...]
    reductions: tuple[LocalReduction, ...]


@dataclass(frozen=True)
class RankCollectivePlan:
    """The part that one rank plays in a Program."""

    steps: tuple[RankCollectiveStep, ...]  # One for each step of the Program, also where there is nothing to do
    scratch_elements: int  # Elements
    final_copies: tuple[LocalCopy, ...]  # At the end: what the rank had from the start and nobody has written
    contributor_counts: tuple[ContributorCount, ...]  # For averages

    @cached_property
    def elements_sent(self) -> int:
        """Elements that go to other ranks."""
        return sum(message.buffer_slice.elements for act in self.steps for message in act.sends)

    @cached_property
    def message_count(self) -> int:
        """How many messages go to other ranks. An empty one is not sent."""
        return sum(len(act.sends) for act in self.steps)


def chunk_lengths(program: Program, elements: int) -> tuple[int, ...]:
    """How many elements each chunk has, of so many in all chunks: in proportion to the sizes, as even as possible."""
    before = list(accumulate(program.sizes, initial=0))
    boundaries = [elements * weight // before[-1] if before[-1] else 0 for weight in before]
    return tuple(stop - start for start, stop in pairwise(boundaries))


def elements_sent(program: Program, rank: int, elements: int) -> int:
    """What a rank sends in all when the chunks together have so many elements."""
    before = [0, *accumulate(chunk_lengths(program, elements))]
    return sum(before[t.last + 1] - before[t.first] for step in program.steps for t in step if t.src == rank)


def total_elements(program: Program, rank: int, input_numel: int, output_numel: int) -> int | None:
    """How many elements all chunks have, when this rank has `held` at the start and room for `kept` at the end.

    A rank that has nothing but passes on what others have takes the sizes for numbers of elements. None where a rank
    has no part at all.
    """
    total = sum(program.sizes)
    ends = (("input", program.initial[rank], input_numel), ("output", program.final[rank], output_numel))
    relative_size, numel = max((sum(program.sizes[chunk] for chunk in chunks), numel) for _, chunks, numel in ends)
    total_numel, remainder = divmod(numel * total, relative_size) if relative_size else (total, 0)
    if remainder:
        raise InputError(
            f"{program}: {numel} elements on rank {rank} cannot be {relative_size} of {total} equal parts; "
            f"give it a multiple of {relative_size}"
        )
    lengths = chunk_lengths(program, total_numel)
    for name, chunks, numel in ends:
        expected = sum(lengths[chunk] for chunk in chunks)
        if numel != expected:
            raise InputError(f"{program}: the {name} of rank {rank} has {numel} elements; it must have {expected}")
    if not relative_size and not any(rank in (t.src, t.dst) for step in program.steps for t in step):
        return None
    return total_numel


def make_rank_plan(program: Program, rank: int, elements: int, in_place: bool) -> RankCollectivePlan:
    """The part of a rank; `elements` are those of all chunks together.

    With `in_place` a chunk that the rank both starts and ends with lies in the output from the start, and is written.
    """
    return _make_rank_plan(CollectiveProgramKey(program), rank, elements, in_place)


class CollectiveProgramKey:
    """A Program as a key: compared by being the same one, which is quick and keeps it alive."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveProgramKey) and other.program is self.program


@lru_cache(maxsize=1024)
def _make_rank_plan(key: CollectiveProgramKey, rank: int, elements: int, in_place: bool) -> RankCollectivePlan:
    program = key.program
    lengths = chunk_lengths(program, elements)
    initial_slices = assign_offsets("input", program.initial[rank], lengths)
    output_slices = assign_offsets("output", program.final[rank], lengths)
    if in_place:
        initial_slices |= {chunk: output_slices[chunk] for chunk in initial_slices if chunk in output_slices}
    planner = _RankCollectivePlanner(rank, lengths, output_slices, initial_slices)
    steps = tuple(
        planner.plan_step(step, after)
        for step, after in zip(program.steps, _chunks_needed_after_steps(program, rank), strict=True)
    )
    filled = {chunk: home for chunk, home in output_slices.items() if home.elements}
    final_copies = [
        LocalCopy(home, planner.locations[chunk]) for chunk, home in filled.items() if planner.locations[chunk] != home
    ]
    counts = [ContributorCount(home, len(program.final[rank][chunk])) for chunk, home in filled.items()]
    return RankCollectivePlan(
        steps,
        planner.scratch_elements,
        _merge_adjacent(final_copies, _merge_copies),
        _merge_adjacent(counts, _merge_counts),
    )


def assign_offsets(buffer: Buffer, chunks: Iterable[int], lengths: Sequence[int]) -> dict[int, BufferSlice]:
    """One chunk after another."""
    slices, offset = {}, 0
    for chunk in sorted(chunks):
        slices[chunk] = BufferSlice(buffer, offset, offset + lengths[chunk])
        offset += lengths[chunk]
    return slices


def _chunks_needed_after_steps(program: Program, rank: int) -> list[set[int]]:
    """After each step, the chunks of this rank that are still read, added to, or belong to the end."""
    needed = set(program.final[rank])
    needed_after: list[set[int]] = []
    for step in reversed(program.steps):
        needed_after.append(set(needed))
        for t in step:
            if t.dst == rank and t.op == "copy":
                needed.difference_update(t.chunks)
        for t in step:
            if t.src == rank or (t.dst == rank and t.op == "reduce"):
                needed.update(t.chunks)
    return needed_after[::-1]


class _RankCollectivePlanner:
    """Where the chunks of a rank are while its part is written, step by step."""

    def __init__(
        self,
        rank: int,
        lengths: Sequence[int],
        output_slices: dict[int, BufferSlice],
        locations: dict[int, BufferSlice],
    ) -> None:
        self.rank = rank
        self.lengths = lengths
        self.output_slices = output_slices
        self.locations = locations
        self.scratch_elements = 0
        self._used_scratch: list[BufferSlice] = []
        self._outgoing: list[BufferSlice] = []

    def plan_step(self, step: Step, needed_after: set[int]) -> RankCollectiveStep:
        pair_chunks = {
            pair: [chunk for t in transfers for chunk in t.chunks if self.lengths[chunk]]
            for pair, transfers in group_by_pair(step).items()
            if self.rank in pair
        }
        packs: list[LocalCopy] = []
        self._outgoing = []
        sends = [
            PlannedPeerMessage(dst, self._pack_if_scattered(chunks, packs))
            for (src, dst), chunks in pair_chunks.items()
            if src == self.rank and chunks
        ]
        incoming = self._incoming_by_chunk(step)
        receives: list[PlannedPeerMessage] = []
        received: dict[tuple[int, int], ReceivedSlice] = {}
        for (src, dst), chunks in pair_chunks.items():
            if dst == self.rank and chunks:
                span = self._direct_output_slice(src, chunks, incoming) or self._allocate_scratch(chunks)
                for chunk, chunk_slice in zip(chunks, self._split_by_chunk(span, chunks), strict=True):
                    received[src, chunk] = ReceivedSlice(len(receives), chunk_slice)
                receives.append(PlannedPeerMessage(src, span))
        reductions = [
            update
            for chunk, transfers in incoming.items()
            if (
                update := self._plan_reduction(chunk, transfers[0].op, tuple(received[t.src, chunk] for t in transfers))
            )
        ]
        live_slices = (
            self.locations[chunk] for chunk in needed_after if self.lengths[chunk] and chunk in self.locations
        )
        self._used_scratch = [span for span in live_slices if span.buffer == "scratch"]
        reductions.sort(key=lambda update: (max(arrival.receive_index for arrival in update.received), update.target))
        return RankCollectiveStep(
            _merge_adjacent(packs, _merge_copies),
            tuple(receives),
            tuple(sends),
            _merge_adjacent(reductions, _merge_reductions),
        )

    def _pack_if_scattered(self, chunks: list[int], packs: list[LocalCopy]) -> BufferSlice:
        """Where these chunks lie one after another; they are brought together if they do not."""
        spans = [self.locations[chunk] for chunk in chunks]
        if contiguous := _join_contiguous(spans):
            self._outgoing.append(contiguous)
            return contiguous
        scratch_slice = self._allocate_scratch(chunks)
        packs += [
            LocalCopy(target, span)
            for target, span in zip(self._split_by_chunk(scratch_slice, chunks), spans, strict=True)
        ]
        return scratch_slice

    def _incoming_by_chunk(self, step: Step) -> dict[int, list[ChunkTransfer]]:
        """What arrives for each chunk, in the order of the list."""
        by_chunk: dict[int, list[ChunkTransfer]] = {}
        for t in step:
            if t.dst == self.rank:
                for chunk in t.chunks:
                    if self.lengths[chunk]:
                        by_chunk.setdefault(chunk, []).append(t)
        return by_chunk

    def _direct_output_slice(
        self, src: int, chunks: list[int], incoming: dict[int, list[ChunkTransfer]]
    ) -> BufferSlice | None:
        """Where in the output a whole message belongs, if nothing is lost there."""
        for chunk in chunks:
            first = incoming[chunk][0]
            if chunk not in self.output_slices or first.src != src:
                return None
            if first.op == "reduce" and self.locations[chunk].buffer != "input":
                return None
        contiguous = _join_contiguous([self.output_slices[chunk] for chunk in chunks])
        return contiguous if contiguous and not self._overlaps_outgoing(contiguous) else None

    def _plan_reduction(self, chunk: int, op: TransferOp, received: tuple[ReceivedSlice, ...]) -> LocalReduction | None:
        """What to do with what has arrived for a chunk; nothing if it is where it belongs."""
        local, received_slice = self.locations.get(chunk), received[0].buffer_slice
        if op == "copy":
            local, received = None, received[:1]
        target = self.output_slices.get(chunk, received_slice) if local is None or local.buffer == "input" else local
        self.locations[chunk] = target
        if local is None and target == received_slice:
            return None
        return LocalReduction(target, local, received, self._overlaps_outgoing(target))

    def _overlaps_outgoing(self, span: BufferSlice) -> bool:
        """Whether some of it goes out in this step."""
        return any(
            span.buffer == other.buffer and span.start < other.stop and other.start < span.stop
            for other in self._outgoing
        )

    def _split_by_chunk(self, span: BufferSlice, chunks: list[int]) -> list[BufferSlice]:
        boundaries = accumulate((self.lengths[chunk] for chunk in chunks), initial=span.start)
        return [BufferSlice(span.buffer, start, stop) for start, stop in pairwise(boundaries)]

    def _allocate_scratch(self, chunks: list[int]) -> BufferSlice:
        """The first gap in the scratch that is wide enough."""
        width, start = sum(self.lengths[chunk] for chunk in chunks), 0
        for used in sorted(self._used_scratch):
            if used.start - start >= width:
                break
            start = max(start, used.stop)
        span = BufferSlice("scratch", start, start + width)
        self._used_scratch.append(span)
        self.scratch_elements = max(self.scratch_elements, span.stop)
        return span


def _join_contiguous(spans: Sequence[BufferSlice]) -> BufferSlice | None:
    """The one that they are together, if each follows the one before."""
    joined = spans[0]
    for span in spans[1:]:
        if (span.buffer, span.start) != (joined.buffer, joined.stop):
            return None
        joined = joined._replace(stop=span.stop)
    return joined


def _merge_adjacent(items: Iterable[T], join: Callable[[T, T], T | None]) -> tuple[T, ...]:
    """With neighbours as one, where they can be."""
    merged: list[T] = []
    for item in items:
        joined = join(merged[-1], item) if merged else None
        if joined is None:
            merged.append(item)
        else:
            merged[-1] = joined
    return tuple(merged)


def _merge_copies(a: LocalCopy, b: LocalCopy) -> LocalCopy | None:
    target, source = _join_contiguous([a.target, b.target]), _join_contiguous([a.source, b.source])
    return LocalCopy(target, source) if target and source else None


def _merge_counts(a: ContributorCount, b: ContributorCount) -> ContributorCount | None:
    span = _join_contiguous([a.buffer_slice, b.buffer_slice])
    return ContributorCount(span, a.ranks) if span and a.ranks == b.ranks else None


def _merge_reductions(a: LocalReduction, b: LocalReduction) -> LocalReduction | None:
    target = _join_contiguous([a.target, b.target])
    local = _join_contiguous([a.local, b.local]) if a.local and b.local else None
    if target is None or (local is None) != (a.local is None and b.local is None) or len(a.received) != len(b.received):
        return None
    received: list[ReceivedSlice] = []
    for first, second in zip(a.received, b.received, strict=True):
        span = _join_contiguous([first.buffer_slice, second.buffer_slice])
        if first.receive_index != second.receive_index or span is None:
            return None
        received.append(ReceivedSlice(first.receive_index, span))
    return LocalReduction(target, local, tuple(received), a.after_sends or b.after_sends)
