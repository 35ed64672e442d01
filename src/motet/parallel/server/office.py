"""The desk at work: takes what comes to its post, gives up who is gone for too long, and tells of each update."""

import queue
import time
from collections.abc import Callable, Collection

from motet.core.errors import PeerFailedError
from motet.parallel.server.desk import Desk
from motet.parallel.server.post import Delivery, Post
from motet.parallel.server.protocol import (
    Book,
    Bye,
    Done,
    Fetch,
    Gone,
    Here,
    Joined,
    Load,
    Lost,
    Norm,
    Offered,
    Sent,
    Stand,
    Standing,
    Stored,
)
from motet.parallel.server.serve import LOOK_S

AGAIN_S = 0.05
"""Before a server is asked again that has not come to the last update."""
REJOIN_S = 3.0
"""For whose connection was closed, as that of a process is that ends."""


class Office:
    """`tell` may be set to whoever wants to hear of processes that come and go."""

    def __init__(
        self, desk: Desk, post: Post, limits_s: tuple[float, float], stored: Callable[[int], memoryview]
    ) -> None:
        """Limits: without any news, and for whoever is out of reach. `stored` is what a piece begins with: it becomes
        what is fetched."""
        self.desk = desk
        self.loads: dict[str, Load] = {}
        self.tell: Callable[[str], None] = _to_nobody
        self._post = post
        self._limit_s, self._patience_s = limits_s
        self._stored = stored
        self._known = desk.first, desk.settled
        """What `stored` is of: (updates, the shares in them)."""
        self._book: dict[str, tuple[str, int]] = {}
        self._gone: dict[str, tuple[float, bool]] = {}
        """Whose connection is lost: since when, and whether it fell silent."""
        self._stands: dict[str, list[tuple[Stand, bool]]] = {}
        """What those that took the place of another were told, and whether with what is stored."""
        self._fetched: dict[int, bytearray] = {}
        self._wanted: set[int] = set()
        """Pieces that were asked for."""
        self._met: set[str] = set()
        """Who was ever connected."""
        self._behind: set[int] = set()
        """Those of which something older came."""
        self._begun: set[str] = set()
        """Servers that know what all their pieces are."""
        self._closing = False
        self._said_bye = False

    def run(self, until: Callable[[], bool], waiting: str) -> None:
        """Do what comes until it is so."""
        heard = time.monotonic()
        while not until():
            try:
                delivery = self._post.inbox.get(timeout=AGAIN_S if self._behind else LOOK_S)
                heard = heard if isinstance(delivery.message, Stored) and self._behind else time.monotonic()
                self._send(self._take(delivery))
            except queue.Empty:
                self._ask_again()
            self._give_up()
            if until():
                return
            if time.monotonic() - heard > self._limit_s:
                raise PeerFailedError(
                    f"the parameter server's desk has heard nothing for {self._limit_s:g} s, {waiting}"
                )

    def go_on(self, until: int) -> None:
        self._send(self.desk.go_on(until))

    def close(self, crew: Collection[str]) -> None:
        """Tell everybody that this is the end, and wait until they have gone; who is late, for a while."""
        self._wait(lambda: self._met >= set(crew) - self.desk.lost, self._patience_s)
        self._closing = True
        self._send(self.desk.go_on(self.desk.rule.step(self.desk.settled.floor), closes=True))
        self._wait(lambda: set(self._post.peers) <= set(self.desk.servers), self._limit_s)
        self._said_bye = True
        for server in self.desk.servers:
            self._post.send(server, Bye(self.desk.updates))
        self._wait(lambda: not self._post.peers, self._limit_s)

    def _wait(self, until: Callable[[], bool], limit_s: float) -> None:
        """Until it is so, or for so long: all is done and saved, whoever does not go."""
        latest = time.monotonic() + limit_s
        self.run(lambda: until() or time.monotonic() > latest, "waiting for all to end")

    def fetch(self) -> dict[int, bytearray]:
        """What the servers have of all pieces, while nothing is underway."""
        assert self.desk.is_resting
        self._fetched.clear()
        self._wanted = set(range(len(self.desk.view.owners)))
        self._ask()
        self.run(lambda: not self._wanted, "waiting for the parameters of the servers")
        found, self._fetched = self._fetched, {}
        self._known = self.desk.updates, self.desk.settled
        return found

    def _ask_again(self) -> None:
        behind, self._behind = self._behind, set()
        self._ask(behind & self._wanted)

    def _ask(self, pieces: Collection[int] | None = None) -> None:
        for piece in sorted(self._wanted if pieces is None else pieces):
            for server in self.desk.view.owners[piece].servers[:1]:
                self._post.send(server, Fetch(piece))

    def _take(self, delivery: Delivery) -> Sent:
        message, sender = delivery.message, delivery.sender
        match message:
            case None:
                return self._note(delivery)
            case Here(server, host, port, begun):
                if server in self.desk.lost:
                    return [(server, Gone(server))]
                self._book[server] = host, port
                if begun:
                    self._begun.add(server)
                else:
                    self._begin(server)
                self._ask()
                return self._entries()
            case Offered():
                return self._admit(message)
            case Stored(piece, version):
                if version < self.desk.updates:  # the server has not come to the last one
                    self._behind.add(piece)
                    return []
                self._fetched[piece] = delivery.payload
                self._wanted.discard(piece)
                return []
            case Load():
                self.loads[sender] = message
                return []
            case Joined() | Done() | Norm() | Standing():
                return self.desk.take(message)
        return []

    # --- who comes and goes ------------------------------------------------------------------------

    def _note(self, delivery: Delivery) -> Sent:
        """A connection that was made or lost."""
        peer = delivery.sender
        if not delivery.connected:
            self._gone[peer] = time.monotonic(), delivery.silent
            return []
        self._gone.pop(peer, None)
        if peer not in self._met:
            self._met.add(peer)
            if self.desk.log:
                self.tell(f"{peer} has joined the run")
        if self._said_bye and peer in self.desk.servers:
            return [(peer, Bye(self.desk.updates))]
        return [(peer, self._entry_book())]

    def _give_up(self) -> None:
        """Whoever others can replace, and was gone for too long."""
        for name, (since, silent) in list(self._gone.items()):
            gone_s = time.monotonic() - since
            if name in self._post.peers or name in self.desk.lost:
                del self._gone[name]
            elif gone_s > self._patience_s / 2 * silent + min(REJOIN_S, self._patience_s) * (not silent) and (
                self.desk.can_spare(name, self._begun)
            ):
                del self._gone[name]
                self._lose(name)
            elif gone_s > self._limit_s:
                raise PeerFailedError(
                    f"server {name} has been gone for {self._limit_s:g} s, and nobody else has its part"
                )

    def _lose(self, name: str) -> None:
        if not self._closing:
            here = self.desk.servers if name in self.desk.servers else self.desk.workers
            left = len([other for other in here if other != name])
            what = "server" if here is self.desk.servers else "worker"
            self.tell(f"{what} {name} is gone; {left} {what}{'s' * (left != 1)} left")
        self._forget(name)
        self._send(self.desk.take(Lost(name)))
        self._send([(name, Gone(name)), *self._entries()])
        self._ask()

    def _forget(self, name: str) -> None:
        self._book.pop(name, None)
        self._begun.discard(name)
        if name in self.loads:
            self.loads[name] = self.loads[name]._replace(waiting_bytes=0)

    def _admit(self, offered: Offered) -> Sent:
        """What its snapshot lacks, the desk has of the last time when it looked at the parameters."""
        name, instead, snapshot = offered
        if name in self.desk.servers or name in self.desk.lost:
            return []
        for other in list(self.desk.servers):
            if _role(other) == _role(name):  # the one before it may have ended before it had offered anything
                instead = other
        for other in self._not_begun_beside(instead):  # they have nothing to go on with, and come again
            self._lose(other)
        there = dict.fromkeys(range(len(self.desk.view.owners)), 0) | dict(snapshot)
        offered = offered._replace(instead=instead)
        self._forget(instead)
        sent = self.desk.take(offered._replace(pieces=tuple(sorted(there.items()))))
        stands = [message for to, message in sent if to == name and isinstance(message, Stand)]
        known = {piece for piece, _ in snapshot}
        self._stands[name] = [(stand, stand.piece not in known) for stand in stands]
        self._tell_admitted(offered, stands)
        self._send([(to, message) for to, message in sent if not isinstance(message, Stand)])
        self._begin(name)
        self._ask()
        return [*self._entries(), *([(name, Bye(self.desk.updates))] if self._said_bye else [])]

    def _not_begun_beside(self, server: str) -> list[str]:
        pairs = [owned.servers for owned in self.desk.view.owners if server in owned.servers]
        beside = {other for pair in pairs for other in pair} - {server, *self._begun}
        return [other for other in self.desk.servers if other in beside]

    def _tell_admitted(self, offered: Offered, stands: list[Stand]) -> None:
        what, versions = "and is given all by the other one", dict(offered.pieces)
        if stands:
            oldest = min(versions.get(stand.piece, -1) for stand in stands)
            what = "with what the desk had of it last"
            if oldest >= 0:
                what = f"from its snapshot; the last {self.desk.updates - oldest} updates of it are lost"
                if oldest == self.desk.updates:
                    what = "from its snapshot after the last update"
        self.tell(f"server {offered.server} takes the place of {offered.instead}, {what}")

    def _begin(self, server: str) -> None:
        """Tell it what its pieces are, again if that was lost."""
        mine = [piece for piece, owned in enumerate(self.desk.view.owners) if server in owned.servers]
        for stand, given in self._stands.get(server, [(Stand(piece, *self._known), True) for piece in mine]):
            self._post.send(server, stand, self._stored(stand.piece) if given else None)

    def _entries(self) -> Sent:
        return [(peer, self._entry_book()) for peer in self._post.peers]

    def _entry_book(self) -> Book:
        return Book(tuple((name, host, port) for name, (host, port) in sorted(self._book.items())))

    def _send(self, sent: Sent) -> None:
        for to, message in sent:
            self._post.send(to, message)


def _role(server: str) -> str:
    """What it has in common with those whose place it takes."""
    return server.partition(".")[0].partition("+")[0]


def _to_nobody(text: str) -> None:
    """Nobody wants to hear."""
