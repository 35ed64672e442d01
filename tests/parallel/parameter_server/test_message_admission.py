"""Each role sends its own messages only, and each field has its limits."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from motet.parallel.parameter_server.protocol import messages as m
from motet.parallel.parameter_server.protocol.message_admission import (
    _FIELD_CHECKS,
    MESSAGE_ROUTES,
    MessageAdmission,
    PayloadSizes,
    ProcessRole,
    role_of_process,
)
from motet.parallel.parameter_server.protocol.messages import BadMessageError

PAGE = Path(__file__).parents[3] / "docs/reference/server-protocol.md"
NAMES = {"coordinator": "coordinator", "server": "s1", "worker": "w0"}
SIZES = PayloadSizes((12, 8), (6, 4), (100, 100))
DECIDED = m.DecidedWorkItems(1, frozenset({3}))
# One valid message of each kind: (message, bytes of its payload), from the peer s1 or w0 to s0, w1 or the coordinator.
VALID: list[tuple[Any, int]] = [
    (m.WorkerJoined("w0"), 0),
    (m.WorkItemCompleted("w0", 3, 0, m.WorkItemReport(float("nan"), 2.0, 2.0, float("inf"), 1.0)), 0),
    (m.WorkAssignment(1, m.NO_MORE_WORK, 0), 0),
    (m.EvictionNotice("OWN"), 0),
    (m.ServerAddressBook((("s0", "10.0.0.1", 4000),)), 0),
    (m.ParameterPlacement(1, (m.SlicePrimaryAndBackups(("s0", "s1.1")), m.SlicePrimaryAndBackups(()))), 0),
    (m.ParameterPull("w0", 1, 1, 0, -3), 0),
    (m.ParameterPullReply(1, 1, 2, 0), 4),
    (m.GradientPush("w0", 1, 1, 3), 8),
    (m.GradientPushAck("s1", 1, 1), 0),
    (m.BackupPush("s1", 1, 3), 8),
    (m.BackupPushAck("s1", 1, 3), 0),
    (m.ParameterStateTransfer(0, 2, DECIDED, frozenset({4, 5})), 100 + 2 * (12 + 256)),
    (m.ServerAddress("s1", "::1", 4000, False), 0),
    (m.ServerTakeoverOffer("s1", "s0.1", ((0, 3), (1, 2))), 0),
    (m.DecisionReplayRequest("s1", 4), 0),
    (m.SliceStartVersion(1, 2, DECIDED), 100),
    (m.GradientNormRequest(1, 2, (3, 4)), 0),
    (m.GradientNormReply(1, 1, float("inf")), 0),
    (m.UpdateDecision(1, (3, 4), 5, m.UpdateScalars(0.1, 0.5, True)), 0),
    (m.ParameterStateRequest(1), 0),
    (m.ParameterStateReply(1, 2), 100),
    (m.ServerTrafficReport(1, 2, 3), 0),
    (m.ServerShutdown(3), 0),
]


def rows_of_page() -> dict[str, tuple[str, str, str]]:
    """message -> (from, to, payload), as the page has them."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]+) \| ([\w, ]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: (sender, receivers, payload) for name, sender, receivers, payload in rows}


def test_the_page_has_the_table() -> None:
    table = {
        kind.__name__: (route.sender.value, ", ".join(sorted(r.value for r in route.receivers)), route.payload.value)
        for kind, route in MESSAGE_ROUTES.items()
    }
    assert rows_of_page() == table


def test_every_message_has_a_route_an_example_and_checks_of_its_fields() -> None:
    kinds = set(get_args(m.SentMessage))
    assert set(MESSAGE_ROUTES) == {type(message) for message, _ in VALID} == kinds
    by_context = {"worker", "server", "name", "slice_id", "replicas", "snapshot_versions"}
    assert {name for kind in kinds for name in kind._fields} == by_context | set(_FIELD_CHECKS)


@pytest.mark.parametrize(("message", "payload_bytes"), VALID, ids=[type(message).__name__ for message, _ in VALID])
def test_a_message_is_admitted_from_its_role_alone(message: Any, payload_bytes: int) -> None:
    expected = {(s, r) for s, to, _ in [rows_of_page()[type(message).__name__]] for r in to.split(", ")}
    admitted = set()
    for sender, peer in NAMES.items():
        for receiver, own in {"coordinator": "coordinator", "server": "s0", "worker": "w1"}.items():
            try:
                sent = m.EvictionNotice(own) if isinstance(message, m.EvictionNotice) else message
                MessageAdmission(own, peer, SIZES).check(sent, payload_bytes)
                admitted.add((sender, receiver))
            except BadMessageError as error:
                assert "may not send" in str(error)
    assert admitted == expected


