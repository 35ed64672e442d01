"""Messages of the parameter server as bytes."""

from collections import deque
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol import message_framing, messages
from motet.parallel.parameter_server.protocol.message_framing import FRAME_HEADER, MessageFrame, MessageFrameReader
from motet.parallel.parameter_server.protocol.messages import DecidedWorkItems, GradientPush


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", get_args(messages.SentMessage), ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    text = message_framing.encode_message(message, 7)
    back, size = message_framing.decode_message(text)
    assert type(back) is kind and size == 7
    assert message_framing.encode_message(back, 7) == text


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nonsense", b"[]", b"GradientPush " + b"[" * 100_000, b"Nothing [[],0]", b'ProcessLost [["s0"],0]'),
        *(b'GradientPush [["w0",1,2],0]', b'GradientPush [["w0",1,2,"3"],0]', b'GradientPush [["w0",1,2,3.5],0]'),
        *(b'ParameterPlacement [[1,[[["s0"],0,0]]],0]', b'GradientPush [{"worker":1},0]'),
        *(b'GradientPush [["w0",1,2,3],"0"]', b'GradientPush [["w0",1,2,3]]'),
    ],
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(PeerFailedError, match="not a message of a parameter server"):
        message_framing.decode_message(text)


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
    assert len(long) > 3 * message_framing.MAX_FRAME_BYTES
    payloads = [(first, memoryview(long)), (second, memoryview(short)), (third, None)]
    sent = [message_framing.cut_into_frames(number, *sending) for number, sending in enumerate(payloads, 1)]
    assert arrive(MessageFrameReader(), sent) == [(third, b""), (second, short), (first, long)]


def test_frames_that_do_not_belong_are_refused() -> None:
    reader, payload_frame = MessageFrameReader(), message_framing.PAYLOAD_FRAME
    with pytest.raises(PeerFailedError, match="a payload frame came for message 4, which has no first frame"):
        read(reader, MessageFrame(FRAME_HEADER.pack(4, payload_frame, 1), b"1"))
    read(reader, message_framing.cut_into_frames(4, GradientPush("w0", 1, 0, 0), memoryview(b"123"))[0])
    with pytest.raises(PeerFailedError, match="a payload of 3 bytes has at least 4"):
        read(reader, MessageFrame(FRAME_HEADER.pack(4, payload_frame, 4), b"1234"))
    with pytest.raises(PeerFailedError, match="at most"):
        length = message_framing.MAX_MESSAGE_BYTES + 1
        read(reader, MessageFrame(FRAME_HEADER.pack(5, message_framing.MESSAGE_FRAME, length), b""))
