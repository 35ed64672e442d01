"""Non-blocking streams of bytes from one rank to another for messages: a ring in shared memory, or a socket."""

from torch import Tensor

from motet.collectives.program import PeerLostError
from motet.collectives.shm_backend.transport.local_peers import LocalPeerSync
from motet.collectives.shm_backend.transport.shared_memory import (
    MESSAGE_RING_BYTES,
    MESSAGE_SLEEP_FLAG,
    PROGRESS_SLEEP_FLAG,
)
from motet.collectives.shm_backend.transport.sockets import PeerSocket, memoryview_of

ALIGNMENT_BYTES = 64  # Data in a ring begins on a cache line, so that a header never wraps around
BURST_BYTES = 128 << 10  # The reader can start after this many bytes


class RingBufferByteStream:
    """A stream through shared memory. Tensors are flat and of bytes; the counts of bytes moved may be 0."""

    def __init__(self, local_peers: LocalPeerSync, peer: int) -> None:
        memory, rank = local_peers.shared_memory, local_peers.local_rank
        self._local_peers, self._peer, self._words = local_peers, peer, memory.words
        self._out, self._in = memory.message_ring(rank, peer), memory.message_ring(peer, rank)
        self._sent, self._read_by_peer = memory.sent_bytes_index(rank, peer), memory.received_bytes_index(rank, peer)
        self._sent_by_peer = memory.sent_bytes_index(peer, rank)
        self._received = memory.received_bytes_index(peer, rank)
        self._memory, self._caller_flag = memory, memory.word_index(peer, MESSAGE_SLEEP_FLAG)
        self._thread_flag = memory.word_index(peer, PROGRESS_SLEEP_FLAG)

    def write(self, data: Tensor) -> int:
        sent = self._words[self._sent]
        count, start = _contiguous_span(len(data), MESSAGE_RING_BYTES - (sent - self._words[self._read_by_peer]), sent)
        if count:
            self._out[start : start + count].copy_(data[:count])
            self._words[self._sent] = sent + _round_up_to_alignment(count)
        return count

    def wake_reader(self, *, is_full: bool) -> None:
        """Wake the peer if it waits for these bytes, and if the ring is full its thread in the background.

        That thread would only take time from a peer that computes now, and reads the message when it needs it.
        """
        self._memory.wake(self._caller_flag)
        if is_full:
            self._memory.wake(self._thread_flag)

    def read(self, into: Tensor) -> int:
        received = self._words[self._received]
        count, start = _contiguous_span(len(into), self._words[self._sent_by_peer] - received, received)
        if count:
            into[:count].copy_(self._in[start : start + count])
            self._words[self._received] = received + _round_up_to_alignment(count)
            if self._words[self._sent_by_peer] - received >= MESSAGE_RING_BYTES:  # The peer may wait for room
                self._memory.wake(self._caller_flag)
                self._memory.wake(self._thread_flag)
        return count

    def lost_reason(self) -> str:
        """The reason why nothing more will come from the peer; empty if something may."""
        reason = self._local_peers.lost_reason(self._peer)
        return reason if self._words[self._sent_by_peer] == self._words[self._received] else ""


def _contiguous_span(requested: int, available: int, position: int) -> tuple[int, int]:
    """The number of bytes that can be moved in one copy, and their offset."""
    start = position % MESSAGE_RING_BYTES
    return min(requested, available, MESSAGE_RING_BYTES - start, BURST_BYTES), start


def _round_up_to_alignment(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SocketByteStream:
    """A stream through a socket."""

    def __init__(self, socket: PeerSocket) -> None:
        self._socket = socket

    def write(self, data: Tensor) -> int:
        return self._socket.write(memoryview_of(data))

    def wake_reader(self, *, is_full: bool) -> None:
        """Do nothing: whoever polls a socket wakes when something arrives."""

    def read(self, into: Tensor) -> int:
        return self._socket.read(memoryview_of(into)) if len(into) else 0

    def lost_reason(self) -> str:
        return ""  # Reading and writing raise the error


class FailedByteStream:
    """A stream that can carry nothing more."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def write(self, data: Tensor) -> int:
        raise PeerLostError(self._reason)

    def wake_reader(self, *, is_full: bool) -> None:
        """Do nothing: nothing was written."""

    def read(self, into: Tensor) -> int:
        raise PeerLostError(self._reason)

    def lost_reason(self) -> str:
        return self._reason


ByteStream = RingBufferByteStream | SocketByteStream | FailedByteStream
