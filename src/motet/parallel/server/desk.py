"""The desk of a parameter server: hands out shares of work, and decides which of them make the next update."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from motet.parallel.server.protocol import (
    END,
    NOTHING,
    Close,
    Decide,
    Done,
    Gone,
    Joined,
    Lost,
    Message,
    Norm,
    Numbers,
    Offered,
    Owners,
    Rule,
    Sent,
    Settled,
    Stand,
    Standing,
    Ticket,
    View,
)

REMEMBERED = 2_000
"""Decisions that a server can have missed: one that is further behind was given up long ago."""
Judge = Callable[[int, dict[int, Numbers], dict[int, float]], Numbers]
"""(number of the update, reports of its shares, squares of its norm by piece) -> how it is to be done."""


def as_it_is(number: int, reports: dict[int, Numbers], squares: dict[int, float]) -> Numbers:
    return ()


@dataclass
class Desk:
    """One for a run."""

    rule: Rule
    view: View
    servers: list[str]
    copies: int = 1
    """Servers that a piece should have."""
    first: int = 0
    """Updates that were done before this run, or so long ago that nobody asks for them."""
    judge: Judge = as_it_is
    workers: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    reborn: int = 0
    """The epoch in which pushes were lost last."""
    tickets: int = 0
    current: dict[str, Ticket] = field(default_factory=dict)
    """What each worker is at."""
    idle: list[str] = field(default_factory=list)
    fresh: int = 0
    """The first share that nobody has had."""
    again: set[int] = field(default_factory=set)
    """Shares that somebody had who is lost."""
    done: dict[int, Numbers] = field(default_factory=dict)
    """Pushed, and not in an update yet: their reports, first come first."""
    settled: Settled = NOTHING
    reached: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Shares -> updates that have all of them, of those that a share may need."""
    finished: set[str] = field(default_factory=set)
    """Of `first-k`, who has done a share of the step that is to be decided next."""
    log: list[Decide] = field(default_factory=list)
    """From update `first` on."""
    closing: tuple[int, ...] | None = None
    """The shares of the next update, while servers tell how large it is."""
    until: int | None = None
    """Steps from here on wait until this is raised; all may begin when not given."""
    closes: bool = True
    """Who has nothing to do then is told that this is the end."""
    turn: int = 0
    norms: dict[int, float] = field(default_factory=dict)

    def begin(self, done: int) -> "Desk":
        """After so many steps that were done before."""
        a_step = self.rule.shares
        self.first = done * (a_step if self.rule.alone else 1)
        self.fresh = done * a_step
        self.settled = Settled(self.fresh)
        if self.rule.ahead is not None:
            self.reached = dict.fromkeys(range(self.rule.needs(self.fresh), self.fresh + 1, a_step), self.first)
        return self

    @property
    def updates(self) -> int:
        return self.first + len(self.log)

    @property
    def is_finished(self) -> bool:
        return self.settled.floor == self.rule.shares * self.rule.steps

    @property
    def is_resting(self) -> bool:
        """Nothing of a step is underway, and nothing will be before `until` is raised."""
        shares = [ticket.share for ticket in self.current.values() if ticket.share > END]
        return self._is_there and all(self.settled.has(share) for share in shares)

    @property
    def _is_there(self) -> bool:
        return self.settled.floor >= self.rule.shares * self._until

    @property
    def _until(self) -> int:
        return self.rule.steps if self.until is None else self.until

    def go_on(self, until: int, closes: bool = False) -> Sent:
        """To these steps."""
        self.until, self.closes = until, closes
        return self._go_on()

    def take(self, message: Message) -> Sent:
        match message:
            case Joined(worker):
                return self._join(worker)
            case Done():
                self._finish(message)
            case Norm(turn, piece, squares):
                if self.closing is not None and turn == self.turn:
                    self.norms[piece] = squares
            case Lost(name):
                return self._lose(name) + self._go_on()
            case Offered():
                return self._admit(message) + self._go_on()
            case Standing(server, version):
                return self._tell(server, version) if server in self.servers else []
            case _:
                raise AssertionError(message)
        return self._go_on()

    def can_spare(self, name: str, begun: Collection[str]) -> bool:
        """Whether others can do all that it does; `begun`: servers that know their pieces."""
        mine = [owned.servers for owned in self.view.owners if name in owned.servers]
        return all(any(other in begun for other in servers if other != name) for servers in mine)

    # --- workers -----------------------------------------------------------------------------------

    def _join(self, worker: str) -> Sent:
        """For the first time, or after its connection was lost."""
        if worker in self.lost:
            return [(worker, Gone(worker))]
        if worker in self.current:
            return [(worker, self.view), (worker, self.current[worker])]
        if worker not in self.workers:
            self.workers.append(worker)
            self.idle.append(worker)
        return [(worker, self.view), *self._go_on()]

    def _finish(self, done: Done) -> None:
        if done.epoch < self.reborn:  # some of it is lost since; the worker will see, and come again
            return
        if done.worker in self.current and self.current[done.worker].share == done.share:
            del self.current[done.worker]
            self.idle.append(done.worker)
            if self._drops and self.rule.step(done.share) == self.updates:
                self.finished.add(done.worker)
        if not self.settled.has(done.share) and done.share not in self.done:
            self.done[done.share] = done.report
            self.again.discard(done.share)

    def _next(self, worker: str) -> int | None:
        """The share to hand out; None while there is none, or only what would be too far ahead, or dropped."""
        if self._is_there:
            return END if self.closes else None
        share = min(self.again, default=self.fresh)
        if self.rule.step(share) >= self._until or self.rule.needs(share) > self.settled.floor:
            return None
        if worker in self.finished and self.rule.step(share) == self.updates and self._enough_of(self.updates):
            return None
        self.again.discard(share)
        self.fresh = max(self.fresh, share + 1)
        return share

    @property
    def _drops(self) -> bool:
        return not self.rule.alone and self.rule.closes < self.rule.shares

    def _enough_of(self, step: int) -> bool:
        """Shares that are done or underway make the step, if nobody is lost."""
        shares = [*self.done, *(ticket.share for ticket in self.current.values() if ticket.share > END)]
        return len([share for share in shares if self.rule.step(share) == step]) >= self.rule.closes

    # --- servers -----------------------------------------------------------------------------------

    def _lose(self, name: str) -> Sent:
        self.lost.add(name)
        if name in self.workers:
            self.workers.remove(name)
            if name in self.idle:
                self.idle.remove(name)
            ticket = self.current.pop(name, None)
            if ticket is not None and ticket.share not in self.done and not self.settled.has(ticket.share):
                self.again.add(ticket.share)
            return []
        if name not in self.servers:
            return []
        self.servers.remove(name)
        return self._look([
            Owners(tuple(server for server in owned.servers if server != name), owned.life)
            for owned in self.view.owners
        ])  # fmt: skip

    def _admit(self, offered: Offered) -> Sent:
        """A server takes the place of one that was lost."""
        name, pieces = offered.server, dict(offered.pieces)
        if name in self.servers or name in self.lost:
            return []
        sent = self._lose(offered.instead)
        self.servers.append(name)
        owners = []
        for piece, owned in enumerate(self.view.owners):
            if not owned.servers and piece in pieces:
                owners.append(Owners((name,), owned.life + 1))
                sent.append((name, Stand(piece, self.updates, self.settled)))
                self._forget()
            elif owned.servers and len(owned.servers) < self.copies:
                owners.append(Owners((*owned.servers, name), owned.life))
            else:
                owners.append(owned)
        return sent + self._look(owners) + self._tell(name, 0)

    def _tell(self, server: str, version: int) -> Sent:
        """What it may not have heard."""
        told: list[Message] = [self.view, *self.log[max(0, version - self.first) :]]
        if self.closing is not None:
            told.append(Close(self.turn, self.updates, self.closing))
        return [(server, message) for message in told]

    def _forget(self) -> None:
        """Pushes are lost that were acknowledged: their shares are to be done again."""
        self.reborn = self.view.epoch + 1
        self.closing = None
        self.norms.clear()
        self.again |= self.done.keys() - {ticket.share for ticket in self.current.values()}
        self.done.clear()

    def _look(self, owners: list[Owners]) -> Sent:
        self.view = View(self.view.epoch + 1, tuple(owners))
        return [(other, self.view) for other in (*self.workers, *self.servers)]

    # --- updates -----------------------------------------------------------------------------------

    def _go_on(self) -> Sent:
        sent: Sent = []
        while (shares := self._complete()) is not None:
            if self.rule.alone or len(self.norms) == len(self.view.owners):
                sent += self._decide(shares)
                continue
            if self.closing is None:
                self.closing = shares
                self.turn += 1
                sent += [(server, Close(self.turn, self.updates, shares)) for server in self.servers]
            break
        for worker in list(self.idle):
            share = self._next(worker)
            if share is None:
                continue
            self.tickets += 1
            least = 0 if share == END else self.reached[self.rule.needs(share)]
            ticket = Ticket(self.tickets, share, least)
            self.idle.remove(worker)
            self.current[worker] = ticket
            sent.append((worker, ticket))
        return sent

    def _complete(self) -> tuple[int, ...] | None:
        """The shares of the next update, once they are known."""
        if self.closing is not None:
            return self.closing
        if self.rule.alone:
            return (next(iter(self.done)),) if self.done else None
        here = [share for share in self.done if self.rule.step(share) == self.updates]
        return tuple(sorted(here[: self.rule.closes])) if len(here) >= self.rule.closes else None

    def _decide(self, shares: tuple[int, ...]) -> Sent:
        how = self.judge(self.updates, {share: self.done[share] for share in shares}, self.norms)
        floor = self.settled.floor
        if self.rule.alone:
            while floor in shares or floor in self.settled.more:
                floor += 1
        else:
            floor = (self.updates + 1) * self.rule.shares
        decision = Decide(self.updates, shares, floor, how)
        self.log.append(decision)
        if len(self.log) > 2 * REMEMBERED:
            self.first += REMEMBERED
            del self.log[:REMEMBERED]
        self._reach(self.settled.floor, floor)
        self.settled = self.settled.with_(shares, floor)
        self.closing = None
        self.norms = {}
        self.finished = set()
        self.done = {share: report for share, report in self.done.items() if not self.settled.has(share)}
        self.again = {share for share in self.again if not self.settled.has(share)}
        self.fresh = max(self.fresh, floor)
        return [(server, decision) for server in self.servers]

    def _reach(self, before: int, floor: int) -> None:
        """Shares until here are in the updates."""
        if self.rule.ahead is None:
            return
        a_step = self.rule.shares
        ends = range(before // a_step * a_step + a_step, floor + 1, a_step)
        self.reached |= dict.fromkeys(ends, self.updates)
        oldest = self.rule.needs(floor)
        self.reached = {end: updates for end, updates in self.reached.items() if end >= oldest}
