"""Connections of the parameter server: real sockets on this machine."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from motet.parallel.parameter_server.process.tcp_transport import HANDSHAKE_FRAME, TcpTransport, TransportEvent
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_framing import FRAME_HEADER, MAX_FRAME_BYTES
from motet.parallel.parameter_server.protocol.messages import GradientPush, GradientPushAck
from waiting import until

WAIT_S = 20.0


@contextmanager
def posts(*names: str, limit_s: float = WAIT_S) -> Iterator[list[TcpTransport]]:
    with ExitStack() as stack:
        made = (TcpTransport(name, {"run": "run"}, limit_s, host="127.0.0.1") for name in names)
        yield [stack.enter_context(closing(post)) for post in made]


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


def stranger(name: str, run: str) -> bytes:
    hello = json.dumps([name, {"run": run}, ""]).encode()
    return FRAME_HEADER.pack(0, HANDSHAKE_FRAME, len(hello)) + hello


def test_messages_and_payloads_arrive_both_ways() -> None:
    payload = bytes(range(256)) * 4000
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        assert arrived(server) == TransportEvent("worker", None, is_connected=True)
        assert arrived(worker).sender == "server"
        worker.send("server", GradientPush("worker", 1, 2, 3), memoryview(payload), priority=5)
        came = arrived(server, GradientPush)
        assert came[:2] == ("worker", GradientPush("worker", 1, 2, 3)) and bytes(came.payload) == payload
        server.send("worker", GradientPushAck("server", 1, 2))
        assert arrived(worker, GradientPushAck).message == GradientPushAck("server", 1, 2)
        until(lambda: worker.traffic["server"].sent_bytes == server.traffic["worker"].received_bytes > len(payload))
        assert worker.queued_bytes("server") == 0


def test_what_is_urgent_overtakes() -> None:
    """A payload that no buffer of the kernel holds is underway; what is more urgent arrives before its end."""
    large = memoryview(bytearray(400 * MAX_FRAME_BYTES))
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        arrived(worker)
        for work_item in range(3):
            worker.send("server", GradientPush("worker", 1, 0, work_item), large, priority=9)
        worker.send("server", GradientPush("worker", 1, 1, 7), large[:10], priority=2)
        worker.send("server", messages.GradientNormReply(1, 1, 0.5))
        order = [server.inbox.get(timeout=WAIT_S).message for _ in range(6)][1:]
        kinds = [message.work_item if isinstance(message, GradientPush) else "norm" for message in order]
        assert kinds.index("norm") < kinds.index(1) and kinds.index(7) < kinds.index(1)


def test_a_lost_connection_is_made_again() -> None:
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        arrived(worker)
        arrived(server)
        worker._connections["server"].tcp_socket.shutdown(socket.SHUT_RDWR)
        assert {arrived(worker).is_connected, arrived(worker).is_connected} == {False, True}
        worker.send("server", GradientPushAck("s", 1, 1))
        assert arrived(server, GradientPushAck).message == GradientPushAck("s", 1, 1)


def test_silence_is_a_loss_and_beats_are_none() -> None:
    with posts("server", "worker", limit_s=0.5) as (server, worker):
        worker.connect("server", server.address)
        arrived(server)
        time.sleep(1.5)
        assert server.inbox.empty()
        with socket.create_connection(server.address) as mute:
            until(lambda: is_closed(mute))
        worker.close()
        assert arrived(server) == TransportEvent("worker", None, is_connected=False)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", stranger("name", "other")])
def test_strangers_are_turned_away(said: bytes) -> None:
    with posts("server") as (server,):
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(said)
            until(lambda: is_closed(stranger))
        assert server.inbox.empty()


def test_who_connects_with_other_data_is_told() -> None:
    with posts("server") as (server,):
        other = TcpTransport("worker", {"run": "run", "data": "b"}, WAIT_S)
        server.handshake = {"run": "run", "data": "a"}
        other.connect("server", server.address)
        reason = arrived(other, messages.ConnectionRejected).message.reason
        assert "the data of worker is not that of the server (b here, a there)" in reason
        other.close()
        assert server.inbox.empty()


def test_nobody_is_left_when_it_is_closed() -> None:
    """A thread that frees a tensor while Python ends would end the process with an abort."""
    before = set(threading.enumerate())
    with posts("a", "b") as (a, b):
        b.connect("a", a.address)
        until(lambda: b.connected_peers == ["a"])
        for item in range(50):
            b.send("a", GradientPush("b", 1, item, item), memoryview(bytes(MAX_FRAME_BYTES)))
    assert set(threading.enumerate()) <= before
