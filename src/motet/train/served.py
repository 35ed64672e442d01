"""A run with a parameter server: one desk, its servers, and the workers, each a process of its own.

The desk does what rank 0 does elsewhere: it tells of steps, judges the model and writes checkpoints. The ranks of such
a run are numbered in that order: the desk, the servers, the workers.
"""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from motet.core import trace
from motet.core.errors import InputError
from motet.data.loader import Loader
from motet.models.build import Trainee
from motet.monitor.callback import Callback
from motet.parallel.alike import described
from motet.parallel.data import FlatSpread, saved_buffers
from motet.parallel.flat import FlatWeights, Gradients
from motet.parallel.group import Group, meeting, pick_device
from motet.parallel.layout import Layout, LayoutSettings, resolve_layout
from motet.parallel.place import Place, threads_for
from motet.parallel.server.attend import Attendant
from motet.parallel.server.client import Client
from motet.parallel.server.desk import Desk
from motet.parallel.server.keeper import Keeper, Kept
from motet.parallel.server.office import Office
from motet.parallel.server.post import Post
from motet.parallel.server.protocol import DESK, Decide, Rule, Settled, Ticket, View
from motet.parallel.server.serve import Server
from motet.parallel.server.settings import owners_of, rule_of
from motet.parallel.server.shelf import Plan, Shelf, as_bytes
from motet.parallel.uses import Uses
from motet.precision.master import cast_frozen
from motet.precision.recipe import RECIPES
from motet.train.assemble import Outcome, build_model, build_parts, monitoring, numerics, restore, train
from motet.train.faults import StopFlag
from motet.train.job import Job
from motet.train.mirror import Mirror, plan_of
from motet.train.optimizer import make_optimizer
from motet.train.served_steps import Share, Steps
from motet.train.step import rows_of_rank

ADDRESS = "desk"
"""The key under which the store has where the desk is."""
SAME = "same"
"""The key under which it has what must be the same everywhere."""


class Crew(NamedTuple):
    """Who is who among the ranks of a run."""

    servers: int
    workers: int

    def name(self, rank: int) -> str:
        if rank == 0:
            return DESK
        return f"s{rank - 1}" if rank <= self.servers else f"w{rank - 1 - self.servers}"


def crew_of(job: Job, world: int) -> Crew:
    servers = job.layout.server.count
    return Crew(servers, world - 1 - servers)


