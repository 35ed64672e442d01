"""The messages of the parameter server's protocol, without tensors and sockets.

The work of a step is cut into work items, numbered on over the steps. A worker asks the coordinator for one, pulls the
parameter slices from their servers, and pushes its gradient of each. A server keeps a push until the coordinator
decides which work items make an update, and in which order updates come. So all servers apply the same updates, and a
second server with the same pushes and decisions has the same bits. Messages are idempotent: slice and work item
identify a push, so a duplicate changes nothing.

    worker                              coordinator                      servers
      WorkerJoined, WorkItemCompleted  ---->
      WorkAssignment  <---------------------
      ParameterPull  ------------------------------------------------------>
      ParameterPullReply  <-------------------------------------------------  once the version is recent enough
      GradientPush  ------------------------------------------------------->  BackupPush, BackupPushAck with 2 copies
      GradientPushAck  <----------------------------------------------------
                                            GradientNormRequest  ---------->  (the work items of the update)
                                            GradientNormReply  <------------
                                            UpdateDecision  --------------->

Parameters cut into slices of about equal size, and slices assigned to servers with balanced load.
A slice is a part of one bucket, so small parameters share one. Slice ids follow the order of the buckets, which is the
order in which backward produces their gradients.

Messages as frames. A long payload is cut, so that a more urgent message can be sent between its frames.
A frame is a message id (4 bytes), a kind (1), a length (4) and that many bytes. The first frame of a message (kind 0)
is its type and a JSON text [fields, bytes of the payload]; the others (kind 1) are parts of the payload.
"""

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple, get_args

from pydantic import TypeAdapter

from motet.core.errors import PeerFailedError, check_input
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket, build_buckets

COORDINATOR = "coordinator"
NO_MORE_WORK = -1  # The work item of the last assignment


class ConsistencyPolicy(NamedTuple):
    """The work items of an update, and the largest age of a work item's parameters."""

    work_items_per_step: int
    steps: int
    quorum: int  # Work items that complete a step; later ones are dropped. Ignored with per-item updates.
    max_staleness: int | None  # The parameters of step t have all steps before t - max_staleness; None: no bound
    has_per_item_updates: bool = False

    @property
    def drops_late_items(self) -> bool:
        return not self.has_per_item_updates and self.quorum < self.work_items_per_step

    @property
    def updates_per_step(self) -> int:
        return self.work_items_per_step if self.has_per_item_updates else 1

    def step_of(self, work_item: int) -> int:
        return work_item // self.work_items_per_step

    def required_work_items(self, work_item: int) -> int:
        """The number of work items, from the first of the run, that the parameters of this one must have."""
        if self.max_staleness is None:
            return 0
        return max(0, self.step_of(work_item) - self.max_staleness) * self.work_items_per_step


class WorkItemReport(NamedTuple):  # Sums over the rows of a work item
    loss_sum: float = 0.0
    targets: float = 0.0
    tokens: float = 0.0
    squared_norm: float = 0.0  # Squared norm of its gradient, if the work item makes an update; else 0
    oldest_version: float = 0.0  # Oldest version among its parameters


class UpdateScalars(NamedTuple):
    """Scalars with which servers apply an update; one that is not finite is skipped."""

    learning_rate: float = 0.0
    gradient_factor: float = 0.0
    is_applied: bool = False


class SlicePrimaryAndBackups(NamedTuple):
    """The servers of a slice. The first one, the primary, answers pulls, accepts pushes and forwards them."""

    servers: tuple[str, ...]
    incarnation: int = 0  # Grows when all servers of the slice were lost, with their pushes


class ParameterPlacement(NamedTuple):
    """The servers of every slice. A later epoch replaces an earlier one."""

    epoch: int
    replicas: tuple[SlicePrimaryAndBackups, ...]


class WorkerJoined(NamedTuple):
    worker: str


class WorkAssignment(NamedTuple):
    assignment_id: int
    work_item: int
    min_version: int  # Updates that its parameters must have


