"""Entry points of the ranks of a run with a parameter server.

A server of a run: holds its parameter slices until the coordinator ends the run.

A worker of a run: computes work items, and joins again after an eviction.

The coordinator of a run does the work of rank 0 elsewhere: it logs, evaluates and writes checkpoints.

The steps of a run as its coordinator sees them: workers compute, and the coordinator decides each update.
"""

import contextlib
import math
import shutil
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from motet.core.errors import check_input
from motet.data.samples.loader import BatchLoader
from motet.models.build import TrainableModel
from motet.monitor.events import ParameterServerStepStats, WarningIssued
from motet.monitor.sinks import Callback
from motet.parallel.data_parallel.bucketed_zero import ModuleParameterWaiter
from motet.parallel.data_parallel.flat_parameters import FlatParameters, GradientBuffer
from motet.parallel.layout import Layout, LayoutSettings, microbatches_of_rank
from motet.parallel.parameter_server.process import server_process
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.server_process import (
    ParameterServerProcess,
    ParameterStore,
    ServerSnapshots,
)
from motet.parallel.parameter_server.process.tcp_transport import EvictedError
from motet.parallel.parameter_server.process.worker_client import ParameterServerClient
from motet.parallel.parameter_server.protocol.messages import (
    COORDINATOR,
    BadMessageError,
    ConsistencyPolicy,
    UpdateScalars,
    WorkAssignment,
    WorkItemReport,
    initial_placement,
)
from motet.parallel.parameter_server.protocol.state_machines import (
    CoordinatorStateMachine,
    ServerSliceState,
    ServerStateMachine,
    WorkerStateMachine,
)
from motet.parallel.parameter_server.server_settings import (
    consistency_policy,
    extra_process_count,
    has_per_item_updates,
)
from motet.parallel.process.launch_environment import RankEnvironment, threads_for
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup, pick_device
from motet.parallel.reproducible.tree_reduce import squared_norm
from motet.precision.numerics import cast_frozen_parameters
from motet.train.build import build_components, build_model, precision_context
from motet.train.job import Job
from motet.train.launch.failures import StopFlag
from motet.train.loop import RunProgress, run_training
from motet.train.optimizer.optimizer_settings import learning_rate_factor
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, make_torch_optimizer
from motet.train.parameter_server.process_roles import (
    WORK_ITEMS_ENTRY,
    ParameterServerRoleContext,
    build_handshake,
    build_partition,
    open_transport,
)
from motet.train.run_report import RunReport, open_rank_monitor
from motet.train.step import StepResult

SNAPSHOTS_FOLDER = "servers"  # A folder in the run folder


def run_server(role: ParameterServerRoleContext, folder: Path) -> None:
    """Run until the end. A server that is evicted offers its place again, under another name."""
    job, timeout_s = role.job, role.job.run.timeout_s
    _, model = build_model(job, torch.device("cpu"))
    partition = build_partition(model.module, job)
    handshake = build_handshake(job, model.module, partition)
    del model
    placement = initial_placement(partition.slices, job.layout.server.count, job.layout.server.copies)
    snapshots = _open_snapshots(role, folder)
    predecessor_name, name = role.predecessor_name if role.rank_env.incarnation else "", role.process_name
    for attempt in count(1):
        with open_transport(role, name, handshake, partition=partition) as transport:
            # A server that replaces another has another name, and no slices until the coordinator gives it some.
            slice_ids = [slice_id for slice_id, (servers, _) in enumerate(placement.replicas) if name in servers]
            slice_states = {slice_id: ServerSliceState(is_initialized=False) for slice_id in slice_ids}
            known_placement = placement._replace(epoch=-1) if predecessor_name else placement
            state_machine = ServerStateMachine(name, known_placement, slice_states)
            store = ParameterStore(partition, partial(make_torch_optimizer, settings=job.optimizer))
            server = ParameterServerProcess(state_machine, store, transport, timeout_s=timeout_s, snapshots=snapshots)
            if predecessor_name:
                server.offer_takeover(predecessor_name)
            try:
                server.run()
                break
            except EvictedError:
                predecessor_name, name = name, f"{role.process_name}+{attempt}"
    if snapshots:
        snapshots.close_and_delete()


