"""Connections of the parameter server: real sockets on this machine."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from motet.core.token_authentication import RunToken, TokenHandshake, authenticate, new_run_token
from motet.parallel.parameter_server.process.tcp_transport import HANDSHAKE_PURPOSE, TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import message_admission, messages
from motet.parallel.parameter_server.protocol.message_admission import PayloadSizes
from motet.parallel.parameter_server.protocol.messages import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MESSAGE_FRAME,
    GradientPush,
    GradientPushAck,
    ParameterPull,
    encode_message,
)
from waiting import until

WAIT_S = 20.0
TOKEN = new_run_token()
LARGE = 400 * MAX_FRAME_BYTES
BYTES = (LARGE, 10, 256 * 4000, *[MAX_FRAME_BYTES] * 50)  # Of the gradient of each slice
SIZES = PayloadSizes(BYTES, BYTES, BYTES)


@contextmanager
def posts(*names: str, limit_s: float = WAIT_S) -> Iterator[list[TcpTransport]]:
    with ExitStack() as stack:
        made = (transport(name, limit_s=limit_s, host="127.0.0.1") for name in names)
        yield [stack.enter_context(closing(post)) for post in made]


def transport(
    name: str, entries: dict[str, str] | None = None, limit_s: float = WAIT_S, *, token: RunToken = TOKEN, **host: Any
) -> TcpTransport:
    return TcpTransport(name, entries or {"run": "run"}, limit_s, token=token, payload_sizes=SIZES, **host)


def arrived(post: TcpTransport, kind: type | None = None) -> TransportEvent:
    """The next message of a kind, or the next connection made or lost."""
    while True:
        delivery = post.inbox.get(timeout=WAIT_S)
        if (kind is None) == (delivery.message is None) and (kind is None or isinstance(delivery.message, kind)):
            return delivery


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1024) == b""
    except ConnectionResetError:
        return True


def test_messages_and_payloads_arrive_both_ways() -> None:
    payload = bytes(range(256)) * 4000
    with posts("s0", "w0") as (server, worker):
        worker.connect("s0", server.address)
        assert arrived(server) == TransportEvent("w0", None, is_connected=True)
        assert arrived(worker).sender == "s0"
        worker.send("s0", GradientPush("w0", 1, 2, 3), memoryview(payload), priority=5)
        came = arrived(server, GradientPush)
        assert came[:2] == ("w0", GradientPush("w0", 1, 2, 3)) and bytes(came.payload) == payload
        server.send("w0", GradientPushAck("s0", 1, 2))
        assert arrived(worker, GradientPushAck).message == GradientPushAck("s0", 1, 2)
        until(lambda: worker.traffic["s0"].sent_bytes == server.traffic["w0"].received_bytes > len(payload))
        assert worker.queued_bytes("s0") == 0


def test_what_is_urgent_overtakes() -> None:
    """A payload that no buffer of the kernel holds is underway; what is more urgent arrives before its end."""
    large = memoryview(bytearray(LARGE))
    with posts("s0", "w0") as (server, worker):
        worker.connect("s0", server.address)
        arrived(worker)
        for work_item in range(3):
            worker.send("s0", GradientPush("w0", 1, 0, work_item), large, priority=9)
        worker.send("s0", GradientPush("w0", 1, 1, 7), large[:10], priority=2)
        worker.send("s0", ParameterPull("w0", 1, 0, 0))
        order = [server.inbox.get(timeout=WAIT_S).message for _ in range(6)][1:]
        kinds = [message.work_item if isinstance(message, GradientPush) else "pull" for message in order]
        assert kinds.index("pull") < kinds.index(1) and kinds.index(7) < kinds.index(1)


def test_a_lost_connection_is_made_again() -> None:
    with posts("s0", "w0") as (server, worker):
        worker.connect("s0", server.address)
        arrived(worker)
        arrived(server)
        worker._connections["s0"].tcp_socket.shutdown(socket.SHUT_RDWR)
        assert {arrived(worker).is_connected, arrived(worker).is_connected} == {False, True}
        worker.send("s0", ParameterPull("w0", 1, 1, 0))
        assert arrived(server, ParameterPull).message == ParameterPull("w0", 1, 1, 0)


def test_silence_is_a_loss_and_beats_are_none() -> None:
    with posts("s0", "w0", limit_s=0.5) as (server, worker):
        worker.connect("s0", server.address)
        arrived(server)
        time.sleep(1.5)
        assert server.inbox.empty()
        worker.close()
        assert arrived(server) == TransportEvent("w0", None, is_connected=False)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, b"\0\0\0\x21" + b"x" * 33 + b"proof" * 7])
def test_strangers_are_turned_away(said: bytes) -> None:
    with posts("s0") as (server,):
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(said)
            until(lambda: is_closed(stranger))
        assert server.inbox.empty()


def test_who_has_another_token_is_refused_on_both_sides_and_hears_why() -> None:
    with posts("s0") as (server,), closing(transport("w0", token=new_run_token())) as worker:
        worker.connect("s0", server.address)
        until(lambda: "its run may have another token" in worker.refusals.get("s0", ""))
        assert worker.inbox.empty() and server.inbox.empty()


@pytest.mark.parametrize("name", ["coordinator", "s0", "x1", "w", "w0\n", "w" * 400])
def test_names_that_do_not_connect_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with posts("s0") as (server,), MadPeer(server, name) as peer:
        until(lambda: is_closed(peer.stream))
        assert server.inbox.empty()
    (line,) = caplog.messages
    assert line.startswith("s0 refuses a connection: ")


def test_a_name_belongs_to_one_process() -> None:
    with posts("s0") as (server,), MadPeer(server, "w0", "first"):
        assert arrived(server).sender == "w0"
        with MadPeer(server, "w0", "second") as second:
            until(lambda: is_closed(second.stream))
        assert server.inbox.empty() and server.connected_peers == ["w0"]


class MadPeer:
    """A process of the run that sends anything."""

    def __init__(self, server: TcpTransport, name: str = "w0", instance: str = "mad") -> None:
        self.stream = socket.create_connection(server.address)
        fields = json.dumps([name, {"run": "run"}, instance]).encode()
        authenticate(self.stream, TokenHandshake(TOKEN, HANDSHAKE_PURPOSE, fields, is_accepting=False))

    def __enter__(self) -> "MadPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def send(self, message: messages.Message, payload_bytes: int = 0) -> None:
        text = encode_message(message, payload_bytes)
        self.stream.sendall(FRAME_HEADER.pack(1, MESSAGE_FRAME, len(text)) + text)


@pytest.mark.parametrize(
    ("message", "payload_bytes", "problem"),
    [
        (messages.ServerShutdown(3), 0, "a worker may not send a ServerShutdown to s0"),
        (messages.ParameterStateRequest(0), 0, "a worker may not send a ParameterStateRequest to s0"),
        (messages.WorkerJoined("w0"), 0, "a worker may not send a WorkerJoined to s0"),
        (GradientPush("w1", 1, 0, 3), LARGE, "GradientPush has worker = 'w1'"),
        (GradientPush("w0", 1, 999, 3), 10, "GradientPush has slice_id = 999"),
        (GradientPush("w0", 1, 1, 3), 2**30, f"GradientPush announces {2**30} bytes, not 10"),
        (GradientPush("w0", 1, 1, 3), -1, "GradientPush announces -1 bytes, not 10"),
    ],
)
def test_a_bad_message_closes_its_connection_with_a_line_and_the_peer_can_come_back(
    message: messages.Message, payload_bytes: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with posts("s0") as (server,):
        with MadPeer(server) as peer:
            assert arrived(server).is_connected
            peer.send(message, payload_bytes)
            until(lambda: is_closed(peer.stream))
            assert arrived(server) == TransportEvent("w0", None, is_connected=False)
        assert caplog.messages == [f"s0 closes its connection to w0: {problem}; the run goes on"]
        with MadPeer(server) as peer:
            peer.send(ParameterPull("w0", 1, 0, 0))
            assert arrived(server, ParameterPull).message == ParameterPull("w0", 1, 0, 0)


def test_a_peer_that_floods_is_not_received_until_its_messages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_admission, "MAX_UNREAD_BYTES", -sum(BYTES))
    with posts("s0") as (server,), MadPeer(server) as peer:
        until(lambda: server.next_event())  # the connection
        pulls = [ParameterPull("w0", 1, 0, version) for version in range(20)]
        for pull in pulls:
            peer.send(pull)
        time.sleep(0.2)
        assert server.inbox.qsize() == 1
        read = [event.message for _ in pulls if (event := server.next_event(WAIT_S))]
        assert read == pulls


def test_who_connects_with_other_data_is_told() -> None:
    with posts("s0") as (server,):
        other = transport("w0", {"run": "run", "data": "b"})
        server.handshake = {"run": "run", "data": "a"}
        other.connect("s0", server.address)
        reason = arrived(other, messages.ConnectionRejected).message.reason
        assert "the data of w0 is not that of the s0 (b here, a there)" in reason
        other.close()
        assert server.inbox.empty()


def test_nobody_is_left_when_it_is_closed() -> None:
    """A thread that frees a tensor while Python ends would end the process with an abort."""
    before = set(threading.enumerate())
    with posts("s0", "w0") as (a, b):
        b.connect("s0", a.address)
        until(lambda: b.connected_peers == ["s0"])
        for item in range(50):
            b.send("s0", GradientPush("w0", 1, 3 + item, item), memoryview(bytes(MAX_FRAME_BYTES)))
    assert set(threading.enumerate()) <= before
