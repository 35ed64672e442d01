"""Every interleaving of a small parameter server: messages in any order, some of them twice, and processes that end.

A state is what every process knows, and the messages underway. What a process does with a message is computed once, and
remembered for all states in which it comes to that. States that differ in the names of workers alone count once. Of a
state that was seen 64 bits are kept: with ten million of them, two are taken for one with a chance of 3 in a million.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import NamedTuple

from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper, Kept
from motet.parallel.server.protocol import (
    DESK,
    Ack,
    Apply,
    Close,
    Compute,
    Copied,
    Decide,
    Joined,
    Lost,
    Message,
    Norm,
    Offered,
    Owners,
    Ready,
    Rule,
    Sent,
    Ticket,
    Value,
    View,
)
from server.numbered import Numbered

Machine = Desk | Keeper | Client


class Reading(NamedTuple):
    """A value underway, of which a part was read at a version."""

    value: Value
    first: int | None = None


@dataclass(frozen=True)
class System:
    """What is explored."""

    rule: Rule
    workers: int
    servers: int
    copies: int = 1
    """Servers that keep a piece; piece i is first on server i."""
    doubles: int = 0
    """So many messages arrive twice."""
    crashes: int = 0
    """So many processes end. What they had sent may arrive or not."""
    returns: bool = False
    """Instead of a server that ended another one comes, with a snapshot of it or, where there are copies, nothing."""
    cuts: int = 0
    """So many connections are lost, with all that is underway on them, and made again."""
    in_parts: bool = False
    """A value is read from the server's memory in two parts, one after the other."""
    in_place: bool = False
    """And that is what is there by then."""
    desk: type[Desk] = Desk
    keeper: type[Keeper] = Keeper
    client: type[Client] = Client


class BrokenPromiseError(AssertionError):
    """A promise that is not kept."""


@dataclass
class Found:
    states: int = 0
    steps: int = 0
    """From one state to another."""
    ends: int = 0


State = tuple[tuple[int, ...], tuple[int, ...], int, int, int]
"""Machines, messages underway, and how often a message may still arrive twice, a process end, a connection be lost."""
Taken = tuple[int, tuple[int, ...], tuple[Message, ...]]
"""(what a machine is then, what it sends, what it says by that)"""
NONE = 0
"""A process that has ended, or not begun."""
DOUBLES, CRASHES, CUTS = range(3)


