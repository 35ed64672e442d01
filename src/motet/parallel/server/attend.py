"""A worker's side: parameters arrive beside forward, gradients leave beside backward."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from motet.core.errors import InputError, PeerFailedError
from motet.parallel.flat import FlatWeights
from motet.parallel.server.client import Client
from motet.parallel.server.packing import Packer, unpack_parameters
from motet.parallel.server.post import Delivery, Post
from motet.parallel.server.protocol import (
    DESK,
    END,
    Book,
    Compute,
    Gone,
    Message,
    Numbers,
    Push,
    Ready,
    Refused,
    Sent,
    Ticket,
    Value,
)
from motet.parallel.server.serve import LOOK_S
from motet.parallel.server.shelf import Plan, as_bytes


class GivenUpError(PeerFailedError):
    """Others do what this worker had to do; it may join anew."""


class Attendant:
    """Speaks with the desk and the servers on a thread of its own."""

    def __init__(
        self, client: Client, plan: Plan, weights: FlatWeights, post: Post, limits_s: tuple[float, float]
    ) -> None:
        """Limits: of any wait, and of the first for the desk."""
        self._client = client
        self._plan = plan
        self._weights = weights
        self._post = post
        self._limit_s, self._first_s = limits_s
        self._changed = threading.Condition()
        self._there: set[int] = set()
        """Buckets whose parameters are those of the ticket."""
        self._desk_is_there = False
        self._taken = 0
        """The number of the last ticket that was begun."""
        self._failed: BaseException | None = None
        self.beside: list[BaseException] = []
        """What other threads of this process ended with."""
        self._ended = False
        self._packer = Packer(plan.packing.push, plan.packing) if plan.packing.push else None
        self._messages: dict[int, Tensor] = {}
        """What was pushed of this ticket, by piece."""
        self._book: set[str] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def next(self) -> Ticket | None:
        """The next ticket; None at the end. As long as the desk is there it may have other things to do."""
        while not self._desk_gives():
            if DESK not in self._post.told:
                self._meet()
            self._wait(lambda: self._desk_is_there or self._desk_gives(), "the desk does not answer", self._limit_s)
            self._wait(lambda: not self._desk_is_there or self._desk_gives(), "", None)
        ticket = self._client.ticket
        self._taken = ticket.number
        self._there.clear()
        self._messages.clear()
        return None if ticket.share == END else ticket

    def _meet(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or self._desk_is_there, self._first_s)
        if DESK not in self._post.told and self._failed is None:
            host, port = self._post.wanted[DESK]
            raise InputError(
                f"cannot reach the desk at {host}:{port} within {self._first_s:g} s; is the run there, with "
                "layout.server.listen?"
            )

    @property
    def told(self) -> Mapping[str, str]:
        """What the desk says of the run."""
        return self._post.told[DESK]

    def _desk_gives(self) -> bool:
        return self._client.ticket.number > self._taken

    def need(self, bucket: int) -> None:
        """Until the parameters of a bucket are there."""
        if bucket in self._there:
            return
        pieces = set(self._plan.of_bucket(bucket))
        self._wait(
            lambda: pieces <= self._client.pulled.keys(), f"parameters of bucket {bucket} did not come", self._limit_s
        )
        self._there.add(bucket)
        self._weights.arrived(bucket)

    def need_all(self) -> None:
        count = len(self._plan.pieces)
        self._wait(lambda: len(self._client.pulled) == count, "parameters did not come", self._limit_s)

    def ready(self, bucket: int, report: Numbers) -> None:
        """The gradients of a bucket are there, and stay until there is another ticket."""
        pieces = tuple(self._plan.of_bucket(bucket))
        with self._changed:
            self._do(self._client.take(Ready(self._taken, pieces, report)))

    def order(self, buckets: Sequence[int]) -> None:
        """In which forward needs them."""
        with self._changed:
            for place, bucket in enumerate(buckets):
                self._client.urgency |= dict.fromkeys(self._plan.of_bucket(bucket), place)

    @property
    def versions(self) -> Sequence[int]:
        """Of what was computed with."""
        return tuple(self._client.pulled.values())

    def close(self) -> None:
        self._ended = True
        self._thread.join()

    def _wait(self, condition: Callable[[], bool], otherwise: str, limit_s: float | None) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._failed is not None or condition(), limit_s)
        if self._failed is not None:
            raise self._failed
        if not there:
            raise PeerFailedError(f"{self._client.name} has waited for {limit_s:g} s, and {otherwise}")

    def _listen(self) -> None:
        try:
            while not self._ended:
                if self.beside:
                    raise self.beside[0]
                try:
                    delivery = self._post.inbox.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                with self._changed, torch.no_grad():
                    self._do(self._take(delivery))
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # told where it is waited for
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _take(self, delivery: Delivery) -> Sent:
        message, client = delivery.message, self._client
        match message:
            case None:
                if delivery.sender == DESK:
                    self._desk_is_there = delivery.connected
                return client.resume(delivery.sender) if delivery.connected else []
            case Book():
                self._book = self._post.follow(message, self._book, lambda name: True)
                return []
            case Refused(sentence):
                raise InputError(sentence)
            case Gone():
                raise GivenUpError(f"{client.name} was out of reach for too long")
            case Value(ticket, piece) if ticket == client.ticket.number and piece not in client.pulled:
                compute = self._weights.compute[self._plan.pieces[piece].place]
                compute.copy_(unpack_parameters(self._plan.packing, delivery.payload, compute))
        return client.take(message)

    def _packed(self, push: Push) -> Tensor:
        """The same when it is said again: what compression has lost counts once."""
        gradient = self._weights.gradients.kept(self._plan.pieces[push.piece].place).cpu()
        if self._packer is None:
            return gradient
        if push.piece not in self._messages:
            self._messages[push.piece] = self._packer.pack(push.piece, push.share, gradient)
        return self._messages[push.piece]

    def _do(self, sent: Sent) -> None:
        for to, message in sent:
            self._do_one(to, message)

    def _do_one(self, to: str, message: Message) -> None:
        if isinstance(message, Push):
            self._post.send(to, message, as_bytes(self._packed(message)), self._client.urgency.get(message.piece, 0))
        elif not isinstance(message, Compute):
            self._post.send(to, message)
