"""A rank of another host that has proven itself and then goes mad: its bytes in collectives and messages.

The truth is a model of the stream: each message that is complete goes to the first receive with its tag that waits. A
receive gets exactly those bytes, or fails with a sentence, before memory is taken for bytes that are only announced.
"""

import os
import socket
import struct
from pathlib import Path
from typing import Any, ClassVar

import torch

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, FuzzTarget, Outcome, check_equal, sentence_problem
from motet.collectives.program import CollectiveError
from motet.collectives.shm_backend.transport import shared_memory
from motet.collectives.shm_backend.transport.local_peers import LocalPeerSync
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher
from motet.collectives.shm_backend.transport.sockets import CollectivePeerSockets, PeerSocket

MESSAGE = struct.Struct("<qQ48s")  # Tag, bytes, description
COLLECTIVE = struct.Struct("<QQH")  # Number, signature, bytes of the description that follows
TIMEOUT_S = 0.3
COLLECTIVE_ID, SIGNATURE, DESCRIPTION = 7, 0x1234, "all-reduce (sum) of float32 [5]"
FIELD_CHANGES: dict[str, tuple[Any, ...]] = {
    "tag": (-1, 1, 2, 3, 2**63 - 1, -(2**63)),
    "length": (0, 1, 4, 19, 24, 63, 64, 2**20, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    "description": (
        b"\xff" * 48,
        b"\x1b[2J\n",
        b"",
        b"float32 [" + b"9" * 39,
        b"int32 [5]",
        b"float64",
        b"FLOAT32 [5]",
    ),
}


class BackendPeerTarget(FuzzTarget):
    """Bytes on the sockets between two ranks after their handshake."""

    name: ClassVar[str] = "backend-peers"
    first_check: ClassVar[str] = "the header of the collective or of a message is complete, and fits"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        descriptor = shared_memory.create_shared_memory(1)
        memory = shared_memory.SharedMemorySegment(1, descriptor)
        os.close(descriptor)
        self.local_peers = LocalPeerSync(memory, 0, {}, rank=0, timeout_s=TIMEOUT_S)

    def run(self, case: FuzzCase) -> Outcome:
        listener = socket.create_server(("127.0.0.1", 0))
        other = socket.create_connection(listener.getsockname())
        own = listener.accept()[0]
        listener.close()
        with own, other:
            return (self._run_messages if case.rng.random() < 0.6 else self._run_collective)(case, own, other)

    # --- messages --------------------------------------------------------------------------------------

    def _run_messages(self, case: FuzzCase, own: socket.socket, other: socket.socket) -> Outcome:
        rng = case.rng
        tensors = [torch.zeros(rng.choice((0, 1, 5, 100)), dtype=torch.float32) for _ in range(rng.choice((1, 2, 3)))]
        messages = [_message(tag, torch.arange(1.0, len(tensor) + 1)) for tag, tensor in enumerate(tensors)]
        content = self._mad_messages(case, messages)
        matcher = MessageMatcher(self.local_peers, [PeerSocket(1, own)], TIMEOUT_S)
        try:
            works = [matcher.receive(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
            other.sendall(content)
            is_cut = rng.random() < 0.95
            if is_cut:
                other.shutdown(socket.SHUT_WR)
            expected = _expected_messages(content, [len(tensor) * 4 for tensor in tensors])
            failures = []
            for tag, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
                try:
                    work.wait()
                except CollectiveError as error:
                    failures.append(_checked_sentence(error))
                    continue
                truth = expected.get(tag)
                if truth is None:
                    raise FindingError(f"receive {tag} ended without a message that fits: {tensor.tolist()}")
                check_equal(f"receive {tag}", tensor.numpy().tobytes(), truth)
        finally:
            matcher.close()
        is_past = len(expected) > 0
        return Outcome("refused", failures[0], is_past) if failures else Outcome("accepted", is_past_first_check=True)

    def _mad_messages(self, case: FuzzCase, messages: list[bytes]) -> bytes:
        rng = case.rng
        if not case.is_structured:
            content, change = mutations.change_bytes(rng, b"".join(messages))
            case.note(f"bytes: {change}")
            return content
        kind, index = (
            rng.choice((*FIELD_CHANGES, "data", "repeat", "order", "drop", "cut")),
            rng.randrange(len(messages)),
        )
        case.note(f"{kind} of message {index}")
        if kind in FIELD_CHANGES or kind == "data":
            fields = dict(zip(("tag", "length", "description"), MESSAGE.unpack_from(messages[index]), strict=True))
            data = messages[index][MESSAGE.size :]
            if kind == "data":
                data = rng.randbytes(len(data))
            else:
                fields[kind] = rng.choice(FIELD_CHANGES[kind])
            case.note(f"{fields}")
            messages[index] = MESSAGE.pack(*fields.values()) + data
        elif kind == "repeat":
            messages.insert(rng.randrange(len(messages) + 1), messages[index])
        elif kind == "order":
            rng.shuffle(messages)
        elif kind == "drop":
            del messages[index]
        content = b"".join(messages)
        return content[: rng.randrange(len(content))] if kind == "cut" else content

    # --- collectives -----------------------------------------------------------------------------------

    def _run_collective(self, case: FuzzCase, own: socket.socket, other: socket.socket) -> Outcome:
        rng, data = case.rng, bytes(range(20))
        number, signature, description = COLLECTIVE_ID, SIGNATURE, DESCRIPTION.encode()
        length = len(description)
        if case.is_structured:
            match rng.choice(("number", "signature", "length", "description", "data", "cut")):
                case "number":
                    number = rng.choice((0, 6, 8, 2**64 - 1))
                case "signature":
                    signature = rng.choice((0, SIGNATURE + 1, 2**64 - 1))
                    description = rng.choice((description, b"\xff\xfe", b"\x1b[31mred", b"a\nb\r", b"x" * 60_000))
                    length = len(description)
                case "length":
                    length = rng.choice((0, 1, length - 1, length + 1, 65535))
                case "description":
                    description = rng.randbytes(length)
                case "data":
                    data = rng.randbytes(len(data))
                case "cut":
                    data = data[: rng.randrange(len(data))]
            content = COLLECTIVE.pack(number, signature, length) + description + data
            case.note(f"header {number}, {signature}, {length}, {description[:40]!r}, {len(data)} bytes of data")
        else:
            whole = COLLECTIVE.pack(number, signature, length) + description + data
            content, change = mutations.change_bytes(rng, whole)
            case.note(f"bytes: {change}")
        other.sendall(content)
        other.shutdown(socket.SHUT_WR)
        sockets, received = CollectivePeerSockets(0, {1: PeerSocket(1, own)}, TIMEOUT_S), bytearray(20)
        sockets.begin(COLLECTIVE_ID, SIGNATURE, DESCRIPTION)
        truth = _expected_collective(content)
        try:
            sockets.receive_into(1, memoryview(received))
        except CollectiveError as error:
            return Outcome("refused", _checked_sentence(error), truth is not None)
        if truth is None or len(truth) < 20:
            raise FindingError(f"a collective took {bytes(received)!r} from a rank that called another one, or cut it")
        check_equal("what a collective received", bytes(received), truth[:20])
        return Outcome("accepted", is_past_first_check=True)


def _message(tag: int, tensor: torch.Tensor) -> bytes:
    data = tensor.numpy().tobytes()
    return MESSAGE.pack(tag, len(data), f"float32 [{len(tensor)}]".encode()) + data


def _expected_messages(content: bytes, sizes: list[int]) -> dict[int, bytes]:
    """Tag -> the bytes of the first message with this tag, if it is complete and fits the receive of that tag."""
    expected, seen, position = dict[int, bytes](), set[int](), 0
    while position + MESSAGE.size <= len(content):
        tag, length, description = MESSAGE.unpack_from(content, position)
        data = content[position + MESSAGE.size : position + MESSAGE.size + length]
        position += MESSAGE.size + length
        if len(data) < length:
            break
        is_float = description.rstrip(b"\0").partition(b" ")[0] == b"float32"
        if tag not in seen and 0 <= tag < len(sizes) and length == sizes[tag] and is_float:
            expected[tag] = data
        seen.add(tag)
    return expected


def _expected_collective(content: bytes) -> bytes | None:
    """The data after a header that fits; None for another header."""
    if len(content) < COLLECTIVE.size:
        return None
    number, signature, length = COLLECTIVE.unpack_from(content)
    if (number, signature) != (COLLECTIVE_ID, SIGNATURE):
        return None
    return content[COLLECTIVE.size + length :]


def _checked_sentence(error: CollectiveError) -> str:
    problem = sentence_problem(str(error))
    if problem:
        raise FindingError(f"{problem}: {error}")
    return str(error)
