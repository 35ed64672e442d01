"""A worker's connections: parameters arrive during forward, and gradients are sent during backward."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.data_parallel.flat_parameters import FlatParameters
from motet.parallel.parameter_server.process.server_process import (
    ParameterSlicingPlan,
    PushPullCompressor,
    decompress,
    tensor_bytes,
)
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, NO_MORE_WORK, OutgoingMessages
from motet.parallel.parameter_server.protocol.state_machines import WorkerStateMachine


@dataclass
class ParameterServerClient:
    """Runs the state machine of a worker on a thread. Errors of the thread are raised by the methods that wait."""

    state_machine: WorkerStateMachine
    partition: ParameterSlicingPlan
    flat_parameters: FlatParameters
    transport: TcpTransport = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    connect_timeout_s: float = field(kw_only=True)  # Limit while nobody listens at the coordinator's address
    sibling_errors: list[BaseException] = field(default_factory=list)  # Errors of other threads of this process
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _arrived_buckets: set[int] = field(default_factory=set)
    _is_coordinator_connected: bool = False
    _is_closed: bool = False
    _current_assignment_id: int = 0
    _error: BaseException | None = None
    _encoded_pushes: dict[int, Tensor] = field(default_factory=dict)  # Pushes of the current assignment, by slice

    def __post_init__(self) -> None:
        codec = self.partition.compression.push_codec
        self._compressor = PushPullCompressor(codec, self.partition.compression) if codec else None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next_assignment(self) -> messages.WorkAssignment | None:
        """The next assignment; None at the end. A connected coordinator may take any time to answer."""
        while not self._has_new_assignment():
            if COORDINATOR not in self.transport.peer_handshakes:
                self._wait_for_coordinator()
            failure = "the coordinator does not answer"
            self._wait_until(lambda: self._is_coordinator_connected or self._has_new_assignment(), failure)
            self._wait_until(lambda: not self._is_coordinator_connected or self._has_new_assignment())
        assignment = self.state_machine.assignment
        self._current_assignment_id = assignment.assignment_id
        self._arrived_buckets, self._encoded_pushes = set(), {}
        return None if assignment.work_item == NO_MORE_WORK else assignment

    def _wait_for_coordinator(self) -> None:
        limit_s = min(self.connect_timeout_s, self.timeout_s)
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._error or self._is_coordinator_connected, limit_s)
            if not is_over and COORDINATOR in self.transport.reached_peers and not self.transport.refusals:
                wait_s, limit_s = self.timeout_s - limit_s, self.timeout_s  # It listens, but was too busy
                self._changed.wait_for(lambda: self._error or self._is_coordinator_connected, wait_s)
        if COORDINATOR not in self.transport.peer_handshakes and self._error is None:
            host, port = self.transport.peer_addresses[COORDINATOR]
            problem = f"cannot reach the coordinator at {host}:{port} within {limit_s:g} s"
            if refusal := self.transport.refusals.get(COORDINATOR):
                raise InputError(f"{problem}: {refusal}; give every host the same run token")
            raise InputError(f"{problem}; check that the run exists and sets layout.server.listen")

    def _has_new_assignment(self) -> bool:
        return self.state_machine.assignment.assignment_id > self._current_assignment_id

    def wait_for_bucket(self, bucket_id: int) -> None:
        if bucket_id in self._arrived_buckets:
            return
        slice_ids = set(self.partition.slice_ids_by_bucket[bucket_id])
        failure = f"parameters of bucket {bucket_id} did not come"
        self._wait_until(lambda: slice_ids <= self.state_machine.pulled_versions.keys(), failure)
        self._arrived_buckets.add(bucket_id)
        self.flat_parameters.bump_versions(bucket_id)

    def wait_for_all(self) -> int:
        """Wait until all parameters have arrived; returns the oldest version among them."""
        machine = self.state_machine
        self._wait_until(lambda: len(machine.pulled_versions) == len(self.partition.slices), "parameters did not come")
        return min(machine.pulled_versions.values())

    def push_bucket(self, bucket_id: int, report: messages.WorkItemReport) -> None:
        """Push the gradients of a bucket; they must stay unchanged until the next assignment."""
        slice_ids = tuple(self.partition.slice_ids_by_bucket[bucket_id])
        with self._changed:
            ready = messages.GradientsReady(self._current_assignment_id, slice_ids, report)
            self._send_all(self.state_machine.handle(ready))

    def set_bucket_order(self, bucket_ids: Sequence[int]) -> None:
        """Give buckets priority in the order in which forward needs them."""
        with self._changed:
            for priority, bucket_id in enumerate(bucket_ids):
                self.state_machine.priorities |= dict.fromkeys(self.partition.slice_ids_by_bucket[bucket_id], priority)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _wait_until(self, condition: Callable[[], bool], failure: str = "") -> None:
        timeout_s = self.timeout_s if failure else None
        with self._changed:
            is_satisfied = self._changed.wait_for(lambda: self._error is not None or condition(), timeout_s)
        if self._error is not None:
            raise self._error
        if not is_satisfied:
            raise PeerFailedError(f"{self.state_machine.name} has waited for {timeout_s:g} s, and {failure}")

    def _listen(self) -> None:
        try:
            while not self._is_closed:
                if self.sibling_errors:
                    raise self.sibling_errors[0]
                if event := self.transport.next_event():
                    with self._changed, torch.no_grad():
                        self._send_all(self._handle(event))
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # raised by the methods that wait
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, state_machine = event.message, self.state_machine
        if message is None:
            if event.sender == COORDINATOR:
                self._is_coordinator_connected = event.is_connected
            return state_machine.messages_on_connect(event.sender) if event.is_connected else []
        if self.transport.handle_membership(message, lambda name: True):
            return []
        if isinstance(message, messages.ParameterPullReply):
            is_current = message.assignment_id == state_machine.assignment.assignment_id
            if is_current and message.slice_id not in state_machine.pulled_versions:
                compute = self.flat_parameters.compute[self.partition.slices[message.slice_id].flat_range]
                compute.copy_(decompress(self.partition.compression.pull_codec, event.payload, compute))
        return state_machine.handle(message)

    def _encoded_push(self, push: messages.GradientPush) -> Tensor:
        """The message of a push. A repeated push sends the same one, so that error feedback counts it only once."""
        gradient = self.flat_parameters.gradients.local_slice(self.partition.slices[push.slice_id].flat_range).cpu()
        if self._compressor is None:
            return gradient
        if push.slice_id not in self._encoded_pushes:
            self._encoded_pushes[push.slice_id] = self._compressor.compress(push.slice_id, push.work_item, gradient)
        return self._encoded_pushes[push.slice_id]

    def _send_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            if isinstance(message, messages.GradientPush):
                priority = self.state_machine.priorities.get(message.slice_id, 0)
                self.transport.send(to, message, tensor_bytes(self._encoded_push(message)), priority=priority)
            elif not isinstance(message, messages.ParametersReady):
                self.transport.send(to, message)
