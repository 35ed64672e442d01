"""Messages of the parameter server as bytes."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import PeerFailedError
from motet.parallel.server import protocol
from motet.parallel.server.protocol import Owners, Push, Settled, State, View
from motet.parallel.server.wire import BODY, HEAD, PART, PART_BYTES, Incoming, Outgoing, from_text, to_text

OWN = (protocol.Refused, protocol.Lost, protocol.Compute, protocol.Ready, protocol.Apply)
KINDS = [kind for kind in get_args(protocol.Message) if kind not in OWN]


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: Any, data: st.DataObject) -> None:
    message = data.draw(st.from_type(kind))
    back, size = from_text(to_text(message, 7))
    assert type(back) is kind and size == 7
    assert to_text(back, 7) == to_text(message, 7)


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
        from_text(text)


def arrive(incoming: Incoming, parcels: list[Outgoing]) -> list[tuple[Any, bytes]]:
    """One part of each in turn, until all are done."""
    found = []
    while parcels:
        for parcel in list(parcels):
            taken = parcel.take()
            if taken is None:
                parcels.remove(parcel)
                continue
            number, kind, length = PART.unpack(taken[0])
            if kind == HEAD:
                whole = incoming.begin(number, bytes(taken[1]))
            else:
                assert kind == BODY
                incoming.room(number, length)[:] = taken[1]
                whole = incoming.filled(number, length)
            if whole:
                found.append((whole[0], bytes(whole[1])))
    return found


def test_parcels_arrive_in_between_each_other() -> None:
    long, short = bytes(range(256)) * 2048, b"12345"
    first, second = Push("w0", 1, 0, 0), State(1, 2, Settled(3, frozenset({5})), frozenset({4}))
    third = View(1, (Owners(("s0", "s1"), 2),))
    assert len(long) > 3 * PART_BYTES
    parcels = [Outgoing(1, first, memoryview(long)), Outgoing(2, second, memoryview(short)), Outgoing(3, third, None)]
    assert arrive(Incoming(), parcels) == [(third, b""), (second, short), (first, long)]


def test_parts_that_do_not_belong_are_refused() -> None:
    incoming = Incoming()
    with pytest.raises(PeerFailedError, match="a part came of parcel 4, which has not begun"):
        incoming.room(4, 1)
    incoming.begin(4, to_text(Push("w0", 1, 0, 0), 3))
    with pytest.raises(PeerFailedError, match="a payload of 3 bytes has at least 4"):
        incoming.room(4, 4)