def run_served(job: Job, place: Place, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Be what this rank is."""
    crew = crew_of(job, place.world)
    name = crew.name(place.rank)
    torch.set_num_threads(threads_for(_among_workers(place, crew), job.run.threads))
    with meeting(place, job.run.timeout_s) as (_, store), numerics(job):
        if name == DESK:
            return _run_desk(job, crew, place, store, Beside(folder, stop, callbacks))
        if place.rank <= crew.servers:
            return _run_server(job, name, place, store)
        return _run_worker(job, crew, name, place, store)


# --- the desk --------------------------------------------------------------------------------------


class Beside(NamedTuple):
    """What the desk has to do with beside the other ranks."""

    folder: Path
    stop: StopFlag
    callbacks: Sequence[Callback]


def _run_desk(job: Job, crew: Crew, place: Place, store: Store, beside: Beside) -> Outcome:
    device = torch.device("cpu")
    alone = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    parts = replace(build_parts(alone, Group(0, 1, None, device), beside.folder), workers=crew.workers)
    if saved_buffers(parts.model.module):
        raise InputError(
            "layout.data = 'parameter_server' has no place for the buffers that this model keeps (running statistics); "
            "use a norm without them, or layout.data=all_reduce"
        )
    _agree(DESK, place, store, parts.model.module, parts.data)
    restored = restore(parts)
    done = restored[1]
    server = job.layout.server
    plan = plan_of(parts.model.module, job.optimizer, RECIPES[job.precision.recipe], server)
    rule = rule_of(server, crew.workers, parts.steps)
    steps = Steps(job, rule, parts.steps)
    view = View(0, owners_of([piece.server for piece in plan.pieces], server))
    names = [crew.name(1 + number) for number in range(crew.servers)]
    first = done * (rule.shares if rule.alone else 1)
    desk = Desk(rule, view, names, server.copies, first, steps.judge, until=done, closes=False)
    desk.settled, desk.fresh = Settled(done * rule.shares), done * rule.shares
    mirror = Mirror(plan, parts.updater)
    with _posted(DESK, job, place, store) as post:
        office = Office(desk, post, job.run.timeout_s, _tell, mirror.piece)
        steps.office = office
        spread = parts.updater.spread
        assert isinstance(spread, FlatSpread)
        spread.refresh = partial(_refresh, mirror, office, [desk.updates])
        with monitoring(job, parts.group, beside.folder, beside.callbacks) as monitor:
            outcome = train(job, parts, restored, monitor, beside.stop, steps)
        office.close([crew.name(rank) for rank in range(1, place.world)])
        return outcome


def _refresh(mirror: Mirror, office: Office, known: list[int]) -> None:
    """Unless it is known what the servers have."""
    if known[0] != office.desk.updates:
        known[0] = office.desk.updates
        mirror.take(office.fetch())


def _tell(decided: Decide) -> None:
    trace.count("updates", 1.0)


# --- servers ---------------------------------------------------------------------------------------


def _run_server(job: Job, name: str, place: Place, store: Store) -> Outcome:
    _, model = build_model(job, torch.device("cpu"))
    _agree(name, place, store, model.module, None)
    plan = plan_of(model.module, job.optimizer, RECIPES[job.precision.recipe], job.layout.server)
    del model
    view = View(0, owners_of([piece.server for piece in plan.pieces], job.layout.server))
    mine = [piece for piece, owned in enumerate(view.owners) if name in owned.servers]
    keeper = Keeper(name, view, {piece: Kept(there=False) for piece in mine})
    with _posted(name, job, place, store) as post:
        shelf = Shelf(plan, partial(make_optimizer, settings=job.optimizer))
        server = Server(keeper, shelf, post, job.run.timeout_s)
        server.run()
    return Outcome(0, 0)


# --- workers ---------------------------------------------------------------------------------------


def _run_worker(job: Job, crew: Crew, name: str, place: Place, store: Store) -> Outcome:
    device = pick_device(job.run.device, _among_workers(place, crew))
    data, model = build_model(job, device)
    _agree(name, place, store, model.module, data)
    recipe = RECIPES[job.precision.recipe]
    plan = plan_of(model.module, job.optimizer, recipe, job.layout.server)
    cast_frozen(model.module, recipe)
    steps = job.run.steps if job.run.steps is not None else data.steps_for_epochs(job.run.epochs or 1.0)
    rule = rule_of(job.layout.server, crew.workers, steps)
    layout = resolve_layout(job.layout, crew.workers, job.data.batch_sequences)
    view = View(0, owners_of([piece.server for piece in plan.pieces], job.layout.server))
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    gradients = Gradients(plan.buckets, 0, plan.gradient, device, keep=True)
    weights = FlatWeights(named, plan.buckets, [slice(b.start, b.start) for b in plan.buckets], recipe, gradients)
    with _posted(name, job, place, store) as post:
        attendant = Attendant(Client(name, view), plan, weights, post, job.run.timeout_s)
        worker = Worker(model, data, attendant, weights, rule, layout, job.data.batch_sequences)
        worker.ordered = job.layout.server.order == "need"
        worker.run(plan, {named[m.name]: number for number, b in enumerate(plan.buckets) for m in b.members})
        attendant.close()
    return Outcome(0, 0)


@dataclass
class Worker:
    model: Trainee
    data: Loader
    attendant: Attendant
    weights: FlatWeights
    rule: Rule
    layout: Layout
    batch_sequences: int
    ordered: bool = False
    """What forward needs first travels first."""

    def run(self, plan: Plan, numbers: dict[Tensor, int]) -> None:
        uses = Uses(self.model.module, numbers, self.attendant.need)
        while (ticket := self.attendant.next()) is not None:
            uses.begin()
            if not uses.order:
                for bucket in range(len(plan.buckets)):
                    self.attendant.need(bucket)
            self._work(ticket, uses)

    def _work(self, ticket: Ticket, uses: Uses) -> None:
        step, index = divmod(ticket.share, self.rule.shares)
        gradients = self.weights.gradients
        gradients.begin()
        loss_sum, count, tokens = 0.0, 0.0, 0.0
        portions = rows_of_rank(self.layout, index, self.batch_sequences)
        for part, rows in enumerate(portions):
            batch = self.data.batch(step, rows).to(self.weights.compute.device)
            count += batch.weights.sum(dtype=torch.float64).item()
            tokens += batch.tokens.numel()
            with self.model.randomness(step, batch.rows):
                loss = self.model.loss_sum(batch)
            uses.end()
            if self.ordered:
                self.attendant.order(uses.order)
                self.ordered = False
            self.attendant.need_all()
            loss_sum += loss.item()
            last = part == len(portions) - 1
            report = Share(loss_sum, count, tokens, 0.0, float(min(self.attendant.versions)))
            sent: set[int] = set()
            gradients.on_complete = partial(self._push, report, sent) if last and not self.rule.alone else _nothing
            gradients.begin_backward()
            loss.backward()
        buckets = range(len(self.weights.buckets))
        for bucket in buckets:
            gradients.fill(bucket)
        if self.rule.alone:
            report = report._replace(squares=self._squares())
        for bucket in buckets:
            if bucket not in sent:
                self._push(report, sent, bucket)

    def _squares(self) -> float:
        whole = self.weights.gradients.kept(slice(0, self.weights.buckets[-1].stop))
        return float(torch.linalg.vector_norm(whole).item() ** 2)

    def _push(self, report: Share, sent: set[int], bucket: int) -> None:
        self.weights.gradients.fill(bucket)
        sent.add(bucket)
        self.attendant.ready(bucket, report)


def _nothing(bucket: int) -> None:
    """Not yet."""


# --- all of them -----------------------------------------------------------------------------------


def _agree(name: str, place: Place, store: Store, module: nn.Module, data: Loader | None) -> None:
    """Processes with another model or other data would train on what does not belong together."""
    frozen = [p.detach().cpu().contiguous().view(-1) for p in module.parameters() if not p.requires_grad]
    digest = crc32(repr(described(module)).encode())
    for tensor in frozen:
        digest = crc32(as_bytes(tensor), digest)
    key, mine = f"{SAME}-{place.attempt}", {"model": str(digest), "data": data.fingerprint if data else ""}
    if name == DESK:
        store.set(key, json.dumps(mine))
        return
    desk = json.loads(store.get(key))
    for what, found in mine.items():
        if found and found != desk[what]:
            raise InputError(
                f"the {what} of {name} is not that of the desk (fingerprint {found} here, {desk[what]} there); give "
                "every machine the same job and the same files"
            )


@contextmanager
def _posted(name: str, job: Job, place: Place, store: Store) -> Iterator[Post]:
    """Connected to the desk, or the desk itself."""
    host = None if name.startswith("w") else _own_host(place)
    key = f"{ADDRESS}-{place.attempt}"
    post = Post(name, job.name, job.run.timeout_s, host)
    try:
        if name == DESK:
            there, port = post.address
            store.set(key, f"{there}:{port}")
        else:
            there, _, number = store.get(key).decode().rpartition(":")
            post.connect(DESK, (there, int(number)))
        yield post
    finally:
        post.close()


def _own_host(place: Place) -> str:
    """The address of this machine that leads to where the ranks meet."""
    if not place.rendezvous.startswith("tcp://"):
        return "127.0.0.1"
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    if found.startswith("127.") and place.local_world < place.world:
        raise InputError(
            f"{host}, where the ranks meet, is this machine's loopback address here, which others cannot reach; give "
            "the launcher an address of the network"
        )
    return found


def _among_workers(place: Place, crew: Crew) -> Place:
    """As if there were only workers on this machine."""
    first = place.rank - place.local_rank
    others = max(0, min(1 + crew.servers - first, place.local_world))
    workers = max(1, place.local_world - others)
    return replace(place, local_rank=max(0, place.local_rank - others), local_world=workers)