NO_ASSIGNMENT = WorkAssignment(0, NO_MORE_WORK, 0)


class EvictionNotice(NamedTuple):
    name: str  # Others have taken over the work of this process


class WorkItemCompleted(NamedTuple):
    worker: str
    work_item: int
    epoch: int  # Epoch of the placement in which all pushes were acknowledged
    report: WorkItemReport = WorkItemReport()


class ParameterPull(NamedTuple):
    worker: str
    assignment_id: int
    slice_id: int
    min_version: int
    priority: int = 0  # The lowest is sent first


class ParameterPullReply(NamedTuple):
    assignment_id: int
    slice_id: int
    version: int
    priority: int = 0


class GradientPush(NamedTuple):
    worker: str
    assignment_id: int
    slice_id: int
    work_item: int


class GradientPushAck(NamedTuple):
    server: str
    assignment_id: int
    slice_id: int


class BackupPush(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class BackupPushAck(NamedTuple):
    server: str
    slice_id: int
    work_item: int


class DecidedWorkItems(NamedTuple):
    """Work items that an update has, or that were dropped: all below the floor, and some above."""

    floor: int = 0
    above_floor: frozenset[int] = frozenset()

    def has(self, work_item: int) -> bool:
        return work_item < self.floor or work_item in self.above_floor

    @lru_cache(maxsize=64)  # noqa: B019  # keyed by value: all slices of a server share the result
    def with_decided(self, work_items: tuple[int, ...], floor: int) -> "DecidedWorkItems":
        return DecidedWorkItems(floor, frozenset(item for item in {*self.above_floor, *work_items} if item >= floor))


class ParameterStateTransfer(NamedTuple):  # Sent to the new second server of a slice
    slice_id: int
    version: int
    decided: DecidedWorkItems
    pending_work_items: frozenset[int]


class ServerTakeoverOffer(NamedTuple):
    """A new server offers to replace a lost one, with its snapshot."""

    server: str
    replaced_server: str
    snapshot_versions: tuple[tuple[int, int], ...] = ()  # (slice_id, version)


class DecisionReplayRequest(NamedTuple):
    server: str
    from_update: int  # The first update whose decision the server may have missed


class SliceStartVersion(NamedTuple):
    """The version at which a server starts a slice: of a checkpoint, or a snapshot whose last updates are lost."""

    slice_id: int
    version: int
    decided: DecidedWorkItems


class GradientNormRequest(NamedTuple):
    attempt: int  # Grows also when the same update is tried again
    update: int
    work_items: tuple[int, ...]


class GradientNormReply(NamedTuple):
    attempt: int
    slice_id: int
    squared_norm: float = 0.0


class UpdateDecision(NamedTuple):
    update: int
    work_items: tuple[int, ...]
    decided_floor: int  # All work items below are decided
    scalars: UpdateScalars = UpdateScalars()


class ServerShutdown(NamedTuple):
    update_count: int


class ParameterStateRequest(NamedTuple):
    slice_id: int


class ParameterStateReply(NamedTuple):
    slice_id: int
    version: int


class ServerTrafficReport(NamedTuple):
    sent_bytes: int
    received_bytes: int
    queued_bytes: int


class ServerAddress(NamedTuple):
    server: str
    host: str
    port: int
    is_initialized: bool  # Whether it has the state of all its slices


class ServerAddressBook(NamedTuple):
    entries: tuple[tuple[str, str, int], ...]  # (name, host, port)


class ConnectionRejected(NamedTuple):
    reason: str  # The other side of the connection has another job, or other data


class ProcessLost(NamedTuple):
    name: str


class ParametersReady(NamedTuple):
    assignment: WorkAssignment  # Assignment whose parameters have all arrived


class GradientsReady(NamedTuple):
    """Tells a worker that gradients are ready; they stay unchanged until its next assignment."""

    assignment_id: int
    slice_ids: tuple[int, ...]
    report: WorkItemReport = WorkItemReport()


class ApplyUpdate(NamedTuple):
    """Tells a server to update one slice with the gradients of these work items, in their order."""

    slice_id: int
    decision: UpdateDecision


SentMessage = (
    WorkerJoined | WorkAssignment | EvictionNotice | WorkItemCompleted | ParameterPull | ParameterPullReply
    | GradientPush | GradientPushAck | BackupPush | BackupPushAck | ParameterStateTransfer | ServerTakeoverOffer
    | DecisionReplayRequest | SliceStartVersion | GradientNormRequest | GradientNormReply | UpdateDecision
    | ParameterPlacement | ServerShutdown | ParameterStateRequest | ParameterStateReply | ServerTrafficReport
    | ServerAddress | ServerAddressBook
)  # fmt: skip
LocalMessage = ConnectionRejected | ProcessLost | ParametersReady | GradientsReady | ApplyUpdate  # Inside one process
Message = SentMessage | LocalMessage
OutgoingMessages = list[tuple[str, Message]]  # (recipient, message), in order


@dataclass(frozen=True)
class ParameterSlice:
    """The part of a bucket that one message pushes or pulls."""

    bucket_id: int
    flat_range: slice  # Range in the flat tensors
    server_index: int

    @property
    def numel(self) -> int:
        return int(self.flat_range.stop - self.flat_range.start)


def slice_parameters(
    sizes: Mapping[str, tuple[int, int]], max_numel: int, server_count: int
) -> tuple[tuple[Bucket, ...], tuple[ParameterSlice, ...]]:
    """The buckets and slices of parameters, given the optimizer group and the elements of each."""
    buckets = build_buckets(sizes, 1, max_numel)
    return buckets, partition_buckets(buckets, max_numel, server_count)


def partition_buckets(buckets: Sequence[Bucket], max_numel: int, server_count: int) -> tuple[ParameterSlice, ...]:
    """Slices of up to `max_numel` elements, each assigned to the server that has the fewest so far."""
    slices: list[ParameterSlice] = []
    load = [0] * server_count
    for bucket_id, bucket in enumerate(buckets):
        slice_count = ceil(bucket.length / max_numel)
        slice_numel = ceil(bucket.length / slice_count / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        for first in range(bucket.start, bucket.stop, slice_numel):
            flat_range = slice(first, min(first + slice_numel, bucket.stop))
            server_index = min(range(server_count), key=load.__getitem__)
            slices.append(ParameterSlice(bucket_id, flat_range, server_index))
            load[server_index] += slices[-1].numel
    problem = f"layout.server.count = {server_count} is more than the slices of the parameters, {len(slices)}"
    remedy = "take fewer servers, or smaller slices (layout.server.slice_mib)"
    check_input(server_count <= len(slices), f"{problem}; {remedy}")
    return tuple(slices)


def initial_placement(slices: Sequence[ParameterSlice], server_count: int, copies: int) -> ParameterPlacement:
    """The placement of a new run: server i + 1 has the second copy of the slices of server i."""
    replicas = (tuple(f"s{(s.server_index + copy) % server_count}" for copy in range(copies)) for s in slices)
    return ParameterPlacement(0, tuple(map(SlicePrimaryAndBackups, replicas)))


FRAME_HEADER = struct.Struct("!IBI")
MESSAGE_FRAME, PAYLOAD_FRAME = 0, 1
MAX_FRAME_BYTES = 128 * 1024  # Most bytes that an urgent message waits for


class BadMessageError(PeerFailedError):
    """A peer has sent a forbidden message. Its connection is closed, and the run goes on."""


# Type -> the message and the bytes of its payload.
_ADAPTERS: dict[bytes, TypeAdapter[tuple[Message, int]]] = {
    kind.__name__.encode(): TypeAdapter(tuple[kind, int])  # type: ignore[valid-type]  # mypy wants a type that it can read; this is one of a list
    for kind in get_args(SentMessage)
}


def encode_message(message: Message, payload_bytes: int) -> bytes:
    content = json.dumps([message, payload_bytes], separators=(",", ":"), default=sorted)  # sorts a set
    return f"{type(message).__name__} {content}".encode()


def decode_message(text: bytes) -> tuple[Message, int]:
    """The message, and the number of bytes of its payload."""
    name, _, content = text.partition(b" ")
    try:
        return _ADAPTERS[name].validate_json(content, strict=True)
    except (ValueError, KeyError) as error:
        raise BadMessageError(f"not a message of a parameter server: {text[:60]!r}") from error


class MessageFrame(NamedTuple):
    header: bytes
    body: bytes | memoryview


def cut_into_frames(message_id: int, message: Message, payload: memoryview | None) -> deque[MessageFrame]:
    """The frames of a message, in the order of sending. They are views of the payload."""
    body = memoryview(payload.cast("B") if payload is not None and payload.nbytes else b"")
    text = encode_message(message, body.nbytes)
    frames = deque([MessageFrame(FRAME_HEADER.pack(message_id, MESSAGE_FRAME, len(text)), text)])
    for offset in range(0, body.nbytes, MAX_FRAME_BYTES):
        chunk = body[offset : offset + MAX_FRAME_BYTES]
        frames.append(MessageFrame(FRAME_HEADER.pack(message_id, PAYLOAD_FRAME, chunk.nbytes), chunk))
    return frames


class MessageFrameReader:
    """Joins the frames that arrive from one sender. Memory is taken for bytes that arrive, not for those announced."""

    def __init__(self, check: Callable[[Message, int], None], *, text_limit: int, open_limit: int) -> None:
        """`check` raises a `BadMessageError` for a message, with the bytes of its payload, that is not admitted."""
        self._check, self._text_limit, self._open_limit = check, text_limit, open_limit
        # By message id: the message, the part of its payload that was received, and the bytes of the whole payload.
        self._incomplete: dict[int, tuple[Message, bytearray, int]] = {}

    def read(
        self, message_id: int, kind: int, length: int, *, receive_into: Callable[[memoryview], object]
    ) -> tuple[Message, bytearray] | None:
        """Receive one frame after its header; returns the message with its payload if it is complete."""
        if kind == MESSAGE_FRAME:
            message, payload_bytes = self._read_first_frame(message_id, length, receive_into)
            payload = bytearray()
        else:
            message, payload, payload_bytes = self._take_incomplete(message_id, kind, length)
            payload.extend(bytes(length))
            receive_into(memoryview(payload)[-length:])
        if len(payload) == payload_bytes:
            return message, payload
        self._incomplete[message_id] = message, payload, payload_bytes
        return None

    def _read_first_frame(
        self, message_id: int, length: int, receive_into: Callable[[memoryview], object]
    ) -> tuple[Message, int]:
        if length > self._text_limit:
            raise BadMessageError(f"a message of {length} bytes, {self._text_limit} at most")
        if message_id in self._incomplete or len(self._incomplete) >= self._open_limit:
            raise BadMessageError(f"message {message_id} begins while {len(self._incomplete)} others are incomplete")
        text = bytearray(length)
        receive_into(memoryview(text))
        message, payload_bytes = decode_message(bytes(text))
        self._check(message, payload_bytes)
        return message, payload_bytes

    def _take_incomplete(self, message_id: int, kind: int, length: int) -> tuple[Message, bytearray, int]:
        if kind != PAYLOAD_FRAME or message_id not in self._incomplete:
            raise BadMessageError(f"a frame of kind {kind} came for message {message_id}, which has no first frame")
        message, payload, payload_bytes = self._incomplete.pop(message_id)
        if not 0 < length <= min(MAX_FRAME_BYTES, payload_bytes - len(payload)):
            raise BadMessageError(f"a frame of {length} bytes in a payload of {payload_bytes}, {len(payload)} received")
        return message, payload, payload_bytes
