"""A server's event loop: handles messages with the state machine, and executes its decisions on tensors.

The tensors of a server: master parameters and moments of its slices, pushed gradients, and published parameters.

Published parameters are never written to: an update makes a new tensor, so a reply that is being sent has one version.

Encoding and decoding of compressed pushes and pulls, with error feedback (arXiv:1901.09847).
The sender adds the compression error of a message to its next message about the same slice: a worker to the gradient of
its next work item, a server to the parameters of the next version.

Snapshots of a server's slices on disk, written in the background for the process that replaces it.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from motet.collectives.compression.codecs import Codec, SparseCodec
from motet.collectives.compression.compressed_collectives import codec_numerics, decode, encode, to_accumulation_dtype
from motet.core.errors import CheckpointSaveError, InputError, PeerFailedError, check_input
from motet.core.seeds import derive_seed
from motet.core.units import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_admission import (
    STATE_BYTES_PER_ELEMENT,
    STATE_HEADER_BYTES,
    PayloadSizes,
)
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    BadMessageError,
    Message,
    OutgoingMessages,
    ParameterSlice,
    UpdateScalars,
)
from motet.parallel.parameter_server.protocol.state_machines import ServerStateMachine
from motet.parallel.reproducible.tree_reduce import squared_norm
from motet.precision.recipe import PrecisionRecipe


@dataclass(frozen=True)
class PushPullCompression:
    """The codecs of pushes and pulls; None sends the tensor uncompressed."""

    push_codec: Codec | None = None
    pull_codec: Codec | None = None
    has_error_feedback: bool = True
    seed: int = 0


def message_seed(seed: int, slice_id: int, sequence_number: int) -> int:
    """The seed with which a message about a slice is encoded and decoded."""
    return derive_seed(seed, sequence_number, str(slice_id))


class PushPullCompressor:
    """Compresses the messages of one process: gradients of a worker, or parameters of a server."""

    def __init__(self, codec: Codec, compression: PushPullCompression) -> None:
        self._codec, self._compression = codec, compression
        self.errors: dict[int, Tensor] = {}  # By slice

    def compress(self, slice_id: int, sequence_number: int, tensor: Tensor) -> Tensor:
        """The message about a slice. The receiver knows the sequence number, which seeds random codecs.

        A message that is not finite leaves the error unchanged, since no server applies such an update.
        """
        seed = message_seed(self._compression.seed, slice_id, sequence_number)
        with codec_numerics():
            if not self._compression.has_error_feedback:
                return encode(self._codec, tensor, seed)
            exact = to_accumulation_dtype(tensor)
            previous = self.errors.get(slice_id, torch.zeros_like(exact))
            corrected = exact + previous
            rounded = corrected.to(tensor.dtype)
            message = encode(self._codec, rounded, seed)
            sent = decode(self._codec, message, rounded.shape, rounded.dtype, seed)
            self.errors[slice_id] = torch.where(sent.isfinite().all(), corrected - sent, previous)
            return message


def decompress(codec: Codec | None, message: bytearray | memoryview, like: Tensor, *, seed: int = 0) -> Tensor:
    """The tensor of a message, in the shape and dtype of `like`."""
    if codec is None:
        return torch.frombuffer(message, dtype=like.dtype)
    with codec_numerics():
        return decode(codec, torch.frombuffer(message, dtype=torch.uint8), like.shape, like.dtype, seed)


# State of a slice that a second server needs, in addition to master parameters and moments.
ERROR_FEEDBACK_ENTRY, PUBLISHED_VALUE_ENTRY, PUSH_PREFIX = "pull/error", "pull/message", "push/"
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ParameterSlicingPlan:
    """The cut and the update of the parameters; the same in all processes."""

    buckets: tuple[Bucket, ...]
    slices: tuple[ParameterSlice, ...]
    recipe: PrecisionRecipe
    optimizer_groups: tuple[tuple[float, float], ...]  # (scale of the learning rate, weight decay)
    compression: PushPullCompression = field(default_factory=PushPullCompression)
    delay_compensation: float = 0.0

    @cached_property
    def payload_sizes(self) -> PayloadSizes:
        """The bytes of the messages about each slice."""
        pushes, pulls = (
            tuple(codec.wire_bytes([s.numel], dtype) if codec else s.numel * DTYPE_BYTES[dtype] for s in self.slices)
            for codec, dtype in (
                (self.compression.push_codec, self.recipe.reduce),
                (self.compression.pull_codec, self.recipe.compute),
            )
        )
        states = tuple(s.numel * STATE_BYTES_PER_ELEMENT + STATE_HEADER_BYTES for s in self.slices)
        return PayloadSizes(pushes, pulls, states)

    @cached_property
    def slice_ids_by_bucket(self) -> list[list[int]]:
        slice_ids: list[list[int]] = [[] for _ in self.buckets]
        for slice_id, parameter_slice in enumerate(self.slices):
            slice_ids[parameter_slice.bucket_id].append(slice_id)
        return slice_ids


@dataclass
class _ParameterSliceTensors:
    master: Tensor
    optimizer: torch.optim.Optimizer
    optimizer_slices: list[tuple[slice, nn.Parameter]]  # (range in the slice, view of the master parameters)
    published_value: Tensor  # Value that workers pull: parameters, or a compressed message
    pushes: dict[int, bytearray] = field(default_factory=dict)  # By work item, as received
    # For delay compensation: the master parameters of each worker's last pull, until its gradient is applied.
    pulled_by_worker: dict[str, Tensor] = field(default_factory=dict)
    pulled_for_item: dict[int, Tensor] = field(default_factory=dict)
    gradient_sum: tuple[tuple[int, ...], Tensor] | None = None  # (work items, sum of their gradients)


class ParameterStore:
    """The slices of one server. A slice is zero until it is loaded."""

    def __init__(self, partition: ParameterSlicingPlan, make_optimizer: OptimizerFactory) -> None:
        self.partition, self._make_optimizer = partition, make_optimizer
        self._tensors_by_slice: dict[int, _ParameterSliceTensors] = {}
        codec = partition.compression.pull_codec
        self._compressor = PushPullCompressor(codec, partition.compression) if codec else None

    def _tensors_of(self, slice_id: int) -> _ParameterSliceTensors:
        if slice_id in self._tensors_by_slice:
            return self._tensors_by_slice[slice_id]
        partition, parameter_slice = self.partition, self.partition.slices[slice_id]
        master = torch.zeros(parameter_slice.numel, dtype=getattr(torch, partition.recipe.master))
        optimizer_slices, groups, start = [], [], parameter_slice.flat_range.start
        for group, flat in partition.buckets[parameter_slice.bucket_id].group_slices(parameter_slice.flat_range):
            slice_range = slice(flat.start - start, flat.stop - start)
            parameter = nn.Parameter(master[slice_range], requires_grad=False)
            scale, weight_decay = partition.optimizer_groups[group]
            optimizer_slices.append((slice_range, parameter))
            groups.append({"params": [parameter], "weight_decay": weight_decay, "scale": scale})
        optimizer, published_value = self._make_optimizer(groups), self._encode_value(slice_id, master)
        tensors = _ParameterSliceTensors(master, optimizer, optimizer_slices, published_value)
        return self._tensors_by_slice.setdefault(slice_id, tensors)

    def _encode_value(self, slice_id: int, master: Tensor) -> Tensor:
        if self._compressor:
            return self._compressor.compress(slice_id, 0, master)
        return master.to(getattr(torch, self.partition.recipe.compute), copy=True)

    def add_push(self, slice_id: int, work_item: int, gradient: bytearray, *, worker: str = "") -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes.setdefault(work_item, gradient)
        if worker in tensors.pulled_by_worker:
            tensors.pulled_for_item.setdefault(work_item, tensors.pulled_by_worker.pop(worker))

    def check_push(self, slice_id: int, work_item: int, gradient: bytearray) -> None:
        """Raise a `BadMessageError` for a compressed gradient with elements outside of the slice."""
        if isinstance(self.partition.compression.push_codec, SparseCodec):
            try:
                self._decompress(slice_id, work_item, gradient)
            except (IndexError, RuntimeError) as error:
                raise BadMessageError(f"a push has elements outside of slice {slice_id}") from error

    def _decompress(self, slice_id: int, work_item: int, gradient: bytearray) -> Tensor:
        compression, numel = self.partition.compression, self.partition.slices[slice_id].numel
        like = torch.empty(numel, dtype=getattr(torch, self.partition.recipe.reduce), device="meta")
        seed = message_seed(compression.seed, slice_id, work_item)
        return decompress(compression.push_codec, gradient, like, seed=seed)

    def push_of(self, slice_id: int, work_item: int) -> memoryview:
        return memoryview(self._tensors_of(slice_id).pushes[work_item])

    def discard_pushes_except(self, slice_id: int, work_items: Collection[int]) -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes = {item: gradient for item, gradient in tensors.pushes.items() if item in work_items}
        tensors.pulled_for_item = {item: t for item, t in tensors.pulled_for_item.items() if item in work_items}

    def squared_norm(self, slice_id: int, work_items: Sequence[int]) -> float:
        return squared_norm(self._sum_pushes(slice_id, work_items)).item()

    def apply_update(self, slice_id: int, work_items: Sequence[int], scalars: UpdateScalars) -> None:
        """Step the optimizer with the sum of these gradients times the factor."""
        tensors, total = self._tensors_of(slice_id), self._sum_pushes(slice_id, work_items)
        total.mul_(scalars.gradient_factor)
        if work_items[0] in tensors.pulled_for_item:  # add strength * gradient^2 * drift (DC-ASGD, arXiv:1609.08326)
            drift = tensors.master - tensors.pulled_for_item[work_items[0]]
            total.add_(self.partition.delay_compensation * total.square() * drift)
        for group in tensors.optimizer.param_groups:
            group["lr"] = scalars.learning_rate * group["scale"]
        for slice_range, parameter in tensors.optimizer_slices:
            parameter.grad = total[slice_range].to(parameter.dtype)
        tensors.optimizer.step()
        tensors.optimizer.zero_grad(set_to_none=True)
        tensors.gradient_sum = None
        tensors.published_value = self._encode_value(slice_id, tensors.master)

    def value_for_worker(self, slice_id: int, worker: str = "") -> memoryview:
        tensors = self._tensors_of(slice_id)
        if self.partition.delay_compensation:
            tensors.pulled_by_worker[worker] = tensors.master.clone()
        return tensor_bytes(tensors.published_value)

    def _sum_pushes(self, slice_id: int, work_items: Sequence[int]) -> Tensor:
        """The sum in the order of the work items, in whatever order they arrived."""
        tensors = self._tensors_of(slice_id)
        if tensors.gradient_sum is None or tensors.gradient_sum[0] != tuple(work_items):
            first, *others = (self._decompress(slice_id, item, tensors.pushes[item]) for item in work_items)
            total = first.to(torch.promote_types(first.dtype, tensors.master.dtype), copy=True)
            for other in others:
                total.add_(other)
            tensors.gradient_sum = tuple(work_items), total
        return tensors.gradient_sum[1]

    def slice_state(self, slice_id: int) -> dict[str, Tensor]:
        """Master parameters, moments and step counts of a slice."""
        tensors = self._tensors_of(slice_id)
        moments = [tensors.optimizer.state[parameter] for _, parameter in tensors.optimizer_slices]
        return {"master": tensors.master} | {
            kind: value if value.ndim == 0 else torch.cat([moment[kind] for moment in moments])
            for kind, value in moments[0].items()
            if isinstance(value, Tensor)
        }

    def full_slice_state(self, slice_id: int, work_items: Collection[int] = ()) -> dict[str, Tensor]:
        """`slice_state`, with the published value, its compression error, and the pushes of these work items."""
        state = self.slice_state(slice_id)
        if self._compressor is not None:
            state[PUBLISHED_VALUE_ENTRY] = self._tensors_of(slice_id).published_value
            if slice_id in self._compressor.errors:
                state[ERROR_FEEDBACK_ENTRY] = self._compressor.errors[slice_id]
        for item in work_items:
            state[f"{PUSH_PREFIX}{item}"] = torch.frombuffer(self.push_of(slice_id, item), dtype=torch.uint8)
        return state

    def _check_slice_state(self, slice_id: int, state: Mapping[str, Tensor]) -> None:
        """Refuse a state of other tensors: a copy would broadcast them."""
        check_input(
            slice_id in range(len(self.partition.slices)) and "master" in state,
            f"slice {slice_id} is not one of the {len(self.partition.slices)} of this run, or its state has no master "
            "parameters; start the run again with --resume",
        )
        tensors = self._tensors_of(slice_id)
        shape = tensors.master.shape
        expected_shapes = {"master": [shape], PUBLISHED_VALUE_ENTRY: [tensors.published_value.shape]}
        for name, value in state.items():
            expected = expected_shapes.get(name, [shape, torch.Size()])
            check_input(
                value.shape in expected or name.startswith(PUSH_PREFIX),
                f"the state of slice {slice_id} has {name} of shape {list(value.shape)}, not {list(expected[0])}; "
                "start the run again with --resume",
            )

    def load_slice_state(self, slice_id: int, state: Mapping[str, Tensor]) -> None:
        """Load a `slice_state` or a `full_slice_state`."""
        self._check_slice_state(slice_id, state)
        tensors = self._tensors_of(slice_id)
        tensors.master.copy_(state["master"])
        for name, value in state.items():
            if name.startswith(PUSH_PREFIX):
                self.add_push(slice_id, int(name.removeprefix(PUSH_PREFIX)), bytearray(tensor_bytes(value)))
            elif name not in ("master", PUBLISHED_VALUE_ENTRY, ERROR_FEEDBACK_ENTRY):
                for slice_range, parameter in tensors.optimizer_slices:
                    own_value = value if value.ndim == 0 else value[slice_range]
                    tensors.optimizer.state[parameter][name] = own_value.clone()
        if self._compressor is not None and PUBLISHED_VALUE_ENTRY in state:
            tensors.published_value = state[PUBLISHED_VALUE_ENTRY].clone()
            if ERROR_FEEDBACK_ENTRY in state:
                self._compressor.errors[slice_id] = state[ERROR_FEEDBACK_ENTRY].clone()
        else:
            tensors.published_value = self._encode_value(slice_id, tensors.master)


def serialize_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """The tensors as safetensors: a header of JSON and plain bytes, which contain no code."""
    return memoryview(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def deserialize_tensors(content: bytes | bytearray) -> dict[str, Tensor]:
    try:
        return dict(safetensors.torch.load(bytes(content)))
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise InputError(f"the state of a slice is damaged ({error}); start the run again with --resume") from None


def read_slice_state(partition: ParameterSlicingPlan, slice_id: int, content: bytearray) -> dict[str, Tensor]:
    """The tensors of a slice that another process has sent. Raises a `BadMessageError` if one does not fit."""
    numel, sizes = partition.slices[slice_id].numel, partition.payload_sizes
    try:
        state = deserialize_tensors(content)
    except InputError as error:
        raise BadMessageError(str(error)) from error
    for name, tensor in {"master": torch.empty(0), **state}.items():
        shapes: tuple[tuple[int, ...], ...] = ((numel,),) if name == "master" else ((), (numel,))
        if name.startswith(PUSH_PREFIX):
            is_valid = name.removeprefix(PUSH_PREFIX).isdecimal() and tensor.dtype == torch.uint8
            shapes = ((sizes.pushes[slice_id],),)
        elif name == PUBLISHED_VALUE_ENTRY:
            is_valid = partition.compression.pull_codec is not None and tensor.dtype == torch.uint8
            shapes = ((sizes.pulls[slice_id],),)
        else:
            is_valid = tensor.is_floating_point()
        if not is_valid or tuple(tensor.shape) not in shapes:
            raise BadMessageError(f"{name} of slice {slice_id} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return state


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which stays alive as long as this view."""
    return tensor.detach().view(torch.uint8).numpy().data


