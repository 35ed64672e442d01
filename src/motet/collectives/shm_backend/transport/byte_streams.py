"""Streams of bytes from one rank to another for messages: a ring in shared memory, or a socket. They never block."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from motet.collectives.shm_backend.transport.shared_memory import MESSAGE_RING_BYTES, SharedMemorySegment
from motet.collectives.shm_backend.transport.sockets import PeerSocket, memoryview_of

ALIGNMENT_BYTES = 64  # What lies in a ring begins on a cache line, so that a head never wraps around
BURST_BYTES = 128 << 10  # The reader can start when so much has been written


class ByteStream(Protocol):
    """Both directions to one rank. Tensors are flat and of bytes; the counts of bytes moved may be 0."""

    def write(self, data: Tensor) -> int: ...

    def read(self, into: Tensor) -> int: ...

    @property
    def is_drained(self) -> bool:
        """Nothing is there to be read now."""
        ...


class RingBufferByteStream:
    """Through the memory that both share."""

    def __init__(self, arena: SharedMemorySegment, me: int, peer: int, wake: Callable[[int], None]) -> None:
        self._words = arena.words
        self._out, self._in = arena.message_ring(me, peer), arena.message_ring(peer, me)
        self._sent, self._read_by_peer = arena.sent_bytes_index(me, peer), arena.received_bytes_index(me, peer)
        self._sent_by_peer, self._received = arena.sent_bytes_index(peer, me), arena.received_bytes_index(peer, me)
        self._peer = peer
        self._wake = wake

    def write(self, data: Tensor) -> int:
        sent = self._words[self._sent]
        count, start = _contiguous_span(len(data), MESSAGE_RING_BYTES - (sent - self._words[self._read_by_peer]), sent)
        if count:
            self._out[start : start + count].copy_(data[:count])
            self._words[self._sent] = sent + _round_up_to_alignment(count)
            self._wake(self._peer)
        return count

    def read(self, into: Tensor) -> int:
        received = self._words[self._received]
        count, start = _contiguous_span(len(into), self._words[self._sent_by_peer] - received, received)
        if count:
            into[:count].copy_(self._in[start : start + count])
            self._words[self._received] = received + _round_up_to_alignment(count)
            self._wake(self._peer)
        return count

    @property
    def is_drained(self) -> bool:
        return bool(self._words[self._sent_by_peer] == self._words[self._received])


def _contiguous_span(requested: int, available: int, position: int) -> tuple[int, int]:
    """How many bytes can be moved at once, and where."""
    start = position % MESSAGE_RING_BYTES
    return min(requested, available, MESSAGE_RING_BYTES - start, BURST_BYTES), start


def _round_up_to_alignment(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SocketByteStream:
    """Through a socket."""

    is_drained = True

    def __init__(self, socket: PeerSocket) -> None:
        self._socket = socket

    def write(self, data: Tensor) -> int:
        return self._socket.write(memoryview_of(data))

    def read(self, into: Tensor) -> int:
        return self._socket.read(memoryview_of(into)) if len(into) else 0


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
