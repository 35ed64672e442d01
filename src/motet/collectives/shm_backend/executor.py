"""The execution of a SlotPlan: each rank copies chunks into its slots and reads the slots of its peers.

A large collective goes in segments, a part of every chunk each. In one round a rank publishes a segment for the first
step and earlier segments for later steps. With many segments it reads the slots of the round before, to wait less.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute import slot_plan
from motet.collectives.execute.reduce_ops import DtypeReduceOp, make_reduce_op
from motet.collectives.shm_backend.tensor_views import Chunks, describe_tensor
from motet.collectives.shm_backend.transport.local_peers import DESCRIPTION_INDEX_BITS, LocalPeerSync
from motet.collectives.shm_backend.transport.shared_memory import BUFFER_BYTES, BUFFERS_PER_RANK, DESCRIPTION_SLOTS
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, memoryview_of
from motet.core.errors import check_input
from motet.core.units import dtype_name

SEGMENT_BYTES = 512 << 10
# From here on, the first and last rounds, in which only some steps are active, cost less than waiting.
LAG_MIN_SEGMENTS = 4

_ROOT_PREPOSITIONS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


@dataclass
class PreparedCollective:
    """A collective of one kind, size and dtype with everything that each call needs."""

    description: str
    event: str  # Name in the profiler
    signature: int
    plan: slot_plan.SlotPlan
    chunk_numels: tuple[int, ...]
    dtype: torch.dtype
    reduce_op: DtypeReduceOp | None
    divisor: int  # The divisor of complete sums

    def __post_init__(self) -> None:
        itemsize, longest = self.dtype.itemsize, max(self.chunk_numels, default=0)
        max_numel = min(SEGMENT_BYTES, BUFFER_BYTES // max(self.plan.slots, 1) // 64 * 64) // itemsize
        self.sent_bytes = itemsize * self.plan.sent_numel(self.chunk_numels)
        self.num_segments = max(1, -(-longest // max_numel))
        self.segment_numel = max_numel if self.num_segments > 1 else max(longest, 1)  # Most elements of each chunk
        self.slot_stride = -(-self.segment_numel * itemsize // 64) * 64 // itemsize
        # Local ranks that read the slots of this rank, and local ranks whose slots this rank reads.
        self.readers = tuple({reader for step in self.plan.steps for reader in step.readers})
        self.sources = tuple({source for step in self.plan.steps for source in step.sources})
        self.views: dict[tuple[int, int, int, int], Tensor] = {}


class PreparedCollectiveCache:
    """At most as many prepared collectives as a rank keeps descriptions; the oldest is dropped."""

    def __init__(self, local_peers: LocalPeerSync, hosts: slot_plan.HostOfRank, rank: int) -> None:
        self._local_peers, self._hosts, self._rank = local_peers, hosts, rank
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
        numel = tensor.numel() if lengths is None else max(lengths)  # The same on all ranks
        is_small = tensor.itemsize * numel <= slot_plan.ONE_STEP_ALL_REDUCE_MAX_BYTES
        plan = slot_plan.slot_plan_for(kind, self._rank, self._hosts, is_small=is_small, root=root)
        action = f"{kind} ({reduction})" if reduction else kind
        description = f"{action} of {dtype_name(tensor.dtype)} with split sizes"
        if lengths is None:
            lengths = slot_plan.chunk_numels(kind, tensor.numel(), plan.chunks, ranks=len(self._hosts))
            where = f" {_ROOT_PREPOSITIONS[kind]} rank {root}" if kind in _ROOT_PREPOSITIONS else ""
            description = kind if kind == "barrier" else f"{action} of {describe_tensor(tensor)}{where}"
        digest_size = 8 - DESCRIPTION_INDEX_BITS // 8
        digest = hashlib.blake2b(f"{description}{lengths}".encode(), digest_size=digest_size).digest()
        if reduce_op is not None and reduce_op.needs_wide_accumulation and plan.needs_wider_dtype:
            reduce_op = replace(reduce_op, dtype=torch.float32)
        dtype, divisor = reduce_op.dtype if reduce_op else tensor.dtype, len(self._hosts) if reduction == "avg" else 1
        with self._lock:
            index = self._made_count % (DESCRIPTION_SLOTS - 1)
            self._made_count += 1
            self._local_peers.shared_memory.write_description(self._local_peers.local_rank, index, description)
            signature = int.from_bytes(digest, "little") << DESCRIPTION_INDEX_BITS | index
            event = f"motet:{kind.replace('-', '_')}"
            prepared = PreparedCollective(description, event, signature, plan, lengths, dtype, reduce_op, divisor)
            self._prepared[key] = prepared
            if len(self._prepared) > DESCRIPTION_SLOTS - 1:
                del self._prepared[next(iter(self._prepared))]
        return prepared


# A step, with the input and output chunks of one segment.
ActiveStep = tuple[slot_plan.SlotStep, Chunks, Chunks]


class CollectiveExecutor:
    """Executes collectives one after another, in the order that all ranks share."""

    def __init__(self, local_peers: LocalPeerSync, sockets: CollectivePeerSockets) -> None:
        self.local_peers, self.sockets = local_peers, sockets
        self._round = 1  # The value of all counters after the rendezvous
        self._last_readers: list[tuple[int, tuple[int, ...]]] = [(0, ())] * BUFFERS_PER_RANK
        self._remote_buffers: dict[int, Tensor] = {}

    def execute(self, prepared: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        local_peers, signature = self.local_peers, prepared.signature
        local_peers.begin(signature)
        self.sockets.begin(local_peers.collective_id, signature >> DESCRIPTION_INDEX_BITS, prepared.description)
        # Sockets send from the buffers themselves, which a lag would need for longer.
        lag = 1 if prepared.num_segments >= LAG_MIN_SEGMENTS and not self.sockets.sockets else 0
        unread: deque[list[ActiveStep]] = deque()
        for active in _active_steps_by_round(prepared, input_chunks, output_chunks, gap=1 + lag):
            self._round += 1
            self._publish(prepared, active)
            unread.append(active)
            if len(unread) > lag:
                self._consume(prepared, self._round - lag, unread.popleft())
        if unread:
            self._consume(prepared, self._round, unread.popleft())
        self.sockets.flush()
        local_peers.finish()

    def _publish(self, prepared: PreparedCollective, active: list[ActiveStep]) -> None:
        local_peers, round_id, rank = self.local_peers, self._round, self.local_peers.local_rank
        buffer = round_id % BUFFERS_PER_RANK
        last, readers = self._last_readers[buffer]
        for reader in readers:
            if local_peers.words[local_peers.consumed_index[reader]] < last:
                local_peers.wait_counter(local_peers.consumed_index[reader], last, reader)
        self._last_readers[buffer] = (round_id, prepared.readers)
        self.sockets.flush()
        for step, input_chunks, output_chunks in active:
            for chunk, slot, is_initial_value, _ in step.published:
                source = (input_chunks if is_initial_value else output_chunks)[chunk]
                if length := source.shape[0]:
                    self._view(prepared, (rank, buffer, slot, length)).copy_(source)
            for peer, slot, chunk in step.socket_sends:
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
            if rank < 0 and rank not in self._remote_buffers:
                self._remote_buffers[rank] = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
            memory = self._remote_buffers[rank] if rank < 0 else self.local_peers.shared_memory.buffer(rank, buffer)
            start = slot * prepared.slot_stride
            view = prepared.views[key] = memory.view(prepared.dtype)[start : start + length]
        return view


def _active_steps_by_round(
    prepared: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks, *, gap: int
) -> Iterator[list[ActiveStep]]:
    steps, num_segments, numel = prepared.plan.steps, prepared.num_segments, prepared.segment_numel
    sides = [input_chunks] if output_chunks is input_chunks else [input_chunks, output_chunks]
    segments = {0: (input_chunks, output_chunks)}
    for round_id in range(num_segments + (len(steps) - 1) * gap if steps else 0):
        if 1 < num_segments > round_id:
            part = slice(round_id * numel, (round_id + 1) * numel)
            cut: list[Chunks] = [[c if c is None else c[part] for c in side] for side in sides]
            segments[round_id] = (cut[0], cut[-1])
        pairs = [(step, segments.get(round_id - step_id * gap)) for step_id, step in enumerate(steps)]
        yield [(step, *chunks) for step, chunks in pairs if chunks is not None]
        segments.pop(round_id - (len(steps) - 1) * gap, None)
