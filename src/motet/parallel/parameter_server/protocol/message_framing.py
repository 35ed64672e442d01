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


class BadMessageError(PeerFailedError):
    """A peer has sent what it may not send. Its connection is closed, and the run goes on."""


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
        raise BadMessageError(f"not a message of a parameter server: {text[:60]!r}") from error


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
    """Joins the frames that arrive from one sender. Memory is taken for bytes that arrive, not for those announced."""

    def __init__(self, check: Callable[[messages.Message, int], None], *, text_limit: int, open_limit: int) -> None:
        """`check` raises a `BadMessageError` for a message, with the bytes of its payload, that is not admitted."""
        self._check, self._text_limit, self._open_limit = check, text_limit, open_limit
        # By message id: the message, the part of its payload that was received, and the bytes of the whole payload.
        self._incomplete: dict[int, tuple[messages.Message, bytearray, int]] = {}

    def read(
        self, message_id: int, kind: int, length: int, *, receive_into: Callable[[memoryview], object]
    ) -> tuple[messages.Message, bytearray] | None:
        """Receive one frame after its header; returns the message with its payload if it is complete."""
        if kind == MESSAGE_FRAME:
            message, payload_bytes = self._read_first_frame(message_id, length, receive_into)
            payload = bytearray()
        else:
            message, payload, payload_bytes = self._take_incomplete(message_id, kind, length)
            payload.extend(bytes(length))
            receive_into(memoryview(payload)[-length:])
        if len(payload) == payload_bytes:
            return message, payload
        self._incomplete[message_id] = message, payload, payload_bytes
        return None

    def _read_first_frame(
        self, message_id: int, length: int, receive_into: Callable[[memoryview], object]
    ) -> tuple[messages.Message, int]:
        if length > self._text_limit:
            raise BadMessageError(f"a message of {length} bytes, {self._text_limit} at most")
        if message_id in self._incomplete or len(self._incomplete) >= self._open_limit:
            raise BadMessageError(f"message {message_id} begins while {len(self._incomplete)} others are incomplete")
        text = bytearray(length)
        receive_into(memoryview(text))
        message, payload_bytes = decode_message(bytes(text))
        self._check(message, payload_bytes)
        return message, payload_bytes

    def _take_incomplete(self, message_id: int, kind: int, length: int) -> tuple[messages.Message, bytearray, int]:
        if kind != PAYLOAD_FRAME or message_id not in self._incomplete:
            raise BadMessageError(f"a frame of kind {kind} came for message {message_id}, which has no first frame")
        message, payload, payload_bytes = self._incomplete.pop(message_id)
        if not 0 < length <= min(MAX_FRAME_BYTES, payload_bytes - len(payload)):
            raise BadMessageError(f"a frame of {length} bytes in a payload of {payload_bytes}, {len(payload)} received")
        return message, payload, payload_bytes
