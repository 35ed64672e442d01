"""The desk at work: takes what comes to its post, and tells of each update."""

import queue
import time
from collections.abc import Callable

from motet.core.errors import PeerError
from motet.parallel.server.desk import Desk
from motet.parallel.server.post import Delivery, Post
from motet.parallel.server.protocol import Book, Decide, Here, Lost, Sent
from motet.parallel.server.serve import LOOK_S


class Office:
    def __init__(self, desk: Desk, post: Post, limit_s: float, decided: Callable[[Decide], None]) -> None:
        self._desk = desk
        self._post = post
        self._limit_s = limit_s
        self._decided = decided
        self._book: dict[str, tuple[str, int]] = {}
        self._told = 0
        self._gone: dict[str, float] = {}
        """Whose connection is lost, and since when."""

    def run(self, ended: Callable[[], bool]) -> None:
        """Until there is nothing more to do, and `ended` says so."""
        heard = time.monotonic()
        while not ended():
            try:
                delivery = self._post.inbox.get(timeout=LOOK_S)
                heard = time.monotonic()
                sent = self._take(delivery)
            except queue.Empty:
                sent = []
            for name, since in list(self._gone.items()):
                if time.monotonic() - since > self._limit_s:
                    del self._gone[name]
                    sent += self._desk.take(Lost(name))
            if time.monotonic() - heard > self._limit_s and not self._desk.is_finished:
                raise PeerError(f"the desk has heard nothing for {self._limit_s:g} s, at update {self._desk.updates}")
            self._send(sent)

    def _take(self, delivery: Delivery) -> Sent:
        message, sender = delivery.message, delivery.sender
        if message is None:
            if not delivery.connected:
                self._gone[sender] = time.monotonic()
                return []
            self._gone.pop(sender, None)
            return [(sender, self._entries())]
        if isinstance(message, Here):
            self._book[message.server] = message.host, message.port
            return [(other, self._entries()) for other in self._post.peers]
        return self._desk.take(message)

    def _entries(self) -> Book:
        return Book(tuple((name, host, port) for name, (host, port) in sorted(self._book.items())))

    def _send(self, sent: Sent) -> None:
        for to, message in sent:
            if isinstance(message, Decide) and message.number == self._told:
                self._told += 1
                self._decided(message)
            self._post.send(to, message)
