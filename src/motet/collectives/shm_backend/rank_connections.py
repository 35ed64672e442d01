"""The connections of one rank to all others: shared memory, message streams and sockets, from rendezvous to exit."""

import atexit
import os
import time
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import Store

from motet.cluster.cpu_count import usable_cores
from motet.collectives.errors import CollectiveError, PeerLostError
from motet.collectives.execute.work_queue import AsyncWork
from motet.collectives.shm_backend.executor import CollectiveExecutor
from motet.collectives.shm_backend.transport.byte_streams import (
    ByteStream,
    PeerActivityWaiter,
    RingBufferByteStream,
    SocketByteStream,
)
from motet.collectives.shm_backend.transport.local_peers import SPINS, LocalPeerSync
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.rendezvous import establish_connections
from motet.collectives.shm_backend.transport.shared_memory import is_supported
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets
from motet.core.errors import check_input

_OVERSUBSCRIBED_SPINS = 20
_MIN_BARRIER_WAIT_S = 0.001


class RankConnections:
    """The message matcher and the collective executor of a rank, over one set of connections."""

    def __init__(self, store: Store, rank: int, ranks: int, *, timeout_s: float) -> None:
        check_input(
            is_supported(),
            "the backend motet needs Linux on an x86-64 processor, because it counts on the order of that "
            "processor's stores; use the backend gloo here",
        )
        rendezvous = establish_connections(store, rank, ranks, timeout_s=timeout_s)
        self.hosts, self.local_index = rendezvous.hosts, rendezvous.local_index
        memory, local_rank = rendezvous.shared_memory, self.local_index[rank]
        self.local_peers = LocalPeerSync(memory, local_rank, rendezvous.local_peers, rank=rank, timeout_s=timeout_s)
        oversubscribed = len(self.local_index) > usable_cores()
        self._spins = self.local_peers.spins = _OVERSUBSCRIBED_SPINS if oversubscribed else SPINS
        self._sockets: CollectivePeerSockets | None = None
        if rendezvous.collective_sockets:
            self._sockets = CollectivePeerSockets(rank, rendezvous.collective_sockets, timeout_s)
        self.executor = CollectiveExecutor(self.local_peers, self._sockets)
        self._message_sockets = list(rendezvous.message_sockets.values())
        streams: dict[int, ByteStream] = {s.rank: SocketByteStream(s) for s in self._message_sockets}
        for other, local in self.local_index.items():
            if other != rank:
                streams[other] = RingBufferByteStream(memory, local_rank, local)
        waiter = PeerActivityWaiter(memory, local_rank, self._message_sockets)
        self.messages = MessageMatcher(rank, streams, timeout_s, waiter=waiter, lost_reason=self._lost_reason)
        self.rank, self.ranks = rank, ranks
        self._closed, self._pid = False, os.getpid()
        atexit.register(self.close)

    def reduce_spinning(self, enabled: bool) -> None:
        """Do not spin while another thread of this process wants to run."""
        self.local_peers.spins = 0 if enabled else self._spins

    def set_timeout(self, timeout_s: float) -> None:
        self.local_peers.timeout_s = self.messages.timeout_s = timeout_s
        if self._sockets is not None:
            self._sockets.timeout_s = timeout_s

    def mark_failed(self, error: BaseException) -> None:
        """Tell the other ranks that this rank takes part in nothing more."""
        self.local_peers.mark_failed(str(error) or type(error).__name__)
        if self._sockets is not None:
            self._sockets.close()

    def close(self) -> None:
        # A process forked from a rank also runs this when it exits.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.messages.close()
        self.local_peers.leave()
        if self._sockets is not None:
            self._sockets.close()
        for peer_socket in self._message_sockets:
            peer_socket.stream.close()

    def monitored_barrier(self, *, tag: int, timeout_s: float, wait_all_ranks: bool) -> None:
        """Let every rank write to rank 0, which answers when all have.

        It raises PeerLostError with the first missing rank, or with all of them if `wait_all_ranks`.
        """
        end, token = time.monotonic() + timeout_s, partial(torch.zeros, 1, dtype=torch.uint8)

        def wait(work: AsyncWork) -> None:
            work.wait(timedelta(seconds=max(_MIN_BARRIER_WAIT_S, end - time.monotonic())))

        if self.rank:
            try:
                wait(self.messages.send(token(), 0, tag))
                wait(self.messages.receive(token(), 0, tag))
            except CollectiveError as error:
                raise PeerLostError(
                    f"rank {self.rank} came to the barrier, but rank 0 did not answer: {error}"
                ) from error
            return
        absent: dict[int, CollectiveError] = {}
        for other, work in [(other, self.messages.receive(token(), other, tag)) for other in range(1, self.ranks)]:
            try:
                wait(work)
            except CollectiveError as error:
                absent[other] = error
                if not wait_all_ranks:
                    break
        if absent:
            who = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
            late = f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s. " if time.monotonic() > end else ""
            raise PeerLostError(f"{late}{who} failed to pass monitoredBarrier: {next(iter(absent.values()))}")
        for other in range(1, self.ranks):
            self.messages.send(token(), other, tag).wait()

    def _lost_reason(self, rank: int) -> str:
        return self.local_peers.lost_reason(self.local_index[rank]) if rank in self.local_index else ""
