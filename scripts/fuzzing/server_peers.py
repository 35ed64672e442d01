"""Processes of a parameter server that have the token and then go mad, by their role.

A mad worker or server sends every kind of message: those of its role with one field changed, those of other roles,
payloads that do not fit, and frames that are cut, repeated, exchanged or changed. The server keeps the bits of its
parameters, because its coordinator decides no update; server and coordinator continue to serve good processes.
"""

import math
import struct
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from fuzzing import mutations
from fuzzing.cases import FindingError, FuzzCase, FuzzTarget, Outcome
from fuzzing.handshakes import ENDS, checked_log
from fuzzing.server_processes import HEADER, PAYLOAD, CoordinatedRun, FramePeer, ServedParameters, frames_of
from motet.parallel.parameter_server.protocol import messages

CHECK_EVERY = 5
ANSWER_S = 0.02  # Waited for often: a process that does not close a connection sends nothing
NAMES = ("w0", "w1", "w5", "s0", "s1", "coordinator", "", "x" * 400, "w1\x1b[2J", "s0.1+2")
NUMBERS = (0, 1, 2, 3, -1, 7, 64, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63))
KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(messages.SentMessage)}
# The messages that a role sends to a server and to the coordinator, by the picture of the protocol in docs/reference.
SENT_TO_SERVER = {
    "w": ("ParameterPull", "GradientPush"),
    "s": ("BackupPush", "BackupPushAck", "ParameterStateTransfer"),
}
SENT_TO_COORDINATOR = {
    "w": ("WorkerJoined", "WorkItemCompleted"),
    "s": ("ServerAddress", "ServerTakeoverOffer", "DecisionReplayRequest", "GradientNormReply", "ParameterStateReply",
          "ServerTrafficReport"),
}  # fmt: skip
ROLES = ("w5", "w5", "s0", "s1", "s7.1")
Message = tuple[str, list[Any], bytes, Any]  # Name, fields, payload, announced bytes of it


