"""The handshake of connections as docs/security.md describes it, by hand, and connections that go wrong in it.

Nothing here calls motet's handshake: a stranger makes its messages by hand, with proofs from the keys that it knows.
"""

import hashlib
import hmac
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, sentence_problem
from motet.core import token_authentication

NONCE_BYTES, PROOF_BYTES, MAX_HELLO_BYTES = 32, 32, 64 * 1024
CONNECTING, ACCEPTING = b"from the connecting side", b"from the accepting side"
WAIT_S = 8.0


@dataclass(frozen=True)
class Secret:
    """The key of a listener, and its purpose."""

    key: bytes
    purpose: bytes

    def proof(self, direction: bytes, connecting_hello: bytes, accepting_hello: bytes) -> bytes:
        parts = [b"motet 1", self.purpose, direction, connecting_hello, accepting_hello]
        content = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return hmac.new(self.key, content, hashlib.sha256).digest()


class RawConnection:
    """A connection whose bytes the fuzzer chooses."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.stream = socket.create_connection(address, timeout=WAIT_S)

    def receive(self, count: int) -> bytes:
        """Up to `count` bytes: fewer if the other side closes the connection before."""
        received = b""
        with suppress(ConnectionError):
            while len(received) < count and (more := self.stream.recv(count - len(received))):
                received += more
        return received

    def read_hello(self) -> bytes:
        return self.receive(int.from_bytes(self.receive(4), "big"))

    def send(self, content: bytes) -> None:
        with suppress(OSError):  # It was refused while it spoke, or has ended
            self.stream.sendall(content)

    def authenticate(self, secret: Secret, hello: bytes) -> bytes:
        """Take part in the handshake as a process of the run. Returns the hello of the accepting side."""
        self.send(framed(hello))
        accepting_hello = self.read_hello()
        self.send(secret.proof(CONNECTING, hello, accepting_hello))
        proof = self.receive(PROOF_BYTES)
        if proof != secret.proof(ACCEPTING, hello, accepting_hello):
            raise FindingError(f"the accepting side answered a good proof with {proof!r}")
        return accepting_hello

    def end(self, how: str) -> None:
        """Close, reset, or shut down one direction; `silent` leaves it open until `close`."""
        with suppress(OSError):
            if how == "reset":
                self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == "half":
                self.stream.shutdown(socket.SHUT_WR)
            elif how != "silent":
                self.stream.close()

    def close(self) -> None:
        self.stream.close()


def framed(hello: bytes) -> bytes:
    return len(hello).to_bytes(4, "big") + hello


BAD_HELLOS = ("a length that does not fit", "a hello without end", "the hello of the accepting side")
ENDS = ("silent", "close", "reset", "half")


class Stranger:
    """Connections of somebody who does not know the key; `replay` is a hello and a proof of an earlier connection."""

    def __init__(self, secret: Secret, make_fields: Callable[[], bytes], replay: tuple[bytes, bytes]) -> None:
        self._secret, self._make_fields, self._replay = secret, make_fields, replay
        self.acts: dict[str, Callable[[FuzzCase, RawConnection], None]] = {
            "a random proof": self._random_proof,
            "a proof with another token": self._other_token,
            "a proof for another purpose": self._other_purpose,
            "a proof of the other direction": self._other_direction,
            "a proof with one bit changed": self._changed_proof,
            "an earlier hello and its proof": self._replayed,
            "the hello of the accepting side": self._reflected_hello,
            "a proof with its parts in another order": self._exchanged,
            "a length that does not fit": self._wrong_length,
            "a hello without end": self._cut_hello,
        }

    def act(self, case: FuzzCase, address: tuple[str, int]) -> tuple[RawConnection, bool]:
        """Connect and speak. Returns the connection, and whether its hello had a length that is admitted."""
        connection = RawConnection(address)
        if not case.is_structured:
            hello = self._hello(case)
            content = framed(hello) + case.rng.randbytes(PROOF_BYTES)
            content, change = mutations.change_bytes(
                case.rng, content if case.rng.random() < 0.7 else case.rng.randbytes(200)
            )
            case.note(f"bytes: {change}")
            connection.send(content)
            length = int.from_bytes(content[:4], "big")
            is_past = NONCE_BYTES <= length <= min(MAX_HELLO_BYTES, len(content) - 4)
        else:
            name = case.rng.choice(list(self.acts))
            case.note(name)
            self.acts[name](case, connection)
            is_past = name not in (
                "a length that does not fit",
                "a hello without end",
                "the hello of the accepting side",
            )
        end = case.rng.choice(ENDS)
        case.note(f"then: {end}")
        connection.end(end)
        return connection, is_past

    def check_nothing_proven(self, connection: RawConnection) -> None:
        """Check that the accepting side has sent no proof to a side that has not proven itself."""
        try:
            connection.stream.settimeout(WAIT_S)
            received = connection.receive(4 + MAX_HELLO_BYTES)
        except (OSError, TimeoutError):
            return
        hello_bytes = int.from_bytes(received[:4], "big")
        if len(received) > 4 + hello_bytes:
            raise FindingError(f"a stranger got {len(received) - 4 - hello_bytes} bytes after the hello")

    def _hello(self, case: FuzzCase) -> bytes:
        return case.rng.randbytes(NONCE_BYTES) + self._make_fields()

    def _prove(self, case: FuzzCase, connection: RawConnection, make: Callable[[bytes, bytes], bytes]) -> None:
        """Send a hello, read the other one, and send the proof that `make` makes of both; nothing may come back."""
        hello = self._hello(case)
        connection.send(framed(hello))
        connection.send(make(hello, connection.read_hello()))
        if case.rng.random() < 0.3 and (answer := connection.receive(PROOF_BYTES)):
            raise FindingError(f"a stranger got {len(answer)} bytes for a false proof")

    def _random_proof(self, case: FuzzCase, connection: RawConnection) -> None:
        self._prove(case, connection, lambda mine, other: case.rng.randbytes(PROOF_BYTES))

    def _other_token(self, case: FuzzCase, connection: RawConnection) -> None:
        keys = (
            b"",
            b"another token of a run",
            self._secret.key[:-1],
            self._secret.key + b"\0",
            self._secret.key.upper(),
        )
        key = case.rng.choice([key for key in keys if key.rstrip(b"\0") != self._secret.key])
        self._prove(case, connection, lambda m, o: Secret(key, self._secret.purpose).proof(CONNECTING, m, o))

    def _other_purpose(self, case: FuzzCase, connection: RawConnection) -> None:
        purpose = case.rng.choice((b"", b"snapshot", self._secret.purpose + b" "))
        self._prove(case, connection, lambda m, o: Secret(self._secret.key, purpose).proof(CONNECTING, m, o))

    def _other_direction(self, case: FuzzCase, connection: RawConnection) -> None:
        self._prove(case, connection, lambda mine, other: self._secret.proof(ACCEPTING, mine, other))

    def _changed_proof(self, case: FuzzCase, connection: RawConnection) -> None:
        def make(mine: bytes, other: bytes) -> bytes:
            proof = bytearray(self._secret.proof(CONNECTING, mine, other))
            proof[case.rng.randrange(PROOF_BYTES)] ^= 1 << case.rng.randrange(8)
            return bytes(proof)

        self._prove(case, connection, make)

    def _exchanged(self, case: FuzzCase, connection: RawConnection) -> None:
        self._prove(case, connection, lambda mine, other: self._secret.proof(CONNECTING, other, mine))

    def _replayed(self, case: FuzzCase, connection: RawConnection) -> None:
        hello, proof = self._replay
        connection.send(framed(hello) + proof)

    def _reflected_hello(self, case: FuzzCase, connection: RawConnection) -> None:
        hello = connection.read_hello()
        connection.send(framed(hello) + case.rng.randbytes(PROOF_BYTES))

    def _wrong_length(self, case: FuzzCase, connection: RawConnection) -> None:
        hello = self._hello(case)
        length = case.rng.choice((0, 1, NONCE_BYTES - 1, MAX_HELLO_BYTES, 2**20, 2**30, 2**32 - 1))
        connection.send(length.to_bytes(4, "big") + hello * case.rng.choice((1, 3000)))

    def _cut_hello(self, case: FuzzCase, connection: RawConnection) -> None:
        content = framed(self._hello(case))
        connection.send(content[: case.rng.randrange(len(content))])


@contextmanager
def checked_log() -> Iterator[list[str]]:
    """The lines that motet logs, each of which must be one sentence."""
    lines: list[str] = []
    lock = threading.Lock()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with lock:
                lines.append(self.format(record))

    logger, handler = logging.getLogger("motet"), Collector()
    logger.addHandler(handler)
    token_authentication.LOG_INTERVAL_S = 0.0  # Logs every line, also of many strangers within seconds
    propagates, logger.propagate = logger.propagate, False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
    for line in lines:
        if problem := sentence_problem(line):
            raise FindingError(f"a line of the log: {problem}: {line}")
