"""What a worker knows of its share: what it has pulled, and which of its pushes are safe."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.server.protocol import (
    DESK,
    END,
    NO_TICKET,
    Ack,
    Compute,
    Done,
    Joined,
    Message,
    Numbers,
    Pull,
    Push,
    Ready,
    Sent,
    Ticket,
    Value,
    View,
)


@dataclass
class Client:
    """One worker. With a ticket it pulls all pieces, computes, and pushes each as its gradient is there."""

    name: str
    view: View
    ticket: Ticket = NO_TICKET
    pulled: dict[int, int] = field(default_factory=dict)
    """Piece -> version."""
    ready: set[int] = field(default_factory=set)
    """Pieces whose gradient is there."""
    safe: set[int] = field(default_factory=set)
    """Pieces whose gradient is known to be kept."""
    report: Numbers = ()
    urgency: dict[int, int] = field(default_factory=dict)
    """Of the values of pieces, once it is known which are needed first."""

    def take(self, message: Message) -> Sent:
        match message:
            case Ticket(number):
                return self._begin(message) if number > self.ticket.number else []
            case Value(ticket, piece, version):
                if ticket != self.ticket.number or piece in self.pulled:
                    return []
                self.pulled[piece] = version
                return [(self.name, Compute(self.ticket))] if len(self.pulled) == self._count else []
            case Ready(ticket, pieces, report):
                self.report = report
                self.ready.update(pieces)
                return self._pushes(pieces)
            case Ack(server, ticket, piece):
                if ticket != self.ticket.number or piece in self.safe or server not in self.view.owners[piece].servers:
                    return []
                self.safe.add(piece)
                return self._end()
            case View(epoch):
                return self._look(message) if epoch > self.view.epoch else []
            case _:
                raise AssertionError(message)

    def resume(self, peer: str) -> Sent:
        """What is to be said, maybe again, to somebody with whom a connection was made."""
        if peer == DESK:
            return [(DESK, Joined(self.name))] + (self._end() if self.ticket.number else [])
        if self.ticket.share == END:
            return []
        there = [piece for piece, owned in enumerate(self.view.owners) if owned.servers[:1] == (peer,)]
        return self._pulls(set(there) - self.pulled.keys()) + self._pushes(set(there) & self.ready - self.safe)

    @property
    def ended(self) -> bool:
        return self.ticket.number > 0 and self.ticket.share == END

    @property
    def _count(self) -> int:
        return len(self.view.owners)

    def _begin(self, ticket: Ticket) -> Sent:
        self.ticket, self.pulled, self.ready, self.safe, self.report = ticket, {}, set(), set(), ()
        return [] if ticket.share == END else self._pulls(range(self._count))

    def _end(self) -> Sent:
        done = Done(self.name, self.ticket.share, self.view.epoch, self.report)
        return [(DESK, done)] if len(self.safe) == self._count else []

    def _pulls(self, pieces: Iterable[int]) -> Sent:
        number, _, least = self.ticket
        return [
            (to, Pull(self.name, number, piece, least, self.urgency.get(piece, 0))) for piece, to in self._first(pieces)
        ]

    def _pushes(self, pieces: Iterable[int]) -> Sent:
        number, share, _ = self.ticket
        return [(to, Push(self.name, number, piece, share)) for piece, to in self._first(pieces)]

    def _first(self, pieces: Iterable[int]) -> list[tuple[int, str]]:
        """Of those that somebody keeps; the rest waits for a later view."""
        return [(piece, owned[0]) for piece in pieces if (owned := self.view.owners[piece].servers)]

    def _look(self, view: View) -> Sent:
        """What was asked of servers that are lost is asked again of those that have their place."""
        before, self.view = self.view, view
        if self.ticket.share == END:
            return []
        pairs = list(enumerate(zip(before.owners, view.owners, strict=True)))
        self.safe -= {piece for piece, (old, new) in pairs if old.life != new.life}
        moved = [piece for piece, (old, new) in pairs if old.servers[:1] != new.servers[:1]]
        pulls = self._pulls(piece for piece in moved if piece not in self.pulled)
        pushes = self._pushes(piece for piece in moved if piece in self.ready - self.safe)
        return pulls + pushes + self._end()
