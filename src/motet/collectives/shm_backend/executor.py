"""Plays a lowered Program: copies chunks into this rank's slots, and joins what others have put into theirs.

A large collective goes in ticks, each of which moves one piece of every chunk, and ticks overlap: in one beat a rank
puts out a piece for the first step and pieces of earlier ticks for the later steps, and says so once. With many ticks
it takes in what others put out a beat ago, so that nobody waits for the slower one of each beat.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet.collectives.execute.reduce_ops import DtypeReduceOp
from motet.collectives.shm_backend.rank_schedule import RankSchedule, RankScheduleStep, ReceivedChunk
from motet.collectives.shm_backend.tensor_views import Chunks
from motet.collectives.shm_backend.transport.local_peers import DESCRIPTION_INDEX_BITS, LocalPeerSync
from motet.collectives.shm_backend.transport.shared_memory import BUFFER_BYTES, BUFFERS_PER_RANK
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, memoryview_of

SEGMENT_BYTES = 512 << 10
# From so many on the first and last beats, in which only some do something, cost less than waiting.
LAG_MIN_SEGMENTS = 4


@dataclass
class PreparedCollective:
    """A collective of one kind, size and dtype, made ready."""

    description: str
    signature: int
    schedule: RankSchedule
    chunk_numels: tuple[int, ...]  # Numbers in each chunk
    dtype: torch.dtype
    reduce_op: DtypeReduceOp | None
    divisor: int  # What sums are divided by in the end
    segment_numel: int = field(init=False)  # Numbers that a tick moves of each chunk, at most
    num_segments: int = field(init=False)
    slot_stride: int = field(init=False)
    # Neighbours that read what this rank puts out, and those from which it reads.
    readers: tuple[int, ...] = field(init=False)
    sources: tuple[int, ...] = field(init=False)
    views: dict[tuple[int, int, int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        slots = max(self.schedule.slots, 1)
        room = min(SEGMENT_BYTES, BUFFER_BYTES // slots // 64 * 64) // self.dtype.itemsize
        longest = max(self.chunk_numels, default=0)
        self.num_segments = max(1, -(-longest // room))
        self.segment_numel = room if self.num_segments > 1 else max(longest, 1)
        self.slot_stride = -(-self.segment_numel * self.dtype.itemsize // 64) * 64 // self.dtype.itemsize
        self.readers = tuple({reader for part in self.schedule.steps for reader in part.readers})
        self.sources = tuple({source for part in self.schedule.steps for source in part.sources})


# A step, with the pieces of the chunks before it and in their place.
ActiveStep = tuple[RankScheduleStep, Chunks, Chunks]


class CollectiveExecutor:
    """Carries out plans, one after another, in the order that all ranks share."""

    def __init__(self, local_peers: LocalPeerSync, sockets: CollectivePeerSockets | None) -> None:
        self.local_peers = local_peers
        self.sockets = sockets
        self._round = 1  # what counters hold when ranks have met
        self._last_readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * BUFFERS_PER_RANK
        self._buffers: dict[torch.dtype, list[list[Tensor]]] = {}
        self._remote_buffers: dict[int, Tensor] = {}

    def execute(self, plan: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        """Chunks are read where they are `before`, and made in their `place`."""
        local_peers = self.local_peers
        local_peers.begin(plan.signature)
        if self.sockets is not None:
            self.sockets.begin(local_peers.collective_id, plan.signature >> DESCRIPTION_INDEX_BITS, plan.description)
        # Sockets send from the buffers themselves, which a lag would need for longer.
        lag = 1 if plan.num_segments >= LAG_MIN_SEGMENTS and self.sockets is None else 0
        steps = plan.schedule.steps
        num_rounds = plan.num_segments + (len(steps) - 1) * (1 + lag) if steps else 0
        pipeline = _ChunkPipelineSchedule(plan, input_chunks, output_chunks, lag)
        for round_id in range(num_rounds + lag if steps else 0):
            if round_id < num_rounds:
                self._publish(plan, self._round + round_id + 1, pipeline.active_steps(round_id))
            if round_id >= lag:
                self._consume(plan, self._round + round_id - lag + 1, pipeline.active_steps(round_id - lag))
        self._round += num_rounds
        if self.sockets is not None:
            self.sockets.flush()
        local_peers.finish()

    def _publish(self, plan: PreparedCollective, round_id: int, active: list[ActiveStep]) -> None:
        local_peers, buffer = self.local_peers, round_id % BUFFERS_PER_RANK
        last, readers = self._last_readers[buffer]
        for reader in readers:
            if local_peers.words[local_peers.consumed_index[reader]] < last:
                local_peers.wait_counter(local_peers.consumed_index[reader], last, reader)
        self._last_readers[buffer] = (round_id, plan.readers)
        if self.sockets is not None:
            self.sockets.flush()
        for step, input_chunks, output_chunks in active:
            for published in step.published:
                x = _require_chunk((input_chunks if published.is_initial_value else output_chunks)[published.chunk])
                if length := x.shape[0]:
                    self._view(plan, local_peers.local_rank, buffer, published.slot, length).copy_(x)
            for rank, slot, chunk in step.socket_sends:
                assert self.sockets is not None
                length = _require_chunk(
                    input_chunks[chunk] if input_chunks[chunk] is not None else output_chunks[chunk]
                ).shape[0]
                # Even nothing is posted: it says that this rank takes part.
                self.sockets.enqueue_send(
                    rank, memoryview_of(self._view(plan, local_peers.local_rank, buffer, slot, length))
                )
        local_peers.publish(local_peers.published_index[local_peers.local_rank], round_id, plan.readers)

    def _consume(self, plan: PreparedCollective, round_id: int, active: list[ActiveStep]) -> None:
        local_peers, buffer = self.local_peers, round_id % BUFFERS_PER_RANK
        for step, input_chunks, output_chunks in active:
            for source in step.sources:
                local_peers.wait_published(source, round_id)
            for rank, slot, chunk in step.socket_receives:
                assert self.sockets is not None
                length = _require_chunk(output_chunks[chunk]).shape[0]
                self.sockets.receive_into(rank, memoryview_of(self._view(plan, ~rank, buffer, slot, length)))
            for received in step.received:
                output = _require_chunk(output_chunks[received.chunk])
                if length := output.shape[0]:
                    views = [self._view(plan, source, buffer, slot, length) for source, slot in received.sources]
                    if received.op == "copy":
                        output.copy_(views[-1])
                    else:
                        self._reduce(plan, received, input_chunks, output, views)
        local_peers.publish(local_peers.consumed_index[local_peers.local_rank], round_id, plan.sources)

    def _reduce(
        self,
        plan: PreparedCollective,
        received: ReceivedChunk,
        input_chunks: Chunks,
        output: Tensor,
        views: list[Tensor],
    ) -> None:
        if received.adds_local_value:
            views.insert(0, _require_chunk(input_chunks[received.chunk]) if received.is_initial_value else output)
        assert plan.reduce_op is not None
        plan.reduce_op.accumulate(output, views[0], views[1:], plan.divisor if received.is_last_contribution else 1)

    def _view(self, plan: PreparedCollective, rank: int, buffer: int, slot: int, length: int) -> Tensor:
        """The slot of a rank of this host, or the room for what the slot of a rank elsewhere holds."""
        key = (rank, buffer, slot, length)
        view = plan.views.get(key)
        if view is None:
            where = self._buffer(rank, buffer, plan.dtype)
            start = slot * plan.slot_stride
            view = plan.views[key] = where[start : start + length]
        return view

    def _buffer(self, rank: int, buffer: int, dtype: torch.dtype) -> Tensor:
        if rank < 0:
            if rank not in self._remote_buffers:
                self._remote_buffers[rank] = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
            return self._remote_buffers[rank].view(dtype)
        if dtype not in self._buffers:
            arena = self.local_peers.shared_memory
            self._buffers[dtype] = [
                [arena.buffer(r, b).view(dtype) for b in range(BUFFERS_PER_RANK)] for r in range(arena.layout.ranks)
            ]
        return self._buffers[dtype][rank][buffer]


class _ChunkPipelineSchedule:
    """Which step of which tick is played in which beat, on which pieces of the chunks."""

    def __init__(self, plan: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks, lag: int) -> None:
        self._plan, self._full_chunks = plan, (input_chunks, output_chunks)
        self._gap = 1 + lag
        self._segments: dict[int, tuple[Chunks, Chunks]] = {}

    def active_steps(self, round_id: int) -> list[ActiveStep]:
        steps, num_segments = self._plan.schedule.steps, self._plan.num_segments
        if num_segments == 1:
            return [(steps[round_id // self._gap], *self._full_chunks)]
        active: list[ActiveStep] = []
        for step_id, step in enumerate(steps):
            segment = round_id - step_id * self._gap
            if 0 <= segment < num_segments:
                active.append((step, *self._segment_chunks(segment)))
        return active

    def _segment_chunks(self, segment: int) -> tuple[Chunks, Chunks]:
        chunks = self._segments.get(segment)
        if chunks is None:
            start = segment * self._plan.segment_numel
            end = start + self._plan.segment_numel
            input_chunks, output_chunks = self._full_chunks
            input_segments = _slice_chunks(input_chunks, start, end)
            chunks = self._segments[segment] = (
                input_segments,
                input_segments if output_chunks is input_chunks else _slice_chunks(output_chunks, start, end),
            )
            self._segments.pop(segment - len(self._plan.schedule.steps) * self._gap - self._gap, None)
        return chunks


def _require_chunk(chunk: Tensor | None) -> Tensor:
    assert chunk is not None
    return chunk


def _slice_chunks(chunks: Chunks, start: int, end: int) -> Chunks:
    return [None if chunk is None else chunk[start:end] for chunk in chunks]
