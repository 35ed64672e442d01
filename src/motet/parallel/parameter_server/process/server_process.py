"""A server's event loop: handles messages with the state machine, and executes what that decides on tensors."""

import time
from dataclasses import dataclass, field

import torch

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.process import parameter_store
from motet.parallel.parameter_server.process.server_snapshots import ServerSnapshots
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_framing import BadMessageError
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, Message, OutgoingMessages
from motet.parallel.parameter_server.protocol.server_state_machine import ServerStateMachine

TRAFFIC_REPORT_INTERVAL_S = 0.05
MAX_PENDING_WORK_ITEMS = 4096  # Of each slice
MAX_WAITING_PULLS = 64  # Of each slice and worker, which pulls a slice again with each assignment


@dataclass
class ParameterServerProcess:
    """Runs the state machine of a server, until the run ends or an error is raised, such as `EvictedError`."""

    state_machine: ServerStateMachine
    store: parameter_store.ParameterStore
    transport: TcpTransport
    timeout_s: float = field(kw_only=True)  # Without a coordinator
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
                content = parameter_store.serialize_tensors(self.store.slice_state(slice_id))
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
                    state = parameter_store.read_slice_state(self.store.partition, slice_id, event.payload)
                    self.store.load_slice_state(slice_id, state)
        return state_machine.handle(message)

    def _check(self, message: Message, payload: bytearray) -> None:
        """Raise a `BadMessageError` for a message that contradicts what the server knows, or that fills its memory."""
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
                payload = parameter_store.serialize_tensors(self.store.full_slice_state(slice_id, pending_work_items))
        self.transport.send(to, message, payload, priority=priority)