_SUFFIX = ".safetensors"


class ServerSnapshots:
    """The newest snapshot of each slice; a newer one replaces one that is not yet written."""

    def __init__(self, folder: Path, interval_updates: int) -> None:
        self.interval_updates, self._folder = interval_updates, folder
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._write_error: OSError | None = None
        self._writer = ThreadPoolExecutor(1)
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, slice_id: int, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, and write them later."""
        if self._write_error:
            reason = f"{self._write_error.strerror}; free some space"
            raise CheckpointSaveError(f"cannot write a snapshot to {self._folder}: {reason}")
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self._pending[slice_id] = copies | {"version": torch.tensor(version)}
        self._writer.submit(self._write, slice_id)

    def load_all(self) -> dict[int, tuple[int, dict[str, Tensor]]]:
        snapshots = {}
        for path in self._folder.glob(f"*{_SUFFIX}"):
            tensors = deserialize_tensors(path.read_bytes())
            version = tensors.pop("version", torch.empty(0))
            is_whole = path.stem.isdecimal() and version.dtype == torch.int64 and version.numel() == 1
            check_input(is_whole, f"snapshot {path} is damaged; remove it and start the run again with --resume")
            snapshots[int(path.stem)] = int(version), tensors
        return snapshots

    def close_and_delete(self) -> None:
        self._writer.shutdown()
        for path in self._folder.glob(f"*{_SUFFIX}"):
            path.unlink()
        with contextlib.suppress(OSError):  # another server has files there
            for folder in (self._folder, *list(self._folder.parents)[:2]):
                folder.rmdir()

    def _write(self, slice_id: int) -> None:
        tensors = self._pending.pop(slice_id, None)
        if tensors is None or self._write_error:  # a newer one was written already
            return
        try:
            partial = self._folder / f"{slice_id}.partial"
            partial.write_bytes(serialize_tensors(tensors))
            partial.replace(self._folder / f"{slice_id}{_SUFFIX}")
        except OSError as error:
            self._write_error = error


TRAFFIC_REPORT_INTERVAL_S = 0.05
MAX_PENDING_WORK_ITEMS = 4096  # Limit for each slice
MAX_WAITING_PULLS = 64  # Limit for each slice and worker, which pulls a slice again with each assignment


@dataclass
class ParameterServerProcess:
    """Runs the state machine of a server, until the run ends or an error is raised, such as `EvictedError`."""

    state_machine: ServerStateMachine
    store: ParameterStore
    transport: TcpTransport
    timeout_s: float = field(kw_only=True)  # Longest time without a coordinator
    snapshots: ServerSnapshots | None = None
    has_ended: bool = False
    _takeover_offer: messages.ServerTakeoverOffer | None = None
    _coordinator_lost_at_s: float | None = field(default_factory=time.monotonic)  # None while it is connected
    _last_traffic_report_s: float = 0.0

    def offer_takeover(self, replaced_server: str) -> None:
        """Load the snapshots, and offer to replace a lost server."""
        snapshots = self.snapshots.load_all() if self.snapshots else {}
        for slice_id, (_, tensors) in snapshots.items():
            self.store.load_slice_state(slice_id, tensors)
        versions = tuple(sorted((slice_id, version) for slice_id, (version, _) in snapshots.items()))
        self._takeover_offer = messages.ServerTakeoverOffer(self.state_machine.name, replaced_server, versions)

    @torch.no_grad()
    def run(self) -> None:
        while not self.has_ended:
            if (event := self.transport.next_event()) is None:
                lost_at_s, name = self._coordinator_lost_at_s, self.state_machine.name
                if lost_at_s is not None and time.monotonic() - lost_at_s > self.timeout_s:
                    raise PeerFailedError(f"server {name} has been without the coordinator for {self.timeout_s:g} s")
                continue
            was_initialized = self._is_initialized
            try:
                outgoing = self._handle(event)
            except BadMessageError as error:
                self.transport.refuse(event.sender, error)
                continue
            self._execute_all(outgoing)
            if self._is_initialized and not was_initialized:
                self.transport.send(COORDINATOR, self._server_address())

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, state_machine = event.message, self.state_machine
        if message is None:
            return self._handle_connection_change(event)
        if self.transport.handle_membership(message, lambda name: name > state_machine.name):
            return []
        self._check(message, event.payload)
        match message:
            case messages.ServerShutdown():
                self.has_ended = True
                return []
            case messages.ParameterStateRequest(slice_id):
                reply = messages.ParameterStateReply(slice_id, state_machine.slice_states[slice_id].version)
                content = serialize_tensors(self.store.slice_state(slice_id))
                self.transport.send(event.sender, reply, content)
                return []
            case messages.GradientPush() | messages.BackupPush():
                was_pending = self._is_pending(message)
                outgoing = state_machine.handle(message)
                if not was_pending and self._is_pending(message):
                    self.store.add_push(message.slice_id, message.work_item, event.payload, worker=event.sender)
                return outgoing
            case messages.SliceStartVersion(slice_id=slice_id) | messages.ParameterStateTransfer(slice_id=slice_id):
                if event.payload and not state_machine.slice_state(slice_id).is_initialized:
                    state = read_slice_state(self.store.partition, slice_id, event.payload)
                    self.store.load_slice_state(slice_id, state)
        return state_machine.handle(message)

    def _check(self, message: Message, payload: bytearray) -> None:
        """Raise a `BadMessageError` for a message that contradicts the server's state, or fills its memory."""
        slice_states = self.state_machine.slice_states
        match message:
            case messages.ParameterStateRequest(slice_id) if slice_id not in slice_states:
                raise BadMessageError(f"slice {slice_id} is not on {self.state_machine.name}")
            case messages.GradientPush(_, _, slice_id, work_item) | messages.BackupPush(_, slice_id, work_item):
                pending = self.state_machine.slice_state(slice_id).pending_work_items
                if work_item not in pending and len(pending) >= MAX_PENDING_WORK_ITEMS:
                    raise BadMessageError(f"{len(pending)} pushes of slice {slice_id} wait already")
                self.store.check_push(slice_id, work_item, payload)
            case messages.ParameterPull(worker, _, slice_id):
                waiting = [p for p in self.state_machine.slice_state(slice_id).waiting_pulls if p.worker == worker]
                if message not in waiting and len(waiting) >= MAX_WAITING_PULLS:
                    raise BadMessageError(f"{len(waiting)} pulls of slice {slice_id} wait already")
            case messages.UpdateDecision():
                self._check_decision(message)

    def _check_decision(self, decision: messages.UpdateDecision) -> None:
        for slice_id, state in self.state_machine.slice_states.items():
            missing = set(decision.work_items) - state.pending_work_items
            if state.is_initialized and state.version == decision.update and missing:
                problem = f"update {decision.update} of slice {slice_id} has work items {sorted(missing)}"
                raise PeerFailedError(f"{problem}, whose gradients server {self.state_machine.name} never received")

    def _handle_connection_change(self, event: TransportEvent) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        if event.sender == COORDINATOR:
            self._coordinator_lost_at_s = None if event.is_connected else time.monotonic()
            outgoing.append((COORDINATOR, self._server_address()))
            if self._takeover_offer:
                outgoing.append((COORDINATOR, self._takeover_offer))
        return outgoing + self.state_machine.messages_on_connect(event.sender) if event.is_connected else []

    def _is_pending(self, push: messages.GradientPush | messages.BackupPush) -> bool:
        slice_states = self.state_machine.slice_states
        return push.slice_id in slice_states and push.work_item in slice_states[push.slice_id].pending_work_items

    @property
    def _is_initialized(self) -> bool:
        slice_states = self.state_machine.slice_states.values()
        return bool(slice_states) and all(state.is_initialized for state in slice_states)

    def _server_address(self) -> messages.ServerAddress:
        return messages.ServerAddress(self.state_machine.name, *self.transport.address, self._is_initialized)

    def _execute_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            self._execute(to, message)
        for slice_id in {message.slice_id for _, message in outgoing if isinstance(message, messages.ApplyUpdate)}:
            state = self.state_machine.slice_states[slice_id]
            self.store.discard_pushes_except(slice_id, state.pending_work_items | state.pushes_awaiting_backup.keys())
            if self.snapshots and state.version % self.snapshots.interval_updates == 0:
                self.snapshots.save(slice_id, state.version, self.store.full_slice_state(slice_id))
        if time.monotonic() - self._last_traffic_report_s > TRAFFIC_REPORT_INTERVAL_S:
            self._last_traffic_report_s = time.monotonic()
            traffic = {peer: t for peer, t in self.transport.traffic.copy().items() if peer != COORDINATOR}
            sent_bytes = sum(peer.sent_bytes for peer in traffic.values())
            received_bytes = sum(peer.received_bytes for peer in traffic.values())
            queued_bytes = sum(map(self.transport.queued_bytes, traffic))
            self.transport.send(COORDINATOR, messages.ServerTrafficReport(sent_bytes, received_bytes, queued_bytes))

    def _execute(self, to: str, message: Message) -> None:
        payload, priority = None, -1
        match message:
            case messages.ApplyUpdate(slice_id, decision):
                if decision.scalars.is_applied:
                    self.store.apply_update(slice_id, decision.work_items, decision.scalars)
                return
            case messages.GradientNormReply(attempt, slice_id):
                assert self.state_machine.norm_request is not None
                squared_norm = self.store.squared_norm(slice_id, self.state_machine.norm_request.work_items)
                message = messages.GradientNormReply(attempt, slice_id, squared_norm)
            case messages.ParameterPullReply(_, slice_id, _, priority):
                payload = self.store.value_for_worker(slice_id, to)
            case messages.BackupPush(_, slice_id, work_item):
                payload = self.store.push_of(slice_id, work_item)
            case messages.ParameterStateTransfer(slice_id, _, _, pending_work_items):
                payload = serialize_tensors(self.store.full_slice_state(slice_id, pending_work_items))
        self.transport.send(to, message, payload, priority=priority)
