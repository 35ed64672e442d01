"""TCP connections between the named processes of a parameter server.
Both sides of a connection prove first that they know the token of the run. A message that its sender may not send
closes the connection with a line in the log, and the run goes on.
Long payloads are sent in frames, so that urgent messages overtake them. The side that made a connection makes it again
when it is lost. Messages in flight are lost then; both sides get an event, and repeat messages that the other may have
missed."""

import contextlib
import heapq
import itertools
import logging
import queue
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from pydantic import TypeAdapter

from motet.core.errors import InputError, PeerFailedError
from motet.core.token_authentication import (
    AuthenticatedListener,
    HandshakeRefusedError,
    RateLimitedLog,
    RunToken,
    TokenHandshake,
    authenticate,
)
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_admission import (
    MessageAdmission,
    PayloadSizes,
    ProcessRole,
    role_of_process,
)
from motet.parallel.parameter_server.protocol.messages import (
    FRAME_HEADER,
    BadMessageError,
    Message,
    MessageFrame,
    OutgoingMessages,
)

HEARTBEAT_FRAME = 2
HANDSHAKE_PURPOSE = "parameter server"
EVENT_BYTES = 1024  # Memory of an event, in addition to its payload
HEARTBEATS_PER_TIMEOUT = 4
RECONNECT_INTERVAL_S = 0.2
HANDSHAKES_PER_START = 10  # Tries that fit into the time of a start-up; a busy machine starves each for long
CONNECT_TIMEOUT_S = 3.0  # Then motet tries again: the kernel's retries become ever less frequent
POLL_INTERVAL_S = 0.5  # A process that waits for events checks this often whether it should end
TCP_NOTSENT_LOWAT = 25  # Linux: bytes that may wait in the kernel, where nothing can overtake them


class EvictedError(PeerFailedError):
    """Others have taken over the work of this process; it may join again."""


class TransportEvent(NamedTuple):
    """A message, or, without one, a connection that was made or lost."""

    sender: str
    message: Message | None
    payload: bytearray = bytearray()
    is_connected: bool = True
    has_timed_out: bool = False  # Otherwise the other side closed the connection, as an ending process does


@dataclass
class PeerTraffic:  # Counts include the headers of frames
    sent_bytes: int = 0
    received_bytes: int = 0


class PublicFields(NamedTuple):
    """A process as it describes itself in its handshake, which proves that it belongs to the run."""

    name: str
    entries: dict[str, str]
    instance_id: str  # Differs for each process, also if a name is used again


_PUBLIC_FIELDS = TypeAdapter(PublicFields)


