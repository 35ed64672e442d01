"""A socket to a rank of another host, and the collective traffic over it. Nothing here ever blocks but `fetch`."""

import select
import socket
import struct
import time
from collections import deque
from typing import Any

from torch import Tensor, uint8

from motet.collectives.backend.errors import CollectiveError, PeerLostError

_HEAD = struct.Struct("<QQH")
LOOK_S = 0.02


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.view(-1).view(uint8).numpy()
    return memoryview(array)


class Link:
    """A stream to one rank."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self.stream = stream
        self.outgoing: deque[memoryview] = deque()
        self.doing = "a message"

    def post(self, data: memoryview) -> None:
        """Send it when there is room; the memory must stay as it is until then."""
        self.outgoing.append(data)
        self.pump()

    def pump(self) -> None:
        """Send of what was posted what there is room for."""
        while self.outgoing:
            data = self.outgoing.popleft()
            sent = self.write(data)
            if sent < len(data):
                self.outgoing.appendleft(data[sent:])
                break

    def write(self, data: memoryview) -> int:
        """How many bytes could be sent at once."""
        try:
            return self.stream.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    def read(self, into: memoryview) -> int:
        """How many bytes have come in."""
        try:
            count = self.stream.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if count == 0 and len(into):
            raise self._lost("it has closed the connection")
        return count

    def _lost(self, reason: object) -> PeerLostError:
        return PeerLostError(f"{self.doing}: rank {self.rank}, on another host, is lost: {reason}")


class Links:
    """The collective traffic with ranks of other hosts."""

    def __init__(self, rank: int, links: dict[int, Link], timeout_s: float) -> None:
        self.rank, self.links, self.timeout_s = rank, links, timeout_s
        self._number = 0
        self._signature = 0
        self._head = memoryview(b"")
        self._text = ""
        self._told: set[int] = set()
        self._heard: set[int] = set()

    def begin(self, number: int, signature: int, text: str) -> None:
        """What goes out first to each rank, and is compared with what comes in first, says which collective this is."""
        self._number, self._signature, self._text = number, signature, text
        encoded = text.encode()
        self._head = memoryview(_HEAD.pack(number, signature, len(encoded)) + encoded)
        for link in self.links.values():
            link.doing = f"rank {self.rank} in {text}"
        self._told.clear()
        self._heard.clear()

    def post(self, rank: int, data: memoryview) -> None:
        if rank not in self._told:
            self._told.add(rank)
            self.links[rank].post(self._head)
        self.links[rank].post(data)

    def pump(self) -> None:
        for link in self.links.values():
            if link.outgoing:
                link.pump()

    def flush(self) -> None:
        """Until all that was posted has gone."""
        start = time.monotonic()
        while waiting := [link for link in self.links.values() if link.outgoing]:
            self._await(waiting[0], select.POLLOUT, start, "take what it is sent")
            self.pump()

    def fetch(self, rank: int, into: memoryview) -> None:
        """Until so much has come in from a rank."""
        if rank not in self._heard:
            self._heard.add(rank)
            self._check(rank)
        self._read(rank, into)

    def _read(self, rank: int, into: memoryview) -> None:
        link = self.links[rank]
        start = time.monotonic()
        while len(into):
            count = link.read(into)
            into = into[count:]
            self.pump()
            if len(into) and not count:
                self._await(link, select.POLLIN, start, "take part")

    def _await(self, link: Link, event: int, start: float, what: str) -> None:
        poll = select.poll()
        poll.register(link.stream, event)
        for other in self.links.values():
            if other.outgoing and other is not link:
                poll.register(other.stream, select.POLLOUT)
        poll.poll(LOOK_S * 1e3)
        if time.monotonic() - start > self.timeout_s:
            raise PeerLostError(
                f"rank {self.rank} in {self._text}: rank {link.rank}, on another host, did not {what} "
                f"within {self.timeout_s:g} s"
            )

    def _check(self, rank: int) -> None:
        head = bytearray(_HEAD.size)
        self._read(rank, memoryview(head))
        number, signature, length = _HEAD.unpack(head)
        text = bytearray(length)
        self._read(rank, memoryview(text))
        if (number, signature) != (self._number, self._signature):
            raise CollectiveError(
                f"collective number {self._number} of the group differs: rank {self.rank} called {self._text}, rank "
                f"{rank} called {text.decode()} as its number {number}; every rank must call the same with equal "
                "shapes and dtypes"
            )

    def close(self) -> None:
        for link in self.links.values():
            link.stream.close()
