"""Connections between the processes of a parameter server, over TCP.

Each has a name. What is more urgent overtakes what is underway: long payloads leave in parts. A connection that is lost
is made again by whoever made it first; what was underway is gone then, and both sides are told, so that they ask again.
"""

import contextlib
import heapq
import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol.message_framing import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGE_FRAME,
    MessageFrameReader,
    MessageFrameWriter,
)
from motet.parallel.parameter_server.protocol.messages import (
    ConnectionRejected,
    EvictionNotice,
    Message,
    ServerAddressBook,
)

HEARTBEAT_FRAME = 2
HANDSHAKE_FRAME = 3
HEARTBEATS_PER_TIMEOUT = 4
RECONNECT_INTERVAL_S = 0.2
CONNECT_TIMEOUT_S = 3.0  # A connection that is not there by then is tried anew: the kernel tries ever less often
TCP_NOTSENT_LOWAT = 25  # Of Linux: how much may wait in the kernel, where nothing can overtake it


class TransportEvent(NamedTuple):
    """What came. Without a message, a connection was made or lost."""

    sender: str
    message: Message | None
    payload: bytearray = bytearray()
    is_connected: bool = True
    # It was lost because nothing came any more. Otherwise the other side closed it, as a process does that ends.
    has_timed_out: bool = False


@dataclass
class PeerTraffic:
    """Bytes, with heads."""

    sent_bytes: int = 0
    received_bytes: int = 0


