"""A server at work: takes what comes to its post, and does what its keeper says."""

import queue
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.parameter_server.process.parameter_store import (
    ParameterStore,
    deserialize_tensors,
    serialize_tensors,
    tensor_bytes,
)
from motet.parallel.parameter_server.process.server_snapshots import ServerSnapshots
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    ApplyUpdate,
    BackupPush,
    ConnectionRejected,
    EvictionNotice,
    GradientNormReply,
    GradientPush,
    Message,
    OutgoingMessages,
    ParameterPullReply,
    ParameterStateAssignment,
    ParameterStateReply,
    ParameterStateRequest,
    ParameterStateTransfer,
    ServerAddress,
    ServerAddressBook,
    ServerShutdown,
    ServerTakeoverOffer,
    ServerTrafficReport,
)
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine

PUSH_PREFIX = "given/"
POLL_INTERVAL_S = 0.5  # How often it is looked whether there is an end
TRAFFIC_REPORT_INTERVAL_S = 0.05  # How often the desk is told of traffic, at most


class ParameterServerProcess:
    def __init__(
        self,
        state_machine: ServerStateMachine,
        store: ParameterStore,
        transport: TcpTransport,
        timeout_s: float,
        snapshots: ServerSnapshots | None = None,
    ) -> None:
        """It goes on without a desk for `limit_s`."""
        self._state_machine = state_machine
        self._store = store
        self._transport = transport
        self._snapshots = snapshots
        self._takeover_offer: ServerTakeoverOffer | None = None
        self.has_ended = False
        self.is_evicted = False  # The desk has another one for its part
        self._timeout_s = timeout_s
        self._coordinator_lost_at_s: float | None = time.monotonic()  # When it was connected last; None while it is
        self._last_traffic_report_s = 0.0
        self._known_servers: set[str] = set()

    def offer_takeover(self, replaced_server: str) -> None:
        """Of another one, with what is known from its snapshots."""
        snapshots = self._snapshots.load_all() if self._snapshots else {}
        for slice_id, (_, tensors) in snapshots.items():
            self._store.load_slice_state(slice_id, tensors)
        versions = tuple(sorted((piece, version) for piece, (version, _) in snapshots.items()))
        self._takeover_offer = ServerTakeoverOffer(self._state_machine.name, replaced_server, versions)

    @torch.no_grad()
    def run(self) -> None:
        while not self.has_ended and not self.is_evicted:
            try:
                event = self._transport.inbox.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                self._check_coordinator()
                continue
            if event.message is None:
                self._execute_all(self._handle_connection_change(event.sender, event.is_connected))
            else:
                was_initialized = self._is_initialized
                self._execute_all(self._handle(event.sender, event.message, event.payload))
                if self._is_initialized and not was_initialized:
                    self._transport.send(
                        COORDINATOR,
                        ServerAddress(self._state_machine.name, *self._transport.address, is_initialized=True),
                    )

    def _check_coordinator(self) -> None:
        if self._coordinator_lost_at_s is not None and time.monotonic() - self._coordinator_lost_at_s > self._timeout_s:
            raise PeerFailedError(
                f"server {self._state_machine.name} has been without the desk for {self._timeout_s:g} s"
            )

    def _handle(self, sender: str, message: Message, payload: bytearray) -> OutgoingMessages:
        match message:
            case ServerAddressBook():
                self._known_servers = self._transport.follow_address_book(
                    message, self._known_servers, lambda name: name > self._state_machine.name
                )
                return []
            case ConnectionRejected(reason):
                raise InputError(reason)
            case EvictionNotice():
                self.is_evicted = True
                return []
            case ServerShutdown():
                self.has_ended = True
                return []
            case (
                GradientPush(slice_id=slice_id, work_item=work_item)
                | BackupPush(slice_id=slice_id, work_item=work_item)
            ):
                previous_state = self._state_machine.slice_states.get(slice_id)
                is_known = previous_state is not None and work_item in previous_state.pending_work_items
                outgoing = self._state_machine.handle(message)
                slice_state = self._state_machine.slice_states.get(slice_id)
                if not is_known and slice_state is not None and work_item in slice_state.pending_work_items:
                    self._store.add_push(slice_id, work_item, payload, sender)
                return outgoing
            case ParameterStateRequest(slice_id):
                stored = ParameterStateReply(slice_id, self._state_machine.slice_states[slice_id].version)
                self._transport.send(sender, stored, serialize_tensors(self._store.slice_state(slice_id)))
                return []
            case ParameterStateAssignment(slice_id=slice_id) | ParameterStateTransfer(slice_id=slice_id) if (
                payload and not self._state_machine.is_slice_initialized(slice_id)
            ):
                self._load_slice_state(message, deserialize_tensors(payload))
        return self._state_machine.handle(message)

    @property
    def _is_initialized(self) -> bool:
        slice_states = self._state_machine.slice_states.values()
        return bool(slice_states) and all(each.is_initialized for each in slice_states)

    def _load_slice_state(
        self, assigned: ParameterStateAssignment | ParameterStateTransfer, tensors: dict[str, Tensor]
    ) -> None:
        pushes = {
            int(name.removeprefix(PUSH_PREFIX)): tensors.pop(name)
            for name in list(tensors)
            if name.startswith(PUSH_PREFIX)
        }
        self._store.load_slice_state(assigned.slice_id, tensors)
        for work_item, gradient in pushes.items():
            self._store.add_push(assigned.slice_id, work_item, bytearray(tensor_bytes(gradient)))

    def _encoded_slice_state(self, slice_id: int, work_items: Iterable[int] = ()) -> memoryview:
        """What is known of a piece, with what was pushed for these shares."""
        pushes = {
            f"{PUSH_PREFIX}{work_item}": torch.frombuffer(self._store.push_of(slice_id, work_item), dtype=torch.uint8)
            for work_item in work_items
        }
        return serialize_tensors(self._store.full_slice_state(slice_id) | pushes)

    def _handle_connection_change(self, peer: str, is_connected: bool) -> OutgoingMessages:
        if peer == COORDINATOR:
            self._coordinator_lost_at_s = None if is_connected else time.monotonic()
        if not is_connected:
            return []
        messages: OutgoingMessages = []
        if peer == COORDINATOR:
            messages.append(
                (COORDINATOR, ServerAddress(self._state_machine.name, *self._transport.address, self._is_initialized))
            )
            if self._takeover_offer:
                messages.append((COORDINATOR, self._takeover_offer))
        return messages + self._state_machine.messages_on_connect(peer)

    def _execute_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            self._execute(to, message)
        for slice_id in {message.slice_id for _, message in outgoing if isinstance(message, ApplyUpdate)}:
            slice_state = self._state_machine.slice_states[slice_id]
            self._store.discard_pushes_except(
                slice_id, slice_state.pending_work_items | slice_state.pushes_awaiting_backup.keys()
            )
            if self._snapshots and slice_state.version % self._snapshots.interval_updates == 0:
                self._snapshots.save(slice_id, slice_state.version, self._store.full_slice_state(slice_id))
        if time.monotonic() - self._last_traffic_report_s > TRAFFIC_REPORT_INTERVAL_S:
            self._last_traffic_report_s = time.monotonic()
            self._transport.send(COORDINATOR, self._traffic_report())

    def _traffic_report(self) -> ServerTrafficReport:
        peer_traffic = [
            (peer, traffic) for peer, traffic in list(self._transport.traffic.items()) if peer != COORDINATOR
        ]
        return ServerTrafficReport(
            sum(traffic.sent_bytes for _, traffic in peer_traffic),
            sum(traffic.received_bytes for _, traffic in peer_traffic),
            sum(self._transport.queued_bytes(peer) for peer, _ in peer_traffic),
        )

    def _execute(self, to: str, message: Message) -> None:
        store = self._store
        match message:
            case ApplyUpdate(slice_id, (_, work_items, _, scalars)):
                learning_rate, factor, applied = scalars
                if applied:
                    store.apply_update(slice_id, work_items, learning_rate, factor)
            case GradientNormReply(attempt, slice_id):
                norm_request = self._state_machine.norm_request
                assert norm_request is not None
                self._transport.send(
                    to, GradientNormReply(attempt, slice_id, store.squared_norm(slice_id, norm_request.work_items))
                )
            case ParameterPullReply(_, slice_id, _, priority):
                self._transport.send(to, message, store.value_for_worker(slice_id, to), priority)
            case BackupPush(_, slice_id, work_item):
                self._transport.send(to, message, store.push_of(slice_id, work_item))
            case ParameterStateTransfer(slice_id, _, _, pending_work_items):
                self._transport.send(to, message, self._encoded_slice_state(slice_id, pending_work_items))
            case _:
                self._transport.send(to, message)
