"""Messages as frames. A long payload is cut, so that a more urgent message can be sent between its frames.
A frame is a message id (4 bytes), a kind (1), a length (4) and that many bytes. The first frame of a message (kind 0)
is its type and a JSON text [fields, bytes of the payload]; the others (kind 1) are parts of the payload."""

import json
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, get_args

from pydantic import TypeAdapter

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol import messages

FRAME_HEADER = struct.Struct("!IBI")
MESSAGE_FRAME, PAYLOAD_FRAME = 0, 1
MAX_FRAME_BYTES = 128 * 1024  # The most that an urgent message waits for
MAX_MESSAGE_BYTES = 2**26

# Type -> the message and the bytes of its payload.
_ADAPTERS: dict[bytes, TypeAdapter[tuple[messages.Message, int]]] = {
    kind.__name__.encode(): TypeAdapter(tuple[kind, int])  # type: ignore[valid-type]  # mypy wants a type that it can read; this is one of a list
    for kind in get_args(messages.SentMessage)
}


def encode_message(message: messages.Message, payload_bytes: int) -> bytes:
    content = json.dumps([message, payload_bytes], separators=(",", ":"), default=sorted)  # sorts a set
    return f"{type(message).__name__} {content}".encode()


def decode_message(text: bytes) -> tuple[messages.Message, int]:
    """The message, and the number of bytes of its payload."""
    name, _, content = text.partition(b" ")
    try:
        return _ADAPTERS[name].validate_json(content, strict=True)
    except (ValueError, KeyError) as error:
        raise PeerFailedError(f"not a message of a parameter server: {text[:60]!r}") from error


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
