"""Training by a parameter server, its processes being threads here."""

import math
import sys
import threading
import time
from contextlib import closing
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core import token_authentication
from motet.core.token_authentication import AuthenticatedListener, new_run_token
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.parameter_server.process import server_process
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.server_process import (
    ParameterServerProcess,
    ParameterSlicingPlan,
    ParameterStore,
)
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.process.worker_client import ParameterServerClient
from motet.parallel.parameter_server.protocol import messages
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    ConsistencyPolicy,
    ParameterPlacement,
    initial_placement,
    partition_buckets,
)
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerSliceState,
    ServerStateMachine,
    WorkerStateMachine,
)
from motet.precision.recipe import RECIPES
from motet.train.optimizer.module_plan import group_parameters
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer
from waiting import until

TOKEN = new_run_token()
STEPS, LIMIT_S, RATE = 20, 30.0, 0.01
CONNECT_S = LIMIT_S  # While nobody listens
Found = dict[str, tuple[ServerStateMachine, ParameterStore]]  # What the servers have
SETTINGS = OptimizerSettings(learning_rate=RATE, clip_norm=0.5)


torch.manual_seed(3)  # threads share the generator of random numbers, so the module is made here
MADE = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 3)).double()


def rows(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def squares(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def plan_of(module: nn.Module, servers: int) -> ParameterSlicingPlan:
    named = dict(module.named_parameters())
    groups = group_parameters(module, SETTINGS)
    sizes = {name: (g, named[name].numel()) for g, members in enumerate(groups.values()) for name in members}
    buckets = build_buckets({name: sizes[name] for name in named}, 1, 1000, first_max_numel=500)
    return ParameterSlicingPlan(buckets, partition_buckets(buckets, 512, servers), RECIPES["fp64"], tuple(groups))


def secured(partition: ParameterSlicingPlan) -> dict[str, Any]:
    return {"token": TOKEN, "payload_sizes": partition.payload_sizes}


def decide(update: int, reports: dict[int, messages.WorkItemReport], norms: dict[int, float]) -> messages.UpdateScalars:
    count = sum(report.targets for report in reports.values())
    norm = math.sqrt(sum(norms[slice_id] for slice_id in sorted(norms))) / count
    return messages.UpdateScalars(RATE, min(1.0, 0.5 / norm) / count, is_applied=True)


def serve(
    name: str, placement: ParameterPlacement, address: tuple[str, int], end: threading.Event, found: Found
) -> None:
    partition = plan_of(MADE, len({replicas.servers[0] for replicas in placement.replicas}))
    slice_ids = [slice_id for slice_id, replicas in enumerate(placement.replicas) if name in replicas.servers]
    transport = TcpTransport(name, {"run": "run"}, LIMIT_S, **secured(partition), host="127.0.0.1")
    store = ParameterStore(partition, lambda groups: make_torch_optimizer(groups, SETTINGS))
    slice_states = {slice_id: ServerSliceState(is_initialized=False) for slice_id in slice_ids}
    state_machine = ServerStateMachine(name, placement, slice_states)
    found[name] = state_machine, store
    server = ParameterServerProcess(state_machine, store, transport, timeout_s=LIMIT_S)
    transport.connect(COORDINATOR, address)
    watch = threading.Thread(target=lambda: (end.wait(), setattr(server, "has_ended", True)), daemon=True)
    watch.start()
    server.run()
    transport.close()


def flat_of(module: nn.Module, partition: ParameterSlicingPlan) -> FlatParameters:
    buckets, named = partition.buckets, dict(module.named_parameters())
    slices = [bucket.flat_slice for bucket in buckets]
    gradients = GradientBuffer(buckets, slices, torch.float64, device=torch.device("cpu"), keeps_all=True)
    held = [slice(b.start, b.start) for b in buckets]
    values = {name: parameter.detach().flatten() for name, parameter in named.items()}
    flat = FlatParameters(named, buckets, held, recipe=partition.recipe, gradients=gradients)
    for name, shard in flat.unfilled_shards():
        shard.values.copy_(values[name])
    return flat


def work(name: str, placement: ParameterPlacement, address: tuple[str, int], policy: ConsistencyPolicy) -> None:
    module = deepcopy(MADE)
    partition = plan_of(module, len({replicas.servers[0] for replicas in placement.replicas}))
    weights = flat_of(module, partition)
    with torch.no_grad():
        weights.compute.fill_(math.nan)
    transport = TcpTransport(name, {"run": "run"}, LIMIT_S, **secured(partition))
    machine, limits = WorkerStateMachine(name, placement), {"timeout_s": LIMIT_S, "connect_timeout_s": CONNECT_S}
    client = ParameterServerClient(machine, partition, weights, transport=transport, **limits)
    transport.connect(COORDINATOR, address)
    while (assignment := client.next_assignment()) is not None:
        for bucket in range(len(partition.buckets)):
            client.wait_for_bucket(bucket)
        step, index = divmod(assignment.work_item, policy.work_items_per_step)
        loss, count = squares(module, rows(step).chunk(policy.work_items_per_step)[index])
        report = messages.WorkItemReport(loss.item(), float(count))
        weights.gradients.on_bucket_ready = lambda bucket, report=report: client.push_bucket(bucket, report)
        weights.gradients.begin_step()
        weights.gradients.begin_backward()
        loss.backward()
    client.close()
    transport.close()


def train(workers: int, servers: int, copies: int = 1) -> dict[str, Tensor]:
    """The parameters at the end. What two servers have must be the same bits."""
    module = deepcopy(MADE)
    partition = plan_of(module, servers)
    placement = initial_placement(partition.slices, servers, copies)
    policy = ConsistencyPolicy(workers, STEPS, workers, 0)
    names = [f"s{i}" for i in range(servers)]
    transport = TcpTransport(COORDINATOR, {"run": "run"}, LIMIT_S, **secured(partition), host="127.0.0.1")
    begin = flat_of(module, partition).compute.clone()
    state_machine = CoordinatorStateMachine(policy, placement, names, copies, update_rule=decide)
    starts = [server_process.serialize_tensors({"master": begin[s.flat_range]}) for s in partition.slices]
    limits = {"timeout_s": LIMIT_S, "eviction_timeout_s": LIMIT_S}
    coordinator = CoordinatorProcess(state_machine, transport, starts.__getitem__, **limits)
    end = threading.Event()
    found: Found = {}
    threads = [
        threading.Thread(target=serve, args=(n, placement, transport.address, end, found), daemon=True) for n in names
    ]
    work_arguments = [(f"w{i}", placement, transport.address, policy) for i in range(workers)]
    worker_threads = [threading.Thread(target=work, args=arguments, daemon=True) for arguments in work_arguments]
    for thread in threads + worker_threads:
        thread.start()
    coordinator.run(lambda: state_machine.is_quiescent, "training")
    contents = coordinator.fetch_slice_states()
    fetched = {i: server_process.deserialize_tensors(content)["master"] for i, content in contents.items()}
    coordinator.run(lambda: not any(thread.is_alive() for thread in worker_threads), "ending")
    until(lambda: all(s.version == STEPS for machine, _ in found.values() for s in machine.slice_states.values()))
    end.set()
    for thread in threads:
        thread.join()
    transport.close()
    weights = flat_of(module, partition)
    for number, slice_id in enumerate(partition.slices):
        first, *others = [found[name][1].slice_state(number)["master"] for name in placement.replicas[number].servers]
        assert torch.equal(first, fetched[number])
        assert all(torch.equal(first, other) for other in others)
        with torch.no_grad():
            weights.compute[slice_id.flat_range] = first
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_alone() -> dict[str, Tensor]:
    module = deepcopy(MADE)
    engine = motet.parallelize(module, loss=squares, optimizer=SETTINGS, precision="fp64")
    for step in range(STEPS):
        engine.step(rows(step))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


SHORT = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (4, 3, 2)]
ALL = [sizes for sizes in product((1, 2, 3, 4), (1, 2, 3), (1, 2)) if sizes[2] <= sizes[1] and sizes not in SHORT]


@pytest.mark.parametrize(
    ("workers", "servers", "copies"), [*SHORT, *(pytest.param(*sizes, marks=pytest.mark.proof) for sizes in ALL)]
)
def test_synchronous_training_is_that_of_one_rank(workers: int, servers: int, copies: int) -> None:
    found = train(workers, servers, copies)
    for name, wanted in train_alone().items():
        assert torch.allclose(found[name], wanted, rtol=1e-12, atol=1e-13), name


def test_a_busy_machine_may_take_its_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listeners answer long after the limits for a peer that does not exist, and for the handshake of a stranger."""
    own, free_s = AuthenticatedListener._accept_all, time.monotonic() + 1.0

    def accept_late(listener: AuthenticatedListener) -> None:
        time.sleep(max(0.0, free_s - time.monotonic()))
        own(listener)

    monkeypatch.setattr(AuthenticatedListener, "_accept_all", accept_late)
    monkeypatch.setattr(token_authentication, "HANDSHAKE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "CONNECT_S", 0.2)
    train(2, 1)


def test_a_run_waits_for_a_worker_that_starts_after_its_end() -> None:
    partition = plan_of(MADE, 1)
    placement, policy = initial_placement(partition.slices, 1, 1), ConsistencyPolicy(2, 0, 2, 0)
    machine = CoordinatorStateMachine(policy, placement, ["s0"], 1, update_rule=decide)
    with closing(TcpTransport(COORDINATOR, {"run": "run"}, LIMIT_S, **secured(partition), host="127.0.0.1")) as post:
        coordinator = CoordinatorProcess(
            machine, post, lambda _: memoryview(b""), timeout_s=20.0, eviction_timeout_s=0.1
        )
        ending = threading.Thread(target=coordinator.close, args=(["w0", "w1"],))
        ending.start()
        time.sleep(0.5)
        late = [threading.Thread(target=work, args=(n, placement, post.address, policy)) for n in ("w0.1", "w1")]
        for thread in late:
            thread.start()
        for thread in (*late, ending):
            thread.join(10)
            assert not thread.is_alive()
        assert coordinator._ever_connected == {"w0.1", "w1"}
