"""A worker of a run: computes work items, and joins again after an eviction."""

import contextlib
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor

from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.data_parallel.forward_prefetch import ModuleParameterWaiter
from motet.parallel.layout import Layout, microbatches_of_rank
from motet.parallel.parameter_server.process.tcp_transport import EvictedError
from motet.parallel.parameter_server.process.worker_client import ParameterServerClient
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, WorkAssignment, WorkItemReport
from motet.parallel.parameter_server.protocol.parameter_slices import initial_placement
from motet.parallel.parameter_server.protocol.worker_state_machine import WorkerStateMachine
from motet.parallel.parameter_server.server_settings import has_per_item_updates
from motet.parallel.process.process_group import pick_device
from motet.parallel.reproducible.norms import squared_norm
from motet.precision.cast_frozen import cast_frozen_parameters
from motet.train.build import build_model
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.parameter_server.build_parameter_slicing import build_handshake, build_partition
from motet.train.parameter_server.process_roles import WORK_ITEMS_ENTRY, ParameterServerRoleContext, open_transport


def run_worker(role: ParameterServerRoleContext, stop: StopFlag) -> None:
    """Run until the end; a worker that joined late may leave earlier."""
    job = role.job
    device = pick_device(job.run.device, role.rank_env_among_workers)
    data, model = build_model(job, device)
    recipe = job.precision.resolved
    partition = build_partition(model.module, job)
    handshake = build_handshake(job, model.module, partition, data=data)
    cast_frozen_parameters(model.module, recipe)
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    slices, dtype = [bucket.flat_slice for bucket in partition.buckets], getattr(torch, recipe.reduce)
    gradients = GradientBuffer(partition.buckets, slices, dtype, device=device, keeps_all=True)
    no_masters = [slice(b.start, b.start) for b in partition.buckets]
    flat_parameters = FlatParameters(named, partition.buckets, no_masters, recipe=recipe, gradients=gradients)
    worker = ParameterServerWorker(job, model, data, flat_parameters, stop if role.has_joined_late else StopFlag())
    bucket_ids: dict[Tensor, int] = {named[m.name]: i for i, b in enumerate(partition.buckets) for m in b.members}
    worker.usage = ModuleParameterWaiter(model.module, bucket_ids, lambda i: worker.client.wait_for_bucket(i))
    placement = initial_placement(partition.slices, job.layout.server.count, job.layout.server.copies)
    for attempt in count():
        name = f"{role.process_name}+{attempt}" if attempt else role.process_name
        with open_transport(role, name, handshake, partition=partition) as transport:
            client = ParameterServerClient(
                WorkerStateMachine(name, placement),
                partition,
                flat_parameters,
                transport=transport,
                timeout_s=job.run.timeout_s,
                connect_timeout_s=job.layout.server.eviction_timeout_s,
                sibling_errors=role.sibling_errors,
            )
            with contextlib.closing(client), contextlib.suppress(EvictedError):
                worker.run(client)
                return


@dataclass
class ParameterServerWorker:
    job: Job
    model: TrainableModel
    data: BatchLoader
    flat_parameters: FlatParameters
    stop: StopFlag
    usage: ModuleParameterWaiter = field(init=False)
    client: ParameterServerClient = field(init=False)  # A new one after each eviction

    def run(self, client: ParameterServerClient) -> None:
        self.client = client
        must_set_order = self.job.layout.server.send_order == "priority"
        layout: Layout | None = None
        while not self.stop.requested and (assignment := client.next_assignment()) is not None:
            if self.usage.first_use_order and must_set_order:
                client.set_bucket_order(self.usage.first_use_order)
                must_set_order = False
            self.usage.begin_step()
            if not self.usage.first_use_order:
                for bucket_id in range(len(self.flat_parameters.buckets)):
                    client.wait_for_bucket(bucket_id)
            layout = layout or self.job.layout_for(int(client.transport.peer_handshakes[COORDINATOR][WORK_ITEMS_ENTRY]))
            self._run_work_item(assignment, layout)

    def _run_work_item(self, assignment: WorkAssignment, layout: Layout) -> None:
        step, index = divmod(assignment.work_item, layout.sharding.ranks)
        microbatches = microbatches_of_rank(layout, index, self.job.data.batch_sequences)
        gradients, buckets = self.flat_parameters.gradients, range(len(self.flat_parameters.buckets))
        gradients.begin_step()
        loss_sum, target_count, token_count, pushed_buckets = 0.0, 0.0, 0.0, set[int]()
        uses_per_item_updates = has_per_item_updates(self.job.layout.server)
        for microbatch in microbatches:
            batch = microbatch.select(self.data.batch(step, microbatch.rows)).to(self.flat_parameters.compute.device)
            target_count += batch.weights.sum(dtype=torch.float64).item()
            token_count += batch.tokens.numel()
            with self.model.randomness(step, batch.rows):
                loss = self.model.loss_sum(batch)
                self.usage.finish_recording()
                oldest_version = self.client.wait_for_all()
                loss_sum += loss.item()
                report = WorkItemReport(loss_sum, target_count, token_count, 0.0, float(oldest_version))
                # The last bucket waits for the norm of the gradient, which is in the report.
                max_pushed = len(buckets) - uses_per_item_updates if microbatch is microbatches[-1] else 0
                gradients.on_bucket_ready = partial(self._push_bucket, report, pushed_buckets, max_pushed)
                gradients.begin_backward()
                loss.backward()
        for bucket_id in buckets:
            gradients.zero_missing(bucket_id)
        if uses_per_item_updates:
            flat_gradient = gradients.local_slice(slice(0, self.flat_parameters.buckets[-1].stop))
            report = report._replace(squared_norm=squared_norm(flat_gradient).item())
        for bucket_id in [i for i in buckets if i not in pushed_buckets]:
            self._push_bucket(report, pushed_buckets, len(buckets), bucket_id)

    def _push_bucket(self, report: WorkItemReport, pushed_buckets: set[int], max_pushed: int, bucket_id: int) -> None:
        if len(pushed_buckets) < max_pushed:
            self.flat_parameters.gradients.zero_missing(bucket_id)
            pushed_buckets.add(bucket_id)
            self.client.push_bucket(bucket_id, report)
