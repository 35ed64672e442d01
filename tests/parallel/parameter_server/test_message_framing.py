"""Messages of the parameter server as bytes."""

from collections import deque
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_framing import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGE_FRAME,
    PAYLOAD_FRAME,
    MessageFrame,
    MessageFrameReader,
    cut_into_frames,
    decode_message,
    encode_message,
)
from motet.parallel.parameter_server.protocol.messages import DecidedWorkItems, GradientPush

OWN = (
    messages.ConnectionRejected,
    messages.ProcessLost,
    messages.ParametersReady,
    messages.GradientsReady,
    messages.ApplyUpdate,
)
KINDS = [kind for kind in get_args(messages.Message) if kind not in OWN]


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    back, size = decode_message(encode_message(message, 7))
    assert type(back) is kind and size == 7
    assert encode_message(back, 7) == encode_message(message, 7)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nonsense", b"[]", b"[" * 100_000, b'["Nothing",[],0]', b'["ProcessLost",["s0"],0]'),
        *(b'["GradientPush",["w0",1,2],0]', b'["GradientPush",["w0",1,2,"3"],0]', b'["GradientPush",["w0",1,2,3.5],0]'),
        *(b'["ParameterPlacement",[1,[[["s0"],0,0]]],0]', b'["GradientPush",{"worker":1},0]'),
    ],
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(PeerFailedError, match="not a message of a parameter server"):
        decode_message(text)


def arrive(reader: MessageFrameReader, sent: list[deque[MessageFrame]]) -> list[tuple[Any, bytes]]:
    """One frame of each message in turn, until all have arrived."""
    received = []
    while sent:
        for frames in list(sent):
            frame = frames.popleft()
            if not frames:
                sent.remove(frames)
            if message := read(reader, frame):
                received.append((message[0], bytes(message[1])))
    return received


def read(reader: MessageFrameReader, frame: MessageFrame) -> tuple[messages.Message, bytearray] | None:
    def receive_into(buffer: memoryview) -> None:
        buffer[:] = frame.body

    return reader.read(*FRAME_HEADER.unpack(frame.header), receive_into=receive_into)


def test_frames_of_messages_may_interleave() -> None:
    long, short = bytes(range(256)) * 2048, b"12345"
    first = GradientPush("w0", 1, 0, 0)
    second = messages.ParameterStateTransfer(1, 2, DecidedWorkItems(3, frozenset({5})), frozenset({4}))
    third = messages.ParameterPlacement(1, (messages.SlicePrimaryAndBackups(("s0", "s1"), 2),))
    assert len(long) > 3 * MAX_FRAME_BYTES
    payloads = [(first, memoryview(long)), (second, memoryview(short)), (third, None)]
    sent = [cut_into_frames(number, *sending) for number, sending in enumerate(payloads, 1)]
    assert arrive(MessageFrameReader(), sent) == [(third, b""), (second, short), (first, long)]


def test_frames_that_do_not_belong_are_refused() -> None:
    reader = MessageFrameReader()
    with pytest.raises(PeerFailedError, match="a payload frame came for message 4, which has no first frame"):
        read(reader, MessageFrame(FRAME_HEADER.pack(4, PAYLOAD_FRAME, 1), b"1"))
    read(reader, cut_into_frames(4, GradientPush("w0", 1, 0, 0), memoryview(b"123"))[0])
    with pytest.raises(PeerFailedError, match="a payload of 3 bytes has at least 4"):
        read(reader, MessageFrame(FRAME_HEADER.pack(4, PAYLOAD_FRAME, 4), b"1234"))
    with pytest.raises(PeerFailedError, match="at most"):
        read(reader, MessageFrame(FRAME_HEADER.pack(5, MESSAGE_FRAME, MAX_MESSAGE_BYTES + 1), b""))
