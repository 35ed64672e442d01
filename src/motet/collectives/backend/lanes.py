"""Streams of bytes from one rank to another for messages: a ring in shared memory, or a socket. They never block."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from motet.collectives.backend.arena import POST_BYTES, Arena
from motet.collectives.backend.links import Link, bytes_of

ALIGNED = 64
"""What lies in a ring begins on a cache line, so that a head never wraps around."""
BURST = 128 << 10
"""The reader can start when so much has been written."""


class Lane(Protocol):
    """Both directions to one rank. Tensors are flat and of bytes; the counts of bytes moved may be 0."""

    def write(self, data: Tensor) -> int: ...

    def read(self, into: Tensor) -> int: ...

    @property
    def drained(self) -> bool:
        """Nothing is there to be read now."""
        ...


class RingLane:
    """Through the memory that both share."""

    def __init__(self, arena: Arena, me: int, other: int, wake: Callable[[int], None]) -> None:
        self._words = arena.words
        self._out, self._in = arena.post(me, other), arena.post(other, me)
        self._sent, self._they_took = arena.sent(me, other), arena.taken(me, other)
        self._they_sent, self._taken = arena.sent(other, me), arena.taken(other, me)
        self._other = other
        self._wake = wake

    def write(self, data: Tensor) -> int:
        sent = self._words[self._sent]
        count, start = _span(len(data), POST_BYTES - (sent - self._words[self._they_took]), sent)
        if count:
            self._out[start : start + count].copy_(data[:count])
            self._words[self._sent] = sent + _rounded(count)
            self._wake(self._other)
        return count

    def read(self, into: Tensor) -> int:
        taken = self._words[self._taken]
        count, start = _span(len(into), self._words[self._they_sent] - taken, taken)
        if count:
            into[:count].copy_(self._in[start : start + count])
            self._words[self._taken] = taken + _rounded(count)
            self._wake(self._other)
        return count

    @property
    def drained(self) -> bool:
        return bool(self._words[self._they_sent] == self._words[self._taken])


def _span(wanted: int, there: int, position: int) -> tuple[int, int]:
    """How many bytes can be moved at once, and where."""
    start = position % POST_BYTES
    return min(wanted, there, POST_BYTES - start, BURST), start


def _rounded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class LinkLane:
    """Through a socket."""

    drained = True

    def __init__(self, link: Link) -> None:
        self._link = link

    def write(self, data: Tensor) -> int:
        return self._link.write(bytes_of(data))

    def read(self, into: Tensor) -> int:
        return self._link.read(bytes_of(into)) if len(into) else 0


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
