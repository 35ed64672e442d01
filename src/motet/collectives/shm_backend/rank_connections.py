"""All that one rank of a group needs to talk to the others, and how it begins and ends."""

import atexit
import os
import select
from collections.abc import Callable

from torch import Tensor
from torch._C._distributed_c10d import Store

from motet.cluster.cpu_count import usable_cores
from motet.collectives.shm_backend.executor import CollectiveExecutor, PreparedCollective
from motet.collectives.shm_backend.tensor_views import Chunks
from motet.collectives.shm_backend.transport.byte_streams import ByteStream, RingBufferByteStream, SocketByteStream
from motet.collectives.shm_backend.transport.futex import futex_wait, futex_wake, is_supported
from motet.collectives.shm_backend.transport.local_peers import (
    FUTEX_TIMEOUT_S,
    SPINS,
    STATE_FAILED,
    STATE_LEFT,
    LocalPeerSync,
)
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.rendezvous import RendezvousResult, establish_connections
from motet.collectives.shm_backend.transport.shared_memory import EXIT_STATE, MESSAGE_SLEEP_FLAG, WORD_BYTES
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, PeerSocket
from motet.collectives.shm_backend.work_handle import BackendWorkHandle
from motet.core.errors import InputError

_OVERSUBSCRIBED_SPINS = 20
_SOCKET_POLL_S = 0.0005


class RankConnections:
    """A rank's end of everything."""

    def __init__(
        self,
        rendezvous: RendezvousResult,
        local_peers: LocalPeerSync,
        sockets: dict[int, tuple[PeerSocket, PeerSocket]],
        timeout_s: float,
    ) -> None:
        self.hosts = _host_indices([card.host for card in rendezvous.contacts])
        self.local_index = rendezvous.local_index
        self.local_peers = local_peers
        self._collective_sockets = (
            CollectivePeerSockets(rendezvous.rank, {rank: pair[0] for rank, pair in sockets.items()}, timeout_s)
            if sockets
            else None
        )
        self._executor = CollectiveExecutor(local_peers, self._collective_sockets)
        oversubscribed = len(self.local_index) > usable_cores()
        self._spins = local_peers.spins = _OVERSUBSCRIBED_SPINS if oversubscribed else SPINS
        streams: dict[int, ByteStream] = {rank: SocketByteStream(pair[1]) for rank, pair in sockets.items()}
        wake = _make_waker(local_peers)
        for rank, other in self.local_index.items():
            if rank != rendezvous.rank:
                streams[rank] = RingBufferByteStream(local_peers.shared_memory, local_peers.local_rank, other, wake)
        message_sockets = [pair[1] for pair in sockets.values()]
        waiter = _FutexOrSocketWaiter(local_peers, message_sockets)
        self.messages = MessageMatcher(rendezvous.rank, streams, timeout_s, waiter, self._lost_reason)
        self._message_sockets = message_sockets
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def execute(self, plan: PreparedCollective, input_chunks: Chunks, output_chunks: Chunks) -> None:
        self._executor.execute(plan, input_chunks, output_chunks)

    def send(self, tensor: Tensor, dst: int, tag: int) -> BackendWorkHandle:
        return self.messages.send(tensor, dst, tag)

    def receive(self, tensor: Tensor, src: int | None, tag: int) -> BackendWorkHandle:
        return self.messages.receive(tensor, src, tag)

    def reduce_spinning(self, enabled: bool) -> None:
        """Spin less: another thread of this process wants to run."""
        self.local_peers.spins = 0 if enabled else self._spins

    def write_description(self, index: int, text: str) -> None:
        """Keep the description of a kind of collective where the neighbours can read it."""
        self.local_peers.shared_memory.write_description(self.local_peers.local_rank, index, text)

    def set_timeout(self, timeout_s: float) -> None:
        self.local_peers.timeout_s = self.messages.timeout_s = timeout_s
        if self._collective_sockets is not None:
            self._collective_sockets.timeout_s = timeout_s

    def mark_failed(self, error: BaseException) -> None:
        """This rank will take part in nothing more; the others need not wait for it."""
        self.local_peers.mark_failed(str(error) or type(error).__name__)
        if self._collective_sockets is not None:
            self._collective_sockets.close()

    def close(self) -> None:
        # A process forked from a rank runs the same when it exits.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.messages.close()
        self.local_peers.leave()
        if self._collective_sockets is not None:
            self._collective_sockets.close()
        for link in self._message_sockets:
            link.stream.close()

    def _lost_reason(self, rank: int) -> str:
        """Why nothing will come from a rank any more."""
        if rank not in self.local_index:
            return ""
        other = self.local_index[rank]
        words, arena = self.local_peers.words, self.local_peers.shared_memory
        if words[arena.word_index(other, EXIT_STATE)] in (STATE_FAILED, STATE_LEFT):
            return "that rank has given up or left the group"
        poll = select.poll()
        poll.register(self.local_peers.peers[other].pidfd, select.POLLIN)
        return "its process has ended" if poll.poll(0) else ""


class _FutexOrSocketWaiter:
    """Sleep until a neighbour has written or taken something; with ranks elsewhere, or something comes from them."""

    def __init__(self, local_peers: LocalPeerSync, sockets: list[PeerSocket]) -> None:
        self._words = local_peers.words
        self._flag = local_peers.shared_memory.word_index(local_peers.local_rank, MESSAGE_SLEEP_FLAG)
        self._address = local_peers.shared_memory.address + self._flag * WORD_BYTES
        self._sockets = sockets

    def arm(self) -> None:
        self._words[self._flag] = 1

    def sleep(self) -> None:
        if self._sockets:
            poll = select.poll()
            for link in self._sockets:
                poll.register(link.stream, select.POLLIN)
            poll.poll(_SOCKET_POLL_S * 1e3)
        else:
            futex_wait(self._address, FUTEX_TIMEOUT_S)
        self._words[self._flag] = 0


def _make_waker(local_peers: LocalPeerSync) -> Callable[[int], None]:
    words, arena = local_peers.words, local_peers.shared_memory
    sleep_flags = [arena.word_index(other, MESSAGE_SLEEP_FLAG) for other in range(arena.layout.ranks)]

    def wake(other: int) -> None:
        flag = sleep_flags[other]
        if words[flag]:
            words[flag] = 0
            futex_wake(arena.address + flag * WORD_BYTES)

    return wake


def _host_indices(hosts: list[str]) -> tuple[int, ...]:
    order = list(dict.fromkeys(hosts))
    return tuple(order.index(host) for host in hosts)


def open_rank_connections(store: Store, rank: int, ranks: int, timeout_s: float) -> RankConnections:
    if not is_supported():
        raise InputError(
            "the backend motet needs Linux on an x86-64 processor, because it counts on the order of that processor's "
            "stores; use the backend gloo here"
        )
    rendezvous, sockets = establish_connections(store, rank, ranks, timeout_s)
    local_peers = LocalPeerSync(
        rendezvous.shared_memory, rendezvous.local_index[rank], rendezvous.local_peers(), rank, timeout_s
    )
    return RankConnections(rendezvous, local_peers, sockets, timeout_s)
