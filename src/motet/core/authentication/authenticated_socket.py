"""Sockets whose other end has proven that it knows the token of the run, and the listener that accepts them."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from motet.core.authentication.token_handshake import (
    HANDSHAKE_TIMEOUT_S,
    MAX_HELLO_BYTES,
    PROOF_BYTES,
    HandshakeRefusedError,
    TokenHandshake,
)

MAX_WAITING_CONNECTIONS = 64  # Connections whose proof is still to come; one more closes the oldest
DESCRIPTORS_PER_WAITING_CONNECTION = 8  # Of the process: strangers leave it most of its file descriptors
LOG_INTERVAL_S = 10.0
ACCEPT_RETRY_INTERVAL_S = 0.2  # After a failure, such as a process without free file descriptors
_LENGTH_BYTES = 4


class RateLimitedLog:
    """Logs at most one line in `LOG_INTERVAL_S`, and counts the others. A line has no control characters."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log, self._next_s, self._suppressed = log, 0.0, 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._next_s:
                self._suppressed += 1
                return
            more = f" ({self._suppressed} more such lines were left out)" if self._suppressed else ""
            self._next_s, self._suppressed = now_s + LOG_INTERVAL_S, 0
        self._log("".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text) + more)


def authenticate(stream: socket.socket, handshake: TokenHandshake) -> bytes:
    """Both sides' hellos and proofs, within `HANDSHAKE_TIMEOUT_S`. Returns the public fields of the other side.
    The stream has a timeout afterwards, which the caller may set anew."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    _send(stream, len(handshake.hello).to_bytes(_LENGTH_BYTES, "big") + handshake.hello, deadline_s)
    length = int.from_bytes(_receive_exactly(stream, _LENGTH_BYTES, deadline_s), "big")
    if length > MAX_HELLO_BYTES:
        raise HandshakeRefusedError(f"it announces a hello of {length} bytes, {MAX_HELLO_BYTES} at most")
    peer_fields = handshake.read_hello(_receive_exactly(stream, length, deadline_s))
    if not handshake.is_accepting:
        _send(stream, handshake.proof(), deadline_s)
    try:
        proof = _receive_exactly(stream, PROOF_BYTES, deadline_s)
    except ConnectionError as error:
        remark = "" if handshake.is_accepting else "; its run may have another token"
        raise HandshakeRefusedError(f"it has closed the connection before its proof{remark}") from error
    handshake.check_proof(proof)
    if handshake.is_accepting:
        _send(stream, handshake.proof(), deadline_s)
    return peer_fields


def _send(stream: socket.socket, content: bytes, deadline_s: float) -> None:
    stream.settimeout(max(1e-3, deadline_s - time.monotonic()))
    stream.sendall(content)


def _receive_exactly(stream: socket.socket, count: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise TimeoutError(f"the other side did not finish its handshake in {HANDSHAKE_TIMEOUT_S:g} s")
        stream.settimeout(left_s)
        if not (more := stream.recv(count - len(received))):
            raise ConnectionError("the other side has closed the connection")
        received += more
    return bytes(received)


class AuthenticatedListener:
    """Accepts connections in the background, and passes on those whose other end has proven that it knows the token.

    A stranger is closed with one line in the log. Nothing that a stranger does ends the listener."""

    def __init__(
        self,
        listener: socket.socket,
        make_handshake: Callable[[], TokenHandshake],
        on_peer: Callable[[socket.socket, bytes], None],
    ) -> None:
        """`on_peer` gets the stream and the other side's public fields, in a thread of this connection. It owns the
        stream then."""
        self._listener, self._make_handshake, self._on_peer = listener, make_handshake, on_peer
        self._waiting: dict[socket.socket, None] = {}  # The oldest comes first
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_PER_WAITING_CONNECTION
        self._waiting_limit = min(MAX_WAITING_CONNECTIONS, max(1, descriptors))
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._log = RateLimitedLog(logging.getLogger("motet").warning)
        self._threads: list[threading.Thread] = [threading.Thread(target=self._accept_all, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close the listener and all connections that still wait for a proof."""
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        with self._lock:
            for stream in self._waiting:
                _shut_down(stream)

    def join(self, timeout_s: float) -> None:
        """Wait until the threads of all connections have ended; call this after `close`."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _accept_all(self) -> None:
        while not self._is_closed.is_set():
            try:
                stream, address = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    self._log(f"cannot accept a connection: {error.strerror}; motet goes on and tries again")
                    self._is_closed.wait(ACCEPT_RETRY_INTERVAL_S)
                continue
            self._start(stream, f"{address[0]}:{address[1]}")

    def _start(self, stream: socket.socket, address: str) -> None:
        with self._lock:
            if len(self._waiting) >= self._waiting_limit:
                _shut_down(oldest := next(iter(self._waiting)))
                del self._waiting[oldest]
            self._waiting[stream] = None
        thread = threading.Thread(target=self._serve, args=[stream, address], daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no threads left
            self._log(f"cannot serve a connection from {address}: {error}")
            self._forget(stream)
            stream.close()
            return
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _serve(self, stream: socket.socket, address: str) -> None:
        try:
            peer_fields = authenticate(stream, self._make_handshake())
        except OSError as error:
            if not self._is_closed.is_set():
                self._log(f"refused a connection from {address}: {error}")
            stream.close()
            return
        finally:
            self._forget(stream)
        self._on_peer(stream, peer_fields)

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(stream, None)


def _shut_down(stream: socket.socket) -> None:
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
