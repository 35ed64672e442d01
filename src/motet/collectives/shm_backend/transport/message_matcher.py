"""Messages between two ranks: each send finds the receive with its tag, whatever the order of the calls.

All sends and receives in flight progress whenever a thread waits for one of them. A progress thread moves the others,
so that two ranks that both send first do not block each other.
"""

import select
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from motet.collectives.execute.work_queue import AsyncWork
from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.tensor_views import describe_tensor, without_modes
from motet.collectives.shm_backend.transport import byte_streams
from motet.collectives.shm_backend.transport.byte_streams import ALIGNMENT_BYTES, ByteStream
from motet.collectives.shm_backend.transport.host_connections import printable
from motet.collectives.shm_backend.transport.local_peers import LocalPeerSync
from motet.collectives.shm_backend.transport.shared_memory import MAX_SLEEP_S, MESSAGE_SLEEP_FLAG, PROGRESS_SLEEP_FLAG
from motet.collectives.shm_backend.transport.sockets import PeerSocket, flat_bytes
from motet.core.units import format_bytes

_HEADER = struct.Struct("<qQ48s")
assert _HEADER.size == ALIGNMENT_BYTES
MAX_UNEXPECTED_BYTES = 1 << 30  # Messages of one rank that no receive takes yet
_UNEXPECTED_MESSAGE_BYTES = 16 << 10  # Added for each of them, so that their number has a limit, too
_CHUNK_BYTES = 1 << 20
_DISCARDED = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)  # Written and never read
_SPINS = 50
_LIVENESS_CHECK_S = 0.02
_SOCKET_POLL_S = 0.0005
_BACKGROUND_SLEEP_S = 0.01  # A peer ends it when the progress of its message depends on this rank


@dataclass
class PostedSend:
    work: AsyncWork
    remaining: deque[Tensor]


@dataclass
class PostedReceive:
    work: AsyncWork
    tensor: Tensor
    tag: int


@dataclass(eq=False)
class IncomingMessage:
    """A message whose header has been read."""

    tag: int
    length: int
    description: str
    data: Tensor | None = None  # Next bytes; None until a receive matches, or the message makes room for others
    received_bytes: int = 0
    receive: PostedReceive | None = None
    kept: list[Tensor] = field(default_factory=list)  # Data of a message that stands before another receive's
    is_discarded: bool = False  # No receive takes it, but the message after it can be read

    def extend(self) -> None:
        """Make room for the next bytes. The memory grows with the bytes that arrive, not with the announced length."""
        remaining = self.length - self.received_bytes
        if not self.is_discarded:
            self.kept.append(torch.empty(min(remaining, max(_CHUNK_BYTES, self.received_bytes)), dtype=torch.uint8))
        self.data = _DISCARDED[:remaining] if self.is_discarded else self.kept[-1]


@dataclass
class PeerMessageQueues:
    """All messages to and from one rank."""

    rank: int
    stream: ByteStream
    sends: deque[PostedSend] = field(default_factory=deque)
    receives: deque[PostedReceive] = field(default_factory=deque)
    incoming: IncomingMessage | None = None
    header: Tensor = field(default_factory=lambda: torch.empty(ALIGNMENT_BYTES, dtype=torch.uint8))
    header_received_bytes: int = 0
    unexpected: list[IncomingMessage] = field(default_factory=list)  # Read before a receive matched
    unexpected_bytes: int = 0

    @property
    def open_receives(self) -> list[PostedReceive]:
        return [*self.receives, *(m.receive for m in (self.incoming, *self.unexpected) if m and m.receive)]

    @property
    def is_open(self) -> bool:
        return bool(self.sends or self.open_receives or (self.incoming and self.incoming.is_discarded))


