"""The desk at work: takes what comes to its post, and tells of each update."""

import queue
import time
from collections.abc import Callable, Collection

from motet.core.errors import PeerError
from motet.parallel.server.desk import Desk
from motet.parallel.server.post import Delivery, Post
from motet.parallel.server.protocol import Book, Bye, Decide, Fetch, Here, Lost, Sent, Stand, Stored
from motet.parallel.server.serve import LOOK_S


class Office:
    def __init__(
        self,
        desk: Desk,
        post: Post,
        limit_s: float,
        decided: Callable[[Decide], None],
        stored: Callable[[int], memoryview],
    ) -> None:
        """`decided` is told of each update, in their order; `stored` is what a piece begins with."""
        self.desk = desk
        self._post = post
        self._limit_s = limit_s
        self._decided = decided
        self._stored = stored
        self._told = desk.first
        self._book: dict[str, tuple[str, int]] = {}
        self._gone: dict[str, float] = {}
        """Whose connection is lost, and since when."""
        self._fetched: dict[int, bytearray] = {}
        self._wanted: set[int] = set()
        """Pieces that were asked for."""
        self._met: set[str] = set()
        """Who was ever connected."""
        self._closing = False

    def run(self, until: Callable[[], bool], waiting: str) -> None:
        """Do what comes until it is so."""
        heard = time.monotonic()
        while not until():
            try:
                delivery = self._post.inbox.get(timeout=LOOK_S)
                heard = time.monotonic()
                self._send(self._take(delivery))
            except queue.Empty:
                pass
            for name, since in list(self._gone.items()):
                if name in self._post.peers:
                    del self._gone[name]
                elif time.monotonic() - since > self._limit_s:
                    del self._gone[name]
                    self._send(self.desk.take(Lost(name)))
            if until():
                return
            if time.monotonic() - heard > self._limit_s:
                raise PeerError(f"the parameter server's desk has heard nothing for {self._limit_s:g} s, {waiting}")

    def go_on(self, until: int) -> None:
        self._send(self.desk.go_on(until))

    def close(self, crew: Collection[str]) -> None:
        """Tell everybody that this is the end, and wait until they have gone. Who is late is waited for."""
        self.run(lambda: self._met >= set(crew) - self.desk.lost, "waiting for all to come, to tell them of the end")
        self._closing = True
        self._send(self.desk.go_on(self.desk.rule.step(self.desk.settled.floor), closes=True))
        servers = set(self.desk.servers)
        self.run(lambda: set(self._post.peers) <= servers, "waiting for workers to end")
        for server in self.desk.servers:
            self._post.send(server, Bye(self.desk.updates))
        self.run(lambda: not self._post.peers, "waiting for servers to end")

    def fetch(self) -> dict[int, bytearray]:
        """What the servers have of all pieces, while nothing is underway."""
        assert self.desk.is_resting
        self._fetched.clear()
        self._wanted = set(range(len(self.desk.view.owners)))
        for server in self.desk.servers:
            self._ask(server)
        self.run(lambda: not self._wanted, "waiting for the parameters of the servers")
        found, self._fetched = self._fetched, {}
        return found

    def _ask(self, server: str) -> None:
        for piece in sorted(self._wanted):
            if self.desk.view.owners[piece].servers[0] == server:
                self._post.send(server, Fetch(piece))

    def _take(self, delivery: Delivery) -> Sent:
        message, sender = delivery.message, delivery.sender
        match message:
            case None:
                return self._note(sender, delivery.connected)
            case Here(server, host, port, begun):
                self._book[server] = host, port
                if not begun:
                    self._begin(server)
                self._ask(server)
                return [(other, self._entries()) for other in self._post.peers]
            case Stored(piece, version):
                if version < self.desk.updates:  # the server has not come to the last one
                    return [(sender, Fetch(piece))]
                self._fetched[piece] = delivery.payload
                self._wanted.discard(piece)
                return []
        return self.desk.take(message)

    def _note(self, peer: str, connected: bool) -> Sent:
        if not connected:
            self._gone[peer] = time.monotonic()
            return []
        self._gone.pop(peer, None)
        self._met.add(peer)
        if self._closing and peer in self.desk.servers:
            return [(peer, Bye(self.desk.updates))]
        return [(peer, self._entries())]

    def _begin(self, server: str) -> None:
        for piece, owned in enumerate(self.desk.view.owners):
            if server in owned.servers:
                stand = Stand(piece, self.desk.first, self.desk.settled)
                self._post.send(server, stand, self._stored(piece))

    def _entries(self) -> Book:
        return Book(tuple((name, host, port) for name, (host, port) in sorted(self._book.items())))

    def _send(self, sent: Sent) -> None:
        for to, message in sent:
            if isinstance(message, Decide) and message.number == self._told:
                self._told += 1
                self._decided(message)
            self._post.send(to, message)
