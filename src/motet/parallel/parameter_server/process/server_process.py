"""A server's event loop: handles messages with the state machine, and executes what that decides on tensors."""

import queue
import time

import torch
from torch import Tensor

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.process.parameter_store import (
    ParameterStore,
    deserialize_tensors,
    serialize_tensors,
    tensor_bytes,
)
from motet.parallel.parameter_server.process.server_snapshots import ServerSnapshots
from motet.parallel.parameter_server.process.tcp_transport import POLL_INTERVAL_S, TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, Message, OutgoingMessages
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine

PUSH_PREFIX = "push/"
TRAFFIC_REPORT_INTERVAL_S = 0.05


class ParameterServerProcess:
    """Runs the state machine of a server, until the run ends or an error is raised, such as `EvictedError`."""

    def __init__(
        self,
        state_machine: ServerStateMachine,
        store: ParameterStore,
        transport: TcpTransport,
        *,
        timeout_s: float,
        snapshots: ServerSnapshots | None = None,
    ) -> None:
        self.has_ended = False
        self._state_machine, self._store, self._snapshots = state_machine, store, snapshots
        self._transport, self._timeout_s = transport, timeout_s  # The timeout is for a server without a coordinator
        self._takeover_offer: messages.ServerTakeoverOffer | None = None
        self._coordinator_lost_at_s: float | None = time.monotonic()  # None while it is connected
        self._last_traffic_report_s = 0.0

    def offer_takeover(self, replaced_server: str) -> None:
        """Load the snapshots, and offer to replace a lost server."""
        snapshots = self._snapshots.load_all() if self._snapshots else {}
        for slice_id, (_, tensors) in snapshots.items():
            self._store.load_slice_state(slice_id, tensors)
        versions = tuple(sorted((slice_id, version) for slice_id, (version, _) in snapshots.items()))
        self._takeover_offer = messages.ServerTakeoverOffer(self._state_machine.name, replaced_server, versions)

    @torch.no_grad()
    def run(self) -> None:
        while not self.has_ended:
            try:
                event = self._transport.inbox.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                lost_at_s = self._coordinator_lost_at_s
                if lost_at_s is not None and time.monotonic() - lost_at_s > self._timeout_s:
                    name, seconds = self._state_machine.name, f"{self._timeout_s:g} s"
                    raise PeerFailedError(f"server {name} has been without the coordinator for {seconds}") from None
                continue
            was_initialized = self._is_initialized
            self._execute_all(self._handle(event))
            if self._is_initialized and not was_initialized:
                self._transport.send(COORDINATOR, self._server_address())

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, state_machine = event.message, self._state_machine
        if message is None:
            return self._handle_connection_change(event)
        if self._transport.handle_membership(message, lambda name: name > state_machine.name):
            return []
        match message:
            case messages.ServerShutdown():
                self.has_ended = True
                return []
            case messages.ParameterStateRequest(slice_id):
                reply = messages.ParameterStateReply(slice_id, state_machine.slice_states[slice_id].version)
                self._transport.send(event.sender, reply, serialize_tensors(self._store.slice_state(slice_id)))
                return []
            case (
                messages.GradientPush(slice_id=slice_id, work_item=work_item)
                | messages.BackupPush(slice_id=slice_id, work_item=work_item)
            ):
                was_pending = self._is_pending(slice_id, work_item)
                outgoing = state_machine.handle(message)
                if not was_pending and self._is_pending(slice_id, work_item):
                    self._store.add_push(slice_id, work_item, event.payload, worker=event.sender)
                return outgoing
            case messages.SliceStartVersion(slice_id=slice_id) | messages.ParameterStateTransfer(slice_id=slice_id):
                if event.payload and not state_machine.is_slice_initialized(slice_id):
                    self._load_slice_state(slice_id, deserialize_tensors(event.payload))
        return state_machine.handle(message)

    def _handle_connection_change(self, event: TransportEvent) -> OutgoingMessages:
        outgoing: OutgoingMessages = []
        if event.sender == COORDINATOR:
            self._coordinator_lost_at_s = None if event.is_connected else time.monotonic()
            outgoing.append((COORDINATOR, self._server_address()))
            if self._takeover_offer:
                outgoing.append((COORDINATOR, self._takeover_offer))
        return outgoing + self._state_machine.messages_on_connect(event.sender) if event.is_connected else []

    def _is_pending(self, slice_id: int, work_item: int) -> bool:
        slice_state = self._state_machine.slice_states.get(slice_id)
        return slice_state is not None and work_item in slice_state.pending_work_items

    @property
    def _is_initialized(self) -> bool:
        slice_states = self._state_machine.slice_states.values()
        return bool(slice_states) and all(state.is_initialized for state in slice_states)

    def _server_address(self) -> messages.ServerAddress:
        return messages.ServerAddress(self._state_machine.name, *self._transport.address, self._is_initialized)

    def _load_slice_state(self, slice_id: int, tensors: dict[str, Tensor]) -> None:
        pushes = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PUSH_PREFIX)}
        self._store.load_slice_state(slice_id, tensors)
        for name, gradient in pushes.items():
            self._store.add_push(slice_id, int(name.removeprefix(PUSH_PREFIX)), bytearray(tensor_bytes(gradient)))

    def _execute_all(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            self._execute(to, message)
        for slice_id in {message.slice_id for _, message in outgoing if isinstance(message, messages.ApplyUpdate)}:
            state = self._state_machine.slice_states[slice_id]
            self._store.discard_pushes_except(slice_id, state.pending_work_items | state.pushes_awaiting_backup.keys())
            if self._snapshots and state.version % self._snapshots.interval_updates == 0:
                self._snapshots.save(slice_id, state.version, self._store.full_slice_state(slice_id))
        if time.monotonic() - self._last_traffic_report_s > TRAFFIC_REPORT_INTERVAL_S:
            self._last_traffic_report_s = time.monotonic()
            traffic = [
                (peer_traffic.sent_bytes, peer_traffic.received_bytes, self._transport.queued_bytes(peer))
                for peer, peer_traffic in list(self._transport.traffic.items())
                if peer != COORDINATOR
            ]
            totals = map(sum, zip((0, 0, 0), *traffic, strict=True))
            self._transport.send(COORDINATOR, messages.ServerTrafficReport(*totals))

    def _execute(self, to: str, message: Message) -> None:
        payload: memoryview | None = None
        priority = -1
        match message:
            case messages.ApplyUpdate(slice_id, decision):
                if decision.scalars.is_applied:
                    self._store.apply_update(slice_id, decision.work_items, decision.scalars)
                return
            case messages.GradientNormReply(attempt, slice_id):
                assert self._state_machine.norm_request is not None
                squared_norm = self._store.squared_norm(slice_id, self._state_machine.norm_request.work_items)
                message = messages.GradientNormReply(attempt, slice_id, squared_norm)
            case messages.ParameterPullReply(_, slice_id, _, priority):
                payload = self._store.value_for_worker(slice_id, to)
            case messages.BackupPush(_, slice_id, work_item):
                payload = self._store.push_of(slice_id, work_item)
            case messages.ParameterStateTransfer(slice_id, _, _, pending_work_items):
                state = self._store.full_slice_state(slice_id)
                for work_item in pending_work_items:
                    push = self._store.push_of(slice_id, work_item)
                    state[f"{PUSH_PREFIX}{work_item}"] = torch.frombuffer(push, dtype=torch.uint8)
                payload = serialize_tensors(state)
        self._transport.send(to, message, payload, priority=priority)