class TcpTransport:
    """The connections of one process. Events arrive in `inbox`."""

    def __init__(
        self,
        name: str,
        handshake: Mapping[str, str],
        timeout_s: float,
        *,
        token: RunToken,
        payload_sizes: PayloadSizes,
        host: str | None = None,
        port: int = 0,
        start_timeout_s: float = 0.0,
    ) -> None:
        """Others can connect if a host is given. A connection that is silent for `timeout_s` is lost. The processes of
        a run may take `start_timeout_s` to connect."""
        # Entries that both handshakes have must be equal; else the side that connects gets a `ConnectionRejected`.
        self.name, self.handshake = name, handshake
        self.inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.traffic: dict[str, PeerTraffic] = {}
        self.peer_handshakes: dict[str, Mapping[str, str]] = {}
        self.refusals: dict[str, str] = {}  # Why the last try to connect to a peer was refused
        self.reached_peers: set[str] = set()  # They listen, though a busy machine may keep them from answering
        self._handshake_timeout_s = start_timeout_s / HANDSHAKES_PER_START
        self._token, self._payload_sizes = token, payload_sizes
        self._instance_id, self._timeout_s = uuid4().hex, timeout_s
        self._peer_instance_ids: dict[str, str] = {}
        self._unread_bytes: Counter[str] = Counter()
        self._has_read = threading.Condition()
        self._log = RateLimitedLog(logging.getLogger("motet").warning)
        self._lock = threading.Lock()
        self._connections: dict[str, _TcpConnection] = {}
        self.peer_addresses: dict[str, tuple[str, int]] = {}  # Peers to stay connected to
        self._listed_peers: set[str] = set()  # Names in the last address book
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: AuthenticatedListener | None = None
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
            self._address: tuple[str, int] = listener.getsockname()[:2]
            self._listener = AuthenticatedListener(
                listener, partial(self._handshake, is_accepting=True), self._run_connection
            )

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener
        return self._address

    def connect(self, peer: str, address: tuple[str, int]) -> None:
        """Stay connected to the peer until `disconnect`."""
        with self._lock:
            if peer in self.peer_addresses:
                return
            self.peer_addresses[peer] = address
        self._start_thread(self._keep_connected, peer, address)

    def handle_membership(self, message: Message, should_connect: Callable[[str], bool]) -> bool:
        """Follow the address book, and raise if this process is rejected or evicted; False for other messages."""
        match message:
            case messages.ServerAddressBook(entries):
                addresses = {name: (host, port) for name, host, port in entries}
                for peer in self._listed_peers - addresses.keys():
                    self.disconnect(peer)
                for peer in filter(should_connect, addresses):
                    self.connect(peer, addresses[peer])
                self._listed_peers = set(addresses)
            case messages.ConnectionRejected(reason):
                raise InputError(reason)
            case messages.EvictionNotice():
                raise EvictedError(f"{self.name} was out of reach for too long")
            case _:
                return False
        return True

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self.peer_addresses.pop(peer, None)
            connection = self._connections.pop(peer, None)
        if connection:
            connection.close()

    def send(self, peer: str, message: Message, payload: memoryview | None = None, *, priority: int = -1) -> None:
        """Send to a connected peer, the lowest priority first. The payload must stay unchanged until it is sent."""
        if connection := self._connections.get(peer):
            connection.enqueue(message, payload, priority)

    def send_all(self, outgoing: OutgoingMessages) -> None:
        for peer, message in outgoing:
            self.send(peer, message)

    @property
    def connected_peers(self) -> list[str]:
        with self._lock:
            return list(self._connections)

    def next_event(self, timeout_s: float = POLL_INTERVAL_S) -> TransportEvent | None:
        """The next event, or None if none arrives in time."""
        with contextlib.suppress(queue.Empty):
            event = self.inbox.get(timeout=timeout_s)
            if event.message is not None:
                with self._has_read:
                    self._unread_bytes[event.sender] -= EVENT_BYTES + len(event.payload)
                    self._has_read.notify_all()
            return event
        return None

    def refuse(self, peer: str, reason: object) -> None:
        """Close the connection to a peer that has sent a forbidden message. It can connect again."""
        self._log_refusal(peer, reason)
        if connection := self._connections.get(peer):
            connection.close()

    def _log_refusal(self, peer: str, reason: object) -> None:
        self._log(f"{self.name} closes its connection to {peer}: {reason}; the run goes on")

    def queued_bytes(self, peer: str) -> int:
        connection = self._connections.get(peer)
        return connection.queued_bytes if connection else 0

    def close(self) -> None:
        self._closed.set()
        with self._has_read:
            self._has_read.notify_all()
        if self._listener:
            self._listener.close()
        with self._lock:
            connections, self._connections = self._connections, {}  # so that the inbox gets no loss
        for connection in connections.values():
            connection.close()
        for thread in self._threads:  # one that frees tensors while Python ends would abort the process
            thread.join(CONNECT_TIMEOUT_S + RECONNECT_INTERVAL_S)
        if self._listener:
            self._listener.join(CONNECT_TIMEOUT_S)

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _handshake(self, *, is_accepting: bool) -> TokenHandshake:
        fields = PublicFields(self.name, dict(self.handshake), self._instance_id)
        public_fields = _PUBLIC_FIELDS.dump_json(fields)
        timeout_s = self._handshake_timeout_s
        return TokenHandshake(
            self._token, HANDSHAKE_PURPOSE, public_fields, is_accepting=is_accepting, timeout_s=timeout_s
        )

    def _keep_connected(self, peer: str, address: tuple[str, int]) -> None:
        while not self._closed.is_set() and self.peer_addresses.get(peer) == address:
            with contextlib.suppress(OSError):
                tcp_socket = socket.create_connection(address, timeout=min(self._timeout_s, CONNECT_TIMEOUT_S))
                self.reached_peers.add(peer)
                with contextlib.closing(tcp_socket):
                    self._connect(tcp_socket, peer)
            self._closed.wait(RECONNECT_INTERVAL_S)

    def _connect(self, tcp_socket: socket.socket, peer: str) -> None:
        try:
            public_fields = authenticate(tcp_socket, self._handshake(is_accepting=False))
        except HandshakeRefusedError as error:
            self.refusals[peer] = str(error)
            self._log(f"{self.name} cannot connect to {peer}: {error}")
            return
        self._run_connection(tcp_socket, public_fields, peer)

    def _run_connection(self, tcp_socket: socket.socket, public_fields: bytes, expected: str | None = None) -> None:
        """Receive all messages of a peer that has proven its public fields."""
        with contextlib.closing(tcp_socket):
            try:
                peer = self._admit(public_fields, expected)
                _set_socket_options(tcp_socket, self._timeout_s)
            except (OSError, ValueError, BadMessageError) as error:
                if expected is None:
                    self._log(f"{self.name} refuses a connection: {error}")
                return
            traffic = self.traffic.setdefault(peer, PeerTraffic())
            connection = _TcpConnection(tcp_socket, self._timeout_s / HEARTBEATS_PER_TIMEOUT, traffic)
            with self._lock:
                if self._closed.is_set() or (expected and expected not in self.peer_addresses):
                    return
                previous, self._connections[peer] = self._connections.get(peer), connection
                self.inbox.put(TransportEvent(peer, None, is_connected=True))
            if previous:
                previous.close()
            self._start_thread(connection.send_all)
            has_timed_out = False
            try:
                has_timed_out = self._receive_all(peer, connection)
            finally:
                with self._lock:
                    if self._connections.get(peer) is connection:
                        del self._connections[peer]
                        self.inbox.put(TransportEvent(peer, None, is_connected=False, has_timed_out=has_timed_out))
                connection.close()

    def _admit(self, public_fields: bytes, expected: str | None) -> str:
        """The name of the peer, if it is a process of this run with the same job and data that may connect to here."""
        name, entries, instance_id = _PUBLIC_FIELDS.validate_json(public_fields, strict=True)
        if name != expected and (expected or role_of_process(name) is ProcessRole.COORDINATOR or name == self.name):
            raise ValueError(f"{name} does not connect to {self.name}")
        for key in sorted(entries.keys() & self.handshake.keys()):
            value, peer_value = self.handshake[key], entries[key]
            if value != peer_value:
                reason = f"the {key} of {self.name} is not that of the {name} ({value} here, {peer_value} there)"
                reason += "; give every machine the same job and the same files"
                if expected:
                    self._put(expected, messages.ConnectionRejected(reason))
                raise ValueError(reason)
        with self._lock:
            is_same = self._peer_instance_ids.setdefault(name, instance_id) == instance_id
        if not is_same:
            if expected:
                self._put(expected, messages.EvictionNotice(self.name))
            raise ValueError(f"{name} is another process than before")
        self.peer_handshakes[name] = entries
        return name

    def _put(self, peer: str, message: Message, payload: bytearray | None = None) -> None:
        """Pass a message on, and wait if too many of this peer were not read yet."""
        event = TransportEvent(peer, message, payload if payload is not None else bytearray())
        with self._has_read:
            self._unread_bytes[peer] += EVENT_BYTES + len(event.payload)
            self.inbox.put(event)
            limit = self._payload_sizes.unread_limit
            self._has_read.wait_for(lambda: self._unread_bytes[peer] <= limit or self._closed.is_set())

    def _receive_all(self, peer: str, connection: "_TcpConnection") -> bool:
        receive_into = partial(_receive_into, connection.tcp_socket)
        sizes = self._payload_sizes
        check = MessageAdmission(self.name, peer, sizes).check
        reader = messages.MessageFrameReader(check, text_limit=sizes.text_limit, open_limit=sizes.open_message_limit)
        try:
            while True:
                header = FRAME_HEADER.unpack(_receive_exactly(connection.tcp_socket, FRAME_HEADER.size))
                connection.traffic.received_bytes += FRAME_HEADER.size + header[2]
                if header == (0, HEARTBEAT_FRAME, 0):
                    continue
                if received := reader.read(*header, receive_into=receive_into):
                    self._put(peer, *received)
        except BadMessageError as error:
            self._log_refusal(peer, error)
            return False
        except OSError as error:
            return connection.has_timed_out or isinstance(error, TimeoutError)


