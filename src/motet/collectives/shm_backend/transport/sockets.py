"""A socket to a rank of another host, and the collective traffic over it."""

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.transport.host_connections import printable

_HEADER = struct.Struct("<QQH")
_MAX_DESCRIPTION_BYTES = 1024
POLL_INTERVAL_S = 0.02


def memoryview_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, flat_bytes(tensor).numpy()))


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class PeerSocket:
    """A non-blocking stream to one rank."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank, self.stream = rank, stream
        self.send_queue: deque[memoryview] = deque()
        self.current_operation = "a message"

    def enqueue_send(self, data: memoryview) -> None:
        """Send when there is room. The memory must not change until then."""
        self.send_queue.append(data)
        self.send_queued()

    def send_queued(self) -> None:
        """Send from the queue as long as there is room."""
        while self.send_queue:
            data = self.send_queue.popleft()
            sent = self.write(data)
            if sent < len(data):
                self.send_queue.appendleft(data[sent:])
                break

    def write(self, data: memoryview) -> int:
        """Send without waiting, and return the number of bytes."""
        return self._without_waiting(self.stream.send, data) or 0

    def read(self, into: memoryview) -> int:
        """Receive without waiting, and return the number of bytes."""
        count = self._without_waiting(self.stream.recv_into, into)
        if count == 0 and len(into):
            raise self._peer_lost_error("it has closed the connection")
        return count or 0

    def _without_waiting(self, operation: Callable[[memoryview], int], data: memoryview) -> int | None:
        try:
            return operation(data)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._peer_lost_error(error) from error

    def _peer_lost_error(self, reason: object) -> PeerLostError:
        return PeerLostError(f"{self.current_operation}: rank {self.rank}, on another host, is lost: {reason}")


class CollectivePeerSockets:
    """The collective traffic with ranks of other hosts."""

    def __init__(self, rank: int, sockets: dict[int, PeerSocket], timeout_s: float) -> None:
        self.rank, self.sockets, self.timeout_s = rank, sockets, timeout_s
        self._header_sent_to: set[int] = set()
        self._header_checked_from: set[int] = set()

    def begin(self, collective_id: int, signature: int, description: str) -> None:
        """Set the header that each rank sends first, and that each receiver compares with its values."""
        self._collective_id, self._signature, self._description = collective_id, signature, description
        for peer_socket in self.sockets.values():
            peer_socket.current_operation = f"rank {self.rank} in {description}"
        self._header_sent_to.clear()
        self._header_checked_from.clear()

    def enqueue_send(self, rank: int, data: memoryview) -> None:
        if rank not in self._header_sent_to:
            self._header_sent_to.add(rank)
            encoded = self._description.encode()[:_MAX_DESCRIPTION_BYTES]
            header = _HEADER.pack(self._collective_id, self._signature, len(encoded)) + encoded
            self.sockets[rank].enqueue_send(memoryview(header))
        self.sockets[rank].enqueue_send(data)

    def send_queued(self) -> None:
        for peer_socket in self.sockets.values():
            peer_socket.send_queued()

    def flush(self) -> None:
        """Wait until the queues are empty."""
        start = time.monotonic()
        while waiting := [peer_socket for peer_socket in self.sockets.values() if peer_socket.send_queue]:
            self._poll_until_ready(waiting[0], select.POLLOUT, start, expected_action="receive its data")
            self.send_queued()

    def receive_into(self, rank: int, into: memoryview) -> None:
        """Wait until a rank has filled this memory."""
        if rank not in self._header_checked_from:
            self._header_checked_from.add(rank)
            self._check_header(rank)
        self._read(rank, into)

    def _read(self, rank: int, into: memoryview) -> None:
        peer_socket, start = self.sockets[rank], time.monotonic()
        while len(into):
            count = peer_socket.read(into)
            into = into[count:]
            self.send_queued()
            if len(into) and not count:
                self._poll_until_ready(peer_socket, select.POLLIN, start, expected_action="take part")

    def _poll_until_ready(self, peer_socket: PeerSocket, event: int, start: float, *, expected_action: str) -> None:
        poll = select.poll()
        poll.register(peer_socket.stream, event)
        for other in self.sockets.values():
            if other.send_queue and other is not peer_socket:
                poll.register(other.stream, select.POLLOUT)
        poll.poll(POLL_INTERVAL_S * 1e3)
        if time.monotonic() - start > self.timeout_s:
            raise PeerLostError(
                f"rank {self.rank} in {self._description}: rank {peer_socket.rank}, on another host, did not "
                f"{expected_action} within {self.timeout_s:g} s"
            )

    def _check_header(self, rank: int) -> None:
        header = bytearray(_HEADER.size)
        self._read(rank, memoryview(header))
        collective_id, signature, length = _HEADER.unpack(header)
        if length > _MAX_DESCRIPTION_BYTES:
            raise CollectiveError(
                f"rank {self.rank} in {self._description}: rank {rank}, on another host, sent an invalid header of a "
                f"collective: a description of {length} bytes, of {_MAX_DESCRIPTION_BYTES} at most; run the same "
                "version of motet on all hosts"
            )
        description = bytearray(length)
        self._read(rank, memoryview(description))
        if (collective_id, signature) != (self._collective_id, self._signature):
            raise CollectiveError(
                f"collective number {self._collective_id} of the group differs: rank {self.rank} called "
                f"{self._description}, rank {rank} called {printable(description)} as its number {collective_id}; "
                "every rank must call the same with equal shapes and dtypes"
            )

    def close(self) -> None:
        for peer_socket in self.sockets.values():
            peer_socket.stream.close()
