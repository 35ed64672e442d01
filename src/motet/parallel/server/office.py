"""The desk at work: takes what comes to its post, and tells of each update."""

import queue
import time
from collections.abc import Callable, Iterable

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
        self._begins = set(desk.servers)
        """Servers that have not been told what their pieces are."""
        self._book: dict[str, tuple[str, int]] = {}
        self._gone: dict[str, float] = {}
        """Whose connection is lost, and since when."""
        self._fetched: dict[int, tuple[int, bytearray]] = {}

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
                if time.monotonic() - since > self._limit_s:
                    del self._gone[name]
                    self._send(self.desk.take(Lost(name)))
            if until():
                return
            if time.monotonic() - heard > self._limit_s:
                raise PeerError(f"the parameter server's desk has heard nothing for {self._limit_s:g} s, {waiting}")

    def go_on(self, until: int, errands: Iterable[int] = ()) -> None:
        self._send(self.desk.go_on(until, errands))

    def close(self) -> None:
        """Tell everybody that this is the end, and wait until they have gone."""
        self._send(self.desk.go_on(self.desk.rule.step(self.desk.settled.floor), closes=True))
        workers = set(self.desk.workers)
        self.run(lambda: not workers & set(self._post.peers), "waiting for workers to end")
        for server in self.desk.servers:
            self._post.send(server, Bye(self.desk.updates))
        self.run(lambda: not self._post.peers, "waiting for servers to end")

    def fetch(self) -> dict[int, bytearray]:
        """What the servers have of all pieces, while nothing is underway."""
        assert self.desk.is_resting
        self._fetched.clear()
        wanted, owners = self.desk.updates, self.desk.view.owners
        for piece, owned in enumerate(owners):
            self._post.send(owned.servers[0], Fetch(piece))
        self.run(
            lambda: len(self._fetched) == len(owners) and all(v == wanted for v, _ in self._fetched.values()),
            "waiting for the parameters of the servers",
        )
        return {piece: content for piece, (_, content) in self._fetched.items()}

    def _take(self, delivery: Delivery) -> Sent:
        message, sender = delivery.message, delivery.sender
        match message:
            case None:
                return self._note(sender, delivery.connected)
            case Here(server, host, port):
                self._book[server] = host, port
                self._begin(server)
                return [(other, self._entries()) for other in self._post.peers]
            case Stored(piece, version):
                self._fetched[piece] = version, delivery.payload
                if version < self.desk.updates:  # the server has not come to the last one
                    return [(sender, Fetch(piece))]
                return []
        return self.desk.take(message)

    def _note(self, peer: str, connected: bool) -> Sent:
        if not connected:
            self._gone[peer] = time.monotonic()
            return []
        self._gone.pop(peer, None)
        return [(peer, self._entries())]

    def _begin(self, server: str) -> None:
        if server not in self._begins:
            return
        self._begins.remove(server)
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
