"""The listener admits holders of the token only, and no stranger ends it or keeps others out."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from motet.core import token_authentication
from motet.core.token_authentication import (
    AuthenticatedListener,
    HandshakeRefusedError,
    RateLimitedLog,
    RunToken,
    TokenHandshake,
    authenticate,
)

TOKEN = RunToken("a token of this test, long enough")


class AdmittedPeers:
    """A listener, and the fields of the peers that it has admitted."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = listener.getsockname()
        self.fields: list[bytes] = []
        self.admitted = threading.Semaphore(0)
        self.listener = AuthenticatedListener(
            listener, lambda: TokenHandshake(TOKEN, "test", b"listener", is_accepting=True), self.admit
        )

    def admit(self, stream: socket.socket, fields: bytes) -> None:
        stream.close()
        self.fields.append(fields)
        self.admitted.release()

    def connect(self, token: RunToken = TOKEN, fields: bytes = b"peer") -> bytes:
        with socket.create_connection(self.address, timeout=10) as stream:
            return authenticate(stream, TokenHandshake(token, "test", fields, is_accepting=False))

    def silent_stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)


@pytest.fixture
def peers() -> Iterator[AdmittedPeers]:
    made = AdmittedPeers(socket.create_server(("127.0.0.1", 0)))
    yield made
    made.listener.close()
    made.listener.join(10)


def test_both_sides_see_the_fields_of_the_other(peers: AdmittedPeers) -> None:
    assert peers.connect() == b"listener"
    assert peers.admitted.acquire(timeout=10)
    assert peers.fields == [b"peer"]


def test_a_stranger_is_refused_and_the_next_holder_gets_in(peers: AdmittedPeers) -> None:
    with pytest.raises(HandshakeRefusedError, match="another token"):
        peers.connect(RunToken("another token, as long as that"))
    for content in [b"", b"\xff" * 4, b"\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n"]:
        with peers.silent_stranger() as stranger:
            stranger.sendall(content)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # closes with a reset
    peers.connect()
    assert peers.admitted.acquire(timeout=10)
    assert peers.fields == [b"peer"]


@pytest.mark.parametrize(("descriptors", "limit"), [(1024, 3), (25, 3), (16, 2), (4, 1)])
def test_strangers_that_stay_silent_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, limit: int
) -> None:
    monkeypatch.setattr(token_authentication, "MAX_WAITING_CONNECTIONS", 3)
    monkeypatch.setattr(token_authentication, "HANDSHAKE_TIMEOUT_S", 60.0)  # Longer than a stranger waits here
    monkeypatch.setattr(token_authentication.resource, "getrlimit", lambda _: (descriptors, descriptors))
    with ExitStack() as open_sockets:
        peers = AdmittedPeers(socket.create_server(("127.0.0.1", 0)))
        open_sockets.callback(peers.listener.join, 10)
        open_sockets.callback(peers.listener.close)
        strangers = [open_sockets.enter_context(peers.silent_stranger()) for _ in range(8)]
        assert len(peers.listener._waiting) <= limit
        assert peers.connect() == b"listener"
        for stranger in strangers[: 8 - limit]:  # the oldest were closed: their stream ends after the hello
            while stranger.recv(4096):
                pass


def test_a_stranger_has_a_limited_time(peers: AdmittedPeers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_authentication, "HANDSHAKE_TIMEOUT_S", 0.05)
    with peers.silent_stranger() as stranger:
        while stranger.recv(4096):
            pass


class ListenerWithoutDescriptors(socket.socket):
    """A listener whose first calls of `accept` fail."""

    failures = 3

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_accepting_goes_on_after_the_process_ran_out_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_authentication, "ACCEPT_RETRY_INTERVAL_S", 0.01)
    listener = ListenerWithoutDescriptors()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    peers = AdmittedPeers(listener)
    assert peers.connect() == b"listener"
    peers.listener.close()
    peers.listener.join(10)
    assert caplog.messages == ["cannot accept a connection: Too many open files; motet goes on and tries again"]


def test_a_log_has_one_line_in_an_interval_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = RateLimitedLog(lines.append)
    for text in ["a\n\x1b[2J", "b", "c"]:
        log(text)
    monkeypatch.setattr(token_authentication.time, "monotonic", lambda: float("1e9"))
    log("d")
    assert lines == [r"a\x0a\x1b[2J", "d (2 more such lines were left out)"]