@dataclass
class _TcpConnection:
    tcp_socket: socket.socket
    heartbeat_interval_s: float
    traffic: PeerTraffic
    queued_bytes: int = 0
    has_timed_out: bool = False  # The other side has stopped receiving
    _send_heap: list[tuple[int, int, deque[MessageFrame]]] = field(default_factory=list)
    _message_ids: "itertools.count[int]" = field(default_factory=itertools.count)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def enqueue(self, message: Message, payload: memoryview | None, priority: int) -> None:
        with self._changed:
            message_id = next(self._message_ids)
            self.queued_bytes += payload.nbytes if payload is not None else 0
            frames = messages.cut_into_frames(message_id % 2**32, message, payload)
            heapq.heappush(self._send_heap, (priority, message_id, frames))
            self._changed.notify()

    def send_all(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                header, body = frame
                sent_bytes = self.tcp_socket.sendmsg([header, body])
                if sent_bytes < len(header):
                    self.tcp_socket.sendall(header[sent_bytes:])
                self.tcp_socket.sendall(memoryview(body)[max(0, sent_bytes - len(header)) :])
                self.traffic.sent_bytes += len(header) + len(body)
        except OSError as error:
            self.has_timed_out = isinstance(error, TimeoutError)
            self.close()

    def _next_frame(self) -> MessageFrame | None:
        """The most urgent frame, or a heartbeat if nothing was sent for a while; None at the end."""
        with self._changed:
            if not self._send_heap and not self._closed:
                self._changed.wait(self.heartbeat_interval_s)
            if self._closed:
                return None
            if not self._send_heap:
                return MessageFrame(FRAME_HEADER.pack(0, HEARTBEAT_FRAME, 0), b"")
            frames = self._send_heap[0][2]
            frame = frames.popleft()
            if not frames:
                heapq.heappop(self._send_heap)
            if FRAME_HEADER.unpack(frame.header)[1] == messages.PAYLOAD_FRAME:
                self.queued_bytes -= len(frame.body)
            return frame

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.tcp_socket.shutdown(socket.SHUT_RDWR)
        self.tcp_socket.close()


def _set_socket_options(tcp_socket: socket.socket, timeout_s: float) -> None:
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        tcp_socket.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, messages.MAX_FRAME_BYTES)
    tcp_socket.settimeout(timeout_s)


def _receive_exactly(tcp_socket: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    _receive_into(tcp_socket, memoryview(buffer))
    return bytes(buffer)


def _receive_into(tcp_socket: socket.socket, buffer: memoryview) -> None:
    while buffer:
        if not (count := tcp_socket.recv_into(buffer)):
            raise ConnectionError("the other side has closed the connection")
        buffer = buffer[count:]
