"""Messages of the parameter server as bytes."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import PeerFailedError
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.message_framing import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MESSAGE_FRAME,
    PAYLOAD_FRAME,
    MessageFrameReader,
    MessageFrameWriter,
    decode_message,
    encode_message,
)
from motet.parallel.parameter_server.protocol.messages import (
    DecidedWorkItems,
    GradientPush,
    ParameterPlacement,
    ParameterReplicas,
    ParameterStateTransfer,
)

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
        b"",
        b"nonsense",
        b"[]",
        b'["Nothing",[],0]',
        b'["Lost",["s0"],0]',
        b'["Push",["w0",1,2],0]',
        b'["Push",["w0",1,2,"3"],0]',
        b'["Push",["w0",1,2,3.5],0]',
        b'["View",[1,[[["s0"],0,0]]],0]',
        b'["Push",{"worker":1},0]',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(PeerFailedError, match="what came is no message of a parameter server"):
        decode_message(text)


def arrive(incoming: MessageFrameReader, parcels: list[MessageFrameWriter]) -> list[tuple[Any, bytes]]:
    """One part of each in turn, until all are done."""
    found = []
    while parcels:
        for parcel in list(parcels):
            taken = parcel.next_frame()
            if taken is None:
                parcels.remove(parcel)
                continue
            number, kind, length = FRAME_HEADER.unpack(taken[0])
            if kind == MESSAGE_FRAME:
                whole = incoming.start_message(number, bytes(taken[1]))
            else:
                assert kind == PAYLOAD_FRAME
                incoming.payload_buffer(number, length)[:] = taken[1]
                whole = incoming.finish_frame(number, length)
            if whole:
                found.append((whole[0], bytes(whole[1])))
    return found


def test_parcels_arrive_in_between_each_other() -> None:
    long, short = bytes(range(256)) * 2048, b"12345"
    first, second = (
        GradientPush("w0", 1, 0, 0),
        ParameterStateTransfer(1, 2, DecidedWorkItems(3, frozenset({5})), frozenset({4})),
    )
    third = ParameterPlacement(1, (ParameterReplicas(("s0", "s1"), 2),))
    assert len(long) > 3 * MAX_FRAME_BYTES
    parcels = [
        MessageFrameWriter(1, first, memoryview(long)),
        MessageFrameWriter(2, second, memoryview(short)),
        MessageFrameWriter(3, third, None),
    ]
    assert arrive(MessageFrameReader(), parcels) == [(third, b""), (second, short), (first, long)]


def test_parts_that_do_not_belong_are_refused() -> None:
    incoming = MessageFrameReader()
    with pytest.raises(PeerFailedError, match="a part came of parcel 4, which has not begun"):
        incoming.payload_buffer(4, 1)
    incoming.start_message(4, encode_message(GradientPush("w0", 1, 0, 0), 3))
    with pytest.raises(PeerFailedError, match="a payload of 3 bytes has at least 4"):
        incoming.payload_buffer(4, 4)
