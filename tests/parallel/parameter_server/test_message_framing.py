"""Messages of the parameter server as bytes."""

import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import (
    FRAME_HEADER,
    BadMessageError,
    DecidedWorkItems,
    GradientPush,
    MessageFrame,
    MessageFrameReader,
)


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", get_args(messages.SentMessage), ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    text = messages.encode_message(message, 7)
    back, size = messages.decode_message(text)
    assert type(back) is kind and size == 7
    assert messages.encode_message(back, 7) == text


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
    with pytest.raises(BadMessageError, match="not a message of a parameter server"):
        messages.decode_message(text)


def reader(check: Callable[[messages.Message, int], None] = lambda message, size: None) -> MessageFrameReader:
    return MessageFrameReader(check, text_limit=2**16, open_limit=3)


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
    assert len(long) > 3 * messages.MAX_FRAME_BYTES
    payloads = [(first, memoryview(long)), (second, memoryview(short)), (third, None)]
    sent = [messages.cut_into_frames(number, *sending) for number, sending in enumerate(payloads, 1)]
    assert arrive(reader(), sent) == [(third, b""), (second, short), (first, long)]


def test_frames_that_do_not_belong_are_refused() -> None:
    first, *rest = messages.cut_into_frames(4, GradientPush("w0", 1, 0, 0), memoryview(b"123"))
    payload_frame, message_frame, huge = messages.PAYLOAD_FRAME, messages.MESSAGE_FRAME, 2**32 - 1
    refused: list[tuple[list[MessageFrame], tuple[int, int, int], str]] = [
        ([], (4, payload_frame, 1), "a frame of kind 1 came for message 4, which has no first frame"),
        ([first, *rest], (4, payload_frame, 1), "which has no first frame"),
        ([first], (4, payload_frame, 4), "a frame of 4 bytes in a payload of 3, 0 received"),
        ([first], (4, payload_frame, 0), "a frame of 0 bytes in a payload of 3, 0 received"),
        ([first], (4, payload_frame, huge), f"a frame of {huge} bytes"),
        ([first], (4, 2, 1), "a frame of kind 2"),
        ([first], (4, message_frame, 20), "message 4 begins while 1 others are incomplete"),
        ([], (5, message_frame, 2**16 + 1), "a message of 65537 bytes, 65536 at most"),
    ]
    for frames, header, problem in refused:
        joined = reader()
        for frame in frames:
            read(joined, frame)
        with pytest.raises(BadMessageError, match=problem):
            read(joined, MessageFrame(FRAME_HEADER.pack(*header), b""))


def test_few_messages_may_be_incomplete() -> None:
    joined, push = reader(), GradientPush("w0", 1, 0, 0)
    firsts = [messages.cut_into_frames(i, push, memoryview(b"123"))[0] for i in range(4)]
    for first in firsts[:3]:
        read(joined, first)
    with pytest.raises(BadMessageError, match="message 3 begins while 3 others are incomplete"):
        read(joined, firsts[3])


def test_announced_bytes_take_no_memory_and_are_checked_first() -> None:
    text = messages.encode_message(GradientPush("w0", 1, 0, 0), 2**40)
    frame = MessageFrame(FRAME_HEADER.pack(1, messages.MESSAGE_FRAME, len(text)), text)
    tracemalloc.start()
    assert read(reader(), frame) is None
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()

    def refuse(message: messages.Message, payload_bytes: int) -> None:
        raise BadMessageError(f"{payload_bytes}")

    with pytest.raises(BadMessageError, match=str(2**40)):
        read(reader(refuse), frame)
