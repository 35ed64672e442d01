"""A server at work: takes what comes to its post, and does what its keeper says."""

import queue
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.server.keeper import Keeper
from motet.parallel.server.post import Post
from motet.parallel.server.protocol import (
    DESK,
    Apply,
    Book,
    Bye,
    Copy,
    Fetch,
    Gone,
    Here,
    Load,
    Message,
    Norm,
    Offered,
    Push,
    Refused,
    Sent,
    Stand,
    State,
    Stored,
    Value,
)
from motet.parallel.server.shelf import Shelf, as_bytes, pack, unpack
from motet.parallel.server.snapshot import Snapshots

GIVEN = "given/"
LOOK_S = 0.5
"""How often it is looked whether there is an end."""
TELL_S = 0.05
"""How often the desk is told of traffic, at most."""


class Server:
    def __init__(
        self, keeper: Keeper, shelf: Shelf, post: Post, limit_s: float, snapshots: Snapshots | None = None
    ) -> None:
        """It goes on without a desk for `limit_s`."""
        self._keeper = keeper
        self._shelf = shelf
        self._post = post
        self._snapshots = snapshots
        self._offered: Offered | None = None
        self.ended = False
        self.given_up = False
        """The desk has another one for its part."""
        self._limit_s = limit_s
        self._desk_seen_s: float | None = time.monotonic()
        """When it was connected last; None while it is."""
        self._told_s = 0.0
        self._book: set[str] = set()

    def take_place(self, instead: str) -> None:
        """Of another one, with what is known from its snapshots."""
        found = self._snapshots.found() if self._snapshots else {}
        for piece, (_, tensors) in found.items():
            self._shelf.load(piece, tensors)
        versions = tuple(sorted((piece, version) for piece, (version, _) in found.items()))
        self._offered = Offered(self._keeper.name, instead, versions)

    @torch.no_grad()
    def run(self) -> None:
        while not self.ended and not self.given_up:
            try:
                delivery = self._post.inbox.get(timeout=LOOK_S)
            except queue.Empty:
                self._look_for_desk()
                continue
            if delivery.message is None:
                self._do(self._greet(delivery.sender, delivery.connected))
            else:
                begun = self._has_begun
                self._do(self._take(delivery.sender, delivery.message, delivery.payload))
                if self._has_begun and not begun:
                    self._post.send(DESK, Here(self._keeper.name, *self._post.address, begun=True))

    def _look_for_desk(self) -> None:
        if self._desk_seen_s is not None and time.monotonic() - self._desk_seen_s > self._limit_s:
            raise PeerFailedError(f"server {self._keeper.name} has been without the desk for {self._limit_s:g} s")

    def _take(self, sender: str, message: Message, payload: bytearray) -> Sent:
        match message:
            case Book():
                self._book = self._post.follow(message, self._book, lambda name: name > self._keeper.name)
                return []
            case Refused(sentence):
                raise InputError(sentence)
            case Gone():
                self.given_up = True
                return []
            case Bye():
                self.ended = True
                return []
            case Push(piece=piece, share=share) | Copy(piece=piece, share=share):
                before = self._keeper.pieces.get(piece)
                is_known = before is not None and share in before.held
                sent = self._keeper.take(message)
                kept = self._keeper.pieces.get(piece)
                if not is_known and kept is not None and share in kept.held:
                    self._shelf.hold(piece, share, payload, sender)
                return sent
            case Fetch(piece):
                stored = Stored(piece, self._keeper.pieces[piece].version)
                self._post.send(sender, stored, pack(self._shelf.state(piece)))
                return []
            case Stand(piece=piece) | State(piece=piece) if payload and not self._keeper.has(piece):
                self._begin(message, unpack(payload))
        return self._keeper.take(message)

    @property
    def _has_begun(self) -> bool:
        kept = self._keeper.pieces.values()
        return bool(kept) and all(each.there for each in kept)

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
        return pack(self._shelf.whole(piece) | given)

    def _greet(self, peer: str, connected: bool) -> Sent:
        if peer == DESK:
            self._desk_seen_s = None if connected else time.monotonic()
        if not connected:
            return []
        here: Sent = []
        if peer == DESK:
            here.append((DESK, Here(self._keeper.name, *self._post.address, self._has_begun)))
            if self._offered:
                here.append((DESK, self._offered))
        return here + self._keeper.resume(peer)

    def _do(self, sent: Sent) -> None:
        for to, message in sent:
            self._do_one(to, message)
        for piece in {message.piece for _, message in sent if isinstance(message, Apply)}:
            kept = self._keeper.pieces[piece]
            self._shelf.keep_only(piece, kept.held | kept.copying.keys())
            if self._snapshots and kept.version % self._snapshots.every == 0:
                self._snapshots.keep(piece, kept.version, self._shelf.whole(piece))
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            self._post.send(DESK, self._load())

    def _load(self) -> Load:
        others = [(peer, traffic) for peer, traffic in list(self._post.traffic.items()) if peer != DESK]
        return Load(
            sum(traffic.sent for _, traffic in others),
            sum(traffic.received for _, traffic in others),
            sum(self._post.waiting(peer) for peer, _ in others),
        )

    def _do_one(self, to: str, message: Message) -> None:
        shelf = self._shelf
        match message:
            case Apply(piece, (_, shares, _, how)):
                learning_rate, factor, applied = how
                if applied:
                    shelf.apply(piece, shares, learning_rate, factor)
            case Norm(turn, piece):
                closing = self._keeper.closing
                assert closing is not None
                self._post.send(to, Norm(turn, piece, shelf.squares(piece, closing.shares)))
            case Value(_, piece, _, urgency):
                self._post.send(to, message, shelf.value(piece, to), urgency)
            case Copy(_, piece, share):
                self._post.send(to, message, shelf.given(piece, share))
            case State(piece, _, _, held):
                self._post.send(to, message, self._packed(piece, held))
            case _:
                self._post.send(to, message)
