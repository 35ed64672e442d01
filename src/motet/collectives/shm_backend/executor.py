"""The execution of a SlotPlan: each rank copies chunks into its slots and reads the slots of its peers.

A large collective goes in segments, a part of every chunk each. In one round a rank publishes a segment for the first
step and earlier segments for later steps. With many segments it reads the slots of the round before, to wait less.
"""

import hashlib
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute.reduce_ops import DtypeReduceOp, make_reduce_op
from motet.collectives.shm_backend.slot_plan import (
    ONE_STEP_ALL_REDUCE_MAX_BYTES,
    HostOfRank,
    SlotPlan,
    SlotStep,
    slot_plan_for,
)
from motet.collectives.shm_backend.tensor_views import Chunks, describe_tensor
from motet.collectives.shm_backend.transport.local_peers import DESCRIPTION_INDEX_BITS, LocalPeerSync
from motet.collectives.shm_backend.transport.shared_memory import BUFFER_BYTES, BUFFERS_PER_RANK, DESCRIPTION_SLOTS
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, memoryview_of
from motet.core.dtypes import dtype_name
from motet.core.errors import check_input

SEGMENT_BYTES = 512 << 10
# From here on, the first and last rounds, in which only some steps are active, cost less than waiting.
LAG_MIN_SEGMENTS = 4

_CHUNK_ALIGNMENT = 16  # Elements
_ROOT_PREPOSITIONS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