@pytest.mark.parametrize(("message", "payload_bytes"), VALID, ids=[type(message).__name__ for message, _ in VALID])
def test_a_payload_of_another_size_is_refused(message: Any, payload_bytes: int) -> None:
    route = MESSAGE_ROUTES[type(message)]
    own = {"coordinator": "coordinator", "server": "s0", "worker": "w1"}[min(r.value for r in route.receivers)]
    admission = MessageAdmission(own, NAMES[route.sender.value], SIZES)
    message = m.EvictionNotice(own) if isinstance(message, m.EvictionNotice) else message
    admission.check(message, payload_bytes)
    for wrong in (-1, payload_bytes + 1, 2**30):
        with pytest.raises(BadMessageError, match=f"announces {wrong} bytes"):
            admission.check(message, wrong)


@pytest.mark.parametrize(
    ("sender", "own", "message", "payload_bytes"),
    [
        ("worker", "coordinator", m.WorkItemCompleted("w0", -2, 0), 0),
        ("worker", "coordinator", m.WorkItemCompleted("w0", 2**60, 0), 0),
        ("worker", "coordinator", m.WorkItemCompleted("w1", 3, 0), 0),
        *(
            ("worker", "coordinator", m.WorkItemCompleted("w0", 3, 0, m.WorkItemReport(**{name: value})), 0)
            for name in ("targets", "tokens", "oldest_version")
            for value in (-1.0, float("nan"), float("inf"), 1e300)
        ),
        ("worker", "coordinator", m.WorkItemCompleted("w0", 3, 0, m.WorkItemReport(squared_norm=-1.0)), 0),
        ("worker", "s0", m.ParameterPull("w0", 1, 2, 0), 0),
        ("worker", "s0", m.ParameterPull("w0", 1, -1, 0), 0),
        ("worker", "s0", m.ParameterPull("w0", 1, 0, -1), 0),
        ("worker", "s0", m.ParameterPull("w0", 1, 0, 0, 2**40), 0),
        ("worker", "s0", m.GradientPush("w0", 1, 0, 0), 8),  # the bytes of the other slice
        ("server", "coordinator", m.ServerAddress("s1", "", 4000, True), 0),
        ("server", "coordinator", m.ServerAddress("s1", "a\nb", 4000, True), 0),
        ("server", "coordinator", m.ServerAddress("s1", "a", 65536, True), 0),
        ("server", "coordinator", m.ServerTakeoverOffer("s1", "w0"), 0),
        ("server", "coordinator", m.ServerTakeoverOffer("s1", "s0", ((2, 0),)), 0),
        ("server", "coordinator", m.ServerTakeoverOffer("s1", "s0", ((0, 0), (0, 1))), 0),
        ("server", "coordinator", m.GradientNormReply(1, 0, -1.0), 0),
        ("server", "s0", m.ParameterStateTransfer(0, 0, DECIDED, frozenset({-1})), 0),
        ("coordinator", "s0", m.SliceStartVersion(0, 0, m.DecidedWorkItems(-1)), 0),
        ("coordinator", "s0", m.UpdateDecision(1, (), 5), 0),
        ("coordinator", "s0", m.UpdateDecision(1, (3, 3), 5), 0),
        ("coordinator", "s0", m.UpdateDecision(1, (3,), 5, m.UpdateScalars(float("nan"), 1.0, True)), 0),
        ("coordinator", "s0", m.ParameterPlacement(1, (m.SlicePrimaryAndBackups(("s0",)),)), 0),
        ("coordinator", "s0", m.ParameterPlacement(1, (m.SlicePrimaryAndBackups(("s0", "s0")),) * 2), 0),
        ("coordinator", "s0", m.ParameterPlacement(1, (m.SlicePrimaryAndBackups(("w0",)),) * 2), 0),
        ("coordinator", "s0", m.ServerAddressBook((("w0", "10.0.0.1", 4000),)), 0),
        ("coordinator", "s0", m.EvictionNotice("s1"), 0),
    ],
)
def test_a_field_beyond_its_limits_is_refused(sender: str, own: str, message: Any, payload_bytes: int) -> None:
    with pytest.raises(BadMessageError, match=f"^{type(message).__name__} (has|announces) "):
        MessageAdmission(own, NAMES[sender], SIZES).check(message, payload_bytes)


def test_the_name_has_the_role() -> None:
    names = {"coordinator": "coordinator", "s0 s12.3 s0.1+2 s0+1": "server", "w0 host-1a2b3c/w7 w3.1+1": "worker"}
    for text, role in names.items():
        assert {role_of_process(name) for name in text.split()} == {ProcessRole(role)}
    for name in ["", "s", "w-1", "s0 ", "coordinator2", "a/b/w0", "a b/w0", "w0\n", "s0x", "/w0", "s" + "1" * 10]:
        with pytest.raises(BadMessageError, match="is not the name of a process"):
            role_of_process(name)
