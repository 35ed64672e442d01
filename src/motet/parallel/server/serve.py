"""A server at work: takes what comes to its post, and does what its keeper says."""

import queue
from collections.abc import Iterable

import torch
from torch import Tensor

from motet.parallel.server.keeper import Keeper
from motet.parallel.server.post import Delivery, Post
from motet.parallel.server.protocol import (
    DESK,
    Apply,
    Book,
    Bye,
    Copy,
    Fetch,
    Here,
    Message,
    Norm,
    Push,
    Sent,
    Stand,
    State,
    Stored,
    Value,
)
from motet.parallel.server.shelf import Shelf, as_bytes, pack, unpack

GIVEN = "given/"
LOOK_S = 0.5
"""How often it is looked whether there is an end."""


class Server:
    def __init__(self, keeper: Keeper, shelf: Shelf, post: Post) -> None:
        self._keeper = keeper
        self._shelf = shelf
        self._post = post
        self.ended = False

    @torch.no_grad()
    def run(self) -> None:
        while not self.ended:
            try:
                delivery = self._post.inbox.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            self._do(self._take(delivery))

    def _take(self, delivery: Delivery) -> Sent:
        message = delivery.message
        match message:
            case None:
                return self._greet(delivery.sender) if delivery.connected else []
            case Book(entries):
                for name, host, port in entries:
                    if name > self._keeper.name:  # one of two connects
                        self._post.connect(name, (host, port))
                return []
            case Bye():
                self.ended = True
                return []
            case Push(piece=piece, share=share) | Copy(piece=piece, share=share):
                kept = self._keeper.pieces.get(piece)
                if kept is None or not (kept.settled.has(share) or share in kept.held):
                    self._shelf.hold(piece, share, delivery.payload)
            case Fetch(piece):
                self._post.send(delivery.sender, Stored(piece, self._keeper.pieces[piece].version), self._packed(piece))
                return []
            case Stand(piece=piece) | State(piece=piece) if delivery.payload and not self._keeper.has(piece):
                self._begin(message, unpack(delivery.payload))
        return self._keeper.take(message)

    def _begin(self, told: Stand | State, tensors: dict[str, Tensor]) -> None:
        given = {int(name.removeprefix(GIVEN)): tensors.pop(name) for name in list(tensors) if name.startswith(GIVEN)}
        self._shelf.load(told.piece, tensors)
        for share, gradient in given.items():
            self._shelf.hold(told.piece, share, bytearray(as_bytes(gradient)))

    def _packed(self, piece: int, shares: Iterable[int] = ()) -> memoryview:
        """What is known of a piece, with what was pushed for these shares."""
        given = {
            f"{GIVEN}{share}": torch.frombuffer(self._shelf.given(piece, share), dtype=torch.uint8) for share in shares
        }
        return pack(self._shelf.state(piece) | given)

    def _greet(self, peer: str) -> Sent:
        here: Sent = [(DESK, Here(self._keeper.name, *self._post.address))] if peer == DESK else []
        return here + self._keeper.resume(peer)

    def _do(self, sent: Sent) -> None:
        for to, message in sent:
            self._do_one(to, message)

    def _do_one(self, to: str, message: Message) -> None:
        shelf = self._shelf
        match message:
            case Apply(piece, (_, shares, _, how)):
                learning_rate, factor, applied = how
                if applied:
                    shelf.apply(piece, shares, learning_rate, factor)
                shelf.keep_only(piece, self._keeper.pieces[piece].held)
            case Norm(turn, piece):
                closing = self._keeper.closing
                assert closing is not None
                self._post.send(to, Norm(turn, piece, shelf.squares(piece, closing.shares)))
            case Value(_, piece, _, urgency):
                self._post.send(to, message, shelf.value(piece), urgency)
            case Copy(_, piece, share):
                self._post.send(to, message, shelf.given(piece, share))
            case State(piece, _, _, held):
                self._post.send(to, message, self._packed(piece, held))
            case _:
                self._post.send(to, message)
