"""A rank of another host that has proven itself, and then sends what does not fit: one sentence, and little memory."""

import re
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch

from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport import message_matcher, shared_memory
from motet.collectives.shm_backend.transport.local_peers import LocalPeerSync
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, PeerSocket

WAIT = timedelta(seconds=10)
MIB = 1 << 20


@pytest.fixture
def ends() -> Iterator[tuple[PeerSocket, socket.socket]]:
    """The socket of rank 0 to rank 1, and the other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield PeerSocket(1, ours), theirs


@pytest.fixture
def messages(ends: tuple[PeerSocket, socket.socket]) -> Iterator[MessageMatcher]:
    memory = shared_memory.SharedMemorySegment(1, shared_memory.create_shared_memory(1))
    with closing(MessageMatcher(LocalPeerSync(memory, 0, {}, rank=0, timeout_s=10), [ends[0]], 10)) as messages:
        yield messages


def header(number: int, signature: int, length: int, text: bytes = b"") -> bytes:
    return struct.pack("<QQH", number, signature, length) + text


HEADERS = {
    header(4, 9, 65535): "sent an invalid header of a collective: a description of 65535 bytes, of 1024 at most",
    header(4, 9, 1025, b"x" * 1025): "sent an invalid header of a collective: a description of 1025 bytes",
    header(4, 8, 6, b"\xff\x1b[2J\n"): "rank 1 called \N{REPLACEMENT CHARACTER}?[2J? as its number 4; every rank must",
    header(2**64 - 1, 9, 3, b"sum"): "rank 1 called sum as its number 18446744073709551615; every rank must",
    header(4, 9, 3, b"sum") + b"1234": "rank 0 in all-reduce: rank 1, on another host, is lost: it has closed the",
    header(4, 9, 3)[:5]: "rank 0 in all-reduce: rank 1, on another host, is lost: it has closed the connection",
    header(4, 9, 3, b"su"): "rank 0 in all-reduce: rank 1, on another host, is lost: it has closed the connection",
}


@pytest.mark.parametrize(("sent", "sentence"), HEADERS.items(), ids=range(len(HEADERS)))
def test_headers_of_collectives(ends: tuple[PeerSocket, socket.socket], sent: bytes, sentence: str) -> None:
    ours, theirs = ends
    sockets = CollectivePeerSockets(0, {1: ours}, 10)
    sockets.begin(4, 9, "all-reduce")
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(CollectiveError, match=re.escape(sentence)):
        sockets.receive_into(1, memoryview(bytearray(8)))


def test_a_peer_that_stops_in_the_middle_is_lost_after_the_timeout(ends: tuple[PeerSocket, socket.socket]) -> None:
    ours, theirs = ends
    sockets = CollectivePeerSockets(0, {1: ours}, 0.05)
    sockets.begin(4, 9, "all-reduce")
    theirs.sendall(header(4, 9, 3, b"sum") + b"1234")
    with pytest.raises(PeerLostError, match=r"rank 1, on another host, did not take part within 0.05 s"):
        sockets.receive_into(1, memoryview(bytearray(8)))


def message(tag: int, length: int, data: bytes = b"", text: bytes = b"uint8 [8]") -> bytes:
    return struct.pack("<qQ48s", tag, length, text) + data


KEPT = r"before the messages with tags \[5\] that this rank waits for, and motet keeps 1 GiB of such messages of a rank"
MESSAGES = {
    message(
        7, 2**64 - 1
    ): rf"^rank 0 receives uint8 \[8\] from rank 1: it sent .* \(18446744073709551615 bytes\) .*{KEPT}",
    message(-3, 1 << 30): rf"^rank 0 receives uint8 \[8\] from rank 1: it sent .* with tag -3 {KEPT}",
    message(7, 600 * MIB): "it has closed the connection",
    message(
        5, 2**62
    ): r"^rank 0 receives uint8 \[8\] \(8 bytes\) .* which sent uint8 \[8\] \(4611686018427387904 bytes\)$",
    message(5, 0): r"which sent uint8 \[8\] \(0 bytes\)$",
    message(5, 9, text=b"\xff\x1b[2J\n"): r"which sent \N{REPLACEMENT CHARACTER}\?\[2J\? \(9 bytes\)$",
    message(5, 8, b"1234"): r"rank 0 receives uint8 \[8\] from rank 1: .* it has closed the connection$",
    message(5, 8)[:30]: r"rank 0 receives uint8 \[8\] from rank 1: .* it has closed the connection$",
}


@pytest.mark.parametrize(("sent", "sentence"), MESSAGES.items(), ids=range(len(MESSAGES)))
@pytest.mark.parametrize("source", [1, None])
def test_headers_of_messages(
    messages: MessageMatcher,
    ends: tuple[PeerSocket, socket.socket],
    sent: bytes,
    sentence: str,
    source: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, empty = [0], torch.empty

    def measured(size: int, **settings: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size, **settings)

    monkeypatch.setattr(message_matcher.torch, "empty", measured)
    receive = messages.receive(torch.zeros(8, dtype=torch.uint8), source, 5)
    ends[1].sendall(sent)
    if "closed" in sentence:
        ends[1].shutdown(socket.SHUT_WR)
        sentence += "|rank 0 receives from any rank, but all have ended"
    with pytest.raises(CollectiveError, match=sentence):
        receive.wait(WAIT)
    assert sum(sizes) <= 2 * MIB


def test_memory_grows_with_what_arrives(
    messages: MessageMatcher, ends: tuple[PeerSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large message before the one that is awaited, a discarded one, and an empty one."""
    sizes, empty = [0], torch.empty
    monkeypatch.setattr(message_matcher.torch, "empty", lambda size, **rest: sizes.append(size) or empty(size, **rest))
    count = 3 * MIB + 17
    large = torch.randint(256, (count,), dtype=torch.uint8)
    sent = message(7, count, large.numpy().tobytes()) + message(5, 3 * MIB, b"x" * 3 * MIB) + message(8, 0)
    first, unfit = torch.empty(8, dtype=torch.uint8), messages.receive(torch.zeros(8, dtype=torch.uint8), 1, 5)
    ends[1].setblocking(False)
    position = 0
    while not unfit.is_completed() or position < len(sent):
        try:
            position += ends[1].send(sent[position : position + MIB])
        except BlockingIOError:
            messages._progress()
        assert sum(sizes) <= 2 * position + 2 * MIB
    with pytest.raises(CollectiveError, match=rf"which sent uint8 \[8\] \({3 * MIB} bytes\)"):
        unfit.wait(WAIT)
    messages.receive(first[:0], 1, 8).wait(WAIT)
    messages.receive(received := torch.zeros_like(large), 1, 7).wait(WAIT)
    assert torch.equal(received, large)
    ends[1].setblocking(True)
    ends[1].sendall(message(5, 8, bytes(range(8))))
    messages.receive(first, 1, 5).wait(WAIT)
    assert first.tolist() == [*range(8)]


