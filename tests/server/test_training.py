"""Training by a parameter server, its processes being threads here."""

import math
import threading
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.parallel.buckets import cut_buckets
from motet.parallel.flat import FlatWeights, Gradients
from motet.parallel.server.attend import Attendant
from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper, Kept
from motet.parallel.server.office import Office
from motet.parallel.server.pieces import cut_pieces
from motet.parallel.server.post import Post
from motet.parallel.server.protocol import DESK, Numbers, Owners, Rule, View
from motet.parallel.server.serve import Server
from motet.parallel.server.shelf import Plan, Shelf, pack, unpack
from motet.precision.recipe import RECIPES
from motet.train.optimizer import group_parameters, make_optimizer
from motet.train.settings import OptimizerSettings
from waiting import until

STEPS, LIMIT_S, RATE = 20, 30.0, 0.01
Found = dict[str, tuple[Keeper, Shelf]]
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


def plan_of(module: nn.Module, servers: int) -> Plan:
    named = dict(module.named_parameters())
    groups = group_parameters(named, SETTINGS)
    numbers = {name: number for number, members in enumerate(groups.values()) for name in members}
    buckets = cut_buckets({name: (numbers[name], p.numel()) for name, p in named.items()}, 1, 1000, 500)
    return Plan(buckets, cut_pieces(buckets, 512, servers), RECIPES["fp64"], tuple(groups))


def judge(number: int, reports: dict[int, Numbers], norms: dict[int, float]) -> Numbers:
    count = sum(report[1] for report in reports.values())
    norm = math.sqrt(sum(norms[piece] for piece in sorted(norms))) / count
    return (RATE, min(1.0, 0.5 / norm) / count, 1.0)


def view_of(plan: Plan, copies: int, servers: int) -> View:
    return View(
        0,
        tuple(Owners(tuple(f"s{(p.server + copy) % servers}" for copy in range(copies))) for p in plan.pieces),
    )


def serve(
    name: str, view: View, desk: tuple[str, int], end: threading.Event, found: dict[str, dict[int, Tensor]]
) -> None:
    module = small()
    plan = plan_of(module, len({owned.servers[0] for owned in view.owners}))
    mine = [piece for piece, owned in enumerate(view.owners) if name in owned.servers]
    post = Post(name, {"run": "run"}, LIMIT_S, "127.0.0.1")
    shelf = Shelf(plan, lambda groups: make_optimizer(groups, SETTINGS))
    keeper = Keeper(name, view, {piece: Kept(there=False) for piece in mine})
    found[name] = keeper, shelf
    server = Server(keeper, shelf, post, LIMIT_S)
    post.connect(DESK, desk)
    watch = threading.Thread(target=lambda: (end.wait(), setattr(server, "ended", True)), daemon=True)
    watch.start()
    server.run()
    post.close()


def flat_of(module: nn.Module, plan: Plan) -> FlatWeights:
    gradients = Gradients(plan.buckets, 0, torch.float64, torch.device("cpu"), keep=True)
    held = [slice(b.start, b.start) for b in plan.buckets]
    return FlatWeights(dict(module.named_parameters()), plan.buckets, held, plan.recipe, gradients)


def work(name: str, view: View, desk: tuple[str, int], rule: Rule) -> None:
    module = small()
    plan = plan_of(module, len({owned.servers[0] for owned in view.owners}))
    weights = flat_of(module, plan)
    with torch.no_grad():
        weights.compute.fill_(math.nan)
    post = Post(name, {"run": "run"}, LIMIT_S)
    attendant = Attendant(Client(name, view), plan, weights, post, (LIMIT_S, LIMIT_S))
    post.connect(DESK, desk)
    while (ticket := attendant.next()) is not None:
        for bucket in range(len(plan.buckets)):
            attendant.need(bucket)
        loss, count = squares(module, rows(rule.step(ticket.share)).chunk(rule.shares)[ticket.share % rule.shares])
        report = (loss.item(), float(count))
        weights.gradients.on_complete = lambda bucket, report=report: attendant.ready(bucket, report)
        weights.gradients.begin()
        weights.gradients.begin_backward()
        loss.backward()
    attendant.close()
    post.close()


def train(workers: int, servers: int, copies: int = 1) -> dict[str, Tensor]:
    """The parameters at the end. What two servers have must be the same bits."""
    module = small()
    plan = plan_of(module, servers)
    view = view_of(plan, copies, servers)
    rule = Rule(workers, STEPS, workers, 0)
    names = [f"s{i}" for i in range(servers)]
    post = Post(DESK, {"run": "run"}, LIMIT_S, "127.0.0.1")
    begin = flat_of(module, plan).compute.clone()
    desk = Desk(rule, view, names, copies, judge=judge)
    office = Office(desk, post, (LIMIT_S, LIMIT_S), lambda piece: pack({"master": begin[plan.pieces[piece].place]}))
    end = threading.Event()
    found: Found = {}
    threads = [threading.Thread(target=serve, args=(n, view, post.address, end, found)) for n in names]
    attending = [threading.Thread(target=work, args=(f"w{i}", view, post.address, rule)) for i in range(workers)]
    for thread in threads + attending:
        thread.start()
    office.run(lambda: desk.is_finished, "training")
    fetched = {piece: unpack(content)["master"] for piece, content in office.fetch().items()}
    office.run(lambda: not any(thread.is_alive() for thread in attending), "ending")
    until(lambda: all(kept.version == STEPS for keeper, _ in found.values() for kept in keeper.pieces.values()))
    end.set()
    for thread in threads:
        thread.join()
    post.close()
    weights = flat_of(module, plan)
    for number, piece in enumerate(plan.pieces):
        first, *others = [found[name][1].state(number)["master"] for name in view.owners[number].servers]
        assert torch.equal(first, fetched[number])
        assert all(torch.equal(first, other) for other in others)
        with torch.no_grad():
            weights.compute[piece.place] = first
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