def _open_snapshots(role: ParameterServerRoleContext, folder: Path) -> ServerSnapshots | None:
    """Snapshots are for a server whose slices have no second copy, and that the launcher can restart."""
    server = role.job.layout.server
    if server.copies > 1 or not server.snapshot_every or not role.rank_env.rendezvous.startswith("file://"):
        return None
    return ServerSnapshots(snapshots_folder(folder, role.rank_env) / role.role_name, server.snapshot_every)


def snapshots_folder(folder: Path, rank_env: RankEnvironment) -> Path:
    """The folder of this start of the run, named after its rendezvous."""
    return folder / SNAPSHOTS_FOLDER / Path(rank_env.rendezvous.removeprefix("file://")).parent.name


def delete_old_snapshots(folder: Path, rank_env: RankEnvironment) -> None:
    """Delete the snapshots of earlier starts."""
    for old_folder in (folder / SNAPSHOTS_FOLDER).glob("*"):
        if old_folder != snapshots_folder(folder, rank_env):
            shutil.rmtree(old_folder, ignore_errors=True)


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
        step, index = divmod(assignment.work_item, layout.data_ranks)
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


class ServerUpdateStats(NamedTuple):
    """The work items of an update; staleness is the number of updates, or steps, that their parameters were behind."""

    reports: list[WorkItemReport]
    update_staleness: list[int]
    step_staleness: list[int]
    grad_norm: float
    is_applied: bool


@dataclass
class ServerUpdateStepTracker:
    """The steps that are complete at each update."""

    policy: ConsistencyPolicy
    first_step: int
    work_items_by_step: Counter[int] = field(default_factory=Counter)  # Work items of incomplete steps
    updates_at_step_end: list[int] = field(default_factory=list)  # Updates until each step from `first_step` on ends

    def add_update(self, update: int, work_items: Iterable[int]) -> None:
        self.work_items_by_step.update(map(self.policy.step_of, work_items))
        items_of_step = self.policy.work_items_per_step if self.policy.has_per_item_updates else self.policy.quorum
        while self.work_items_by_step[step := self.first_step + len(self.updates_at_step_end)] == items_of_step:
            del self.work_items_by_step[step]
            self.updates_at_step_end.append(update + 1)

    def completed_steps(self, updates: int) -> int:
        return self.first_step + bisect_right(self.updates_at_step_end, updates)


