"""The desk at work: takes what comes to its post, gives up who is gone for too long, and tells of each update."""

import queue
import time
from collections.abc import Callable, Collection

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.process.server_process import POLL_INTERVAL_S
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    DecisionReplayRequest,
    EvictionNotice,
    GradientNormReply,
    OutgoingMessages,
    ParameterStateAssignment,
    ParameterStateReply,
    ParameterStateRequest,
    ProcessLost,
    ServerAddress,
    ServerAddressBook,
    ServerShutdown,
    ServerTakeoverOffer,
    ServerTrafficReport,
    WorkerJoined,
    WorkItemCompleted,
)

REFETCH_INTERVAL_S = 0.05  # Before a server is asked again that has not come to the last update
RECONNECT_GRACE_S = 3.0  # For whose connection was closed, as that of a process is that ends


class CoordinatorProcess:
    """`tell` may be set to whoever wants to hear of processes that come and go."""

    def __init__(
        self,
        state_machine: CoordinatorStateMachine,
        transport: TcpTransport,
        timeouts_s: tuple[float, float],
        stored_slice_state: Callable[[int], memoryview],
    ) -> None:
        """Limits: without any news, and for whoever is out of reach. `stored` is what a piece begins with: it becomes
        what is fetched."""
        self.state_machine = state_machine
        self.traffic_reports: dict[str, ServerTrafficReport] = {}
        self.log_membership: Callable[[str], None] = _ignore_text
        self._transport = transport
        self._timeout_s, self._eviction_timeout_s = timeouts_s
        self._stored_slice_state = stored_slice_state
        # What `stored` is of: (updates, the shares in them).
        self._stored_version = state_machine.first_logged_update, state_machine.decided
        self._addresses: dict[str, tuple[str, int]] = {}
        # Whose connection is lost: since when, and whether it fell silent.
        self._disconnected: dict[str, tuple[float, bool]] = {}
        # What those that took the place of another were told, and whether with what is stored.
        self._assigned_states: dict[str, list[tuple[ParameterStateAssignment, bool]]] = {}
        self._fetched_states: dict[int, bytearray] = {}
        self._pending_fetches: set[int] = set()  # Pieces that were asked for
        self._ever_connected: set[str] = set()  # Who was ever connected
        self._stale_slices: set[int] = set()  # Those of which something older came
        self._initialized_servers: set[str] = set()  # Servers that know what all their pieces are
        self._is_closing = False
        self._has_sent_shutdown = False

    def run(self, is_done: Callable[[], bool], activity: str) -> None:
        """Do what comes until it is so."""
        last_message_s = time.monotonic()
        while not is_done():
            try:
                event = self._transport.inbox.get(timeout=REFETCH_INTERVAL_S if self._stale_slices else POLL_INTERVAL_S)
                last_message_s = (
                    last_message_s
                    if isinstance(event.message, ParameterStateReply) and self._stale_slices
                    else time.monotonic()
                )
                self._send(self._handle(event))
            except queue.Empty:
                self._refetch_stale()
            self._evict_unreachable()
            if is_done():
                return
            if time.monotonic() - last_message_s > self._timeout_s:
                raise PeerFailedError(
                    f"the parameter server's desk has heard nothing for {self._timeout_s:g} s, {activity}"
                )

    def extend_to_step(self, step_limit: int) -> None:
        self._send(self.state_machine.extend_to_step(step_limit))

    def close(self, expected_processes: Collection[str]) -> None:
        """Tell everybody that this is the end, and wait until they have gone; who is late, for a while."""
        self._wait_until(
            lambda: self._ever_connected >= set(expected_processes) - self.state_machine.lost_processes,
            self._eviction_timeout_s,
        )
        self._is_closing = True
        self._send(
            self.state_machine.extend_to_step(
                self.state_machine.policy.step_of(self.state_machine.decided.floor), ends_at_step_limit=True
            )
        )
        self._wait_until(
            lambda: set(self._transport.connected_peers) <= set(self.state_machine.servers), self._timeout_s
        )
        self._has_sent_shutdown = True
        for server in self.state_machine.servers:
            self._transport.send(server, ServerShutdown(self.state_machine.update_count))
        self._wait_until(lambda: not self._transport.connected_peers, self._timeout_s)

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Until it is so, or for so long: all is done and saved, whoever does not go."""
        deadline_s = time.monotonic() + timeout_s
        self.run(lambda: is_done() or time.monotonic() > deadline_s, "waiting for all to end")

    def fetch_slice_states(self) -> dict[int, bytearray]:
        """What the servers have of all pieces, while nothing is underway."""
        assert self.state_machine.is_quiescent
        self._fetched_states.clear()
        self._pending_fetches = set(range(len(self.state_machine.placement.replicas)))
        self._request_slice_states()
        self.run(lambda: not self._pending_fetches, "waiting for the parameters of the servers")
        slice_states, self._fetched_states = self._fetched_states, {}
        self._stored_version = self.state_machine.update_count, self.state_machine.decided
        return slice_states

    def _refetch_stale(self) -> None:
        stale_slices, self._stale_slices = self._stale_slices, set()
        self._request_slice_states(stale_slices & self._pending_fetches)

    def _request_slice_states(self, slice_ids: Collection[int] | None = None) -> None:
        for slice_id in sorted(self._pending_fetches if slice_ids is None else slice_ids):
            for server in self.state_machine.placement.replicas[slice_id].servers[:1]:
                self._transport.send(server, ParameterStateRequest(slice_id))

    def _handle(self, event: TransportEvent) -> OutgoingMessages:
        message, sender = event.message, event.sender
        match message:
            case None:
                return self._handle_connection_change(event)
            case ServerAddress(server, host, port, is_initialized):
                if server in self.state_machine.lost_processes:
                    return [(server, EvictionNotice(server))]
                self._addresses[server] = host, port
                if is_initialized:
                    self._initialized_servers.add(server)
                else:
                    self._assign_slice_states(server)
                self._request_slice_states()
                return self._address_book_messages()
            case ServerTakeoverOffer():
                return self._admit_server(message)
            case ParameterStateReply(slice_id, version):
                if version < self.state_machine.update_count:  # the server has not come to the last one
                    self._stale_slices.add(slice_id)
                    return []
                self._fetched_states[slice_id] = event.payload
                self._pending_fetches.discard(slice_id)
                return []
            case ServerTrafficReport():
                self.traffic_reports[sender] = message
                return []
            case WorkerJoined() | WorkItemCompleted() | GradientNormReply() | DecisionReplayRequest():
                return self.state_machine.handle(message)
        return []

    # --- who comes and goes ------------------------------------------------------------------------

    def _handle_connection_change(self, event: TransportEvent) -> OutgoingMessages:
        """A connection that was made or lost."""
        peer = event.sender
        if not event.is_connected:
            self._disconnected[peer] = time.monotonic(), event.has_timed_out
            return []
        self._disconnected.pop(peer, None)
        if peer not in self._ever_connected:
            self._ever_connected.add(peer)
            if self.state_machine.decision_log:
                self.log_membership(f"{peer} has joined the run")
        if self._has_sent_shutdown and peer in self.state_machine.servers:
            return [(peer, ServerShutdown(self.state_machine.update_count))]
        return [(peer, self._address_book())]

    def _evict_unreachable(self) -> None:
        """Whoever others can replace, and was gone for too long."""
        for name, (lost_at_s, has_timed_out) in list(self._disconnected.items()):
            disconnected_s = time.monotonic() - lost_at_s
            if name in self._transport.connected_peers or name in self.state_machine.lost_processes:
                del self._disconnected[name]
            elif disconnected_s > self._eviction_timeout_s / 2 * has_timed_out + min(
                RECONNECT_GRACE_S, self._eviction_timeout_s
            ) * (not has_timed_out) and (self.state_machine.is_replaceable(name, self._initialized_servers)):
                del self._disconnected[name]
                self._evict(name)
            elif disconnected_s > self._timeout_s:
                raise PeerFailedError(
                    f"server {name} has been gone for {self._timeout_s:g} s, and nobody else has its part"
                )

    def _evict(self, name: str) -> None:
        if not self._is_closing:
            same_kind = self.state_machine.servers if name in self.state_machine.servers else self.state_machine.workers
            remaining = len([other for other in same_kind if other != name])
            kind = "server" if same_kind is self.state_machine.servers else "worker"
            self.log_membership(f"{kind} {name} is gone; {remaining} {kind}{'s' * (remaining != 1)} left")
        self._forget_process(name)
        self._send(self.state_machine.handle(ProcessLost(name)))
        self._send([(name, EvictionNotice(name)), *self._address_book_messages()])
        self._request_slice_states()

    def _forget_process(self, name: str) -> None:
        self._addresses.pop(name, None)
        self._initialized_servers.discard(name)
        if name in self.traffic_reports:
            self.traffic_reports[name] = self.traffic_reports[name]._replace(queued_bytes=0)

    def _admit_server(self, offer: ServerTakeoverOffer) -> OutgoingMessages:
        """What its snapshot lacks, the desk has of the last time when it looked at the parameters."""
        name, replaced_server, snapshot = offer
        if name in self.state_machine.servers or name in self.state_machine.lost_processes:
            return []
        for other in list(self.state_machine.servers):
            if _role_of(other) == _role_of(name):  # the one before it may have ended before it had offered anything
                replaced_server = other
        for other in self._uninitialized_replicas_of(
            replaced_server
        ):  # they have nothing to go on with, and come again
            self._evict(other)
        versions = dict.fromkeys(range(len(self.state_machine.placement.replicas)), 0) | dict(snapshot)
        offer = offer._replace(replaced_server=replaced_server)
        self._forget_process(replaced_server)
        outgoing = self.state_machine.handle(offer._replace(snapshot_versions=tuple(sorted(versions.items()))))
        assigned_states = [
            message for to, message in outgoing if to == name and isinstance(message, ParameterStateAssignment)
        ]
        snapshot_slices = {slice_id for slice_id, _ in snapshot}
        self._assigned_states[name] = [
            (assigned_state, assigned_state.slice_id not in snapshot_slices) for assigned_state in assigned_states
        ]
        self._log_takeover(offer, assigned_states)
        self._send([(to, message) for to, message in outgoing if not isinstance(message, ParameterStateAssignment)])
        self._assign_slice_states(name)
        self._request_slice_states()
        return [
            *self._address_book_messages(),
            *([(name, ServerShutdown(self.state_machine.update_count))] if self._has_sent_shutdown else []),
        ]

    def _uninitialized_replicas_of(self, server: str) -> list[str]:
        replica_sets = [
            replicas.servers for replicas in self.state_machine.placement.replicas if server in replicas.servers
        ]
        neighbors = {other for pair in replica_sets for other in pair} - {server, *self._initialized_servers}
        return [other for other in self.state_machine.servers if other in neighbors]

    def _log_takeover(self, offer: ServerTakeoverOffer, assigned_states: list[ParameterStateAssignment]) -> None:
        origin, versions = "and is given all by the other one", dict(offer.snapshot_versions)
        if assigned_states:
            oldest_version = min(versions.get(assigned_state.slice_id, -1) for assigned_state in assigned_states)
            origin = "with what the desk had of it last"
            if oldest_version >= 0:
                origin = f"from its snapshot; the last {self.state_machine.update_count - oldest_version} updates of it are lost"
                if oldest_version == self.state_machine.update_count:
                    origin = "from its snapshot after the last update"
        self.log_membership(f"server {offer.server} takes the place of {offer.replaced_server}, {origin}")

    def _assign_slice_states(self, server: str) -> None:
        """Tell it what its pieces are, again if that was lost."""
        server_slices = [
            slice_id
            for slice_id, replicas in enumerate(self.state_machine.placement.replicas)
            if server in replicas.servers
        ]
        for assigned_state, sends_stored in self._assigned_states.get(
            server, [(ParameterStateAssignment(piece, *self._stored_version), True) for piece in server_slices]
        ):
            self._transport.send(
                server, assigned_state, self._stored_slice_state(assigned_state.slice_id) if sends_stored else None
            )

    def _address_book_messages(self) -> OutgoingMessages:
        return [(peer, self._address_book()) for peer in self._transport.connected_peers]

    def _address_book(self) -> ServerAddressBook:
        return ServerAddressBook(tuple((name, host, port) for name, (host, port) in sorted(self._addresses.items())))

    def _send(self, outgoing: OutgoingMessages) -> None:
        for to, message in outgoing:
            self._transport.send(to, message)


def _role_of(server: str) -> str:
    """What it has in common with those whose place it takes."""
    return server.partition(".")[0].partition("+")[0]


def _ignore_text(text: str) -> None:
    """Nobody wants to hear."""
