"""A worker's connections: parameters arrive during forward, and gradients are sent during backward."""

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.data_parallel.flat_parameters import FlatParameters
from motet.parallel.parameter_server.process.parameter_store import ParameterSlicingPlan, tensor_bytes
from motet.parallel.parameter_server.process.push_pull_compression import decompress, make_compressor
from motet.parallel.parameter_server.process.tcp_transport import POLL_INTERVAL_S, TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, NO_MORE_WORK, OutgoingMessages
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine


class ParameterServerClient:
    """Runs the state machine of a worker on a thread. Errors of the thread are raised by the methods that wait."""

    def __init__(
        self,
        state_machine: WorkerStateMachine,
        partition: ParameterSlicingPlan,
        flat_parameters: FlatParameters,
        *,
        transport: TcpTransport,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.sibling_errors: list[BaseException] = []  # Errors of other threads of this process
        self._state_machine, self._transport = state_machine, transport
        self._partition, self._flat_parameters = partition, flat_parameters
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._changed = threading.Condition()
        self._arrived_buckets: set[int] = set()
        self._is_coordinator_connected = self._is_closed = False
        self._current_assignment_id = 0
        self._error: BaseException | None = None
        self._compressor = make_compressor(partition.compression.push_codec, partition.compression)
        self._encoded_pushes: dict[int, Tensor] = {}  # Of the current assignment, by slice
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next_assignment(self) -> messages.WorkAssignment | None:
        """The next assignment; None at the end. A connected coordinator may take any time to answer."""
        while not self._has_new_assignment():
            if COORDINATOR not in self._transport.peer_handshakes:
                self._wait_for_coordinator()
            failure = "the coordinator does not answer"
            self._wait_until(lambda: self._is_coordinator_connected or self._has_new_assignment(), failure)
            self._wait_until(lambda: not self._is_coordinator_connected or self._has_new_assignment())
        assignment = self._state_machine.assignment
        self._current_assignment_id = assignment.assignment_id
        self._arrived_buckets, self._encoded_pushes = set(), {}
        return None if assignment.work_item == NO_MORE_WORK else assignment

    def _wait_for_coordinator(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._is_coordinator_connected, self._connect_timeout_s)
        if COORDINATOR not in self._transport.peer_handshakes and self._error is None:
            (host, port), seconds = self._transport.peer_addresses[COORDINATOR], f"{self._connect_timeout_s:g} s"
            remedy = "check that the run exists and sets layout.server.listen"
            raise InputError(f"cannot reach the coordinator at {host}:{port} within {seconds}; {remedy}")

    @property
    def coordinator_handshake(self) -> Mapping[str, str]:
        return self._transport.peer_handshakes[COORDINATOR]

    def _has_new_assignment(self) -> bool:
        return self._state_machine.assignment.assignment_id > self._current_assignment_id

    def wait_for_bucket(self, bucket_id: int) -> None:
        """Wait until the parameters of a bucket have arrived."""
        if bucket_id in self._arrived_buckets:
            return
        slice_ids = set(self._partition.slice_ids_by_bucket[bucket_id])
        failure = f"parameters of bucket {bucket_id} did not come"
        self._wait_until(lambda: slice_ids <= self._state_machine.pulled_versions.keys(), failure)
        self._arrived_buckets.add(bucket_id)
        self._flat_parameters.bump_versions(bucket_id)

    def wait_for_all(self) -> int:
        """Wait until all parameters have arrived; returns the oldest version among them."""
        machine, count = self._state_machine, len(self._partition.slices)
        self._wait_until(lambda: len(machine.pulled_versions) == count, "parameters did not come")
        return min(machine.pulled_versions.values())

    def push_bucket(self, bucket_id: int, report: messages.WorkItemReport) -> None:
        """Push the gradients of a bucket; they must stay unchanged until the next assignment."""
        slice_ids = tuple(self._partition.slice_ids_by_bucket[bucket_id])
        with self._changed:
            ready = messages.GradientsReady(self._current_assignment_id, slice_ids, report)
            self._send_all(self._state_machine.handle(ready))

    def set_bucket_order(self, bucket_ids: Sequence[int]) -> None:
        """Give buckets priority in the order in which forward needs them."""
        with self._changed:
            for priority, bucket_id in enumerate(bucket_ids):
                slice_ids = self._partition.slice_ids_by_bucket[bucket_id]
                self._state_machine.priorities |= dict.fromkeys(slice_ids, priority)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _wait_until(self, condition: Callable[[], bool], failure: str = "") -> None:
        """Wait for as long as it takes if the failure has no name."""
        timeout_s = self._timeout_s if failure else None
        with self._changed:
            is_satisfied = self._changed.wait_for(lambda: self._error is not None or condition(), timeout_s)
        if self._error is not None:
            raise self._error
        if not is_satisfied:
            raise PeerFailedError(f"{self._state_machine.name} has waited for {timeout_s:g} s, and {failure}")

    def _listen(self) -> None:
        try:
            while not self._is_closed:
                if self.sibling_errors:
                    raise self.sibling_errors[0]
                with contextlib.suppress(queue.Empty):
                    event = self._transport.inbox.get(timeout=POLL_INTERVAL_S)
                    with self._changed, torch.no_grad():
                        self._send_all(self._handle(event))
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # raised by the methods that wait
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, state_machine = event.message, self._state_machine
        if message is None:
            if event.sender == COORDINATOR:
                self._is_coordinator_connected = event.is_connected
            return state_machine.messages_on_connect(event.sender) if event.is_connected else []
        if self._transport.handle_membership(message, lambda name: True):
            return []
        if isinstance(message, messages.ParameterPullReply):
            is_current = message.assignment_id == state_machine.assignment.assignment_id
            if is_current and message.slice_id not in state_machine.pulled_versions:
                compute = self._flat_parameters.compute[self._partition.slices[message.slice_id].flat_range]
                compute.copy_(decompress(self._partition.compression.pull_codec, event.payload, compute))
        return state_machine.handle(message)

    def _encoded_push(self, push: messages.GradientPush) -> Tensor:
        """The message of a push. A repeated push sends the same one, so that error feedback counts it only once."""
        gradient = self._flat_parameters.gradients.local_slice(self._partition.slices[push.slice_id].flat_range).cpu()
        if self._compressor is None:
            return gradient
        if push.slice_id not in self._encoded_pushes:
            self._encoded_pushes[push.slice_id] = self._compressor.compress(push.slice_id, push.work_item, gradient)
        return self._encoded_pushes[push.slice_id]

    def _send_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            if isinstance(message, messages.GradientPush):
                payload = tensor_bytes(self._encoded_push(message))
                priority = self._state_machine.priorities.get(message.slice_id, 0)
                self._transport.send(to, message, payload, priority=priority)
            elif not isinstance(message, messages.ParametersReady):
                self._transport.send(to, message)
