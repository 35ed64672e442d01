"""Messages that nothing will come of, now or later: a state is the same without them."""

from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper
from motet.parallel.server.protocol import (
    Ack,
    Close,
    Copied,
    Decide,
    Joined,
    Message,
    Norm,
    Pull,
    Push,
    Stand,
    State,
    Ticket,
    Value,
    View,
)
from server.system import Machine, Reading


def is_ignored(machine: Machine, message: Message | Reading, is_lasting: bool) -> bool:
    """By the one that it goes to. `is_lasting`: what a worker knows to be safe stays so."""
    message = message.value if isinstance(message, Reading) else message
    if isinstance(machine, Client):
        return _by_client(machine, message, is_lasting)
    return _by_keeper(machine, message) if isinstance(machine, Keeper) else _by_desk(machine, message)


def _by_client(client: Client, message: Message, is_lasting: bool) -> bool:
    match message:
        case Ticket(number):
            return number <= client.ticket.number
        case Value(ticket, piece):
            return ticket < client.ticket.number or (ticket == client.ticket.number and piece in client.pulled)
        case Ack(_, ticket, piece):
            again = ticket == client.ticket.number and piece in client.safe
            return ticket < client.ticket.number or (again and is_lasting)
        case View(epoch):
            return epoch <= client.view.epoch
    return False


def _by_keeper(keeper: Keeper, message: Message) -> bool:
    match message:
        case View(epoch):
            return epoch <= keeper.view.epoch
        case Close(turn):
            return keeper.closing is not None and turn <= keeper.closing.turn
        case Decide(number):
            is_told = any(keeper.name in owned.servers for owned in keeper.view.owners)
            return is_told and all(k.there and number < k.version for k in keeper.pieces.values())
        case Copied(_, piece, share):
            kept = keeper.pieces.get(piece)
            return kept is not None and share not in kept.copying and (share in kept.held or kept.settled.has(share))
        case Stand(piece) | State(piece):
            return keeper.has(piece)
    return False


def _by_desk(desk: Desk, message: Message) -> bool:
    match message:
        case Norm(turn, piece):
            return turn < desk.turn or desk.closing is None or piece in desk.norms
        case Joined(worker):
            return worker in desk.lost
    return False


def is_answered(keeper: Keeper, client: Client | None, pull: Pull) -> bool:
    """Who asked has ended or gone on, or has the answer: the server's would be ignored. None: has ended."""
    if pull.piece not in keeper.pieces:
        return False
    if client is None or pull.ticket < client.ticket.number:
        return True
    return pull.ticket == client.ticket.number and pull.piece in client.pulled


def is_known(keeper: Keeper, client: Client | None, push: Push, is_lasting: bool) -> bool:
    """The server has it, and who pushed need not be told."""
    kept = keeper.pieces.get(push.piece)
    if kept is None or push.share in kept.copying or not (push.share in kept.held or kept.settled.has(push.share)):
        return False
    if client is None or push.ticket < client.ticket.number:
        return True
    return push.ticket == client.ticket.number and push.piece in client.safe and is_lasting
