"""Authentication of connections between ranks: the run token, its handshake, and sockets that use it.

Sockets whose other end has proven that it knows the token of the run, and the listener that accepts them.

The secret that the processes of one run share, and where a process reads it.
A token is never on a command line, in a log, in an event or in a record: `repr` of a `RunToken` does not show it.

The handshake with which the two ends of a connection prove that they know the token of the run, without sockets.

    connecting                                   accepting
      hello: nonce and public fields  --->
      <---  hello: nonce and public fields
      proof  --->                                checks it
      checks it                       <---  proof

A proof is HMAC-SHA256(token, purpose | direction | hello of the connecting side | hello of the accepting side). Each
nonce is new, so no proof holds in another connection, and the direction is in it, so none can be sent back. The
accepting side computes no proof before the other side's proof holds: nobody can use it to make proofs.
"""

import hashlib
import hmac
import logging
import os
import resource
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "MOTET_RUN_TOKEN", "MOTET_RUN_TOKEN_FILE"
NO_AUTH_VARIABLE = "MOTET_NO_AUTH"  # The supervisor hands `--no-auth` to its ranks with it
MIN_TOKEN_CHARACTERS, MAX_TOKEN_BYTES = 16, 4096
HOW_TO_GIVE_A_TOKEN = (
    f"give every host the same token in the environment variable {TOKEN_VARIABLE}, or in a file of mode 0600 that "
    f"{TOKEN_FILE_VARIABLE} names (`openssl rand -hex 32` makes one), or let everybody in with --no-auth"
)


@dataclass(frozen=True)
class RunToken:
    """The secret of a run. It is empty in a run that admits everybody."""

    secret: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables from which `read_run_token` reads this token."""
        return {TOKEN_VARIABLE: self.secret} if self.secret else {NO_AUTH_VARIABLE: "1"}


NO_AUTHENTICATION = RunToken("")


def new_run_token() -> RunToken:
    return RunToken(secrets.token_hex(32))


def read_run_token(environment: Mapping[str, str]) -> RunToken | None:
    """The token that the environment gives, or None if it gives none."""
    if environment.get(NO_AUTH_VARIABLE) == "1":
        return NO_AUTHENTICATION
    if (secret := environment.get(TOKEN_VARIABLE)) is not None:
        return _checked(secret, f"the environment variable {TOKEN_VARIABLE}")
    if (path := environment.get(TOKEN_FILE_VARIABLE)) is not None:
        return read_token_file(Path(path))
    return None


def read_token_file(path: Path) -> RunToken:
    """The token in a file that only this user can read."""
    remedy = f"give {TOKEN_FILE_VARIABLE} a file of mode 0600 that holds the token"
    with convert_os_errors(f"read the run token in {path}", remedy):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            check_input(stat.S_ISREG(status.st_mode), f"{path} is not a regular file; {remedy}")
            owner = f"{path} belongs to the user with id {status.st_uid}, not to this one ({os.getuid()})"
            check_input(status.st_uid == os.getuid(), f"{owner}, who could know the token; {remedy}")
            mode = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read or change the token"
            check_input(not status.st_mode & 0o077, f"{mode}; run `chmod 600 {path}` and take a new token")
            content = file.read(MAX_TOKEN_BYTES + 1)
    check_input(len(content) <= MAX_TOKEN_BYTES, f"{path} has more than {MAX_TOKEN_BYTES} bytes; {remedy}")
    try:
        return _checked(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text; {remedy}") from error


def write_token_file(path: Path, token: RunToken) -> None:
    """Write a new file that only this user can read, in the place of an older one."""
    with convert_os_errors(f"write the run token to {path}", "give a folder in which this user can write"):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(token.secret)


def _checked(secret: str, source: str) -> RunToken:
    secret = secret.strip()
    check_input(
        len(secret) >= MIN_TOKEN_CHARACTERS,
        f"the run token in {source} has {len(secret)} characters, and at least {MIN_TOKEN_CHARACTERS} are needed; "
        "`openssl rand -hex 32` makes one",
    )
    return RunToken(secret)


NONCE_BYTES, PROOF_BYTES = 32, 32
MAX_HELLO_BYTES = 2**16 - 1024  # A peer may send less than 64 KiB before its proof holds
HANDSHAKE_TIMEOUT_S = 5.0


class HandshakeRefusedError(ConnectionError):
    """The other end of a connection has not proven that it knows the token of the run."""


class TokenHandshake:
    """One side of the handshake of one connection. `hello` and `proof` are sent, and the other side's are checked."""

    def __init__(
        self,
        token: RunToken,
        purpose: str,
        public_fields: bytes,
        *,
        is_accepting: bool,
        timeout_s: float | None = None,
    ) -> None:
        """The purpose, such as `parameter server`, keeps a proof from holding elsewhere. A handshake may take
        `timeout_s`, by default and at least `HANDSHAKE_TIMEOUT_S`."""
        self.timeout_s = max(HANDSHAKE_TIMEOUT_S, timeout_s or 0.0)
        self._key, self._purpose, self.is_accepting = token.secret.encode(), purpose.encode(), is_accepting
        self.hello = secrets.token_bytes(NONCE_BYTES) + public_fields
        assert len(self.hello) <= MAX_HELLO_BYTES
        self._peer_hello = b""
        self._is_proven = False

    def read_hello(self, hello: bytes) -> bytes:
        """Take the other side's hello. Returns its public fields, which nothing proves yet."""
        assert not self._peer_hello
        if not NONCE_BYTES <= len(hello) <= MAX_HELLO_BYTES:
            raise HandshakeRefusedError(f"a hello of {len(hello)} bytes, not {NONCE_BYTES} to {MAX_HELLO_BYTES}")
        if hmac.compare_digest(hello[:NONCE_BYTES], self.hello[:NONCE_BYTES]):
            raise HandshakeRefusedError("it has sent this side's own nonce back")
        self._peer_hello = bytes(hello)
        return self._peer_hello[NONCE_BYTES:]

    def proof(self) -> bytes:
        """The proof of this side. The accepting side has none before the other side's proof holds."""
        assert self._is_proven or not self.is_accepting
        return self._proof_of(is_accepting=self.is_accepting)

    def check_proof(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof_of(is_accepting=not self.is_accepting)):
            raise HandshakeRefusedError("its proof does not fit the token of this run")
        self._is_proven = True

    def _proof_of(self, *, is_accepting: bool) -> bytes:
        assert self._peer_hello
        hellos = [self.hello, self._peer_hello]
        direction = b"from the accepting side" if is_accepting else b"from the connecting side"
        parts = [b"motet 1", self._purpose, direction, *(reversed(hellos) if self.is_accepting else hellos)]
        content = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, content, hashlib.sha256)


MAX_WAITING_CONNECTIONS = 64  # Connections whose proof is still to come; one more closes the oldest
DESCRIPTORS_PER_WAITING_CONNECTION = 8  # File descriptors of the process; strangers leave it most of them
LOG_INTERVAL_S = 10.0
ACCEPT_RETRY_INTERVAL_S = 0.2  # The wait after a failure, such as a process without free file descriptors
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
    """Both sides' hellos and proofs, within the time of the handshake. Returns the public fields of the other side.
    The stream has a timeout afterwards, which the caller may set anew."""
    deadline_s = time.monotonic() + handshake.timeout_s
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
            raise TimeoutError("the other side did not finish its handshake in time")
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
