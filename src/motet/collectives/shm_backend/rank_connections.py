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
from motet.collectives.shm_backend.transport.local_peers import SPINS
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
        self.hosts, self.local_peers = rendezvous.hosts, rendezvous.local_peers
        self._spins = _OVERSUBSCRIBED_SPINS if len(self.local_peers.peers) >= usable_cores() else SPINS
        self.local_peers.spins = self._spins
        self._sockets = CollectivePeerSockets(rank, rendezvous.collective_sockets, timeout_s)
        self.executor = CollectiveExecutor(self.local_peers, self._sockets)
        self._message_sockets = list(rendezvous.message_sockets.values())
        self.messages = MessageMatcher(self.local_peers, self._message_sockets, timeout_s)
        self.rank, self.ranks = rank, ranks
        self._closed, self._pid = False, os.getpid()
        atexit.register(self.close)

    def reduce_spinning(self, enabled: bool) -> None:
        """Do not spin while another thread of this process wants to run."""
        self.local_peers.spins = 0 if enabled else self._spins

    def set_timeout(self, timeout_s: float) -> None:
        self.local_peers.timeout_s = self.messages.timeout_s = self._sockets.timeout_s = timeout_s

    def mark_failed(self, error: BaseException) -> None:
        """Tell the other ranks that this rank takes part in nothing more."""
        self.local_peers.mark_failed(str(error) or type(error).__name__)
        self._sockets.close()

    def close(self) -> None:
        # A process forked from a rank also runs this when it exits.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.messages.close()
        self.local_peers.leave()
        self._sockets.close()
        for peer_socket in self._message_sockets:
            peer_socket.stream.close()

    def monitored_barrier(self, *, tag: int, timeout_s: float, wait_all_ranks: bool) -> None:
        """Let every rank write to rank 0, which answers when all have; it names the first missing rank, or all."""
        end, token = time.monotonic() + timeout_s, partial(torch.zeros, 1, dtype=torch.uint8)

        def wait(work: AsyncWork) -> None:
            work.wait(timedelta(seconds=max(_MIN_BARRIER_WAIT_S, end - time.monotonic())))

        if self.rank:
            try:
                wait(self.messages.send(token(), 0, tag))
                wait(self.messages.receive(token(), 0, tag))
            except CollectiveError as error:
                problem = f"rank {self.rank} came to the barrier, but rank 0 did not answer: {error}"
                raise PeerLostError(problem) from error
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