@dataclass
class PreparedCollective:
    """A collective of one kind, size and dtype with everything that each call needs."""

    description: str
    signature: int
    plan: SlotPlan
    chunk_numels: tuple[int, ...]
    dtype: torch.dtype
    reduce_op: DtypeReduceOp | None
    divisor: int  # The divisor of complete sums
    segment_numel: int = field(init=False)  # The most elements of a chunk in one segment
    num_segments: int = field(init=False)
    slot_stride: int = field(init=False)
    readers: tuple[int, ...] = field(init=False)  # Local ranks that read the slots of this rank
    sources: tuple[int, ...] = field(init=False)  # Local ranks whose slots this rank reads
    views: dict[tuple[int, int, int, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        slots, itemsize = max(self.plan.slots, 1), self.dtype.itemsize
        max_numel = min(SEGMENT_BYTES, BUFFER_BYTES // slots // 64 * 64) // itemsize
        longest = max(self.chunk_numels, default=0)
        self.num_segments = max(1, -(-longest // max_numel))
        self.segment_numel = max_numel if self.num_segments > 1 else max(longest, 1)
        self.slot_stride = -(-self.segment_numel * itemsize // 64) * 64 // itemsize
        self.readers = tuple({reader for step in self.plan.steps for reader in step.readers})
        self.sources = tuple({source for step in self.plan.steps for source in step.sources})


class PreparedCollectiveCache:
    """At most as many prepared collectives as a rank keeps descriptions; the oldest is dropped."""

    def __init__(self, local_peers: LocalPeerSync, hosts: HostOfRank, rank: int) -> None:
        self._local_peers, self._hosts, self._rank, self._ranks = local_peers, hosts, rank, len(hosts)
        self._prepared: dict[Any, PreparedCollective] = {}
        self._made_count = 0
        self._lock = threading.Lock()

    def get_or_prepare(
        self, kind: str, tensor: Tensor, *, reduction: str = "", root: int = 0, lengths: tuple[int, ...] | None = None
    ) -> PreparedCollective:
        """`lengths` gives the elements of each chunk where these differ."""
        key = (kind, tensor.dtype, tensor.shape if lengths is None else lengths, reduction, root)
        if (cached := self._prepared.get(key)) is not None:
            return cached
        check_input(
            tensor.device.type == "cpu" and tensor.layout == torch.strided,
            f"{kind} of a {tensor.layout} tensor on {tensor.device}: the backend motet moves dense tensors on the "
            "CPU; for others start the group with cpu:gloo or cuda:nccl",
        )
        reduce_op = make_reduce_op(reduction, tensor.dtype, tensor.device) if reduction else None
        plan = slot_plan_for(
            kind, self._rank, self._hosts, is_small=tensor.nbytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES, root=root
        )
        description = f"all-to-all of {dtype_name(tensor.dtype)} with split sizes"
        if lengths is None:
            lengths = self._chunk_numels(kind, tensor.numel(), plan.chunks)
            description = _describe_collective(kind, reduction, tensor, root=root)
        digest_size = 8 - DESCRIPTION_INDEX_BITS // 8
        digest = hashlib.blake2b(f"{description}{lengths}".encode(), digest_size=digest_size).digest()
        with self._lock:
            index = self._made_count % (DESCRIPTION_SLOTS - 1)
            self._made_count += 1
            self._local_peers.shared_memory.write_description(self._local_peers.local_rank, index, description)
        signature = int.from_bytes(digest, "little") << DESCRIPTION_INDEX_BITS | index
        if reduce_op is not None and reduce_op.needs_wide_accumulation and plan.needs_wider_dtype:
            reduce_op = replace(reduce_op, dtype=torch.float32)
        prepared = PreparedCollective(
            description,
            signature,
            plan,
            lengths,
            tensor.dtype if reduce_op is None else reduce_op.dtype,
            reduce_op,
            divisor=self._ranks if reduction == "avg" else 1,
        )
        with self._lock:
            self._prepared[key] = prepared
            if len(self._prepared) > DESCRIPTION_SLOTS - 1:
                del self._prepared[next(iter(self._prepared))]
        return prepared

    def _chunk_numels(self, kind: str, numel: int, chunks: int) -> tuple[int, ...]:
        if kind == "all-to-all":
            return (numel // self._ranks,) * chunks
        if kind not in ("all-reduce", "reduce", "broadcast") or chunks == 1:
            return (numel,) * chunks
        chunk_numel = -(-numel // chunks // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        return tuple(max(0, min(chunk_numel, numel - i * chunk_numel)) for i in range(chunks))


def _describe_collective(kind: str, reduction: str, tensor: Tensor, *, root: int) -> str:
    where = f" {_ROOT_PREPOSITIONS[kind]} rank {root}" if kind in _ROOT_PREPOSITIONS else ""
    text = f"{kind}{f' ({reduction})' if reduction else ''} of {describe_tensor(tensor)}{where}"
    return kind if kind == "barrier" else text


# A step, with the input and output chunks of one segment.
ActiveStep = tuple[SlotStep, Chunks, Chunks]


class CollectiveExecutor:
    """Executes collectives one after another, in the order that all ranks share."""

    def __init__(self, local_peers: LocalPeerSync, sockets: CollectivePeerSockets | None) -> None:
        self.local_peers, self.sockets = local_peers, sockets
        self._round = 1  # The value of all counters after the rendezvous
        self._last_readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * BUFFERS_PER_RANK
        self._buffers: dict[torch.dtype, list[list[Tensor]]] = {}
        self._remote_buffers: dict[int, Tensor] = {}

    def execute(self, prepared: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        local_peers, steps = self.local_peers, prepared.plan.steps
        local_peers.begin(prepared.signature)
        if self.sockets is not None:
            self.sockets.begin(
                local_peers.collective_id, prepared.signature >> DESCRIPTION_INDEX_BITS, prepared.description
            )
        # Sockets send from the buffers themselves, which a lag would need for longer.
        lag = 1 if prepared.num_segments >= LAG_MIN_SEGMENTS and self.sockets is None else 0
        num_rounds = prepared.num_segments + (len(steps) - 1) * (1 + lag) if steps else 0
        pipeline = _ChunkPipelineSchedule(prepared, input_chunks, output_chunks, lag=lag)
        for round_id in range(num_rounds + lag if steps else 0):
            if round_id < num_rounds:
                self._publish(prepared, self._round + round_id + 1, pipeline.active_steps(round_id))
            if round_id >= lag:
                self._consume(prepared, self._round + round_id - lag + 1, pipeline.active_steps(round_id - lag))
        self._round += num_rounds
        if self.sockets is not None:
            self.sockets.flush()
        local_peers.finish()

    def _publish(self, prepared: PreparedCollective, round_id: int, active: list[ActiveStep]) -> None:
        local_peers, buffer, rank = self.local_peers, round_id % BUFFERS_PER_RANK, self.local_peers.local_rank
        last, readers = self._last_readers[buffer]
        for reader in readers:
            if local_peers.words[local_peers.consumed_index[reader]] < last:
                local_peers.wait_counter(local_peers.consumed_index[reader], last, reader)
        self._last_readers[buffer] = (round_id, prepared.readers)
        if self.sockets is not None:
            self.sockets.flush()
        for step, input_chunks, output_chunks in active:
            for chunk, slot, is_initial_value in step.published:
                source = (input_chunks if is_initial_value else output_chunks)[chunk]
                if length := source.shape[0]:
                    self._view(prepared, (rank, buffer, slot, length)).copy_(source)
            for peer, slot, chunk in step.socket_sends:
                assert self.sockets is not None
                sent = input_chunks[chunk] if input_chunks[chunk] is not None else output_chunks[chunk]
                view = self._view(prepared, (rank, buffer, slot, sent.shape[0]))
                # An empty message is sent too: it says that this rank takes part.
                self.sockets.enqueue_send(peer, memoryview_of(view))
        local_peers.publish(local_peers.published_index[rank], round_id, prepared.readers)

    def _consume(self, prepared: PreparedCollective, round_id: int, active: list[ActiveStep]) -> None:
        local_peers, buffer = self.local_peers, round_id % BUFFERS_PER_RANK
        for step, input_chunks, output_chunks in active:
            for source in step.sources:
                local_peers.wait_published(source, round_id)
            for peer, slot, chunk in step.socket_receives:
                assert self.sockets is not None
                length = output_chunks[chunk].shape[0]
                self.sockets.receive_into(peer, memoryview_of(self._view(prepared, (~peer, buffer, slot, length))))
            for received in step.received:
                output = output_chunks[received.chunk]
                if length := output.shape[0]:
                    views = [self._view(prepared, (source, buffer, slot, length)) for source, slot in received.sources]
                    if received.op == "copy":
                        output.copy_(views[-1])
                        continue
                    if received.adds_local_value:
                        views.insert(0, input_chunks[received.chunk] if received.is_initial_value else output)
                    divisor = prepared.divisor if received.is_last_contribution else 1
                    assert prepared.reduce_op is not None
                    prepared.reduce_op.accumulate(output, views[0], views[1:], divisor=divisor)
        local_peers.publish(local_peers.consumed_index[local_peers.local_rank], round_id, prepared.sources)

    def _view(self, prepared: PreparedCollective, key: tuple[int, int, int, int]) -> Tensor:
        """A slot by (rank, buffer, slot, length); the rank is local, or ~rank for a rank of another host."""
        view = prepared.views.get(key)
        if view is None:
            rank, buffer, slot, length = key
            start = slot * prepared.slot_stride
            view = prepared.views[key] = self._buffer(rank, buffer, prepared.dtype)[start : start + length]
        return view

    def _buffer(self, rank: int, buffer: int, dtype: torch.dtype) -> Tensor:
        if rank < 0:
            if rank not in self._remote_buffers:
                self._remote_buffers[rank] = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
            return self._remote_buffers[rank].view(dtype)
        if dtype not in self._buffers:
            memory = self.local_peers.shared_memory
            self._buffers[dtype] = [
                [memory.buffer(r, b).view(dtype) for b in range(BUFFERS_PER_RANK)] for r in range(memory.layout.ranks)
            ]
        return self._buffers[dtype][rank][buffer]


class _ChunkPipelineSchedule:
    """The steps that are active in each round, with the segment of the chunks that each works on."""

    def __init__(self, prepared: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks, *, lag: int) -> None:
        self._prepared, self._gap = prepared, 1 + lag
        self._sides = (input_chunks,) if output_chunks is input_chunks else (input_chunks, output_chunks)
        self._segments: dict[int, tuple[Chunks, Chunks]] = {}

    def active_steps(self, round_id: int) -> list[ActiveStep]:
        steps, num_segments = self._prepared.plan.steps, self._prepared.num_segments
        if num_segments == 1:
            return [(steps[round_id // self._gap], self._sides[0], self._sides[-1])]
        segments = [(step, round_id - step_id * self._gap) for step_id, step in enumerate(steps)]
        return [(step, *self._segment_chunks(segment)) for step, segment in segments if 0 <= segment < num_segments]

    def _segment_chunks(self, segment: int) -> tuple[Chunks, Chunks]:
        chunks = self._segments.get(segment)
        if chunks is None:
            start, numel = segment * self._prepared.segment_numel, self._prepared.segment_numel
            sides = [[c if c is None else c[start : start + numel] for c in side] for side in self._sides]
            chunks = self._segments[segment] = (sides[0], sides[-1])
            self._segments.pop(segment - (len(self._prepared.plan.steps) + 1) * self._gap, None)
        return chunks
