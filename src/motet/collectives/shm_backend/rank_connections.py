"""The connections of one rank to all others: shared memory, message streams and sockets, from rendezvous to exit."""

import atexit
import os

from torch.distributed import Store

from motet.cluster.cpu_count import usable_cores
from motet.collectives.shm_backend.executor import CollectiveExecutor
from motet.collectives.shm_backend.transport.local_peers import SPINS
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.rendezvous import establish_connections
from motet.collectives.shm_backend.transport.shared_memory import is_supported
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets
from motet.core.errors import check_input

_OVERSUBSCRIBED_SPINS = 20


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
