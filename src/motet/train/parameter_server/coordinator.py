"""The coordinator of a run does what rank 0 does elsewhere: it logs, evaluates and writes checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from motet.parallel.parameter_server.protocol.messages import COORDINATOR, ConsistencyPolicy
from motet.parallel.parameter_server.server_settings import consistency_policy, extra_process_count
from motet.parallel.process.process_group import RankGroup
from motet.parallel.process.rank_consistency import persistent_buffers
from motet.train.build import (
    TrainingComponents,
    build_components,
    open_rank_monitor,
    restore_newest_checkpoint,
    run_training,
)
from motet.train.launch.failures import StopFlag
from motet.train.loop import RunProgress
from motet.train.parameter_server.coordinator_parameters import CoordinatorParameterCopy
from motet.train.parameter_server.coordinator_step import CoordinatorTrainStep, StepCompletionTracker
from motet.train.parameter_server.parameter_partition import build_handshake, build_partition, placement_at_start
from motet.train.parameter_server.process_roles import WORK_ITEMS_ENTRY, ParameterServerRole, open_transport
from motet.train.parameter_server.server import delete_old_snapshots


def run_coordinator(
    role: ParameterServerRole, folder: Path, stop: StopFlag, callbacks: Sequence[Callback]
) -> RunProgress:
    job = role.job
    server = job.layout.server
    single_device_job = job.model_copy(update={"layout": LayoutSettings(microbatches=job.layout.microbatches)})
    workers = role.rank_env.world - extra_process_count(server)
    group = RankGroup(0, 1, None, torch.device("cpu"))
    training = replace(build_components(single_device_job, group, folder), worker_count=workers)
    if persistent_buffers(training.model.module):
        raise InputError(
            "layout.data = 'parameter_server' does not support the buffers of this model (running statistics); use a "
            "norm without them, or layout.data=all_reduce"
        )
    partition = build_partition(training.model.module, job)
    resume_point = restore_newest_checkpoint(training)
    done = resume_point.completed_steps
    delete_old_snapshots(folder, role.rank_env)
    policy = consistency_policy(server, workers, training.total_steps)
    handshake = build_handshake(job, training.model.module, partition, data=training.data)
    handshake[WORK_ITEMS_ENTRY] = str(policy.work_items_per_step)
    with open_transport(role, COORDINATOR, handshake) as transport:
        coordinator = _build_coordinator(role, training, partition, policy=policy, transport=transport, done_steps=done)
        completion = StepCompletionTracker(policy, done)
        train_step = CoordinatorTrainStep(job, policy, training.total_steps, completion, coordinator)
        coordinator.state_machine.update_rule = train_step.decide_update
        with open_rank_monitor(job, training.group, folder, callbacks) as monitor:
            coordinator.log_membership = lambda text: monitor.on_event(WarningIssued(text=text))
            outcome = run_training(job, training, resume_point, monitor, stop, train_step)
            coordinator.close(_process_names("s", server.count) + _process_names("w", workers))
        return outcome


def _build_coordinator(
    role: ParameterServerRole,
    training: TrainingComponents,
    partition: ParameterPartition,
    *,
    policy: ConsistencyPolicy,
    transport: TcpTransport,
    done_steps: int,
) -> CoordinatorProcess:
    job, server = role.job, role.job.layout.server
    state_machine = CoordinatorStateMachine(
        policy,
        placement_at_start(partition, job),
        _process_names("s", server.count),
        server.copies,
        step_limit=done_steps,
        ends_at_step_limit=False,
    ).resume_after(done_steps)
    parameter_copy = CoordinatorParameterCopy(partition, training.optimizer, state_machine.update_count)
    coordinator = CoordinatorProcess(
        state_machine,
        transport,
        parameter_copy.stored_slice_state,
        timeout_s=job.run.timeout_s,
        eviction_timeout_s=server.eviction_timeout_s,
    )
    parameters = training.optimizer.sharded_parameters
    assert isinstance(parameters, BucketedDataParallel)
    parameters.fetch_updates = partial(parameter_copy.refresh, coordinator)
    return coordinator


def _process_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]
