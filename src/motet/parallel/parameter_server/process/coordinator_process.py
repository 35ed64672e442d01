"""The coordinator's event loop: handles messages, evicts processes that stay unreachable, and admits new servers."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.process.tcp_transport import POLL_INTERVAL_S, TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import (
    BadMessageError,
    DecisionReplayRequest,
    GradientNormReply,
    OutgoingMessages,
)
from motet.parallel.parameter_server.protocol.state_machines import CoordinatorStateMachine

REFETCH_INTERVAL_S = 0.05  # Wait before the coordinator asks again a server that has not applied the last update
RECONNECT_GRACE_S = 3.0  # Wait after a connection was closed, perhaps by a process that ends


@dataclass
class CoordinatorProcess:
    """Runs the state machine of a coordinator."""

    state_machine: CoordinatorStateMachine
    transport: TcpTransport
    stored_slice_state: Callable[[int], memoryview]  # Tensors at the start of the run, later those of the last fetch
    timeout_s: float = field(kw_only=True)
    eviction_timeout_s: float = field(kw_only=True)
    # Raises a `BadMessageError` for a slice state that a server has sent.
    check_slice_state: Callable[[int, bytearray], object] = lambda slice_id, content: None
    log_membership: Callable[[str], None] = lambda text: None  # Called when a process joins, leaves or is replaced
    traffic_reports: dict[str, messages.ServerTrafficReport] = field(default_factory=dict)
    _addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    # (since when, seconds until the process is evicted, if others can replace it).
    _disconnected: dict[str, tuple[float, float]] = field(default_factory=dict)
    # By replacing server: the start of its slices; True: with the stored tensors, which its snapshot does not have.
    _initial_states: dict[str, list[tuple[messages.SliceStartVersion, bool]]] = field(default_factory=dict)
    _fetched_states: dict[int, bytearray] = field(default_factory=dict)
    _pending_fetches: set[int] = field(default_factory=set)
    _stale_slices: set[int] = field(default_factory=set)  # Fetched at an older version than the last
    _ever_connected: set[str] = field(default_factory=set)
    _initialized_servers: set[str] = field(default_factory=set)
    _has_sent_shutdown: bool = False

    def __post_init__(self) -> None:
        self._stored_version = self.state_machine.first_logged_update, self.state_machine.decided

    def run(self, is_done: Callable[[], bool], activity: str) -> None:
        last_message_s = time.monotonic()
        while not is_done():
            if event := self.transport.next_event(REFETCH_INTERVAL_S if self._stale_slices else POLL_INTERVAL_S):
                if not (isinstance(event.message, messages.ParameterStateReply) and self._stale_slices):
                    last_message_s = time.monotonic()
                try:
                    self._check(event)
                    self.transport.send_all(self._handle(event))
                except BadMessageError as error:
                    self.transport.refuse(event.sender, error)
            else:
                stale_slices, self._stale_slices = self._stale_slices, set()
                self._request_slice_states(stale_slices & self._pending_fetches)
            self._evict_unreachable()
            if is_done():
                return
            if time.monotonic() - last_message_s > self.timeout_s:
                raise PeerFailedError(f"the coordinator has heard nothing for {self.timeout_s:g} s, {activity}")

    def extend_to_step(self, step_limit: int, ends_at_step_limit: bool = False) -> None:
        self.transport.send_all(self.state_machine.extend_to_step(step_limit, ends_at_step_limit))

    def close(self, expected_processes: Collection[str]) -> None:
        """Tell all processes that the run has ended, and wait until they have left. Nothing is logged after that."""
        machine, transport = self.state_machine, self.transport
        expected, lost = set(expected_processes), machine.lost_processes
        self.log_membership = lambda text: None
        # On a busy machine the others may do all the work before a process has started.
        self._run_until(lambda: {*map(_role_of, self._ever_connected)} >= expected - lost, self.timeout_s)
        self.extend_to_step(machine.policy.step_of(machine.decided.floor), ends_at_step_limit=True)
        self._run_until(lambda: set(transport.connected_peers) <= set(machine.servers), self.timeout_s)
        self._has_sent_shutdown = True
        transport.send_all([(server, messages.ServerShutdown(machine.update_count)) for server in machine.servers])
        self._run_until(lambda: not transport.connected_peers, self.timeout_s)

    def _run_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self.run(lambda: is_done() or time.monotonic() > deadline_s, "waiting for all to end")

    def fetch_slice_states(self) -> dict[int, bytearray]:
        """The state of all slices on the servers, while nothing is in flight."""
        assert self.state_machine.is_quiescent
        self._fetched_states.clear()
        self._pending_fetches = set(range(len(self.state_machine.placement.replicas)))
        self._request_slice_states(self._pending_fetches)
        self.run(lambda: not self._pending_fetches, "waiting for the parameters of the servers")
        slice_states, self._fetched_states = self._fetched_states, {}
        self._stored_version = self.state_machine.update_count, self.state_machine.decided
        return slice_states

    def _request_slice_states(self, slice_ids: Iterable[int]) -> None:
        for slice_id in sorted(slice_ids):
            for primary in self.state_machine.placement.replicas[slice_id].servers[:1]:
                self.transport.send(primary, messages.ParameterStateRequest(slice_id))

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        match message := event.message:
            case None:
                return self._handle_connection_change(event)
            case messages.ServerAddress(server, host, port, is_initialized):
                if server in self.state_machine.lost_processes:
                    return [(server, messages.EvictionNotice(server))]
                self._addresses[server] = host, port
                if is_initialized:
                    self._initialized_servers.add(server)
                else:
                    self._send_initial_states(server)
                self._request_slice_states(self._pending_fetches)
                return self._address_book_messages()
            case messages.ServerTakeoverOffer():
                return self._admit_server(message)
            case messages.ParameterStateReply(slice_id, version) if version < self.state_machine.update_count:
                self._stale_slices.add(slice_id)
            case messages.ParameterStateReply(slice_id):
                self._fetched_states[slice_id] = event.payload
                self._pending_fetches.discard(slice_id)
            case messages.ServerTrafficReport():
                self.traffic_reports[event.sender] = message
            case messages.WorkerJoined() | messages.WorkItemCompleted() | GradientNormReply() | DecisionReplayRequest():
                return self.state_machine.handle(message)
        return []

    def _check(self, event: TransportEvent) -> None:
        """Raise a `BadMessageError` for a message that contradicts the coordinator's state."""
        match event.message:
            case messages.WorkItemCompleted(_, work_item, _, report):
                machine, version = self.state_machine, report.oldest_version
                if not 0 <= work_item < machine.next_work_item or version > machine.update_count:
                    raise BadMessageError(f"work item {work_item} was not assigned with parameters after {version:g}")
            case messages.ParameterStateReply(slice_id):
                self.check_slice_state(slice_id, event.payload)

    def _handle_connection_change(self, event: TransportEvent) -> OutgoingMessages:
        peer = event.sender
        if not event.is_connected:
            timeout_s = self.eviction_timeout_s
            grace_s = timeout_s / 2 if event.has_timed_out else min(RECONNECT_GRACE_S, timeout_s)
            self._disconnected[peer] = time.monotonic(), grace_s
            return []
        self._disconnected.pop(peer, None)
        if peer not in self._ever_connected:
            self._ever_connected.add(peer)
            if self.state_machine.decision_log:
                self.log_membership(f"{peer} has joined the run")
        if self._has_sent_shutdown and peer in self.state_machine.servers:
            return [(peer, messages.ServerShutdown(self.state_machine.update_count))]
        return [(peer, self._address_book())]

    def _evict_unreachable(self) -> None:
        for name, (at_s, grace_s) in list(self._disconnected.items()):
            disconnected_s = time.monotonic() - at_s
            if name in self.transport.connected_peers or name in self.state_machine.lost_processes:
                del self._disconnected[name]
            elif disconnected_s > grace_s and self.state_machine.is_replaceable(name, self._initialized_servers):
                del self._disconnected[name]
                self._evict(name)
            elif disconnected_s > self.timeout_s:
                raise PeerFailedError(f"server {name} has been gone for {self.timeout_s:g} s; no other has its slices")

    def _evict(self, name: str) -> None:
        servers, workers = self.state_machine.servers, self.state_machine.workers
        kind, peers = ("server", servers) if name in servers else ("worker", workers)
        remaining = len(set(peers) - {name})
        self.log_membership(f"{kind} {name} is gone; {remaining} {kind}{'s' * (remaining != 1)} left")
        self._forget_process(name)
        self.transport.send_all(self.state_machine.handle(messages.ProcessLost(name)))
        self.transport.send_all([(name, messages.EvictionNotice(name)), *self._address_book_messages()])
        self._request_slice_states(self._pending_fetches)

    def _forget_process(self, name: str) -> None:
        self._addresses.pop(name, None)
        self._initialized_servers.discard(name)
        if name in self.traffic_reports:
            self.traffic_reports[name] = self.traffic_reports[name]._replace(queued_bytes=0)

    def _admit_server(self, offer: messages.ServerTakeoverOffer) -> OutgoingMessages:
        """Replace a lost server. Slices that its snapshot does not have are sent as of the last fetch."""
        name, replaced_server, snapshot = offer
        state_machine = self.state_machine
        if name in state_machine.servers or name in state_machine.lost_processes:
            return []
        for other in state_machine.servers:
            if _role_of(other) == _role_of(name):  # its predecessor may have ended before it offered anything
                replaced_server = other
        replicas = state_machine.placement.replicas
        neighbors = {server for r in replicas if replaced_server in r.servers for server in r.servers}
        for other in list(state_machine.servers):  # without a state they cannot continue, and join again
            if other in neighbors - {replaced_server, *self._initialized_servers}:
                self._evict(other)
        self._forget_process(replaced_server)
        versions = dict.fromkeys(range(len(replicas)), 0) | dict(snapshot)
        offer = messages.ServerTakeoverOffer(name, replaced_server, tuple(sorted(versions.items())))
        outgoing = state_machine.handle(offer)
        assigned = [m for to, m in outgoing if to == name and isinstance(m, messages.SliceStartVersion)]
        self._initial_states[name] = [(state, state.slice_id not in dict(snapshot)) for state in assigned]
        self._log_takeover(name, replaced_server, [dict(snapshot).get(state.slice_id, -1) for state in assigned])
        self.transport.send_all([sent for sent in outgoing if not isinstance(sent[1], messages.SliceStartVersion)])
        self._send_initial_states(name)
        self._request_slice_states(self._pending_fetches)
        shutdown = [(name, messages.ServerShutdown(state_machine.update_count))] if self._has_sent_shutdown else []
        return [*self._address_book_messages(), *shutdown]

    def _log_takeover(self, server: str, replaced_server: str, snapshot_versions: list[int]) -> None:
        lost_updates = self.state_machine.update_count - min(snapshot_versions, default=0)
        if not snapshot_versions:
            origin = "and gets all slices from the other server"
        elif min(snapshot_versions) < 0:  # not in the snapshot
            origin = "with the parameters that the coordinator fetched last"
        elif lost_updates:
            origin = f"from its snapshot; the last {lost_updates} updates of it are lost"
        else:
            origin = "from its snapshot after the last update"
        self.log_membership(f"server {server} takes the place of {replaced_server}, {origin}")

    def _send_initial_states(self, server: str) -> None:
        replicas = enumerate(self.state_machine.placement.replicas)
        slice_ids = [slice_id for slice_id, (servers, _) in replicas if server in servers]
        stored = [(messages.SliceStartVersion(slice_id, *self._stored_version), True) for slice_id in slice_ids]
        for state, sends_stored in self._initial_states.get(server, stored):
            self.transport.send(server, state, self.stored_slice_state(state.slice_id) if sends_stored else None)

    def _address_book_messages(self) -> OutgoingMessages:
        return [(peer, self._address_book()) for peer in self.transport.connected_peers]

    def _address_book(self) -> messages.ServerAddressBook:
        return messages.ServerAddressBook(tuple((name, *address) for name, address in sorted(self._addresses.items())))


def _role_of(server: str) -> str:
    return server.partition(".")[0].partition("+")[0]  # `s0.1+2` -> `s0`