@dataclass
class CoordinatorTrainStep:
    """Waits until workers have done a step, and reports it. The protocol calls `decide_update` for each update."""

    job: Job
    policy: ConsistencyPolicy
    total_steps: int
    completion: ServerUpdateStepTracker
    coordinator: CoordinatorProcess
    unreported_updates: list[ServerUpdateStats] = field(default_factory=list)
    consecutive_skipped: int = 0
    last_traffic: tuple[int, int] = 0, 0  # Bytes that all servers had sent and received at the last step

    def decide_update(self, update: int, reports: dict[int, WorkItemReport], norms: dict[int, float]) -> UpdateScalars:
        """Clip the gradient by the squared norms, scale the learning rate, and skip an update that is not finite."""
        work_items = sorted(reports)
        item_reports = [reports[work_item] for work_item in work_items]
        count = sum(report.targets for report in item_reports)
        divisor = count if count > 0 else 1.0
        if self.policy.has_per_item_updates:
            norms = {work_item: reports[work_item].squared_norm for work_item in work_items}
        norm = math.sqrt(_sum(norms.values())) / divisor
        is_finite = math.isfinite(norm) and all(math.isfinite(report.loss_sum) for report in item_reports)
        versions = [int(report.oldest_version) for report in item_reports]
        update_staleness = [update - version for version in versions]
        completed = map(self.completion.completed_steps, versions)
        step_staleness = [self.policy.step_of(i) - steps for i, steps in zip(work_items, completed, strict=True)]
        self.completion.add_update(update, work_items)
        stats = ServerUpdateStats(item_reports, update_staleness, step_staleness, norm, is_finite)
        self.unreported_updates.append(stats)
        if not is_finite:
            return UpdateScalars()
        clip_norm = self.job.optimizer.clip_norm
        clip_factor = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
        return UpdateScalars(self._update_rate(update, update_staleness), clip_factor / divisor, is_applied=True)

    def _update_rate(self, update: int, update_staleness: list[int]) -> float:
        updates_per_step, optimizer = self.policy.updates_per_step, self.job.optimizer
        factor = learning_rate_factor(optimizer.schedule, update // updates_per_step, self.total_steps)
        rate = factor * optimizer.learning_rate / updates_per_step
        if self.job.layout.server.learning_rate_scaling == "by-staleness":
            rate /= max(1.0, sum(update_staleness) / len(update_staleness) / updates_per_step)
        return rate

    def step(
        self, step: int, learning_rate: float, stop: bool = False, last: bool = False, save: bool = False
    ) -> StepResult:
        state_machine = self.coordinator.state_machine
        started_steps = -(-state_machine.next_work_item // self.policy.work_items_per_step)
        step_limit = max(step + 1, started_steps) if stop or save else self._next_boundary(step)
        if step_limit != state_machine.step_limit:
            self.coordinator.extend_to_step(step_limit)
        count = self.policy.updates_per_step
        self.coordinator.run(lambda: len(self.unreported_updates) >= count, f"at step {step + 1}")
        updates, self.unreported_updates = self.unreported_updates[:count], self.unreported_updates[count:]
        is_boundary = step_limit == step + 1
        result = self._step_result(updates, learning_rate, stop_requested=stop and is_boundary)
        return replace(result, save_requested=save and is_boundary)

    def _next_boundary(self, step: int) -> int:
        """The next step after which the coordinator reads the parameters."""
        job = self.job
        intervals = [*job.checkpoint.step_intervals, *filter(None, [job.monitor.evaluate_every])]
        ends = [self.total_steps, job.run.stop_at or self.total_steps]
        return min([*ends, *((step // every + 1) * every for every in intervals)])

    def _step_result(self, updates: list[ServerUpdateStats], rate: float, *, stop_requested: bool) -> StepResult:
        reports = [report for update in updates for report in update.reports]
        count = _sum(report.targets for report in reports)
        is_finite = all(update.is_applied for update in updates)
        self.consecutive_skipped = 0 if is_finite else self.consecutive_skipped + 1
        traffic, previous_traffic = self.coordinator.traffic_reports.values(), self.last_traffic
        sent, received = self.last_traffic = sum(t.sent_bytes for t in traffic), sum(t.received_bytes for t in traffic)
        server_work = ParameterServerStepStats(
            staleness_histogram=_histogram(late for update in updates for late in update.update_staleness),
            steps_behind_histogram=_histogram(late for update in updates for late in update.step_staleness),
            workers=len(self.coordinator.state_machine.workers),
            sent_bytes=sent - previous_traffic[0],
            received_bytes=received - previous_traffic[1],
            waiting_bytes=sum(report.queued_bytes for report in traffic),
        )
        return StepResult(
            loss=_sum(report.loss_sum for report in reports) / (count if count > 0 else 1.0),
            grad_norm=max(update.grad_norm for update in updates),
            targets=count,
            tokens=int(sum(report.tokens for report in reports)),
            learning_rate=rate,
            is_finite=is_finite,
            stop_requested=stop_requested,
            skipped_steps=self.consecutive_skipped,
            server_work=server_work,
        )


def _sum(values: Iterable[float]) -> float:
    """The exact sum; not a number if it is infinite."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _histogram(values: Iterable[int]) -> tuple[int, ...]:
    counts = Counter(values)
    return tuple(counts[value] for value in range(max(counts) + 1))


@dataclass
class CoordinatorParameterCopy:
    """The master parameters and moments of the coordinator's optimizer, cut into slices."""

    partition: server_process.ParameterSlicingPlan
    optimizer: ShardedOptimizer
    version: int
    _skips_fetch: bool = False  # While the copy itself is read, however old it is

    def refresh(self, coordinator: CoordinatorProcess) -> None:
        """Fetch the parameters from the servers, unless the copy is up to date."""
        if self.version != coordinator.state_machine.update_count and not self._skips_fetch:
            slice_states = coordinator.fetch_slice_states()
            self.version = coordinator.state_machine.update_count
            self.load_slice_states(slice_states)

    def stored_slice_state(self, slice_id: int) -> memoryview:
        """The serialized state of a slice at the version of the copy."""
        tensors_by_kind = self._stored_tensors_by_kind()
        tensors: dict[str, Tensor] = {}
        for kind, values, in_slice in self._parts_of_slice(slice_id, tensors_by_kind):
            shape = values.shape if in_slice is ... else self.partition.slices[slice_id].numel
            tensors.setdefault(kind, torch.zeros(shape, dtype=values.dtype))[in_slice] = values
        return server_process.serialize_tensors(tensors)

    def load_slice_states(self, slice_states: Mapping[int, bytearray]) -> None:
        tensors_by_kind = self._tensors_by_kind()
        for slice_id, content in slice_states.items():
            tensors = self.read_slice_state(slice_id, content)
            for kind, values, in_slice in self._parts_of_slice(slice_id, tensors_by_kind):
                values.copy_(tensors[kind][in_slice])
        self.optimizer.sync_parameters()

    def read_slice_state(self, slice_id: int, content: bytearray) -> dict[str, Tensor]:
        """The tensors of a slice that a server has sent. Raises a `BadMessageError` if one is missing."""
        tensors = server_process.read_slice_state(self.partition, slice_id, content)
        if missing := self._stored_tensors_by_kind().keys() - tensors.keys():
            raise BadMessageError(f"slice {slice_id} came without {', '.join(sorted(missing))}")
        return tensors

    def _stored_tensors_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the copy, however old it is."""
        self._skips_fetch = True
        try:
            return self._tensors_by_kind()
        finally:
            self._skips_fetch = False

    def _tensors_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """The flat values of each parameter by kind of state and name; a count that all share has no name."""
        by_kind = self.optimizer.state_by_kind()
        return {kind: {name: shard.values for name, shard in shards.items()} for kind, shards in by_kind.items()}

    def _parts_of_slice(
        self, slice_id: int, tensors_by_kind: dict[str, dict[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor, slice | EllipsisType]]:
        """(kind, values, their range in the slice) of each parameter in a slice, and of each shared count."""
        parameter_slice = self.partition.slices[slice_id]
        flat, members = parameter_slice.flat_range, self.partition.buckets[parameter_slice.bucket_id].members
        for kind, named in tensors_by_kind.items():
            if "" in named:
                yield kind, named[""], ...
                continue
            for member in members:
                first, stop = max(member.start, flat.start), min(member.stop, flat.stop)
                if first < stop:
                    in_slice = slice(first - flat.start, stop - flat.start)
                    yield kind, named[member.name][first - member.start : stop - member.start], in_slice


def run_coordinator(
    role: ParameterServerRoleContext, folder: Path, stop: StopFlag, callbacks: Sequence[Callback]
) -> RunProgress:
    job, server = role.job, role.job.layout.server
    single_device_job = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    workers = role.rank_env.world - extra_process_count(server)
    group = RankGroup(0, 1, None, torch.device("cpu"))
    training = replace(build_components(single_device_job, group, folder), ranks=workers)
    problem = "layout.data = 'parameter_server' does not support the buffers of this model (running statistics)"
    remedy = "use a norm without them, or layout.data=all_reduce"
    check_input(not persistent_buffers(training.model.module), f"{problem}; {remedy}")
    partition = build_partition(training.model.module, job)
    resume_point = training.state.restore_newest()
    done_steps = resume_point.completed_steps
    delete_old_snapshots(folder, role.rank_env)
    policy = consistency_policy(server, workers, training.total_steps)
    handshake = build_handshake(job, training.model.module, partition, data=training.data)
    handshake[WORK_ITEMS_ENTRY] = str(policy.work_items_per_step)
    servers = [f"s{index}" for index in range(server.count)]
    placement = initial_placement(partition.slices, server.count, server.copies)
    state_machine = CoordinatorStateMachine(policy, placement, list(servers), server.copies).resume_after(done_steps)
    state_machine.step_limit, state_machine.ends_at_step_limit = done_steps, False
    parameter_copy = CoordinatorParameterCopy(partition, training.engine.optimizer, state_machine.update_count)
    with open_transport(role, COORDINATOR, handshake, partition=partition) as transport:
        stored, eviction_timeout_s = parameter_copy.stored_slice_state, server.eviction_timeout_s
        coordinator = CoordinatorProcess(
            state_machine,
            transport,
            stored,
            timeout_s=job.run.timeout_s,
            eviction_timeout_s=eviction_timeout_s,
            check_slice_state=parameter_copy.read_slice_state,
        )
        training.engine.optimizer.sharded_parameters.fetch_updates = partial(parameter_copy.refresh, coordinator)
        completion = ServerUpdateStepTracker(policy, done_steps)
        train_step = CoordinatorTrainStep(job, policy, training.total_steps, completion, coordinator)
        state_machine.update_rule = train_step.decide_update
        with open_rank_monitor(job, training, callbacks) as monitor:
            coordinator.log_membership = lambda text: monitor.on_event(WarningIssued(text=text))
            report = RunReport(job, training, monitor)
            outcome = run_training(report, resume_point, stop, take_step=train_step.step)
            coordinator.close([*servers, *(f"w{index}" for index in range(workers))])
        return outcome


def run_parameter_server_rank(
    job: Job, rank_env: RankEnvironment, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    names = [COORDINATOR, *(f"s{index}" for index in range(extra_process_count(job.layout.server) - 1))]
    name = names[rank_env.rank] if rank_env.rank < len(names) else f"w{rank_env.rank - len(names)}"
    return run_role(ParameterServerRoleContext(job, rank_env, name), folder, stop, callbacks)


def run_late_worker(job: Job, rank_env: RankEnvironment, host: str, stop: StopFlag) -> None:
    """Join a run as another worker. The host makes its name unique."""
    run_role(ParameterServerRoleContext(job, rank_env, f"{host}/w{rank_env.rank}"), Path(), stop)


def run_role(
    role: ParameterServerRoleContext, folder: Path, stop: StopFlag, callbacks: Sequence[Callback] = ()
) -> RunProgress:
    torch.set_num_threads(threads_for(role.rank_env_among_workers, role.job.run.threads))
    with precision_context(role.job):
        if role.role_name == COORDINATOR:
            return run_coordinator(role, folder, stop, callbacks)
        if not role.is_worker:
            run_server(role, folder)
        elif role.colocated_server is None:
            run_worker(role, stop)
        else:
            _run_worker_with_server(role, role.colocated_server, folder, stop)
    return RunProgress(0, 0)


def _run_worker_with_server(
    role: ParameterServerRoleContext, server: ParameterServerRoleContext, folder: Path, stop: StopFlag
) -> None:
    """Run a worker, and a server as a thread. An error of the server is raised first, as the cause of the other."""

    def run_server_thread() -> None:
        try:
            with precision_context(server.job):
                run_server(server, folder)
        except BaseException as error:  # noqa: BLE001  # raised by the other thread
            role.sibling_errors.append(error)

    thread = threading.Thread(target=run_server_thread, daemon=True)
    thread.start()
    try:
        run_worker(role, stop)
        thread.join()
    finally:
        if role.sibling_errors:
            raise role.sibling_errors[0]
