"""Messages as frames. A long payload is cut, so that a more urgent message can be sent between its frames.

A frame is a message id (4 bytes), a kind (1), a length (4) and that many bytes. The first frame of a message (kind 0)
is a JSON text [type, fields, bytes of the payload]; the others (kind 1) are parts of the payload.
"""

import json
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol import messages

FRAME_HEADER = struct.Struct("!IBI")
MESSAGE_FRAME, PAYLOAD_FRAME = 0, 1
MAX_FRAME_BYTES = 128 * 1024  # The most that an urgent message waits for
MAX_MESSAGE_BYTES = 2**26

_MESSAGE_TYPES = {kind.__name__: kind for kind in get_args(messages.SentMessage)}
_FIELD_TYPES = {kind: get_type_hints(kind) for kind in _MESSAGE_TYPES.values()}


def encode_message(message: messages.Message, payload_bytes: int) -> bytes:
    return json.dumps([type(message).__name__, _to_json(message), payload_bytes], separators=(",", ":")).encode()


def decode_message(text: bytes) -> tuple[messages.Message, int]:
    """The message, and the number of bytes of its payload."""
    try:
        name, fields, payload_bytes = json.loads(text)
        return _from_json(_MESSAGE_TYPES[name], fields), int(payload_bytes)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise PeerFailedError(f"not a message of a parameter server: {text[:60]!r}") from error


def _to_json(value: Any) -> Any:
    if isinstance(value, frozenset):
        value = tuple(sorted(value))
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def _from_json(kind: Any, value: Any) -> Any:
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
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind}")
    return value


class MessageFrame(NamedTuple):
    header: bytes
    body: bytes | memoryview


def cut_into_frames(message_id: int, message: messages.Message, payload: memoryview | None) -> deque[MessageFrame]:
    """The frames of a message, in the order of sending. They are views of the payload."""
    body = memoryview(payload.cast("B") if payload is not None and payload.nbytes else b"")
    text = encode_message(message, body.nbytes)
    frames = deque([MessageFrame(FRAME_HEADER.pack(message_id, MESSAGE_FRAME, len(text)), text)])
    for offset in range(0, body.nbytes, MAX_FRAME_BYTES):
        chunk = body[offset : offset + MAX_FRAME_BYTES]
        frames.append(MessageFrame(FRAME_HEADER.pack(message_id, PAYLOAD_FRAME, chunk.nbytes), chunk))
    return frames


class MessageFrameReader:
    """Joins the frames that arrive from one sender."""

    def __init__(self) -> None:
        # By message id: the message, its payload, and the bytes of it that were received.
        self._incomplete: dict[int, tuple[messages.Message, bytearray, int]] = {}

    def read(
        self, message_id: int, kind: int, length: int, *, receive_into: Callable[[memoryview], object]
    ) -> tuple[messages.Message, bytearray] | None:
        """Receive one frame after its header; returns the message with its payload if it is complete."""
        if kind == MESSAGE_FRAME:
            if length > MAX_MESSAGE_BYTES:
                raise PeerFailedError(f"a message of {length} bytes, {MAX_MESSAGE_BYTES} at most")
            text = bytearray(length)
            receive_into(memoryview(text))
            message, payload_bytes = decode_message(bytes(text))
            payload, offset = bytearray(payload_bytes), 0
        elif message_id not in self._incomplete:
            raise PeerFailedError(f"a payload frame came for message {message_id}, which has no first frame")
        else:
            message, payload, start = self._incomplete.pop(message_id)
            offset = start + length
            if offset > len(payload):
                raise PeerFailedError(f"a payload of {len(payload)} bytes has at least {offset}")
            receive_into(memoryview(payload)[start:offset])
        if offset == len(payload):
            return message, payload
        self._incomplete[message_id] = message, payload, offset
        return None