class TcpTransport:
    """The connections of one process. `inbox` has what comes."""

    def __init__(
        self, name: str, handshake: Mapping[str, str], timeout_s: float, host: str | None = None, port: int = 0
    ) -> None:
        """With a host, others can connect. Silence for `limit_s` is a loss.

        What is in `same` here and there must be the same; whoever connects nevertheless has a `Refused` delivered.
        """
        self.name = name
        self.handshake = handshake
        self.inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.traffic: dict[str, PeerTraffic] = {}
        self.peer_handshakes: dict[str, Mapping[str, str]] = {}  # What others have said that must be the same, and more
        self._instance_id = uuid4().hex
        self._peer_instance_ids: dict[str, str] = {}
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connections: dict[str, _TcpConnection] = {}
        self.peer_addresses: dict[str, tuple[str, int]] = {}  # To whom we want to be connected, and where that is
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = _create_listener(host, port) if host is not None else None
        if self._listener:
            self._start_thread(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener
        host, port = self._listener.getsockname()[:2]
        return host, port

    def connect(self, peer: str, address: tuple[str, int]) -> None:
        """Be connected to it from now on, as often as it takes; `forget` ends that."""
        with self._lock:
            if peer in self.peer_addresses:
                return
            self.peer_addresses[peer] = address
        self._start_thread(self._keep_connected, peer, address)

    def follow_address_book(
        self, book: ServerAddressBook, known_peers: Collection[str], should_connect: Callable[[str], bool]
    ) -> set[str]:
        """Be connected to those in the book that are ours to connect to, and forget who is not in it any more."""
        listed_peers = {name for name, _, _ in book.entries}
        for peer in set(known_peers) - listed_peers:
            self.disconnect(peer)
        for name, host, port in book.entries:
            if should_connect(name):
                self.connect(name, (host, port))
        return listed_peers

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self.peer_addresses.pop(peer, None)
            connection = self._connections.pop(peer, None)
        if connection:
            connection.close()

    def send(self, peer: str, message: Message, payload: memoryview | None = None, priority: int = -1) -> None:
        """Less is sooner. A payload must stay as it is until it has been sent. Nothing is done without a connection."""
        with self._lock:
            connection = self._connections.get(peer)
        if connection:
            connection.enqueue(message, payload, priority)

    @property
    def connected_peers(self) -> list[str]:
        """With whom there is a connection."""
        with self._lock:
            return list(self._connections)

    def queued_bytes(self, peer: str) -> int:
        """Bytes that have not left."""
        with self._lock:
            connection = self._connections.get(peer)
        return connection.queued_bytes if connection else 0

    def close(self) -> None:
        self._closed.set()
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for connections
            self._listener.close()
        with self._lock:
            connections = list(self._connections.values())
            self._connections.clear()  # nobody is told: it is we who leave
        for connection in connections:
            connection.close()
        # Those that are left when Python ends are ended while they free tensors, which ends the process with an abort.
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(CONNECT_TIMEOUT_S + RECONNECT_INTERVAL_S)

    # --- making connections ------------------------------------------------------------------------

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _accept(self) -> None:
        assert self._listener
        while not self._closed.is_set():
            try:
                tcp_socket, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._start_thread(self._run_connection, tcp_socket)

    def _keep_connected(self, peer: str, address: tuple[str, int]) -> None:
        while not self._closed.is_set() and self.peer_addresses.get(peer) == address:
            with contextlib.suppress(OSError, PeerFailedError):
                tcp_socket = socket.create_connection(address, timeout=min(self._timeout_s, CONNECT_TIMEOUT_S))
                self._run_connection(tcp_socket, peer)
            self._closed.wait(RECONNECT_INTERVAL_S)

    def _run_connection(self, tcp_socket: socket.socket, expected: str | None = None) -> None:
        """Until it is lost."""
        _set_socket_options(tcp_socket, self._timeout_s)
        try:
            handshake = json.dumps([self.name, dict(self.handshake), self._instance_id]).encode()
            tcp_socket.sendall(FRAME_HEADER.pack(0, HANDSHAKE_FRAME, len(handshake)) + handshake)
            peer = self._receive_handshake(tcp_socket, expected)
        except (OSError, PeerFailedError):
            tcp_socket.close()
            return
        connection = _TcpConnection(
            tcp_socket, self._timeout_s / HEARTBEATS_PER_TIMEOUT, self.traffic.setdefault(peer, PeerTraffic())
        )
        with self._lock:
            if self._closed.is_set() or (expected and expected not in self.peer_addresses):
                tcp_socket.close()
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

    def _receive_handshake(self, tcp_socket: socket.socket, expected: str | None) -> str:
        """The name of the other side, if it belongs to us."""
        _, kind, length = FRAME_HEADER.unpack(_receive_exactly(tcp_socket, FRAME_HEADER.size))
        if kind != HANDSHAKE_FRAME or length > MAX_FRAME_BYTES:
            raise PeerFailedError("the other side is no process of a parameter server")
        try:
            name, peer_handshake, instance_id = json.loads(_receive_exactly(tcp_socket, length))
            mismatches = sorted(
                mismatch
                for mismatch in peer_handshake.keys() & self.handshake.keys()
                if peer_handshake[mismatch] != self.handshake[mismatch]
            )
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise PeerFailedError("the other side is no process of a parameter server") from error
        if expected not in (None, name):
            raise PeerFailedError(f"{name} is not {expected}")
        if mismatches:
            what = mismatches[0]
            reason = (
                f"the {what} of {self.name} is not that of the {name} ({self.handshake[what]} here, {peer_handshake[what]} there); "
                "give every machine the same job and the same files"
            )
            if expected:
                self.inbox.put(TransportEvent(expected, ConnectionRejected(reason)))
            raise PeerFailedError(reason)
        if expected and self._peer_instance_ids.setdefault(name, instance_id) != instance_id:
            self.inbox.put(TransportEvent(expected, EvictionNotice(self.name)))
            raise PeerFailedError(f"{name} is another process than before")
        self.peer_handshakes[name] = peer_handshake
        return str(name)

    def _receive_all(self, peer: str, connection: "_TcpConnection") -> bool:
        """Until it is lost; whether it had fallen silent."""
        reader = MessageFrameReader()
        try:
            while True:
                message_id, kind, length = FRAME_HEADER.unpack(
                    _receive_exactly(connection.tcp_socket, FRAME_HEADER.size)
                )
                connection.traffic.received_bytes += FRAME_HEADER.size + length
                if kind == HEARTBEAT_FRAME:
                    continue
                if kind == MESSAGE_FRAME:
                    if length > MAX_MESSAGE_BYTES:
                        return False
                    complete_message = reader.start_message(message_id, _receive_exactly(connection.tcp_socket, length))
                else:
                    _receive_into(connection.tcp_socket, reader.payload_buffer(message_id, length))
                    complete_message = reader.finish_frame(message_id, length)
                if complete_message:
                    self.inbox.put(TransportEvent(peer, *complete_message))
        except (ConnectionError, PeerFailedError):
            return connection.has_timed_out
        except OSError as error:
            return connection.has_timed_out or isinstance(error, TimeoutError)


@dataclass
class _TcpConnection:
    """One connection, as its sender sees it."""

    tcp_socket: socket.socket
    heartbeat_interval_s: float
    traffic: PeerTraffic
    queued_bytes: int = 0
    has_timed_out: bool = False  # The other side does not take anything more
    _send_heap: list[tuple[int, int, MessageFrameWriter]] = field(default_factory=list)
    _message_ids: "itertools.count[int]" = field(default_factory=itertools.count)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def enqueue(self, message: Message, payload: memoryview | None, priority: int) -> None:
        with self._changed:
            message_id = next(self._message_ids)
            writer = MessageFrameWriter(message_id % 2**32, message, payload)
            self.queued_bytes += writer.payload_bytes
            heapq.heappush(self._send_heap, (priority, message_id, writer))
            self._changed.notify()

    def send_all(self) -> None:
        """Until the connection is lost."""
        try:
            while (frame := self._next_frame()) is not None:
                _send_frame(self.tcp_socket, frame)
                self.traffic.sent_bytes += sum(len(slice_id) for slice_id in frame)
        except OSError as error:
            self.has_timed_out = isinstance(error, TimeoutError)
            self.close()

    def _next_frame(self) -> tuple[bytes, memoryview | bytes] | None:
        """The most urgent part; a sign of life when there is none for a while; None at the end."""
        with self._changed:
            if not self._send_heap and not self._closed:
                self._changed.wait(self.heartbeat_interval_s)
            if self._closed:
                return None
            if not self._send_heap:
                return FRAME_HEADER.pack(0, HEARTBEAT_FRAME, 0), b""
            writer = self._send_heap[0][2]
            frame = writer.next_frame()
            assert frame is not None
            if writer.is_done:
                heapq.heappop(self._send_heap)
            if FRAME_HEADER.unpack(frame[0])[1] != MESSAGE_FRAME:
                self.queued_bytes -= len(frame[1])
            return frame

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.tcp_socket.shutdown(socket.SHUT_RDWR)
        self.tcp_socket.close()


def _create_listener(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _set_socket_options(tcp_socket: socket.socket, timeout_s: float) -> None:
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        tcp_socket.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX_FRAME_BYTES)
    tcp_socket.settimeout(timeout_s)


def _send_frame(tcp_socket: socket.socket, frame: tuple[bytes, memoryview | bytes]) -> None:
    header, body = frame
    if not len(body):
        tcp_socket.sendall(header)
        return
    sent_bytes = tcp_socket.sendmsg([header, body])
    if sent_bytes < len(header):
        tcp_socket.sendall(header[sent_bytes:])
        sent_bytes = len(header)
    if sent_bytes < len(header) + len(body):
        tcp_socket.sendall(memoryview(body)[sent_bytes - len(header) :])


def _receive_exactly(tcp_socket: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    _receive_into(tcp_socket, memoryview(buffer))
    return bytes(buffer)


def _receive_into(tcp_socket: socket.socket, buffer: memoryview) -> None:
    offset = 0
    while offset < len(buffer):
        count = tcp_socket.recv_into(buffer[offset:])
        if not count:
            raise ConnectionError("the other side has closed the connection")
        offset += count
