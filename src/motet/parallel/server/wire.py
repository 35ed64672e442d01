"""Messages as bytes, and parcels cut into parts, so that what is needed sooner can go in between.

part    = parcel (4 bytes) | kind (1) | length (4) | that many bytes
kinds   0: the first part, a JSON text [type, fields, bytes of the payload]; 1: a part of the payload
"""

import json
import struct
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from motet.core.errors import PeerFailedError
from motet.parallel.server import protocol

PART = struct.Struct("!IBI")
HEAD, BODY = 0, 1
PART_BYTES = 128 * 1024
"""Of a payload, in one part: what something more urgent waits for at most."""
LONGEST_HEAD = 2**26

_OWN = (protocol.Refused, protocol.Lost, protocol.Compute, protocol.Ready, protocol.Apply)
"""What a process says to itself alone."""
_KINDS = {kind.__name__: kind for kind in get_args(protocol.Message) if kind not in _OWN}
_HINTS = {kind: get_type_hints(kind) for kind in _KINDS.values()}


def to_text(message: protocol.Message, payload_bytes: int) -> bytes:
    return json.dumps([type(message).__name__, _plain(message), payload_bytes], separators=(",", ":")).encode()


def from_text(text: bytes) -> tuple[protocol.Message, int]:
    """(message, bytes of its payload)"""
    try:
        name, fields, payload_bytes = json.loads(text)
        return _typed(_KINDS[name], fields), int(payload_bytes)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise PeerFailedError(f"what came is no message of a parameter server: {text[:60]!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def _typed(kind: Any, value: Any) -> Any:
    """What `_plain` made of a value of this type."""
    if kind in _HINTS or hasattr(kind, "_fields"):
        hints = _HINTS.setdefault(kind, get_type_hints(kind))
        if len(value) != len(hints):
            raise ValueError(f"{kind.__name__} has {len(hints)} fields, not {len(value)}")
        return kind(*(_typed(hint, item) for hint, item in zip(hints.values(), value, strict=True)))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(_typed(each, item) for each, item in zip(kinds, value, strict=True))
    if origin is frozenset:
        return frozenset(_typed(inner[0], item) for item in value)
    if origin in (Union, UnionType):
        raise TypeError(kind)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


class Outgoing:
    """A message on its way: what of it is still to be sent."""

    def __init__(self, number: int, message: protocol.Message, payload: memoryview | None) -> None:
        body = payload.cast("B") if payload is not None and payload.nbytes else None
        self.bytes = body.nbytes if body is not None else 0
        self._number = number
        self._parts = self._cut(to_text(message, self.bytes), body)
        self._next = next(self._parts, None)

    def take(self) -> tuple[bytes, memoryview | bytes] | None:
        """(head of the next part, what it holds); None when there is none."""
        now, self._next = self._next, next(self._parts, None)
        return now

    @property
    def is_done(self) -> bool:
        return self._next is None

    def _cut(self, text: bytes, body: memoryview | None) -> Iterator[tuple[bytes, memoryview | bytes]]:
        yield PART.pack(self._number, HEAD, len(text)), text
        for first in range(0, self.bytes, PART_BYTES):
            assert body is not None
            part = body[first : first + PART_BYTES]
            yield PART.pack(self._number, BODY, part.nbytes), part


class Incoming:
    """Parcels whose parts are arriving, from one sender."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[protocol.Message, bytearray, int]] = {}

    def begin(self, number: int, text: bytes) -> tuple[protocol.Message, bytearray] | None:
        """The whole parcel, if this is all of it."""
        message, size = from_text(text)
        if not size:
            return message, bytearray()
        self._open[number] = message, bytearray(size), 0
        return None

    def room(self, number: int, length: int) -> memoryview:
        """Where the next part of the payload goes."""
        if number not in self._open:
            raise PeerFailedError(f"a part came of parcel {number}, which has not begun")
        _, body, at = self._open[number]
        if at + length > len(body):
            raise PeerFailedError(f"a payload of {len(body)} bytes has at least {at + length}")
        return memoryview(body)[at : at + length]

    def filled(self, number: int, length: int) -> tuple[protocol.Message, bytearray] | None:
        message, body, at = self._open[number]
        if at + length < len(body):
            self._open[number] = message, body, at + length
            return None
        del self._open[number]
        return message, body
