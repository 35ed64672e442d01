"""Connections of the parameter server: real sockets on this machine."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from motet.parallel.server.post import HELLO, Delivery, Post
from motet.parallel.server.protocol import Ack, Norm, Push, Refused
from motet.parallel.server.wire import PART, PART_BYTES

WAIT_S = 20.0


@contextmanager
def posts(*names: str, limit_s: float = WAIT_S) -> Iterator[list[Post]]:
    with ExitStack() as stack:
        made = [Post(name, {"run": "run"}, limit_s, "127.0.0.1") for name in names]
        for post in made:
            stack.callback(post.close)
        yield made


def arrived(post: Post, kind: type | None = None) -> Delivery:
    """The next message of a kind, or the next connection made or lost."""
    while True:
        delivery = post.inbox.get(timeout=WAIT_S)
        if (kind is None) == (delivery.message is None) and (kind is None or isinstance(delivery.message, kind)):
            return delivery


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_closed(connection: socket.socket) -> bool:
    """By the other side."""
    try:
        return connection.recv(1024) == b""
    except ConnectionResetError:
        return True


def stranger(name: str, run: str) -> bytes:
    """What a process of another run says."""
    hello = json.dumps([name, {"run": run}, ""]).encode()
    return PART.pack(0, HELLO, len(hello)) + hello


def test_messages_and_payloads_arrive_both_ways() -> None:
    payload = bytes(range(256)) * 4000
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        assert arrived(server) == Delivery("worker", None, connected=True)
        assert arrived(worker).sender == "server"
        worker.send("server", Push("worker", 1, 2, 3), memoryview(payload), urgency=5)
        came = arrived(server, Push)
        assert came.sender == "worker" and came.message == Push("worker", 1, 2, 3) and bytes(came.payload) == payload
        server.send("worker", Ack("server", 1, 2))
        assert arrived(worker, Ack).message == Ack("server", 1, 2)
        until(lambda: worker.traffic["server"].sent == server.traffic["worker"].received > len(payload))
        assert worker.waiting("server") == 0


def test_what_is_urgent_overtakes() -> None:
    """A payload that no buffer of the kernel holds is underway; what is more urgent arrives before its end."""
    large = memoryview(bytearray(400 * PART_BYTES))
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        arrived(worker)
        for share in range(3):
            worker.send("server", Push("worker", 1, 0, share), large, urgency=9)
        worker.send("server", Push("worker", 1, 1, 7), large[:10], urgency=2)
        worker.send("server", Norm(1, 1, 0.5))
        order = [server.inbox.get(timeout=WAIT_S).message for _ in range(6)][1:]
        kinds = [message.share if isinstance(message, Push) else "norm" for message in order]
        assert kinds.index("norm") < kinds.index(1) and kinds.index(7) < kinds.index(1)


def test_a_lost_connection_is_made_again() -> None:
    with posts("server", "worker") as (server, worker):
        worker.connect("server", server.address)
        arrived(worker)
        arrived(server)
        worker._lines["server"].connection.shutdown(socket.SHUT_RDWR)
        assert {arrived(worker).connected, arrived(worker).connected} == {False, True}
        worker.send("server", Ack("s", 1, 1))
        assert arrived(server, Ack).message == Ack("s", 1, 1)


def test_silence_is_a_loss_and_beats_are_none() -> None:
    with posts("server", "worker", limit_s=0.5) as (server, worker):
        worker.connect("server", server.address)
        arrived(server)
        time.sleep(1.5)
        assert server.inbox.empty()
        with socket.create_connection(server.address) as mute:
            until(lambda: is_closed(mute))
        worker.close()
        assert arrived(server) == Delivery("worker", None, connected=False)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", stranger("name", "other")])
def test_strangers_are_turned_away(said: bytes) -> None:
    with posts("server") as (server,):
        with socket.create_connection(server.address) as stranger:
            stranger.sendall(said)
            until(lambda: is_closed(stranger))
        assert server.inbox.empty()


def test_who_connects_with_other_data_is_told() -> None:
    with posts("server") as (server,):
        other = Post("worker", {"run": "run", "data": "b"}, WAIT_S)
        server.same = {"run": "run", "data": "a"}
        other.connect("server", server.address)
        assert (
            "the data of worker is not that of the server (b here, a there)" in arrived(other, Refused).message.sentence
        )
        other.close()
        assert server.inbox.empty()


def test_nobody_is_left_when_it_is_closed() -> None:
    """A thread that frees a tensor while Python ends would end the process with an abort."""
    before = set(threading.enumerate())
    with posts("a", "b") as (a, b):
        b.connect("a", a.address)
        until(lambda: b.peers == ["a"])
        for piece in range(50):
            b.send("a", Push("b", 1, piece, piece), memoryview(bytes(PART_BYTES)))
    assert set(threading.enumerate()) <= before
