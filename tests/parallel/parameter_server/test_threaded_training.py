"""Training by a parameter server, its processes being threads here."""

import math
import threading
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.parallel.data_parallel.buckets import build_buckets
from motet.parallel.data_parallel.flat_parameters import FlatParameters
from motet.parallel.data_parallel.gradient_buffer import GradientBuffer
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.parameter_store import (
    ParameterPartition,
    ParameterStore,
    deserialize_tensors,
    serialize_tensors,
)
from motet.parallel.parameter_server.process.server_process import ParameterServerProcess
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.process.worker_client import ParameterServerClient
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    ConsistencyPolicy,
    ParameterPlacement,
    ParameterReplicas,
    UpdateScalars,
    WorkItemReport,
)
from motet.parallel.parameter_server.protocol.parameter_slices import partition_buckets
from motet.parallel.parameter_server.protocol.server_state_machine import ServerSliceState, ServerStateMachine
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from motet.precision.recipe import RECIPES
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import group_parameters, make_torch_optimizer
from waiting import until

STEPS, LIMIT_S, RATE = 20, 30.0, 0.01
Found = dict[str, tuple[ServerStateMachine, ParameterStore]]
"""What the servers have."""
SETTINGS = OptimizerSettings(learning_rate=RATE, clip_norm=0.5)


def made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 3)).double()


MADE = made()
"""Threads share the generator of random numbers."""


def small() -> nn.Module:
    return deepcopy(MADE)


