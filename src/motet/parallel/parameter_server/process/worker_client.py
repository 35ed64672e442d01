"""A worker's side: parameters arrive beside forward, gradients leave beside backward."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.data_parallel.flat_parameters import FlatParameters
from motet.parallel.parameter_server.process.parameter_store import ParameterPartition, tensor_bytes
from motet.parallel.parameter_server.process.push_pull_compression import PushPullCompressor, decompress_parameters
from motet.parallel.parameter_server.process.server_process import POLL_INTERVAL_S
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    NO_MORE_WORK,
    ConnectionRejected,
    EvictionNotice,
    GradientPush,
    GradientsReady,
    Message,
    OpaqueScalars,
    OutgoingMessages,
    ParameterPullReply,
    ParametersReady,
    ServerAddressBook,
    WorkAssignment,
)
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine


class WorkerEvictedError(PeerFailedError):
    """Others do what this worker had to do; it may join anew."""


class ParameterServerClient:
    """Speaks with the desk and the servers on a thread of its own."""

    def __init__(
        self,
        state_machine: WorkerStateMachine,
        partition: ParameterPartition,
        flat_parameters: FlatParameters,
        transport: TcpTransport,
        timeouts_s: tuple[float, float],
    ) -> None:
        """Limits: of any wait, and of the first for the desk."""
        self._state_machine = state_machine
        self._partition = partition
        self._flat_parameters = flat_parameters
        self._transport = transport
        self._timeout_s, self._connect_timeout_s = timeouts_s
        self._changed = threading.Condition()
        self._arrived_buckets: set[int] = set()  # Buckets whose parameters are those of the ticket
        self._is_coordinator_connected = False
        self._current_assignment_id = 0  # The number of the last ticket that was begun
        self._error: BaseException | None = None
        self.sibling_errors: list[BaseException] = []  # What other threads of this process ended with
        self._is_closed = False
        self._compressor = (
            PushPullCompressor(partition.compression.push_codec, partition.compression)
            if partition.compression.push_codec
            else None
        )
        self._encoded_pushes: dict[int, Tensor] = {}  # What was pushed of this ticket, by piece
        self._known_servers: set[str] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next_assignment(self) -> WorkAssignment | None:
        """The next ticket; None at the end. As long as the desk is there it may have other things to do."""
        while not self._has_new_assignment():
            if COORDINATOR not in self._transport.peer_handshakes:
                self._wait_for_coordinator()
            self._wait_until(
                lambda: self._is_coordinator_connected or self._has_new_assignment(),
                "the desk does not answer",
                self._timeout_s,
            )
            self._wait_until(lambda: not self._is_coordinator_connected or self._has_new_assignment(), "", None)
        assignment = self._state_machine.assignment
        self._current_assignment_id = assignment.assignment_id
        self._arrived_buckets.clear()
        self._encoded_pushes.clear()
        return None if assignment.work_item == NO_MORE_WORK else assignment

    def _wait_for_coordinator(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._is_coordinator_connected, self._connect_timeout_s
            )
        if COORDINATOR not in self._transport.peer_handshakes and self._error is None:
            host, port = self._transport.peer_addresses[COORDINATOR]
            raise InputError(
                f"cannot reach the desk at {host}:{port} within {self._connect_timeout_s:g} s; is the run there, with "
                "layout.server.listen?"
            )

    @property
    def coordinator_handshake(self) -> Mapping[str, str]:
        """What the desk says of the run."""
        return self._transport.peer_handshakes[COORDINATOR]

    def _has_new_assignment(self) -> bool:
        return self._state_machine.assignment.assignment_id > self._current_assignment_id

    def wait_for_bucket(self, bucket_id: int) -> None:
        """Until the parameters of a bucket are there."""
        if bucket_id in self._arrived_buckets:
            return
        slice_ids = set(self._partition.slice_ids_of_bucket(bucket_id))
        self._wait_until(
            lambda: slice_ids <= self._state_machine.pulled_versions.keys(),
            f"parameters of bucket {bucket_id} did not come",
            self._timeout_s,
        )
        self._arrived_buckets.add(bucket_id)
        self._flat_parameters.bump_versions(bucket_id)

    def wait_for_all(self) -> None:
        count = len(self._partition.slices)
        self._wait_until(
            lambda: len(self._state_machine.pulled_versions) == count, "parameters did not come", self._timeout_s
        )

    def push_bucket(self, bucket_id: int, report: OpaqueScalars) -> None:
        """The gradients of a bucket are there, and stay until there is another ticket."""
        slice_ids = tuple(self._partition.slice_ids_of_bucket(bucket_id))
        with self._changed:
            self._send_all(self._state_machine.handle(GradientsReady(self._current_assignment_id, slice_ids, report)))

    def set_bucket_order(self, bucket_ids: Sequence[int]) -> None:
        """In which forward needs them."""
        with self._changed:
            for priority, bucket_id in enumerate(bucket_ids):
                self._state_machine.priorities |= dict.fromkeys(
                    self._partition.slice_ids_of_bucket(bucket_id), priority
                )

    @property
    def pulled_versions(self) -> Sequence[int]:
        """Of what was computed with."""
        return tuple(self._state_machine.pulled_versions.values())

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()

    def _wait_until(self, condition: Callable[[], bool], failure: str, timeout_s: float | None) -> None:
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
                try:
                    event = self._transport.inbox.get(timeout=POLL_INTERVAL_S)
                except queue.Empty:
                    continue
                with self._changed, torch.no_grad():
                    self._send_all(self._handle(event))
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # told where it is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, state_machine = event.message, self._state_machine
        match message:
            case None:
                if event.sender == COORDINATOR:
                    self._is_coordinator_connected = event.is_connected
                return state_machine.messages_on_connect(event.sender) if event.is_connected else []
            case ServerAddressBook():
                self._known_servers = self._transport.follow_address_book(
                    message, self._known_servers, lambda name: True
                )
                return []
            case ConnectionRejected(reason):
                raise InputError(reason)
            case EvictionNotice():
                raise WorkerEvictedError(f"{state_machine.name} was out of reach for too long")
            case ParameterPullReply(assignment_id, slice_id) if (
                assignment_id == state_machine.assignment.assignment_id
                and slice_id not in state_machine.pulled_versions
            ):
                compute = self._flat_parameters.compute[self._partition.slices[slice_id].flat_range]
                compute.copy_(decompress_parameters(self._partition.compression, event.payload, compute))
        return state_machine.handle(message)

    def _encoded_push(self, push: GradientPush) -> Tensor:
        """The same when it is said again: what compression has lost counts once."""
        gradient = self._flat_parameters.gradients.local_slice(self._partition.slices[push.slice_id].flat_range).cpu()
        if self._compressor is None:
            return gradient
        if push.slice_id not in self._encoded_pushes:
            self._encoded_pushes[push.slice_id] = self._compressor.compress(push.slice_id, push.work_item, gradient)
        return self._encoded_pushes[push.slice_id]

    def _send_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            self._send(to, message)

    def _send(self, to: str, message: Message) -> None:
        if isinstance(message, GradientPush):
            self._transport.send(
                to,
                message,
                tensor_bytes(self._encoded_push(message)),
                self._state_machine.priorities.get(message.slice_id, 0),
            )
        elif not isinstance(message, ParametersReady):
            self._transport.send(to, message)
