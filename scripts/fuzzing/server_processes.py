"""Processes of a parameter server in this process, and peers that speak its frames by hand.

Frames are made and read here by the description in docs/reference: a message id (4 bytes), a kind (1), a length (4),
then a text `Name [fields, bytes of the payload]` or a part of the payload.
"""

import json
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fuzzing.cases import FindingError
from fuzzing.handshakes import WAIT_S, RawConnection, Secret
from motet.core.errors import MotetError
from motet.core.token_authentication import RunToken
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.parameter_server.process import server_process
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.server_process import (
    ParameterServerProcess,
    ParameterSlicingPlan,
    ParameterStore,
)
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import initial_placement, partition_buckets
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerSliceState,
    ServerStateMachine,
)
from motet.precision.recipe import RECIPES
from motet.train.optimizer.module_plan import group_parameters
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer

TOKEN = "the token of the fuzzer's runs"
SECRET = Secret(TOKEN.encode(), b"parameter server")
RUN = {"run": "of the fuzzer"}
HEADER = struct.Struct("!IBI")
MESSAGE, PAYLOAD, HEARTBEAT = 0, 1, 2
FRAME_BYTES = 128 * 1024
SETTINGS = OptimizerSettings(learning_rate=0.01)
WORKERS, STEPS = 2, 1000


def make_plan(servers: int = 1) -> ParameterSlicingPlan:
    """The slices of a small model."""
    module = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 3)).double()
    named, groups = dict(module.named_parameters()), group_parameters(module, SETTINGS)
    sizes = {name: (g, named[name].numel()) for g, members in enumerate(groups.values()) for name in members}
    buckets = build_buckets({name: sizes[name] for name in named}, 1, 1000, first_max_numel=60)
    return ParameterSlicingPlan(buckets, partition_buckets(buckets, 512, servers), RECIPES["fp64"], tuple(groups))


def make_transport(name: str, plan: ParameterSlicingPlan) -> TcpTransport:
    return TcpTransport(
        name, RUN, WAIT_S * 4, token=RunToken(TOKEN), payload_sizes=plan.payload_sizes, host="127.0.0.1"
    )


class RunningProcess:
    """A process of a run in a thread; `error` is the error that ended it."""

    def __init__(self, run: Callable[[], None], transport: TcpTransport) -> None:
        self.transport = transport
        self.error: BaseException | None = None
        self._run = run
        self.thread = threading.Thread(target=self._run_to_the_end, daemon=True)
        self.thread.start()

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - reported by the check of the case
            self.error = error

    def check_alive(self) -> None:
        if self.error is not None or not self.thread.is_alive():
            raise FindingError(f"the process {self.transport.name} has ended") from self.error


class ServedParameters:
    """A server with all slices, whose coordinator is the fuzzer, which decides nothing: no parameter may change."""

    def __init__(self) -> None:
        self.plan = make_plan()
        generator = torch.Generator().manual_seed(5)
        self.parameters = [torch.randn(s.numel, generator=generator, dtype=torch.float64) for s in self.plan.slices]
        placement = initial_placement(self.plan.slices, 1, 1)
        self.coordinator = make_transport(messages.COORDINATOR, self.plan)
        states = {i: ServerSliceState(is_initialized=False) for i in range(len(self.plan.slices))}
        transport = make_transport("s0", self.plan)
        self.server = ParameterServerProcess(
            ServerStateMachine("s0", placement, states),
            ParameterStore(self.plan, lambda groups: make_torch_optimizer(groups, SETTINGS)),
            transport,
            timeout_s=3600.0,
        )
        transport.connect(messages.COORDINATOR, self.coordinator.address)
        self.process = RunningProcess(self.server.run, transport)
        wait_until(lambda: "s0" in self.coordinator.connected_peers)
        for slice_id, values in enumerate(self.parameters):
            start = messages.SliceStartVersion(slice_id, 0, messages.DecidedWorkItems())
            self.coordinator.send("s0", start, server_process.serialize_tensors({"master": values}))
        wait_until(lambda: all(state.is_initialized for state in states.values()))

    @property
    def address(self) -> tuple[str, int]:
        return self.process.transport.address

    def check(self) -> None:
        """Check that a good worker that pulls every slice gets the bits that the server started with."""
        self.process.check_alive()
        peer = FramePeer(self.address, "w0")
        try:
            for slice_id, values in enumerate(self.parameters):
                peer.send_message("ParameterPull", ["w0", 1, slice_id, 0, 0], b"", slice_id)
                name, fields, payload = peer.read_message("ParameterPullReply")
                expected = values.numpy().tobytes()
                if fields[:3] != [1, slice_id, 0] or payload != expected:
                    raise FindingError(f"a good worker got {name} {fields} with {len(payload)} bytes, or other values")
        finally:
            peer.close()

    def close(self) -> None:
        self.server.has_ended = True
        self.process.thread.join(WAIT_S)
        self.process.transport.close()
        self.coordinator.close()


