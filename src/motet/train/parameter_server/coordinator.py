"""The desk of a run: does what rank 0 does elsewhere, that is, tells of steps, judges the model, writes checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from motet.core.errors import InputError
from motet.monitor.callback import Callback
from motet.monitor.events import WarningIssued
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.layout import LayoutSettings
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.parameter_store import ParameterPartition
from motet.parallel.parameter_server.process.tcp_transport import TcpTransport
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, ParameterPlacement
from motet.parallel.parameter_server.server_settings import assign_replicas, consistency_policy, extra_process_count
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import persistent_buffers
from motet.train.build import (
    ResumePoint,
    TrainingComponents,
    build_components,
    open_rank_monitor,
    restore_newest_checkpoint,
    run_training,
)
from motet.train.launch.failures import StopFlag
from motet.train.loop import RunProgress
from motet.train.parameter_server.coordinator_parameters import CoordinatorParameterCopy, build_partition
from motet.train.parameter_server.coordinator_step import CoordinatorTrainStep, StepCompletionTracker
from motet.train.parameter_server.process_roles import (
    WORK_ITEMS_ENTRY,
    ParameterServerRole,
    build_handshake,
    open_transport,
)
from motet.train.parameter_server.server import delete_old_snapshots


class CoordinatorRunContext(NamedTuple):
    """What the desk has to do with beside the other ranks."""

    folder: Path
    stop: StopFlag
    callbacks: Sequence[Callback]


def run_coordinator(role: ParameterServerRole, context: CoordinatorRunContext) -> RunProgress:
    job = role.job
    device = torch.device("cpu")
    single_device_job = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    workers = role.rank_env.world - extra_process_count(job.layout.server)
    training = replace(
        build_components(single_device_job, RankGroup(0, 1, None, device), context.folder), worker_count=workers
    )
    if persistent_buffers(training.model.module):
        raise InputError(
            "layout.data = 'parameter_server' has no place for the buffers that this model keeps (running statistics); "
            "use a norm without them, or layout.data=all_reduce"
        )
    partition = build_partition(training.model.module, job)
    resume_point = restore_newest_checkpoint(training)
    delete_old_snapshots(context.folder, role.rank_env)
    work_items = consistency_policy(job.layout.server, workers, training.total_steps).work_items_per_step
    handshake = build_handshake(job, training.model.module, partition, training.data) | {
        WORK_ITEMS_ENTRY: str(work_items)
    }
    with open_transport(role, COORDINATOR, handshake) as transport:
        coordinator, train_step, parameter_copy = _build_coordinator(
            role, training, resume_point, (partition, transport)
        )
        parameters = training.optimizer.sharded_parameters
        assert isinstance(parameters, BucketedDataParallel)
        parameters.fetch_updates = parameter_copy.refresh
        with open_rank_monitor(job, training.group, context.folder, context.callbacks) as monitor:
            coordinator.log_membership = lambda text: monitor.on_event(WarningIssued(text=text))
            outcome = run_training(job, training, resume_point, monitor, context.stop, train_step)
            coordinator.close(
                [f"s{number}" for number in range(job.layout.server.count)] + _process_names("w", workers)
            )
        return outcome


def _build_coordinator(
    role: ParameterServerRole,
    training: TrainingComponents,
    resume_point: ResumePoint,
    partition_and_transport: tuple[ParameterPartition, TcpTransport],
) -> tuple[CoordinatorProcess, CoordinatorTrainStep, CoordinatorParameterCopy]:
    job, done_steps, (partition, transport) = role.job, resume_point[1], partition_and_transport
    server = job.layout.server
    assert training.worker_count
    policy = consistency_policy(server, training.worker_count, training.total_steps)
    train_step = CoordinatorTrainStep(job, policy, training.total_steps, StepCompletionTracker(policy, done_steps))
    placement = ParameterPlacement(0, assign_replicas([slice_id.server_index for slice_id in partition.slices], server))
    state_machine = CoordinatorStateMachine(
        policy,
        placement,
        _process_names("s", server.count),
        server.copies,
        update_rule=train_step.decide_update,
        step_limit=done_steps,
        ends_at_step_limit=False,
    )
    state_machine.resume_after(done_steps)
    parameter_copy = CoordinatorParameterCopy(partition, training.optimizer)
    coordinator = CoordinatorProcess(
        state_machine, transport, (job.run.timeout_s, server.eviction_timeout_s), parameter_copy.stored_slice_state
    )
    train_step.coordinator = coordinator
    parameter_copy.attach(coordinator)
    return coordinator, train_step, parameter_copy


def _process_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]
