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
from motet.parallel.server.protocol import Book, Gone, Message, Refused
from motet.parallel.server.wire import HEAD, LONGEST_HEAD, PART, PART_BYTES, Incoming, Outgoing

BEAT = 2
HELLO = 3
BEATS_IN_LIMIT = 4
RETRY_S = 0.2
CONNECT_S = 3.0
"""A connection that is not there by then is tried anew: the kernel tries ever less often."""
TCP_NOTSENT_LOWAT = 25
"""Of Linux: how much may wait in the kernel, where nothing can overtake it."""


class Delivery(NamedTuple):
    """What came. Without a message, a connection was made or lost."""

    sender: str
    message: Message | None
    payload: bytearray = bytearray()
    connected: bool = True
    silent: bool = False
    """It was lost because nothing came any more. Otherwise the other side closed it, as a process does that ends."""


@dataclass
class Traffic:
    """Bytes, with heads."""

    sent: int = 0
    received: int = 0


class Post:
    """The connections of one process. `inbox` has what comes."""

    def __init__(
        self, name: str, same: Mapping[str, str], limit_s: float, host: str | None = None, port: int = 0
    ) -> None:
        """With a host, others can connect. Silence for `limit_s` is a loss.

        What is in `same` here and there must be the same; whoever connects nevertheless has a `Refused` delivered.
        """
        self.name = name
        self.same = same
        self.inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.traffic: dict[str, Traffic] = {}
        self.told: dict[str, Mapping[str, str]] = {}
        """What others have said that must be the same, and more."""
        self._id = uuid4().hex
        self._ids: dict[str, str] = {}
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self.wanted: dict[str, tuple[str, int]] = {}
        """To whom we want to be connected, and where that is."""
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._server = _listening(host, port) if host is not None else None
        if self._server:
            self._start(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        assert self._server
        host, port = self._server.getsockname()[:2]
        return host, port

    def connect(self, peer: str, address: tuple[str, int]) -> None:
        """Be connected to it from now on, as often as it takes; `forget` ends that."""
        with self._lock:
            if peer in self.wanted:
                return
            self.wanted[peer] = address
        self._start(self._keep_connected, peer, address)

    def follow(self, book: Book, before: Collection[str], mine: Callable[[str], bool]) -> set[str]:
        """Be connected to those in the book that are ours to connect to, and forget who is not in it any more."""
        there = {name for name, _, _ in book.entries}
        for peer in set(before) - there:
            self.forget(peer)
        for name, host, port in book.entries:
            if mine(name):
                self.connect(name, (host, port))
        return there

    def forget(self, peer: str) -> None:
        with self._lock:
            self.wanted.pop(peer, None)
            line = self._lines.pop(peer, None)
        if line:
            line.close()

    def send(self, peer: str, message: Message, payload: memoryview | None = None, urgency: int = -1) -> None:
        """Less is sooner. A payload must stay as it is until it has been sent. Nothing is done without a connection."""
        with self._lock:
            line = self._lines.get(peer)
        if line:
            line.put(message, payload, urgency)

    @property
    def peers(self) -> list[str]:
        """With whom there is a connection."""
        with self._lock:
            return list(self._lines)

    def waiting(self, peer: str) -> int:
        """Bytes that have not left."""
        with self._lock:
            line = self._lines.get(peer)
        return line.waiting if line else 0

    def close(self) -> None:
        self._closed.set()
        if self._server:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for connections
            self._server.close()
        with self._lock:
            lines = list(self._lines.values())
            self._lines.clear()  # nobody is told: it is we who leave
        for line in lines:
            line.close()
        # Those that are left when Python ends are ended while they free tensors, which ends the process with an abort.
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(CONNECT_S + RETRY_S)

    # --- making connections ------------------------------------------------------------------------

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _accept(self) -> None:
        assert self._server
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            self._start(self._serve, connection)

    def _keep_connected(self, peer: str, address: tuple[str, int]) -> None:
        while not self._closed.is_set() and self.wanted.get(peer) == address:
            with contextlib.suppress(OSError, PeerFailedError):
                connection = socket.create_connection(address, timeout=min(self._limit_s, CONNECT_S))
                self._serve(connection, peer)
            self._closed.wait(RETRY_S)

    def _serve(self, connection: socket.socket, expected: str | None = None) -> None:
        """Until it is lost."""
        _tune(connection, self._limit_s)
        try:
            hello = json.dumps([self.name, dict(self.same), self._id]).encode()
            connection.sendall(PART.pack(0, HELLO, len(hello)) + hello)
            peer = self._greeted(connection, expected)
        except (OSError, PeerFailedError):
            connection.close()
            return
        line = _Line(connection, self._limit_s / BEATS_IN_LIMIT, self.traffic.setdefault(peer, Traffic()))
        with self._lock:
            if self._closed.is_set() or (expected and expected not in self.wanted):
                connection.close()
                return
            before, self._lines[peer] = self._lines.get(peer), line
            self.inbox.put(Delivery(peer, None, connected=True))
        if before:
            before.close()
        self._start(line.send_all)
        silent = False
        try:
            silent = self._receive_all(peer, line)
        finally:
            with self._lock:
                if self._lines.get(peer) is line:
                    del self._lines[peer]
                    self.inbox.put(Delivery(peer, None, connected=False, silent=silent))
            line.close()

    def _greeted(self, connection: socket.socket, expected: str | None) -> str:
        """The name of the other side, if it belongs to us."""
        _, kind, length = PART.unpack(_exactly(connection, PART.size))
        if kind != HELLO or length > PART_BYTES:
            raise PeerFailedError("the other side is no process of a parameter server")
        try:
            name, same, number = json.loads(_exactly(connection, length))
            unlike = sorted(what for what in same.keys() & self.same.keys() if same[what] != self.same[what])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise PeerFailedError("the other side is no process of a parameter server") from error
        if expected not in (None, name):
            raise PeerFailedError(f"{name} is not {expected}")
        if unlike:
            what = unlike[0]
            sentence = (
                f"the {what} of {self.name} is not that of the {name} ({self.same[what]} here, {same[what]} there); "
                "give every machine the same job and the same files"
            )
            if expected:
                self.inbox.put(Delivery(expected, Refused(sentence)))
            raise PeerFailedError(sentence)
        if expected and self._ids.setdefault(name, number) != number:
            self.inbox.put(Delivery(expected, Gone(self.name)))
            raise PeerFailedError(f"{name} is another process than before")
        self.told[name] = same
        return str(name)

    def _receive_all(self, peer: str, line: "_Line") -> bool:
        """Until it is lost; whether it had fallen silent."""
        incoming = Incoming()
        try:
            while True:
                number, kind, length = PART.unpack(_exactly(line.connection, PART.size))
                line.traffic.received += PART.size + length
                if kind == BEAT:
                    continue
                if kind == HEAD:
                    if length > LONGEST_HEAD:
                        return False
                    whole = incoming.begin(number, _exactly(line.connection, length))
                else:
                    _fill(line.connection, incoming.room(number, length))
                    whole = incoming.filled(number, length)
                if whole:
                    self.inbox.put(Delivery(peer, *whole))
        except (ConnectionError, PeerFailedError):
            return line.silent
        except OSError as error:
            return line.silent or isinstance(error, TimeoutError)


@dataclass
class _Line:
    """One connection, as its sender sees it."""

    connection: socket.socket
    beat_s: float
    traffic: Traffic
    waiting: int = 0
    silent: bool = False
    """The other side does not take anything more."""
    _heap: list[tuple[int, int, Outgoing]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def put(self, message: Message, payload: memoryview | None, urgency: int) -> None:
        with self._changed:
            number = next(self._numbers)
            parcel = Outgoing(number % 2**32, message, payload)
            self.waiting += parcel.bytes
            heapq.heappush(self._heap, (urgency, number, parcel))
            self._changed.notify()

    def send_all(self) -> None:
        """Until the connection is lost."""
        try:
            while (part := self._next()) is not None:
                _send(self.connection, part)
                self.traffic.sent += sum(len(piece) for piece in part)
        except OSError as error:
            self.silent = isinstance(error, TimeoutError)
            self.close()

    def _next(self) -> tuple[bytes, memoryview | bytes] | None:
        """The most urgent part; a sign of life when there is none for a while; None at the end."""
        with self._changed:
            if not self._heap and not self._closed:
                self._changed.wait(self.beat_s)
            if self._closed:
                return None
            if not self._heap:
                return PART.pack(0, BEAT, 0), b""
            parcel = self._heap[0][2]
            part = parcel.take()
            assert part is not None
            if parcel.is_done:
                heapq.heappop(self._heap)
            if PART.unpack(part[0])[1] != HEAD:
                self.waiting -= len(part[1])
            return part

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def _listening(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _tune(connection: socket.socket, limit_s: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, PART_BYTES)
    connection.settimeout(limit_s)


def _send(connection: socket.socket, part: tuple[bytes, memoryview | bytes]) -> None:
    head, body = part
    if not len(body):
        connection.sendall(head)
        return
    sent = connection.sendmsg([head, body])
    if sent < len(head):
        connection.sendall(head[sent:])
        sent = len(head)
    if sent < len(head) + len(body):
        connection.sendall(memoryview(body)[sent - len(head) :])


def _exactly(connection: socket.socket, count: int) -> bytes:
    room = bytearray(count)
    _fill(connection, memoryview(room))
    return bytes(room)


def _fill(connection: socket.socket, room: memoryview) -> None:
    at = 0
    while at < len(room):
        count = connection.recv_into(room[at:])
        if not count:
            raise ConnectionError("the other side has closed the connection")
        at += count