def test_messages_that_nobody_awaits_have_a_limit(
    messages: MessageMatcher, ends: tuple[PeerSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds for what is kept: what is received frees its part of it, and a rank that goes beyond it is lost."""
    monkeypatch.setattr(message_matcher, "MAX_UNEXPECTED_BYTES", 10 * 17_000)
    for _ in range(3):
        ends[1].sendall(message(7, 0) * 9 + message(5, 0))
        messages.receive(torch.zeros(0, dtype=torch.uint8), 1, 5).wait(WAIT)
        for _ in range(9):
            messages.receive(torch.zeros(0, dtype=torch.uint8), 1, 7).wait(WAIT)
    receive, ones = messages.receive(torch.zeros(0, dtype=torch.uint8), 1, 5), torch.ones(1)
    ends[1].sendall(message(7, 0) * 11 + message(5, 0))
    for call in (lambda: receive, lambda: messages.send(ones, 1, 5), lambda: messages.receive(ones, 1, 5)):
        with pytest.raises(CollectiveError, match=r"motet keeps 166 KiB of such messages"):
            call().wait(WAIT)


def test_waiting_for_any_rank_ends_when_one_is_gone_and_another_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = [socket.create_connection(server.getsockname()) for _ in range(2)]
        theirs = [server.accept()[0] for _ in range(2)]
    theirs[0].close()
    memory = shared_memory.SharedMemorySegment(1, shared_memory.create_shared_memory(1))
    peers = LocalPeerSync(memory, 0, {}, rank=0, timeout_s=10)
    with closing(MessageMatcher(peers, [PeerSocket(rank, end) for rank, end in enumerate(ours, 1)], 10)) as messages:
        receive = messages.receive(torch.zeros(8), None, 5)
        with pytest.raises(PeerLostError, match=r"receiving from any rank did not end within 0.1 s"):
            receive.wait(timedelta(seconds=0.1))
    for end in (*ours, theirs[1]):
        end.close()
