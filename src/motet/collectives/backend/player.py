"""Plays a lowered Program: copies chunks into this rank's slots, and joins what others have put into theirs.

A large collective goes in ticks, each of which moves one piece of every chunk, and ticks overlap: in one beat a rank
puts out a piece for the first step and pieces of earlier ticks for the later steps, and says so once. With many ticks
it takes in what others put out a beat ago, so that nobody waits for the slower one of each beat.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet.collectives.arithmetic import Arithmetic
from motet.collectives.backend.arena import BUFFER_BYTES, BUFFERS
from motet.collectives.backend.chunks import Chunks
from motet.collectives.backend.links import Links, bytes_of
from motet.collectives.backend.neighbours import INDEX_BITS, Neighbours
from motet.collectives.backend.parts import Arrival, Lowered, Part

PIECE_BYTES = 512 << 10
MANY_TICKS = 4
"""From so many on the first and last beats, in which only some do something, cost less than waiting."""


@dataclass
class Plan:
    """A collective of one kind, size and dtype, made ready."""

    text: str
    signature: int
    lowered: Lowered
    lengths: tuple[int, ...]
    """Numbers in each chunk."""
    dtype: torch.dtype
    how: Arithmetic | None
    divisor: int
    """What sums are divided by in the end."""
    piece: int = field(init=False)
    """Numbers that a tick moves of each chunk, at most."""
    ticks: int = field(init=False)
    stride: int = field(init=False)
    readers: tuple[int, ...] = field(init=False)
    """Neighbours that read what this rank puts out, and those from which it reads."""
    sources: tuple[int, ...] = field(init=False)
    views: dict[tuple[int, int, int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        slots = max(self.lowered.slots, 1)
        room = min(PIECE_BYTES, BUFFER_BYTES // slots // 64 * 64) // self.dtype.itemsize
        longest = max(self.lengths, default=0)
        self.ticks = max(1, -(-longest // room))
        self.piece = room if self.ticks > 1 else max(longest, 1)
        self.stride = -(-self.piece * self.dtype.itemsize // 64) * 64 // self.dtype.itemsize
        self.readers = tuple({reader for part in self.lowered.parts for reader in part.readers})
        self.sources = tuple({source for part in self.lowered.parts for source in part.sources})


Active = tuple[Part, Chunks, Chunks]
"""A step, with the pieces of the chunks before it and in their place."""


class Player:
    """Carries out plans, one after another, in the order that all ranks share."""

    def __init__(self, neighbours: Neighbours, links: Links | None) -> None:
        self.neighbours = neighbours
        self.links = links
        self._beat = 1  # what counters hold when ranks have met
        self._last_readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * BUFFERS
        self._buffers: dict[torch.dtype, list[list[Tensor]]] = {}
        self._inboxes: dict[int, Tensor] = {}

    def play(self, plan: Plan, before: Chunks, place: Chunks) -> None:
        """Chunks are read where they are `before`, and made in their `place`."""
        neighbours = self.neighbours
        neighbours.begin(plan.signature)
        if self.links is not None:
            self.links.begin(neighbours.number, plan.signature >> INDEX_BITS, plan.text)
        # Sockets send from the buffers themselves, which a lag would need for longer.
        lag = 1 if plan.ticks >= MANY_TICKS and self.links is None else 0
        parts = plan.lowered.parts
        beats = plan.ticks + (len(parts) - 1) * (1 + lag) if parts else 0
        score = _Score(plan, before, place, lag)
        for beat in range(beats + lag if parts else 0):
            if beat < beats:
                self._put_out(plan, self._beat + beat + 1, score.active(beat))
            if beat >= lag:
                self._take_in(plan, self._beat + beat - lag + 1, score.active(beat - lag))
        self._beat += beats
        if self.links is not None:
            self.links.flush()
        neighbours.finish()

    def _put_out(self, plan: Plan, beat: int, active: list[Active]) -> None:
        neighbours, buffer = self.neighbours, beat % BUFFERS
        last, readers = self._last_readers[buffer]
        for reader in readers:
            if neighbours.words[neighbours.done[reader]] < last:
                neighbours.wait(neighbours.done[reader], last, reader)
        self._last_readers[buffer] = (beat, plan.readers)
        if self.links is not None:
            self.links.flush()
        for part, before, place in active:
            for put in part.puts:
                x = _there((before if put.fresh else place)[put.chunk])
                if length := x.shape[0]:
                    self._view(plan, neighbours.me, buffer, put.slot, length).copy_(x)
            for rank, slot, chunk in part.posts:
                assert self.links is not None
                length = _there(before[chunk] if before[chunk] is not None else place[chunk]).shape[0]
                # Even nothing is posted: it says that this rank takes part.
                self.links.post(rank, bytes_of(self._view(plan, neighbours.me, buffer, slot, length)))
        neighbours.publish(neighbours.ready[neighbours.me], beat, plan.readers)

    def _take_in(self, plan: Plan, beat: int, active: list[Active]) -> None:
        neighbours, buffer = self.neighbours, beat % BUFFERS
        for part, before, place in active:
            for source in part.sources:
                neighbours.wait_ready(source, beat)
            for rank, slot, chunk in part.fetches:
                assert self.links is not None
                length = _there(place[chunk]).shape[0]
                self.links.fetch(rank, bytes_of(self._view(plan, ~rank, buffer, slot, length)))
            for arrival in part.arrivals:
                out = _there(place[arrival.chunk])
                if length := out.shape[0]:
                    views = [self._view(plan, source, buffer, slot, length) for source, slot in arrival.sources]
                    if arrival.op == "copy":
                        out.copy_(views[-1])
                    else:
                        self._join(plan, arrival, before, out, views)
        neighbours.publish(neighbours.done[neighbours.me], beat, plan.sources)

    def _join(self, plan: Plan, arrival: Arrival, before: Chunks, out: Tensor, views: list[Tensor]) -> None:
        if arrival.adds_own:
            views.insert(0, _there(before[arrival.chunk]) if arrival.fresh else out)
        assert plan.how is not None
        plan.how.join(out, views[0], views[1:], plan.divisor if arrival.completes else 1)

    def _view(self, plan: Plan, rank: int, buffer: int, slot: int, length: int) -> Tensor:
        """The slot of a rank of this host, or the room for what the slot of a rank elsewhere holds."""
        key = (rank, buffer, slot, length)
        view = plan.views.get(key)
        if view is None:
            where = self._buffer(rank, buffer, plan.dtype)
            start = slot * plan.stride
            view = plan.views[key] = where[start : start + length]
        return view

    def _buffer(self, rank: int, buffer: int, dtype: torch.dtype) -> Tensor:
        if rank < 0:
            if rank not in self._inboxes:
                self._inboxes[rank] = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
            return self._inboxes[rank].view(dtype)
        if dtype not in self._buffers:
            arena = self.neighbours.arena
            self._buffers[dtype] = [
                [arena.buffer(r, b).view(dtype) for b in range(BUFFERS)] for r in range(arena.shape.ranks)
            ]
        return self._buffers[dtype][rank][buffer]


class _Score:
    """Which step of which tick is played in which beat, on which pieces of the chunks."""

    def __init__(self, plan: Plan, before: Chunks, place: Chunks, lag: int) -> None:
        self._plan, self._whole = plan, (before, place)
        self._gap = 1 + lag
        self._pieces: dict[int, tuple[Chunks, Chunks]] = {}

    def active(self, beat: int) -> list[Active]:
        parts, ticks = self._plan.lowered.parts, self._plan.ticks
        if ticks == 1:
            return [(parts[beat // self._gap], *self._whole)]
        found: list[Active] = []
        for number, part in enumerate(parts):
            tick = beat - number * self._gap
            if 0 <= tick < ticks:
                found.append((part, *self._cut(tick)))
        return found

    def _cut(self, tick: int) -> tuple[Chunks, Chunks]:
        pieces = self._pieces.get(tick)
        if pieces is None:
            start = tick * self._plan.piece
            end = start + self._plan.piece
            before, place = self._whole
            first = _piece(before, start, end)
            pieces = self._pieces[tick] = (first, first if place is before else _piece(place, start, end))
            self._pieces.pop(tick - len(self._plan.lowered.parts) * self._gap - self._gap, None)
        return pieces


def _there(chunk: Tensor | None) -> Tensor:
    assert chunk is not None
    return chunk


def _piece(chunks: Chunks, start: int, end: int) -> Chunks:
    return [None if chunk is None else chunk[start:end] for chunk in chunks]
