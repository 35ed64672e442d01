"""The messages that a process admits from each role, and the limits of their fields and payloads.
The role of a process is a part of its name, which its handshake has proven; `MESSAGE_ROUTES` is the only table of
the messages that each role may send. A message that is not admitted closes the connection, before any memory is taken
for its payload."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, NO_MORE_WORK, BadMessageError, Message

MAX_NAME_CHARACTERS, MAX_HOST_CHARACTERS = 300, 255
MAX_COUNT = 2**53  # Limit of updates, work items and bytes: whole numbers up to here are exact in float64
MAX_SUM = 1e15  # Limit of sums, such as the tokens of a work item
MAX_PRIORITY = 2**31
STATE_BYTES_PER_ELEMENT, STATE_HEADER_BYTES = 64, 2**16  # Master parameters, moments, the last pull and its error
PUSH_HEADER_BYTES = 256  # Header of a push within a slice state
MAX_TEXT_BYTES, TEXT_BYTES_PER_SLICE = 2**20, 2**10
MAX_OPEN_MESSAGES = 64  # In addition to one for each slice: each may be interrupted by a more urgent one
MAX_UNREAD_BYTES = 2**26  # In addition to all slices: a process stops receiving while as much waits to be handled


class ProcessRole(Enum):
    COORDINATOR = "coordinator"
    SERVER = "server"
    WORKER = "worker"


_SUFFIX = r"[0-9]{1,9}(\.[0-9]{1,9})?(\+[0-9]{1,9})?"  # `s0.1+2`: the second try of the first process that replaces s0
_ROLE_PATTERNS = {
    ProcessRole.COORDINATOR: re.compile(COORDINATOR),
    ProcessRole.SERVER: re.compile(f"s{_SUFFIX}"),
    ProcessRole.WORKER: re.compile(rf"([\w.-]+/)?w{_SUFFIX}"),
}


def role_of_process(name: str) -> ProcessRole:
    """The role in a run of the process with this name."""
    for role, pattern in _ROLE_PATTERNS.items():
        if len(name) <= MAX_NAME_CHARACTERS and pattern.fullmatch(name):
            return role
    raise BadMessageError(f"{name[:60]!r} is not the name of a process")


class PayloadKind(Enum):
    """The payload of a message, and its number of bytes."""

    NONE = "nothing"
    PUSH = "the gradient of the slice, exactly"
    PULL = "the parameters of the slice, exactly"
    STATE = "the state of the slice, at most"
    STATE_AND_PUSHES = "the state of the slice and its pending pushes, at most"


class MessageRoute(NamedTuple):
    sender: ProcessRole
    receivers: frozenset[ProcessRole]
    payload: PayloadKind = PayloadKind.NONE


_C, _S, _W = ProcessRole
_TO_C, _TO_S, _TO_W, _TO_S_AND_W = frozenset([_C]), frozenset([_S]), frozenset([_W]), frozenset([_S, _W])
MESSAGE_ROUTES: dict[type[Any], MessageRoute] = {
    messages.WorkerJoined: MessageRoute(_W, _TO_C),
    messages.WorkItemCompleted: MessageRoute(_W, _TO_C),
    messages.WorkAssignment: MessageRoute(_C, _TO_W),
    messages.EvictionNotice: MessageRoute(_C, _TO_S_AND_W),
    messages.ServerAddressBook: MessageRoute(_C, _TO_S_AND_W),
    messages.ParameterPlacement: MessageRoute(_C, _TO_S_AND_W),
    messages.ParameterPull: MessageRoute(_W, _TO_S),
    messages.ParameterPullReply: MessageRoute(_S, _TO_W, PayloadKind.PULL),
    messages.GradientPush: MessageRoute(_W, _TO_S, PayloadKind.PUSH),
    messages.GradientPushAck: MessageRoute(_S, _TO_W),
    messages.BackupPush: MessageRoute(_S, _TO_S, PayloadKind.PUSH),
    messages.BackupPushAck: MessageRoute(_S, _TO_S),
    messages.ParameterStateTransfer: MessageRoute(_S, _TO_S, PayloadKind.STATE_AND_PUSHES),
    messages.ServerAddress: MessageRoute(_S, _TO_C),
    messages.ServerTakeoverOffer: MessageRoute(_S, _TO_C),
    messages.DecisionReplayRequest: MessageRoute(_S, _TO_C),
    messages.SliceStartVersion: MessageRoute(_C, _TO_S, PayloadKind.STATE),
    messages.GradientNormRequest: MessageRoute(_C, _TO_S),
    messages.GradientNormReply: MessageRoute(_S, _TO_C),
    messages.UpdateDecision: MessageRoute(_C, _TO_S),
    messages.ParameterStateRequest: MessageRoute(_C, _TO_S),
    messages.ParameterStateReply: MessageRoute(_S, _TO_C, PayloadKind.STATE),
    messages.ServerTrafficReport: MessageRoute(_S, _TO_C),
    messages.ServerShutdown: MessageRoute(_C, _TO_S),
}


@dataclass(frozen=True)
class PayloadSizes:
    """The bytes of the payloads about each slice; those of states are limits."""

    pushes: tuple[int, ...]
    pulls: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def text_limit(self) -> int:
        return MAX_TEXT_BYTES + TEXT_BYTES_PER_SLICE * len(self.pushes)

    @property
    def open_message_limit(self) -> int:
        return MAX_OPEN_MESSAGES + len(self.pushes)

    @property
    def unread_limit(self) -> int:
        return MAX_UNREAD_BYTES + sum(map(max, zip(self.pushes, self.pulls, strict=True)))


@dataclass(frozen=True)
class MessageAdmission:
    """The messages that one process admits from one peer."""

    own_name: str
    peer: str
    sizes: PayloadSizes

    def check(self, message: Message, payload_bytes: int) -> None:
        """Raise a `BadMessageError` unless the peer may send this message with a payload of this size."""
        kind = type(message)
        route, role = MESSAGE_ROUTES[kind], role_of_process(self.peer)
        if route.sender is not role or role_of_process(self.own_name) not in route.receivers:
            raise BadMessageError(f"a {role.value} may not send a {kind.__name__} to {self.own_name}")
        for name, value in zip(message._fields, message, strict=True):
            if not self._is_admitted(name, value):
                raise BadMessageError(f"{kind.__name__} has {name} = {value!r:.60}")
        self._check_payload(message, route.payload, payload_bytes)

    def _is_admitted(self, name: str, value: Any) -> bool:
        match name:
            case "worker" | "server":
                return bool(value == self.peer)  # the sender
            case "name":
                return bool(value == self.own_name)  # the evicted process
            case "slice_id":
                return bool(0 <= value < len(self.sizes.pushes))
            case "replicas":
                return len(value) == len(self.sizes.pushes) and all(map(_are_replicas, value))
            case "snapshot_versions":
                slice_ids = [slice_id for slice_id, _ in value]
                return len(set(slice_ids)) == len(slice_ids) and all(
                    self._is_admitted("slice_id", slice_id) and _is_count(version) for slice_id, version in value
                )
            case _:
                return _FIELD_CHECKS[name](value)

    def _check_payload(self, message: Any, kind: PayloadKind, payload_bytes: int) -> None:
        least = most = 0
        match kind:
            case PayloadKind.PUSH:
                least = most = self.sizes.pushes[message.slice_id]
            case PayloadKind.PULL:
                least = most = self.sizes.pulls[message.slice_id]
            case PayloadKind.STATE:
                most = self.sizes.states[message.slice_id]
            case PayloadKind.STATE_AND_PUSHES:
                push = self.sizes.pushes[message.slice_id] + PUSH_HEADER_BYTES
                most = self.sizes.states[message.slice_id] + len(message.pending_work_items) * push
        if not least <= payload_bytes <= most:
            size = f"{least}" if least == most else f"{least} to {most}"
            raise BadMessageError(f"{type(message).__name__} announces {payload_bytes} bytes, not {size}")


def _is_count(value: int) -> bool:
    return 0 <= value <= MAX_COUNT


def _are_counts(values: Iterable[int]) -> bool:
    return all(map(_is_count, values))


def _is_sum(value: float) -> bool:
    return 0 <= value <= MAX_SUM


def _are_decided(decided: messages.DecidedWorkItems) -> bool:
    return _is_count(decided.floor) and _are_counts(decided.above_floor)


def _is_report(report: messages.WorkItemReport) -> bool:
    """Losses and norms may be NaN or infinite: such an update is skipped."""
    sums = (report.targets, report.tokens, report.oldest_version)
    return all(isfinite(value) and _is_sum(value) for value in sums) and not report.squared_norm < 0


def _is_server(name: str) -> bool:
    return bool(_ROLE_PATTERNS[ProcessRole.SERVER].fullmatch(name))


def _are_replicas(replicas: messages.SlicePrimaryAndBackups) -> bool:
    servers, incarnation = replicas
    return len(set(servers)) == len(servers) <= 2 and all(map(_is_server, servers)) and _is_count(incarnation)


def _is_host(host: str) -> bool:
    return 0 < len(host) <= MAX_HOST_CHARACTERS and host.isprintable()


def _is_port(port: int) -> bool:
    return 0 < port < 2**16


_COUNTS = "version min_version epoch attempt update update_count from_update decided_floor assignment_id"
_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys([*_COUNTS.split(), "sent_bytes", "received_bytes", "queued_bytes"], _is_count),
    "work_item": lambda value: NO_MORE_WORK <= value <= MAX_COUNT,
    "priority": lambda value: abs(value) <= MAX_PRIORITY,
    "work_items": lambda values: len(values) > 0 and len(set(values)) == len(values) and _are_counts(values),
    "pending_work_items": _are_counts,
    "decided": _are_decided,
    "report": _is_report,
    "squared_norm": lambda value: not value < 0,
    "scalars": lambda scalars: isfinite(scalars.learning_rate) and isfinite(scalars.gradient_factor),
    "replaced_server": _is_server,
    "host": _is_host,
    "port": _is_port,
    "is_initialized": lambda value: True,
    "entries": lambda entries: all(_is_server(name) and _is_host(host) and _is_port(p) for name, host, p in entries),
}
