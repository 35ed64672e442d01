"""What must be true of a parameter server, whatever happens."""

from dataclasses import dataclass, field

from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper
from motet.parallel.server.protocol import Ack, Apply, Close, Decide, Message, Ready, Sent, Ticket, Value
from server.numbered import Numbered
from server.system import Machine, System, demand


@dataclass
class Promises:
    system: System
    machines: Numbered[Machine | None]
    places: dict[str, int]
    within: set[int] = field(default_factory=set)
    """Workers, as numbers, that have what the bound asks for."""

    @property
    def _is_lasting(self) -> bool:
        """What is acknowledged is not lost again. Where it is, a worker that does a share again may hear that it need
        not: what it has done before is there."""
        return self.system.copies > 1 or not self.system.returns

    def of_step(self, machines: tuple[int, ...], at: int, said: tuple[Message, ...]) -> None:
        """Of what a machine is now, and has said."""
        for message in said:
            if isinstance(message, Ack):
                self._is_kept(machines, message)
            elif isinstance(message, Ticket) and at == 0 and self._is_lasting:
                self._is_free(machines, message)
            elif isinstance(message, Close | Decide) and at == 0:
                self._are_kept(machines, message)
            elif isinstance(message, Value):
                later = [apply.decision for apply in said if isinstance(apply, Apply) and apply.piece == message.piece]
                self._is_recent(machines, at, message, later)
        if machines[at] not in self.within:
            self._has_recent(self.machines[machines[at]])
            self.within.add(machines[at])

    def _is_kept(self, machines: tuple[int, ...], ack: Ack) -> None:
        """A push that is acknowledged is with all servers of its piece, for it may be decided upon from now on."""
        desk, client = self.machines[machines[0]], self._client(machines, ack.ticket)
        assert isinstance(desk, Desk)
        if client is None or desk.settled.has(client.ticket.share):
            return
        for server in desk.view.owners[ack.piece].servers:
            keeper = self.machines[machines[self.places[server]]]
            if isinstance(keeper, Keeper) and keeper.has(ack.piece):  # others are about to be told
                kept, share = keeper.pieces[ack.piece], client.ticket.share
                demand(share in kept.held or kept.settled.has(share), f"{server} has not {ack}")

    def _are_kept(self, machines: tuple[int, ...], chosen: Close | Decide) -> None:
        """What makes an update is with all servers."""
        desk = self.machines[machines[0]]
        assert isinstance(desk, Desk)
        for piece, owned in enumerate(desk.view.owners):
            for server in owned.servers:
                keeper = self.machines[machines[self.places[server]]]
                if isinstance(keeper, Keeper) and keeper.has(piece):
                    kept = keeper.pieces[piece]
                    all_held = all(share in kept.held or kept.settled.has(share) for share in chosen.shares)
                    demand(all_held, f"{server} has not all of {chosen} of piece {piece}")

    def of_updates(self, before: Machine, now: Machine, sent: Sent) -> None:
        """A server does one update after another, and an update is in the floor of the desk once."""
        for piece, kept in now.pieces.items() if isinstance(now, Keeper) and isinstance(before, Keeper) else ():
            done = [m.decision.number for _, m in sent if isinstance(m, Apply) and m.piece == piece]
            known = before.pieces.get(piece)
            first = known.version if known and known.there else kept.version - len(done)
            demand(done == list(range(first, kept.version)), f"{now.name} does {done} of piece {piece} from {first} on")
        if isinstance(now, Desk) and self.system.rule.alone:
            settled = now.settled.floor + len(now.settled.more)
            demand(settled == now.updates, f"{settled} shares are decided upon, in {now.updates} updates")

    def _client(self, machines: tuple[int, ...], ticket: int) -> Client | None:
        """Who waits to hear that its pushes are safe."""
        clients = (self.machines[number] for number in machines)
        return next((c for c in clients if isinstance(c, Client) and c.ticket.number == ticket), None)

    def _is_free(self, machines: tuple[int, ...], ticket: Ticket) -> None:
        """Who is given something to do has nothing to do."""
        desk = self.machines[machines[0]]
        assert isinstance(desk, Desk)
        name = next((worker for worker, current in desk.current.items() if current == ticket), None)
        client = self.machines[machines[self.places[name]]] if name is not None else None
        if isinstance(client, Client) and client.ticket.number:
            all_safe = len(client.safe) == len(client.view.owners)
            demand(all_safe or client.ticket == ticket, f"{name} is given {ticket} at its {client.ticket}")

    def _is_recent(self, machines: tuple[int, ...], at: int, value: Value, applied: list[Decide]) -> None:
        """A server sends a worker no value that lacks what its share needs. `applied`: in the same breath."""
        keeper, client = self.machines[machines[at]], self._client(machines, value.ticket)
        if client is None:
            return
        assert isinstance(keeper, Keeper)
        needs, settled = self.system.rule.needs(client.ticket.share), keeper.pieces[value.piece].settled
        later = [share for decision in applied if decision.number >= value.version for share in decision.shares]
        demand(settled.floor >= needs <= min(later, default=needs), f"{client.ticket} is answered with {value}")

    def _has_recent(self, machine: Machine | None) -> None:
        if isinstance(machine, Client) and machine.ready:
            bound = machine.ticket.least
            demand(min(machine.pulled.values()) >= bound, f"{machine.ticket} is computed with {machine.pulled}")

    def of_value(self, client: Client, value: Value) -> None:
        """Whether or not it is the first of its piece that comes."""
        rule, least = self.system.rule, client.ticket.least
        if not rule.alone:  # steps are updates
            demand(least * rule.shares >= rule.needs(client.ticket.share), f"{client.ticket} does not keep the bound")
        demand(value.version >= least, f"{client.ticket} is answered with {value}")

    @staticmethod
    def of_gradient(client: Machine, ready: Ready) -> None:
        assert isinstance(client, Client)
        demand(client.ticket.number == ready.ticket, f"{ready} is taken for one of {client.ticket}")

    def of_end(self, machines: tuple[int, ...]) -> None:
        """Nothing is underway any more, and nothing will be."""
        desk, *others = (self.machines[number] for number in machines)
        assert isinstance(desk, Desk)
        steps = self.system.rule.steps if desk.until is None else desk.until
        is_over = desk.closes and desk.settled.floor == self.system.rule.shares * steps
        demand(is_over, f"nobody goes on: {[desk, *others]}")
        for machine in others:
            if isinstance(machine, Client):
                demand(machine.ended, f"{machine.name} waits for ever")
            for piece, kept in machine.pieces.items() if isinstance(machine, Keeper) else ():
                if machine.name in desk.view.owners[piece].servers:
                    demand(kept.version == desk.updates, f"{machine.name} has {kept.version} updates of piece {piece}")