class MessageMatcher:
    """All messages of one rank in a group."""

    def __init__(self, local_peers: LocalPeerSync, sockets: list[PeerSocket], timeout_s: float) -> None:
        self.rank, self.timeout_s = local_peers.rank, timeout_s
        streams: dict[int, ByteStream] = {s.rank: byte_streams.SocketByteStream(s) for s in sockets}
        for local, peer in local_peers.peers.items():
            streams[peer.rank] = byte_streams.RingBufferByteStream(local_peers, local)
        self.peers = {other: PeerMessageQueues(other, stream) for other, stream in streams.items()}
        self._memory, self._sockets = local_peers.shared_memory, sockets
        self._caller_flag, self._thread_flag = (
            self._memory.word_index(local_peers.local_rank, flag) for flag in (MESSAGE_SLEEP_FLAG, PROGRESS_SLEEP_FLAG)
        )
        self._any_source_receives: deque[PostedReceive] = deque()
        self._lock = threading.RLock()
        self._has_pending = threading.Event()
        self._progress_thread: threading.Thread | None = None
        self._closed, self._waiting_callers, self._last_liveness_check = False, 0, 0.0

    def send(self, tensor: Tensor, dst: int, tag: int) -> AsyncWork:
        description, data = describe_tensor(tensor), flat_bytes(tensor)
        work = AsyncWork(partial(self._progress_until_finished, f"sending {description} to rank {dst}"), [tensor])
        header = torch.frombuffer(bytearray(_HEADER.pack(tag, len(data), description.encode()[:48])), dtype=torch.uint8)
        with self._lock:
            self._peer(dst).sends.append(PostedSend(work, deque([header, data])))
            self._progress()
        return self._start_progress(work)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> AsyncWork:
        """Receive from a rank, or with `src` None from the rank that sends first."""
        message = f"{describe_tensor(tensor)} from rank {src} with tag {tag}"
        text = "receiving from any rank" if src is None else f"receiving {message}"
        work = AsyncWork(partial(self._progress_until_finished, text), [tensor], source=-1 if src is None else src)
        receive = PostedReceive(work, tensor, tag)
        with self._lock:
            candidates = list(self.peers.values()) if src is None else [self._peer(src)]
            if not any(self._match_unexpected(peer, receive) for peer in candidates):
                (self._any_source_receives if src is None else candidates[0].receives).append(receive)
            self._progress()
        return self._start_progress(work)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._has_pending.set()
        if self._progress_thread is not None:
            self._progress_thread.join()

    def _peer(self, rank: int) -> PeerMessageQueues:
        if rank not in self.peers:
            options = f"use one of {[*self.peers]}"
            raise CollectiveError(f"rank {self.rank}: a message to or from rank {rank}; {options}")
        return self.peers[rank]

    # Progress, by whichever thread waits.

    def _start_progress(self, work: AsyncWork) -> AsyncWork:
        if not work.finished:
            self._drive_progress()
        return work

    def _drive_progress(self) -> None:
        """Let the progress thread move messages that no caller waits for."""
        if self._progress_thread is None:
            self._progress_thread = threading.Thread(target=self._progress_loop, name="motet-messages", daemon=True)
            self._progress_thread.start()
        self._has_pending.set()

    def _progress_until_finished(self, description: str, work: AsyncWork, seconds: float | None) -> None:
        limit_s = self.timeout_s if seconds is None else seconds
        start, idle = time.monotonic(), 0
        self._waiting_callers += 1
        try:
            with without_modes():  # Other threads go on writing to memory that is made here
                while not work.finished:
                    if self._progress():
                        idle = 0
                        continue
                    idle += 1
                    if idle > _SPINS:
                        self._sleep_until_activity(self._caller_flag)
                        if time.monotonic() - start > limit_s and not work.finished:
                            raise PeerLostError(f"rank {self.rank}: {description} did not end within {limit_s:g} s")
        finally:
            self._waiting_callers -= 1

    def _progress_loop(self) -> None:
        while True:
            self._has_pending.wait()
            if self._closed:
                return
            if self._waiting_callers or not self._progress():
                with self._lock:
                    is_open = self._any_source_receives or any(p.is_open for p in self.peers.values())
                    if not is_open and not self._closed:
                        self._has_pending.clear()
                        continue
                self._sleep_until_activity(self._thread_flag, _BACKGROUND_SLEEP_S)

    def _sleep_until_activity(self, flag: int, max_s: float = MAX_SLEEP_S) -> None:
        """Sleep until something may have happened, or a moment; then fail the operations of lost peers."""
        words = self._memory.words
        words[flag] = 1  # Any later activity of a local peer ends or prevents the sleep
        if not self._progress():
            if self._sockets:
                poll = select.poll()
                for peer_socket in self._sockets:
                    poll.register(peer_socket.stream, select.POLLIN)
                poll.poll(_SOCKET_POLL_S * 1e3)
            else:
                self._memory.sleep(flag, max_s)
            words[flag] = 0
        if time.monotonic() - self._last_liveness_check >= _LIVENESS_CHECK_S:
            self._last_liveness_check = time.monotonic()
            self._fail_lost_peers()

    def _progress(self) -> bool:
        moved = False
        with self._lock:
            for peer in self.peers.values():
                is_reading = peer.incoming is not None and peer.incoming.data is not None
                try:
                    if peer.sends:
                        moved |= self._advance_sends(peer)
                    if peer.receives or self._any_source_receives or is_reading:
                        moved |= self._advance_receives(peer)
                except CollectiveError as error:
                    moved |= self._fail_peer(peer, str(error), is_faulty=not isinstance(error, PeerLostError))
        return moved

    def _advance_sends(self, peer: PeerMessageQueues) -> bool:
        moved = False
        while peer.sends:
            remaining = peer.sends[0].remaining
            while remaining:
                if not len(remaining[0]):
                    remaining.popleft()
                    continue
                count = peer.stream.write(remaining[0])
                if count < ALIGNMENT_BYTES or len(remaining) == 1:  # A header is not worth a wake before its data
                    peer.stream.wake_reader(is_full=not count)
                if not count:
                    return moved
                moved = True
                remaining[0] = remaining[0][count:]
            _complete(peer.sends.popleft().work)
        return moved

    def _advance_receives(self, peer: PeerMessageQueues) -> bool:
        moved = False
        while peer.receives or self._any_source_receives or peer.incoming is not None:
            message = peer.incoming or self._read_header(peer)
            if message is None or (message.data is None and not self._match_receive(peer, message)):
                return moved
            assert message.data is not None
            if message.received_bytes < message.length:
                count = peer.stream.read(message.data)
                if not count:
                    return moved
                message.received_bytes += count
                message.data = message.data[count:]
            moved = True
            if message.received_bytes == message.length:
                peer.incoming = None
                self._deliver(peer, message)
            elif not len(message.data):
                message.extend()
        return moved

    def _read_header(self, peer: PeerMessageQueues) -> IncomingMessage | None:
        peer.header_received_bytes += peer.stream.read(peer.header[peer.header_received_bytes :])
        if peer.header_received_bytes < ALIGNMENT_BYTES:
            return None
        peer.header_received_bytes = 0
        tag, length, description = _HEADER.unpack(bytes(peer.header.tolist()))
        peer.incoming = IncomingMessage(tag, length, printable(description))
        return peer.incoming

    # Matching of messages and receives.

    def _match_receive(self, peer: PeerMessageQueues, message: IncomingMessage) -> bool:
        """Choose the memory for a message: of its receive, or its own if it stands before the message of another."""
        for receives in (peer.receives, self._any_source_receives):
            for receive in receives:
                if receive.tag == message.tag:
                    receives.remove(receive)
                    message.receive, message.data = receive, flat_bytes(receive.tensor)
                    if len(message.data) != message.length:
                        self._discard(peer, message)
                    return True
        if not peer.receives and not self._any_source_receives:
            return False
        peer.unexpected_bytes += message.length + _UNEXPECTED_MESSAGE_BYTES
        if peer.unexpected_bytes > MAX_UNEXPECTED_BYTES:
            tags = sorted({receive.tag for receive in (*peer.receives, *self._any_source_receives)})
            raise CollectiveError(
                f"it sent {message.description} ({message.length} bytes) with tag {message.tag} before the messages "
                f"with tags {tags} that this rank waits for, and motet keeps {format_bytes(MAX_UNEXPECTED_BYTES)} of "
                "such messages of a rank at most; receive messages in the order in which they are sent"
            )
        peer.unexpected.append(message)
        message.extend()
        return True

    def _discard(self, peer: PeerMessageQueues, message: IncomingMessage) -> None:
        """Fail the receive of a message of another size now, and read the message to its end without keeping it."""
        self._deliver(peer, message)
        message.receive, message.is_discarded = None, True
        message.extend()
        self._drive_progress()

    def _match_unexpected(self, peer: PeerMessageQueues, receive: PostedReceive) -> bool:
        for message in peer.unexpected:
            if message.tag == receive.tag and message.receive is None:
                message.receive = receive
                if message.received_bytes == message.length:
                    self._deliver(peer, message)
                return True
        return False

    def _deliver(self, peer: PeerMessageQueues, message: IncomingMessage) -> None:
        if (receive := message.receive) is None:
            return
        if message in peer.unexpected:
            peer.unexpected.remove(message)
            peer.unexpected_bytes -= message.length + _UNEXPECTED_MESSAGE_BYTES
        data, expected, error = flat_bytes(receive.tensor), describe_tensor(receive.tensor), None
        receive.work.source = peer.rank
        dtypes = {text.partition(" ")[0] for text in (expected, message.description)}
        if len(data) != message.length or len(dtypes) > 1:
            error = CollectiveError(
                f"rank {self.rank} receives {expected} ({len(data)} bytes) from rank {peer.rank} with "
                f"tag {message.tag}, which sent {message.description} ({message.length} bytes)"
            )
        elif message.kept:
            torch.cat(message.kept, out=data)
        _complete(receive.work, error)

    # Failures.

    def _fail_lost_peers(self) -> None:
        with self._lock:
            self._progress()
            for peer in self.peers.values():
                if (peer.sends or peer.open_receives) and (reason := peer.stream.lost_reason()):
                    self._fail_peer(peer, reason)
            if self._any_source_receives and all(peer.stream.lost_reason() for peer in self.peers.values()):
                error = PeerLostError(f"rank {self.rank} receives from any rank, but all have ended")
                while self._any_source_receives:
                    _complete(self._any_source_receives.popleft().work, error)

    def _fail_peer(self, peer: PeerMessageQueues, reason: str, *, is_faulty: bool = False) -> bool:
        """Fail all that is open with a rank, and everything later. A faulty rank also fails receives from any rank."""
        kind = CollectiveError if is_faulty else PeerLostError
        failed = [(send.work, "sends", "to") for send in peer.sends]
        failed += [(receive.work, "receives", "from") for receive in peer.open_receives]
        while is_faulty and self._any_source_receives:
            failed.append((self._any_source_receives.popleft().work, "receives", "from"))
        for work, verb, side in failed:
            operation = f"{verb} {describe_tensor(work.outputs[0])} {side} rank {peer.rank}"
            _complete(work, kind(f"rank {self.rank} {operation}: {reason}"))
        for queue in (peer.sends, peer.receives, peer.unexpected):
            queue.clear()
        peer.incoming, peer.unexpected_bytes = None, 0
        peer.stream = byte_streams.FailedByteStream(reason)
        return bool(failed)


def _complete(work: AsyncWork, error: CollectiveError | None = None) -> None:
    work.complete(error)
    work.notify_future()
