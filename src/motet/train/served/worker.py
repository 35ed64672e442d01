"""A worker of a run: does share after share, and joins anew when it was out of reach for too long."""

from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.data_parallel.forward_prefetch import ParameterUsageTracker
from motet.parallel.layout import Layout
from motet.parallel.parameter_server.process.parameter_store import ParameterPartition
from motet.parallel.parameter_server.process.worker_client import ParameterServerClient, WorkerEvictedError
from motet.parallel.parameter_server.protocol.messages import ParameterPlacement, WorkAssignment
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from motet.parallel.parameter_server.server_settings import assign_replicas, has_per_item_updates
from motet.parallel.process.process_group import pick_device
from motet.parallel.reproducible.accurate_norm import squared_norm
from motet.parallel.row_assignment import microbatches_of_rank
from motet.precision.cast_frozen import cast_frozen_parameters
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
    cast_frozen_parameters(model.module, recipe)
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    gradients = GradientBuffer(plan.buckets, 0, plan.gradient_dtype, device, keeps_full_gradients=True)
    weights = FlatParameters(named, plan.buckets, [slice(b.start, b.start) for b in plan.buckets], recipe, gradients)
    worker = Worker(job, model, data, plan, weights, stop if seat.has_joined else StopFlag())
    numbers: dict[Tensor, int] = {named[m.name]: number for number, b in enumerate(plan.buckets) for m in b.members}
    uses = ParameterUsageTracker(model.module, numbers, worker.need)
    view = ParameterPlacement(0, assign_replicas([piece.server_index for piece in plan.slices], job.layout.server))
    limits_s = job.run.timeout_s, job.layout.server.eviction_timeout_s
    for again in count():
        name = f"{seat.name}+{again}" if again else seat.name
        with posted(seat, name, same) as post:
            attendant = ParameterServerClient(WorkerStateMachine(name, view), plan, weights, post, limits_s)
            attendant.sibling_errors = seat.failed
            try:
                worker.run(attendant, uses)
                return
            except WorkerEvictedError:
                continue
            finally:
                attendant.close()


@dataclass
class Worker:
    job: Job
    model: TrainableModel
    data: BatchLoader
    plan: ParameterPartition
    weights: FlatParameters
    stop: StopFlag
    attendant: ParameterServerClient | None = None
    """Another one when it joins anew."""

    def run(self, attendant: ParameterServerClient, uses: ParameterUsageTracker) -> None:
        """Share after share, until the end."""
        self.attendant = attendant
        ordered = self.job.layout.server.send_order == "need"
        layout: Layout | None = None
        while not self.stop.requested and (ticket := attendant.next_assignment()) is not None:
            if uses.first_use_order and ordered:
                attendant.set_bucket_order(uses.first_use_order)
                ordered = False
            uses.begin_step()
            if not uses.first_use_order:
                for bucket in range(len(self.plan.buckets)):
                    attendant.wait_for_bucket(bucket)
            if layout is None:  # the desk says how a step is cut
                shares = int(attendant.coordinator_handshake[SHARES])
                layout = self.job.resolved(shares)
            self._work(ticket, layout, uses)

    def need(self, bucket: int) -> None:
        assert self.attendant
        self.attendant.wait_for_bucket(bucket)

    def _work(self, ticket: WorkAssignment, layout: Layout, uses: ParameterUsageTracker) -> None:
        attendant = self.attendant
        assert attendant
        step, index = divmod(ticket.work_item, layout.dp)
        portions = [share.rows for share in microbatches_of_rank(layout, index, self.job.data.batch_sequences)]
        gradients = self.weights.gradients
        gradients.begin_step()
        loss_sum, count, tokens = 0.0, 0.0, 0.0
        alone = has_per_item_updates(self.job.layout.server)
        for part, rows in enumerate(portions):
            batch = self.data.batch(step, rows).to(self.weights.compute.device)
            count += batch.weights.sum(dtype=torch.float64).item()
            tokens += batch.tokens.numel()
            with self.model.randomness(step, batch.rows):
                loss = self.model.loss_sum(batch)
            uses.finish_recording()
            attendant.wait_for_all()
            loss_sum += loss.item()
            last = part == len(portions) - 1
            report = Share(loss_sum, count, tokens, 0.0, float(min(attendant.pulled_versions)))
            sent: set[int] = set()
            # The norm of a share that is an update by itself is told with its last bucket.
            most = len(self.weights.buckets) - alone
            gradients.on_bucket_ready = partial(self._push, report, sent, most) if last else _nothing
            gradients.begin_backward()
            loss.backward()
        buckets = range(len(self.weights.buckets))
        for bucket in buckets:
            gradients.zero_missing(bucket)
        if alone:
            report = report._replace(squares=self._squares())
        for bucket in buckets:
            if bucket not in sent:
                self._push(report, sent, len(buckets), bucket)

    def _squares(self) -> float:
        whole = self.weights.gradients.local_slice(slice(0, self.weights.buckets[-1].stop))
        return squared_norm(whole)

    def _push(self, report: Share, sent: set[int], most: int, bucket: int) -> None:
        assert self.attendant
        if len(sent) >= most:
            return
        self.weights.gradients.zero_missing(bucket)
        sent.add(bucket)
        self.attendant.push_bucket(bucket, report)


def _nothing(bucket: int) -> None:
    """Not yet."""