class ServerPeerTarget(FuzzTarget):
    """Messages of mad workers and servers to a server and to a coordinator."""

    name: ClassVar[str] = "server-peers"
    first_check: ClassVar[str] = "the message is one that the role may send to this process, with fields of their types"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.served, self.coordinated = ServedParameters(), CoordinatedRun()
        self.sizes = self.served.plan.payload_sizes

    def run(self, case: FuzzCase) -> Outcome:
        rng = case.rng
        to_server = rng.random() < 0.6
        process = self.served if to_server else self.coordinated
        role = rng.choice([role for role in ROLES if not (to_server and role == "s0")])
        kinds = (SENT_TO_SERVER if to_server else SENT_TO_COORDINATOR)[role[0]]
        made = [self._message(case, role, rng.choice(kinds)) for _ in range(rng.choice((1, 1, 2, 4)))]
        if rng.random() < 0.8:
            made[-1] = self._changed(case, role, made[-1])
        content = self._content(case, made)
        with checked_log() as lines:
            peer = FramePeer(process.address, role)
            case.note(f"{role} to the {'server' if to_server else 'coordinator'}")
            try:
                peer.send(content)
                is_refused = self._is_closed(peer)
                peer.end(rng.choice(ENDS))
                if case.number % CHECK_EVERY == 0 or rng.random() < 0.1:
                    process.check()
            finally:
                peer.close()
            process.process.check_alive()
            refused = [line for line in lines if "closes its connection" in line]
        is_past = not any("may not send" in line or "not a message" in line or "frame" in line for line in refused)
        text = refused[0] if refused else ""
        return Outcome("refused" if is_refused or refused else "accepted", text, is_past)

    def close(self) -> None:
        for process in (self.served, self.coordinated):
            process.check()
            process.close()

    def _is_closed(self, peer: FramePeer) -> bool:
        """Whether the process closes the connection after the messages."""
        peer.stream.settimeout(ANSWER_S)
        try:
            while True:
                if not peer.stream.recv(1 << 16):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True

    def _content(self, case: FuzzCase, made: list[Message]) -> bytes:
        rng = case.rng
        frames = [frames_of(i, *message) for i, message in enumerate(made)]
        case.note("; ".join(f"{name} {fields!r:.150} with {len(payload)} bytes" for name, fields, payload, _ in made))
        if not case.is_structured:
            content, change = mutations.change_bytes(rng, b"".join(frame for each in frames for frame in each))
            case.note(f"bytes: {change}")
            return content
        flat = [frame for each in frames for frame in each]
        match order := rng.choice(("as made",) * 5 + ("repeated", "exchanged", "cut", "without its first", "same id")):
            case "repeated":
                flat = flat * rng.choice((2, 20))
            case "exchanged":
                rng.shuffle(flat)
            case "without its first":
                flat = [HEADER.pack(9, rng.choice((PAYLOAD, 2, 3, 255)), length) + bytes(min(length, 99))
                        for length in (rng.choice((0, 1, 99, 2**20, 2**32 - 1)),)]  # fmt: skip
            case "same id":
                flat = [struct.pack("!I", 1) + frame[4:] for frame in flat]
        content = b"".join(flat)
        if order == "cut":
            content = content[: rng.randrange(len(content))]
        case.note(f"frames: {order}")
        return content

    def _changed(self, case: FuzzCase, role: str, message: Message) -> Message:
        """A message with one part that its sender may not send, or a message of another role."""
        rng = case.rng
        name, fields, payload, announced = message
        match rng.choice(("field", "field", "field", "payload", "announced", "another")):
            case "field":
                index = rng.randrange(len(fields))
                fields[index] = mutations.other_value(rng, fields[index])
            case "payload":
                payload = payload[: rng.randrange(len(payload) + 1)] + rng.randbytes(rng.choice((0, 1, 8)))
                announced = rng.choice((announced, len(payload)))
            case "announced":
                announced = rng.choice((*NUMBERS, len(payload) + 1, max(0, len(payload) - 1), 2**30, "1", None, 1.5))
            case "another":
                return self._message(case, role, rng.choice(list(KINDS)))
        return name, fields, payload, announced

    def _message(self, case: FuzzCase, role: str, name: str) -> Message:
        """A message whose fields have the right types, and a payload of the right size."""
        fields = [self._value(case, field, hint, role) for field, hint in get_type_hints(KINDS[name]).items()]
        slice_id = next(
            (value for field, value in zip(KINDS[name]._fields, fields, strict=True) if field == "slice_id"), 0
        )
        sizes = self.sizes.pushes if name in ("GradientPush", "BackupPush") else self.sizes.states
        has_payload = name in ("GradientPush", "BackupPush", "ParameterStateTransfer", "ParameterStateReply")
        payload = bytes(sizes[slice_id] if has_payload and slice_id in range(len(sizes)) else 0)[: 1 << 16]
        return name, fields, payload, len(payload)

    def _value(self, case: FuzzCase, name: str, hint: Any, role: str) -> Any:
        rng = case.rng
        if name in ("worker", "server"):
            return role if rng.random() < 0.95 else rng.choice(NAMES)
        if name == "slice_id":
            return rng.randrange(len(self.sizes.pushes)) if rng.random() < 0.95 else rng.choice(NUMBERS)
        if hasattr(hint, "_fields"):
            return [self._value(case, field, inner, role) for field, inner in get_type_hints(hint).items()]
        if get_origin(hint) in (tuple, frozenset):
            inner = [each for each in get_args(hint) if each is not Ellipsis]
            if len(inner) == len(get_args(hint)) and get_origin(hint) is tuple:
                return [self._value(case, "", each, role) for each in inner]
            return [self._value(case, "", inner[0], role) for _ in range(rng.choice((0, 1, 3)))]
        if hint is float:
            return rng.choice((0.0, 1.0, 3.0, 1.0, -1.0, 1e308, math.inf, math.nan))
        if hint is bool:
            return rng.random() < 0.5
        if hint is str:
            return rng.choice((*NAMES, "127.0.0.1"))
        if hint is not int:
            raise FindingError(f"a field of type {hint} has no values here")
        return rng.choice(NUMBERS[:4]) if rng.random() < 0.95 else rng.choice(NUMBERS)