def rows(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def squares(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return module(x).square().sum(), len(x)


def plan_of(module: nn.Module, servers: int) -> ParameterPartition:
    named = dict(module.named_parameters())
    groups = group_parameters(named, SETTINGS)
    numbers = {name: number for number, members in enumerate(groups.values()) for name in members}
    buckets = build_buckets(
        {name: (numbers[name], p.numel()) for name, p in named.items()}, 1, 1000, first_max_numel=500
    )
    return ParameterPartition(buckets, partition_buckets(buckets, 512, servers), RECIPES["fp64"], tuple(groups))


def decide(update: int, reports: dict[int, WorkItemReport], norms: dict[int, float]) -> UpdateScalars:
    count = sum(report.targets for report in reports.values())
    norm = math.sqrt(sum(norms[piece] for piece in sorted(norms))) / count
    return UpdateScalars(RATE, min(1.0, 0.5 / norm) / count, is_applied=True)


def view_of(plan: ParameterPartition, copies: int, servers: int) -> ParameterPlacement:
    return ParameterPlacement(
        0,
        tuple(
            ParameterReplicas(tuple(f"s{(p.server_index + copy) % servers}" for copy in range(copies)))
            for p in plan.slices
        ),
    )


def serve(
    name: str,
    view: ParameterPlacement,
    desk: tuple[str, int],
    end: threading.Event,
    found: dict[str, dict[int, Tensor]],
) -> None:
    module = small()
    plan = plan_of(module, len({owned.servers[0] for owned in view.replicas}))
    mine = [piece for piece, owned in enumerate(view.replicas) if name in owned.servers]
    post = TcpTransport(name, {"run": "run"}, LIMIT_S, host="127.0.0.1")
    shelf = ParameterStore(plan, lambda groups: make_torch_optimizer(groups, SETTINGS))
    keeper = ServerStateMachine(name, view, {piece: ServerSliceState(is_initialized=False) for piece in mine})
    found[name] = keeper, shelf
    server = ParameterServerProcess(keeper, shelf, post, timeout_s=LIMIT_S)
    post.connect(COORDINATOR, desk)
    watch = threading.Thread(target=lambda: (end.wait(), setattr(server, "has_ended", True)), daemon=True)
    watch.start()
    server.run()
    post.close()


def flat_of(module: nn.Module, plan: ParameterPartition) -> FlatParameters:
    gradients = GradientBuffer(plan.buckets, 0, torch.float64, device=torch.device("cpu"), keeps_full_gradients=True)
    held = [slice(b.start, b.start) for b in plan.buckets]
    return FlatParameters(dict(module.named_parameters()), plan.buckets, held, recipe=plan.recipe, gradients=gradients)


def work(name: str, view: ParameterPlacement, desk: tuple[str, int], rule: ConsistencyPolicy) -> None:
    module = small()
    plan = plan_of(module, len({owned.servers[0] for owned in view.replicas}))
    weights = flat_of(module, plan)
    with torch.no_grad():
        weights.compute.fill_(math.nan)
    post = TcpTransport(name, {"run": "run"}, LIMIT_S)
    attendant = ParameterServerClient(
        WorkerStateMachine(name, view),
        plan,
        weights,
        transport=post,
        timeout_s=LIMIT_S,
        connect_timeout_s=LIMIT_S,
    )
    post.connect(COORDINATOR, desk)
    while (ticket := attendant.next_assignment()) is not None:
        for bucket in range(len(plan.buckets)):
            attendant.wait_for_bucket(bucket)
        loss, count = squares(
            module,
            rows(rule.step_of(ticket.work_item)).chunk(rule.work_items_per_step)[
                ticket.work_item % rule.work_items_per_step
            ],
        )
        report = WorkItemReport(loss.item(), float(count))
        weights.gradients.on_bucket_ready = lambda bucket, report=report: attendant.push_bucket(bucket, report)
        weights.gradients.begin_step()
        weights.gradients.begin_backward()
        loss.backward()
    attendant.close()
    post.close()


def train(workers: int, servers: int, copies: int = 1) -> dict[str, Tensor]:
    """The parameters at the end. What two servers have must be the same bits."""
    module = small()
    plan = plan_of(module, servers)
    view = view_of(plan, copies, servers)
    rule = ConsistencyPolicy(workers, STEPS, workers, 0)
    names = [f"s{i}" for i in range(servers)]
    post = TcpTransport(COORDINATOR, {"run": "run"}, LIMIT_S, host="127.0.0.1")
    begin = flat_of(module, plan).compute.clone()
    desk = CoordinatorStateMachine(rule, view, names, copies, update_rule=decide)
    office = CoordinatorProcess(
        desk,
        post,
        lambda piece: serialize_tensors({"master": begin[plan.slices[piece].flat_range]}),
        timeout_s=LIMIT_S,
        eviction_timeout_s=LIMIT_S,
    )
    end = threading.Event()
    found: Found = {}
    threads = [threading.Thread(target=serve, args=(n, view, post.address, end, found)) for n in names]
    attending = [threading.Thread(target=work, args=(f"w{i}", view, post.address, rule)) for i in range(workers)]
    for thread in threads + attending:
        thread.start()
    office.run(lambda: desk.is_finished, "training")
    fetched = {piece: deserialize_tensors(content)["master"] for piece, content in office.fetch_slice_states().items()}
    office.run(lambda: not any(thread.is_alive() for thread in attending), "ending")
    until(lambda: all(kept.version == STEPS for keeper, _ in found.values() for kept in keeper.slice_states.values()))
    end.set()
    for thread in threads:
        thread.join()
    post.close()
    weights = flat_of(module, plan)
    for number, piece in enumerate(plan.slices):
        first, *others = [found[name][1].slice_state(number)["master"] for name in view.replicas[number].servers]
        assert torch.equal(first, fetched[number])
        assert all(torch.equal(first, other) for other in others)
        with torch.no_grad():
            weights.compute[piece.flat_range] = first
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_alone() -> dict[str, Tensor]:
    module = small()
    engine = motet.parallelize(module, loss=squares, optimizer=SETTINGS, precision="fp64")
    for step in range(STEPS):
        engine.step(rows(step))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def check(workers: int, servers: int, copies: int) -> None:
    found = train(workers, servers, copies)
    for name, wanted in train_alone().items():
        assert torch.allclose(found[name], wanted, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize(("workers", "servers", "copies"), [(1, 1, 1), (2, 3, 1), (3, 2, 2), (4, 3, 2)])
def test_synchronous_training_is_that_of_one_rank(workers: int, servers: int, copies: int) -> None:
    check(workers, servers, copies)


@pytest.mark.proof
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_synchronous_training_in_every_size(workers: int, servers: int, copies: int) -> None:
    check(workers, servers, min(copies, servers))