class CoordinatedRun:
    """A coordinator of a run with one server; the fuzzer plays all other processes."""

    def __init__(self) -> None:
        self.plan = make_plan()
        placement = initial_placement(self.plan.slices, 1, 1)
        policy = messages.ConsistencyPolicy(WORKERS, STEPS, WORKERS, 0)
        self.machine = CoordinatorStateMachine(policy, placement, ["s0"], 1, update_rule=_no_update)
        starts = [server_process.serialize_tensors({"master": torch.zeros(s.numel)}) for s in self.plan.slices]
        transport = make_transport(messages.COORDINATOR, self.plan)
        self.has_ended = threading.Event()
        coordinator = CoordinatorProcess(
            self.machine, transport, starts.__getitem__, timeout_s=3600.0, eviction_timeout_s=3600.0
        )
        self.process = RunningProcess(lambda: coordinator.run(self.has_ended.is_set, "training"), transport)

    @property
    def address(self) -> tuple[str, int]:
        return self.process.transport.address

    def check(self) -> None:
        """Check that a good worker that connects gets the addresses of the servers."""
        self.process.check_alive()
        peer = FramePeer(self.address, "w0")
        try:
            peer.read_message("ServerAddressBook")
        finally:
            peer.close()

    def close(self) -> None:
        self.has_ended.set()
        self.process.thread.join(WAIT_S)
        self.process.transport.close()


def _no_update(update: int, reports: dict[int, Any], norms: dict[int, float]) -> messages.UpdateScalars:
    return messages.UpdateScalars()


class FramePeer(RawConnection):
    """A process with the token and a name, whose frames the fuzzer makes."""

    def __init__(self, address: tuple[str, int], name: str, instance: str = "of the fuzzer") -> None:
        super().__init__(address)
        self.name, self._next_id = name, 0
        self._payloads: dict[int, tuple[str, list[Any], int, bytes]] = {}
        self.authenticate(SECRET, bytes(32 - len(name)) + name.encode() + public_fields(name, instance))

    def send_message(self, name: str, fields: list[Any], payload: bytes, message_id: int) -> None:
        self.send(b"".join(frames_of(message_id, name, fields, payload)))

    def read_message(self, wanted: str) -> tuple[str, list[Any], bytes]:
        """The next message of a kind; others are left out."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            header = self.receive(HEADER.size)
            if len(header) < HEADER.size:
                raise FindingError(f"a good process was cut off while it waited for {wanted}")
            message_id, kind, length = HEADER.unpack(header)
            body = self.receive(length)
            if kind == HEARTBEAT:
                continue
            if kind == MESSAGE:
                name, _, text = body.decode().partition(" ")
                fields, payload_bytes = json.loads(text)
                self._payloads[message_id] = name, fields, payload_bytes, b""
            else:
                name, fields, payload_bytes, earlier = self._payloads[message_id]
                self._payloads[message_id] = name, fields, payload_bytes, earlier + body
            name, fields, payload_bytes, payload = self._payloads[message_id]
            if len(payload) == payload_bytes:
                del self._payloads[message_id]
                if name == wanted:
                    return name, fields, payload
        raise FindingError(f"no {wanted} came in {WAIT_S:g} s")


def public_fields(name: str, instance: str = "of the fuzzer") -> bytes:
    return json.dumps([name, RUN, instance]).encode()


def frames_of(message_id: int, name: str, fields: Any, payload: bytes, announced: Any = None) -> list[bytes]:
    """The frames of a message; `announced` bytes of payload may differ from those that follow."""
    text = f"{name} {json.dumps([fields, len(payload) if announced is None else announced])}".encode()
    frames = [HEADER.pack(message_id % 2**32, MESSAGE, len(text)) + text]
    for start in range(0, len(payload), FRAME_BYTES):
        part = payload[start : start + FRAME_BYTES]
        frames.append(HEADER.pack(message_id % 2**32, PAYLOAD, len(part)) + part)
    return frames


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise FindingError("a process of the run did not start")
        with suppress(MotetError):
            time.sleep(0.002)
