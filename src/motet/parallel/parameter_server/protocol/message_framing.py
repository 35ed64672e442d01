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
from motet.parallel.parameter_server.protocol import messages

FRAME_HEADER = struct.Struct("!IBI")
MESSAGE_FRAME, PAYLOAD_FRAME = 0, 1
MAX_FRAME_BYTES = 128 * 1024  # Of a payload, in one part: what something more urgent waits for at most
MAX_MESSAGE_BYTES = 2**26

# What a process says to itself alone.
_LOCAL_MESSAGES = (
    messages.ConnectionRejected,
    messages.ProcessLost,
    messages.ParametersReady,
    messages.GradientsReady,
    messages.ApplyUpdate,
)
_MESSAGE_TYPES = {kind.__name__: kind for kind in get_args(messages.Message) if kind not in _LOCAL_MESSAGES}
_FIELD_TYPES = {kind: get_type_hints(kind) for kind in _MESSAGE_TYPES.values()}


def encode_message(message: messages.Message, payload_bytes: int) -> bytes:
    return json.dumps([type(message).__name__, _to_json(message), payload_bytes], separators=(",", ":")).encode()


def decode_message(text: bytes) -> tuple[messages.Message, int]:
    """(message, bytes of its payload)"""
    try:
        name, fields, payload_bytes = json.loads(text)
        return _from_json(_MESSAGE_TYPES[name], fields), int(payload_bytes)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise PeerFailedError(f"what came is no message of a parameter server: {text[:60]!r}") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple | frozenset):
        return [_to_json(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    return value


def _from_json(kind: Any, value: Any) -> Any:
    """What `_plain` made of a value of this type."""
    if kind in _FIELD_TYPES or hasattr(kind, "_fields"):
        hints = _FIELD_TYPES.setdefault(kind, get_type_hints(kind))
        if len(value) != len(hints):
            raise ValueError(f"{kind.__name__} has {len(hints)} fields, not {len(value)}")
        return kind(*(_from_json(hint, item) for hint, item in zip(hints.values(), value, strict=True)))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(_from_json(each, item) for each, item in zip(kinds, value, strict=True))
    if origin is frozenset:
        return frozenset(_from_json(inner[0], item) for item in value)
    if origin in (Union, UnionType):
        raise TypeError(kind)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


class MessageFrameWriter:
    """A message on its way: what of it is still to be sent."""

    def __init__(self, message_id: int, message: messages.Message, payload: memoryview | None) -> None:
        body = payload.cast("B") if payload is not None and payload.nbytes else None
        self.payload_bytes = body.nbytes if body is not None else 0
        self._message_id = message_id
        self._frame_iterator = self._frames(encode_message(message, self.payload_bytes), body)
        self._upcoming_frame = next(self._frame_iterator, None)

    def next_frame(self) -> tuple[bytes, memoryview | bytes] | None:
        """(head of the next part, what it holds); None when there is none."""
        frame, self._upcoming_frame = self._upcoming_frame, next(self._frame_iterator, None)
        return frame

    @property
    def is_done(self) -> bool:
        return self._upcoming_frame is None

    def _frames(self, header: bytes, body: memoryview | None) -> Iterator[tuple[bytes, memoryview | bytes]]:
        yield FRAME_HEADER.pack(self._message_id, MESSAGE_FRAME, len(header)), header
        for offset in range(0, self.payload_bytes, MAX_FRAME_BYTES):
            assert body is not None
            chunk = body[offset : offset + MAX_FRAME_BYTES]
            yield FRAME_HEADER.pack(self._message_id, PAYLOAD_FRAME, chunk.nbytes), chunk


class MessageFrameReader:
    """Parcels whose parts are arriving, from one sender."""

    def __init__(self) -> None:
        self._incomplete: dict[int, tuple[messages.Message, bytearray, int]] = {}

    def start_message(self, message_id: int, text: bytes) -> tuple[messages.Message, bytearray] | None:
        """The whole parcel, if this is all of it."""
        message, payload_bytes = decode_message(text)
        if not payload_bytes:
            return message, bytearray()
        self._incomplete[message_id] = message, bytearray(payload_bytes), 0
        return None

    def payload_buffer(self, message_id: int, length: int) -> memoryview:
        """Where the next part of the payload goes."""
        if message_id not in self._incomplete:
            raise PeerFailedError(f"a part came of parcel {message_id}, which has not begun")
        _, body, offset = self._incomplete[message_id]
        if offset + length > len(body):
            raise PeerFailedError(f"a payload of {len(body)} bytes has at least {offset + length}")
        return memoryview(body)[offset : offset + length]

    def finish_frame(self, message_id: int, length: int) -> tuple[messages.Message, bytearray] | None:
        message, body, offset = self._incomplete[message_id]
        if offset + length < len(body):
            self._incomplete[message_id] = message, body, offset + length
            return None
        del self._incomplete[message_id]
        return message, body