@dataclass
class Explorer:
    system: System
    machines: Numbered[Machine | None] = field(default_factory=lambda: Numbered(None))
    """0 is none."""
    messages: Numbered[tuple[str, str, Message | Reading]] = field(default_factory=Numbered)
    """(to, from, what)"""
    known: dict[tuple[int, int], Taken] = field(default_factory=dict)
    stale: dict[tuple[int, int], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.system
        self.servers = [f"s{i}" for i in range(s.servers)]
        self.workers = [f"w{i}" for i in range(s.workers)]
        self.names = [DESK, *self.servers, *self.workers, "new"]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.owners = tuple(
            Owners(tuple(self.servers[(piece + copy) % s.servers] for copy in range(s.copies)))
            for piece in range(s.servers)
        )
        first = 1 + s.servers
        self.swaps = [
            (
                [*range(first), *(first + i for i in order), first + s.workers],
                dict(zip(self.workers, names, strict=True)),
            )
            for order in permutations(range(s.workers))
            for names in [[self.workers[i] for i in order]]
        ][1:]

    def start(self) -> State:
        s = self.system
        view = View(0, self.owners)
        machines: list[Machine] = [s.desk(s.rule, view, list(self.servers), s.copies)]
        for name in self.servers:
            own = {piece: Kept() for piece, owned in enumerate(self.owners) if name in owned.servers}
            machines.append(s.keeper(name, view, own))
        machines += [s.client(name, view) for name in self.workers]
        joined = [self.messages.number((DESK, name, Joined(name))) for name in self.workers]
        return (*map(self.machines.number, machines), NONE), tuple(sorted(joined)), s.doubles, s.crashes, s.cuts

    # --- what may happen ---------------------------------------------------------------------------

    def after(self, state: State) -> Iterator[State]:
        """Everything that may happen next."""
        machines, underway, *left = state
        for index, number in enumerate(underway):
            if index and underway[index - 1] == number:
                continue
            _, sender, message = self.messages[number]
            rest = underway[:index] + underway[index + 1 :]
            if isinstance(message, Reading):
                yield self._state(machines, (*rest, self._read(machines, number)), left)
                continue
            now, sent = self._take(machines, number)
            yield self._state(now, rest + sent, left)
            if left[DOUBLES]:
                yield self._state(now, underway + sent, _less(left, DOUBLES))
            if not machines[self.places[sender]] and not isinstance(message, Lost | Offered):
                yield self._state(machines, rest, left)
        alive = [place for place, machine in enumerate(machines) if machine]
        for place in alive if left[CRASHES] else ():
            if 0 < place < len(machines) - 1 and self._may_end(machines, place):
                yield from self._crash(state, place)
        for one, other in combinations(alive, 2) if left[CUTS] else ():
            yield from self._cut(state, one, other)

    def _cut(self, state: State, one: int, other: int) -> Iterator[State]:
        machines, underway, *left = state
        kept = tuple(m for m in underway if {*self.messages[m][:2]} != {self.names[one], self.names[other]})
        now = list(machines)
        sent: tuple[int, ...] = ()
        for here, there in ((one, other), (other, one)):
            if here:  # the desk waits to be told where others are
                now[here], said = self._resume(machines[here], here, there)
                sent += said
        if len(kept) < len(underway):
            yield self._state(tuple(now), kept + sent, _less(left, CUTS))

    def _read(self, machines: tuple[int, ...], number: int) -> int:
        """One part more of a value."""
        to, sender, reading = self.messages[number]
        assert isinstance(reading, Reading)
        value, first = reading
        keeper, version = self.machines[machines[self.places[sender]]], value.version
        if self.system.in_place and isinstance(keeper, Keeper):
            version = keeper.pieces[value.piece].version
        if first is None:
            return self.messages.number((to, sender, Reading(value, version)))
        _demand(first == version, f"{value} is torn: its first part is of version {first}, the other of {version}")
        return self.messages.number((to, sender, value))

    def _may_end(self, machines: tuple[int, ...], place: int) -> bool:
        """Somebody must be left to go on, and to keep each piece."""
        if place > self.system.servers:
            return sum(map(bool, machines[1 + self.system.servers : -1])) > 1
        return self.system.copies > 1 or self.system.returns

    def _crash(self, state: State, place: int) -> Iterator[State]:
        machines, underway, *left = state
        name, machine = self.names[place], self.machines[machines[place]]
        gone = (*machines[:place], NONE, *machines[place + 1 :])
        told = (*underway, self.messages.number((DESK, name, Lost(name))))
        left = _less(left, CRASHES)
        if not (isinstance(machine, Keeper) and self.system.returns):
            yield self._state(gone, told, left)
            return
        for older in (0, 1) if self.system.copies == 1 else (0,):
            snapshot = (
                () if self.system.copies > 1 else tuple((p, k.version - older) for p, k in machine.pieces.items())
            )
            new = self.machines.number(self.system.keeper("new", View(-1, self.owners)))
            offer = self.messages.number((DESK, "new", Offered("new", name, snapshot)))
            yield self._state((*gone[:-1], new), (*told, offer), left)

    def _state(self, machines: tuple[int, ...], underway: tuple[int, ...], left: list[int]) -> State:
        return machines, tuple(sorted(m for m in underway if not self._is_stale(machines, m))), *left

    # --- machines and messages as numbers ----------------------------------------------------------

    def _take(self, machines: tuple[int, ...], number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(the machines then, what is sent)"""
        name, _, message = self.messages[number]
        to = self.places[name]
        key = machines[to], number
        if key not in self.known:
            now = deepcopy(self.machines[machines[to]])
            assert now is not None and not isinstance(message, Reading)
            self.known[key] = self._told(now, to, now.take(message))
        then, sent, said = self.known[key]
        following = (*machines[:to], then, *machines[to + 1 :])
        self._judge(following, to, said)
        return following, sent

    def _resume(self, machine: int, here: int, there: int) -> tuple[int, tuple[int, ...]]:
        now = deepcopy(self.machines[machine])
        assert isinstance(now, Keeper | Client)
        return self._told(now, here, now.resume(self.names[there]))[:2]

    def _told(self, now: Machine, here: int, sent: Sent) -> Taken:
        for _, computed in [m for m in sent if isinstance(m[1], Compute)]:
            assert isinstance(now, Client) and isinstance(computed, Compute)
            sent += now.take(Ready(computed.ticket.number, tuple(range(self.system.servers))))
        said = tuple(m for _, m in sent if isinstance(m, Ack | Apply))
        out = tuple(
            self.messages.number((to, self.names[here], self._underway(m)))
            for to, m in sent
            if not isinstance(m, Apply | Compute)
        )
        return self.machines.number(now), out, said

    def _underway(self, message: Message) -> Message | Reading:
        return Reading(message) if isinstance(message, Value) and self.system.in_parts else message

    def _is_stale(self, machines: tuple[int, ...], message: int) -> bool:
        """Nothing will come of it, now or later."""
        machine = machines[self.places[self.messages[message][0]]]
        key = machine, message
        if key not in self.stale:
            self.stale[key] = machine == NONE or self._is_ignored(self.machines[machine], self.messages[message][2])
        return self.stale[key]

    def _is_ignored(self, machine: Machine | None, message: Message) -> bool:
        message = message.value if isinstance(message, Reading) else message
        match machine, message:
            case Client(), Ticket(number):
                return number <= machine.ticket.number
            case Client(), Value(ticket, piece):
                return ticket < machine.ticket.number or (ticket == machine.ticket.number and piece in machine.pulled)
            case Client(), Ack(_, ticket, piece):
                lasting = self.system.copies > 1 or not self.system.returns
                again = ticket == machine.ticket.number and piece in machine.safe
                return ticket < machine.ticket.number or (again and lasting)
            case ((Client() | Keeper()), View(epoch)):
                return epoch <= machine.view.epoch
            case Keeper(), Close(turn):
                return machine.closing is not None and turn <= machine.closing.turn
            case Keeper(), Decide(number):
                return bool(machine.pieces) and all(k.there and number < k.version for k in machine.pieces.values())
            case Keeper(), Copied(_, piece, share):
                kept = machine.pieces.get(piece)
                return (
                    kept is not None and share not in kept.copying and (share in kept.held or kept.settled.has(share))
                )
            case Desk(), Norm(turn):
                return turn < machine.turn
        return False

    def canonical(self, state: State) -> State:
        """The least of the states that are this one with other names of workers."""
        machines, underway, *left = state
        best = machines, underway
        for number, (places, names) in enumerate(self.swaps):
            mapped = [0] * len(machines)
            for place, machine in enumerate(machines):
                mapped[places[place]] = self.machines.renamed(machine, number, names) if machine else NONE
            other = tuple(mapped)
            if other <= best[0]:
                best = min(best, (other, tuple(sorted(self.messages.renamed(m, number, names) for m in underway))))
        return *best, *left

    # --- what must be true -------------------------------------------------------------------------

    def _judge(self, machines: tuple[int, ...], at: int, said: tuple[Message, ...]) -> None:
        desk, machine = self.machines[machines[0]], self.machines[machines[at]]
        assert isinstance(desk, Desk)
        for message in said:
            share = self._share(machines, message.ticket) if isinstance(message, Ack) else None
            if isinstance(message, Ack) and share is not None and not desk.settled.has(share):
                for server in desk.view.owners[message.piece].servers:
                    keeper = self.machines[machines[self.places[server]]]
                    if isinstance(keeper, Keeper) and server in self._informed(machines, message.piece):
                        kept = keeper.pieces[message.piece]
                        _demand(share in kept.held or kept.settled.has(share), f"{server} has not {message}")
        if isinstance(machine, Client) and machine.ready and self.system.rule.ahead is not None:
            bound = max(0, self.system.rule.step(machine.ticket.share) - self.system.rule.ahead)
            _demand(min(machine.pulled.values()) >= bound, f"{machine.ticket} is computed with {machine.pulled}")

    def _informed(self, machines: tuple[int, ...], piece: int) -> set[str]:
        """Servers that have been told all that is known of a piece: others are about to be."""
        keepers = (self.machines[number] for number in machines)
        return {k.name for k in keepers if isinstance(k, Keeper) and piece in k.pieces and k.pieces[piece].there}

    def _share(self, machines: tuple[int, ...], ticket: int) -> int | None:
        """Of a worker that still waits to hear that its pushes are safe."""
        clients = (self.machines[number] for number in machines)
        return next((c.ticket.share for c in clients if isinstance(c, Client) and c.ticket.number == ticket), None)

    def end(self, state: State) -> None:
        """Nothing is underway any more."""
        desk, *others = (self.machines[number] for number in state[0])
        assert isinstance(desk, Desk)
        _demand(
            desk.settled.floor == self.system.rule.shares * self.system.rule.steps, f"nobody goes on: {[desk, *others]}"
        )
        for machine in others:
            if isinstance(machine, Client):
                _demand(machine.ended, f"{machine.name} waits for ever")
            for piece, kept in machine.pieces.items() if isinstance(machine, Keeper) else ():
                if machine.name in desk.view.owners[piece].servers:
                    _demand(kept.version == desk.updates, f"{machine.name} has {kept.version} updates of piece {piece}")


def explore(system: System, most: int = 10**9) -> Found:
    explorer = Explorer(system)
    start = explorer.start()
    seen = {hash(start)}
    found = Found()
    stack = [start]
    while stack and len(seen) < most:
        state = stack.pop()
        for following in explorer.after(state):
            found.steps += 1
            same = explorer.canonical(following)
            if (mark := hash(same)) not in seen:
                seen.add(mark)
                stack.append(same)
        if not state[1]:
            found.ends += 1
            explorer.end(state)
    found.states = len(seen)
    return found


def _demand(kept: bool, sentence: str) -> None:
    if not kept:
        raise BrokenPromiseError(sentence)


def _less(left: list[int], which: int) -> list[int]:
    return [count - (number == which) for number, count in enumerate(left)]
