"""A worker of a run: does share after share, and joins anew when it was out of reach for too long."""

from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.parallel.flat import FlatWeights, Gradients
from motet.parallel.group import pick_device
from motet.parallel.layout import Layout
from motet.parallel.server.attend import Attendant, GivenUpError
from motet.parallel.server.client import Client
from motet.parallel.server.protocol import Ticket, View
from motet.parallel.server.settings import owners_of, updates_alone
from motet.parallel.server.shelf import Plan
from motet.parallel.shares import shares_of_rank
from motet.parallel.squares import squares_of
from motet.parallel.uses import Uses
from motet.precision.master import cast_frozen
from motet.precision.recipe import RECIPES
from motet.train.assemble import build_model
from motet.train.faults import StopFlag
from motet.train.job import Job
from motet.train.served.meet import SHARES, Seat, among_workers, posted, same_of
from motet.train.served.mirror import plan_of
from motet.train.served.steps import Share


def run_worker(seat: Seat, stop: StopFlag) -> None:
    """Until the end; who has joined may leave earlier."""
    job = seat.job
    device = pick_device(job.run.device, among_workers(seat))
    data, model = build_model(job, device)
    recipe = RECIPES[job.precision.recipe]
    plan = plan_of(model.module, job)
    same = same_of(job, model.module, plan, data)
    cast_frozen(model.module, recipe)
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    gradients = Gradients(plan.buckets, 0, plan.gradient, device, keep=True)
    weights = FlatWeights(named, plan.buckets, [slice(b.start, b.start) for b in plan.buckets], recipe, gradients)
    worker = Worker(job, model, data, plan, weights, stop if seat.has_joined else StopFlag())
    numbers: dict[Tensor, int] = {named[m.name]: number for number, b in enumerate(plan.buckets) for m in b.members}
    uses = Uses(model.module, numbers, worker.need)
    view = View(0, owners_of([piece.server for piece in plan.pieces], job.layout.server))
    limits_s = job.run.timeout_s, job.layout.server.patience_s
    for again in count():
        name = f"{seat.name}+{again}" if again else seat.name
        with posted(seat, name, same) as post:
            attendant = Attendant(Client(name, view), plan, weights, post, limits_s)
            attendant.beside = seat.failed
            try:
                worker.run(attendant, uses)
                return
            except GivenUpError:
                continue
            finally:
                attendant.close()


@dataclass
class Worker:
    job: Job
    model: TrainableModel
    data: BatchLoader
    plan: Plan
    weights: FlatWeights
    stop: StopFlag
    attendant: Attendant | None = None
    """Another one when it joins anew."""

    def run(self, attendant: Attendant, uses: Uses) -> None:
        """Share after share, until the end."""
        self.attendant = attendant
        ordered = self.job.layout.server.order == "need"
        layout: Layout | None = None
        while not self.stop.requested and (ticket := attendant.next()) is not None:
            if uses.order and ordered:
                attendant.order(uses.order)
                ordered = False
            uses.begin()
            if not uses.order:
                for bucket in range(len(self.plan.buckets)):
                    attendant.need(bucket)
            if layout is None:  # the desk says how a step is cut
                shares = int(attendant.told[SHARES])
                layout = self.job.resolved(shares)
            self._work(ticket, layout, uses)

    def need(self, bucket: int) -> None:
        assert self.attendant
        self.attendant.need(bucket)

    def _work(self, ticket: Ticket, layout: Layout, uses: Uses) -> None:
        attendant = self.attendant
        assert attendant
        step, index = divmod(ticket.share, layout.dp)
        portions = [share.rows for share in shares_of_rank(layout, index, self.job.data.batch_sequences)]
        gradients = self.weights.gradients
        gradients.begin()
        loss_sum, count, tokens = 0.0, 0.0, 0.0
        alone = updates_alone(self.job.layout.server)
        for part, rows in enumerate(portions):
            batch = self.data.batch(step, rows).to(self.weights.compute.device)
            count += batch.weights.sum(dtype=torch.float64).item()
            tokens += batch.tokens.numel()
            with self.model.randomness(step, batch.rows):
                loss = self.model.loss_sum(batch)
            uses.end()
            attendant.need_all()
            loss_sum += loss.item()
            last = part == len(portions) - 1
            report = Share(loss_sum, count, tokens, 0.0, float(min(attendant.versions)))
            sent: set[int] = set()
            # The norm of a share that is an update by itself is told with its last bucket.
            most = len(self.weights.buckets) - alone
            gradients.on_complete = partial(self._push, report, sent, most) if last else _nothing
            gradients.begin_backward()
            loss.backward()
        buckets = range(len(self.weights.buckets))
        for bucket in buckets:
            gradients.fill(bucket)
        if alone:
            report = report._replace(squares=self._squares())
        for bucket in buckets:
            if bucket not in sent:
                self._push(report, sent, len(buckets), bucket)

    def _squares(self) -> float:
        whole = self.weights.gradients.kept(slice(0, self.weights.buckets[-1].stop))
        return squares_of(whole)

    def _push(self, report: Share, sent: set[int], most: int, bucket: int) -> None:
        assert self.attendant
        if len(sent) >= most:
            return
        self.weights.gradients.fill(bucket)
        sent.add(bucket)
        self.attendant.ready(bucket, report)


def _nothing(bucket: int) -> None:
    """Not yet."""
