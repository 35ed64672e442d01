"""What a server knows of its pieces: who pushed what, which updates were done, and who waits for a later version."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from motet.parallel.server.protocol import (
    DESK,
    NOTHING,
    Ack,
    Apply,
    Close,
    Copied,
    Copy,
    Decide,
    Message,
    Norm,
    Pull,
    Push,
    Sent,
    Settled,
    Stand,
    Standing,
    State,
    Value,
    View,
)


@dataclass
class Kept:
    """A piece, as a server has it."""

    version: int = 0
    """Updates that are done."""
    settled: Settled = NOTHING
    """The shares in them, and those that were dropped."""
    held: set[int] = field(default_factory=set)
    """Shares that were pushed, and are in no update yet."""
    copying: dict[int, frozenset[Push]] = field(default_factory=dict)
    """By share: what is to be acknowledged once the second server has it."""
    waiting: list[Pull] = field(default_factory=list)
    there: bool = True
    """False until its first server has told what it is."""


@dataclass
class Keeper:
    """One server."""

    name: str
    view: View
    pieces: dict[int, Kept] = field(default_factory=dict)
    closing: Close | None = None
    decisions: dict[int, Decide] = field(default_factory=dict)
    """By number, that some piece has not come to."""

    def take(self, message: Message) -> Sent:
        """What is to be sent and done, in this order."""
        match message:
            case Push():
                return self._push(message)
            case Copy(server, piece, share):
                if self._is_first(piece):  # from a server that is lost, and has acknowledged nothing
                    return []
                kept = self._kept(piece)
                if not kept.settled.has(share):
                    kept.held.add(share)
                return [(server, Copied(self.name, piece, share))]
            case Copied(server, piece, share):
                if server != self._other(piece):
                    return []
                return self._acks(self._kept(piece).copying.pop(share, frozenset()))
            case Pull():
                return self._pull(message)
            case State() | Stand():
                return self._begin(message)
            case _:
                return self._hear(message)

    def _hear(self, message: Message) -> Sent:
        """From the desk."""
        match message:
            case Close(turn):
                if self.closing is None or turn > self.closing.turn:
                    self.closing = message
                return self._norms(self.pieces)
            case Decide(number):
                self.decisions[number] = message
                return self._apply()
            case View(epoch):
                return self._look(message) if epoch > self.view.epoch else []
            case _:
                raise AssertionError(message)

    def resume(self, peer: str) -> Sent:
        """What is to be said, maybe again, to somebody with whom a connection was made."""
        if peer == DESK:
            return [(DESK, Standing(self.name, self._oldest())), *self._norms(self.pieces)]
        sent: Sent = []
        for piece, kept in self.pieces.items():
            if self._other(piece) == peer:
                sent += [(peer, self._state(piece))] if self._is_first(piece) and kept.there else []
                sent += [(peer, Copy(self.name, piece, share)) for share in kept.copying]
        return sent

    def _oldest(self) -> int:
        """No piece needs a decision before; one that it has not heard of may need any."""
        if not any(self.name in owned.servers for owned in self.view.owners):
            return 0
        return min((kept.version if kept.there else 0 for kept in self.pieces.values()), default=0)

    def _state(self, piece: int) -> State:
        kept = self.pieces[piece]
        return State(piece, kept.version, kept.settled, frozenset(kept.held))

    def has(self, piece: int) -> bool:
        """Whether it knows what the piece is."""
        return piece in self.pieces and self.pieces[piece].there

    def _kept(self, piece: int) -> Kept:
        """What another server has of it is told later; until then it is empty."""
        return self.pieces.setdefault(piece, Kept(there=False))

    def _push(self, push: Push) -> Sent:
        _, _, piece, share = push
        kept = self._kept(piece)
        if share in kept.copying:
            kept.copying[share] |= {push}
            return []
        if kept.settled.has(share) or share in kept.held:
            return self._acks([push])
        kept.held.add(share)
        return self._copy(piece, share, frozenset({push}))

    def _copy(self, piece: int, share: int, pushes: frozenset[Push]) -> Sent:
        other = self._other(piece)
        if other is None:
            return self._acks(pushes)
        self._kept(piece).copying[share] = pushes
        return [(other, Copy(self.name, piece, share))]

    def _pull(self, pull: Pull) -> Sent:
        kept = self._kept(pull.piece)
        if pull not in kept.waiting:
            kept.waiting.append(pull)
        return self._answers(kept)

    def _answers(self, kept: Kept) -> Sent:
        if not kept.there:
            return []
        ready = [pull for pull in kept.waiting if pull.least <= kept.version]
        kept.waiting = [pull for pull in kept.waiting if pull.least > kept.version]
        return [(pull.worker, Value(pull.ticket, pull.piece, kept.version, pull.urgency)) for pull in ready]

    def _norms(self, pieces: Iterable[int]) -> Sent:
        """Of the sum that is to be the next update, by the first server of a piece."""
        closing = self.closing
        return [
            (DESK, Norm(closing.turn, piece))
            for piece in pieces
            if closing is not None and self._is_ready(piece, closing.number, closing.shares) and self._is_first(piece)
        ]

    def _is_ready(self, piece: int, number: int, shares: tuple[int, ...]) -> bool:
        kept = self.pieces[piece]
        return kept.there and kept.version == number and kept.held >= set(shares)

    def _apply(self) -> Sent:
        """Decisions in their order, as far as they are known."""
        sent: Sent = []
        for piece, kept in self.pieces.items():
            while kept.there and (decision := self.decisions.get(kept.version)) is not None:
                assert kept.held >= set(decision.shares), (self.name, piece, decision)
                sent.append((self.name, Apply(piece, decision)))
                kept.version += 1
                kept.settled = kept.settled.with_(decision.shares, decision.floor)
                kept.held = {share for share in kept.held if not kept.settled.has(share)}
                sent += self._answers(kept)
        oldest = self._oldest()
        self.decisions = {number: known for number, known in self.decisions.items() if number >= oldest}
        return sent + self._norms(self.pieces)

    def _look(self, view: View) -> Sent:
        """Others keep the pieces now."""
        before, self.view = self.view, view
        sent: Sent = []
        for piece, owned in enumerate(view.owners):
            if self.name not in owned.servers:
                continue
            kept, other = self._kept(piece), self._other(piece)
            if other is not None and other not in before.owners[piece].servers and self._is_first(piece):
                sent.append((other, self._state(piece)))
            waiting, kept.copying = kept.copying, {}
            for share, pushes in waiting.items():
                sent += self._copy(piece, share, pushes)
        return sent + self._norms(self.pieces)

    def _begin(self, told: State | Stand) -> Sent:
        kept = self._kept(told.piece)
        if kept.there:
            return []
        kept.there, kept.version, kept.settled = True, told.version, told.settled
        kept.held |= told.held if isinstance(told, State) else set()
        kept.held = {share for share in kept.held if not kept.settled.has(share)}
        return self._answers(kept) + self._apply()

    def _is_first(self, piece: int) -> bool:
        return self.view.owners[piece].servers[:1] == (self.name,)

    def _other(self, piece: int) -> str | None:
        """The second server of the piece."""
        return next((server for server in self.view.owners[piece].servers if server != self.name), None)

    def _acks(self, pushes: Iterable[Push]) -> Sent:
        return [(push.worker, Ack(self.name, push.ticket, push.piece)) for push in sorted(pushes)]
