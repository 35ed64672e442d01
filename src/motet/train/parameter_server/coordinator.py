"""The coordinator of a run does what rank 0 does elsewhere: it logs, evaluates and writes checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from motet.core.errors import check_input
from motet.monitor.callback import Callback
from motet.monitor.events import WarningIssued
from motet.parallel.layout import LayoutSettings
from motet.parallel.parameter_server.process import parameter_store
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.protocol.coordinator_state_machine import CoordinatorStateMachine
from motet.parallel.parameter_server.protocol.message_framing import BadMessageError
from motet.parallel.parameter_server.protocol.messages import COORDINATOR
from motet.parallel.parameter_server.protocol.parameter_slices import initial_placement
from motet.parallel.parameter_server.server_settings import consistency_policy, extra_process_count
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, open_rank_monitor, restore_newest_checkpoint, run_training
from motet.train.launch.failures import StopFlag
from motet.train.loop import RunProgress
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer
from motet.train.parameter_server.build_parameter_slicing import build_handshake, build_partition
from motet.train.parameter_server.coordinator_step import CoordinatorTrainStep, ServerUpdateStepTracker
from motet.train.parameter_server.process_roles import WORK_ITEMS_ENTRY, ParameterServerRoleContext, open_transport
from motet.train.parameter_server.server import delete_old_snapshots


@dataclass
class CoordinatorParameterCopy:
    """The master parameters and moments of the coordinator's optimizer, cut into slices."""

    partition: parameter_store.ParameterSlicingPlan
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
        return parameter_store.serialize_tensors(tensors)

    def load_slice_states(self, slice_states: Mapping[int, bytearray]) -> None:
        tensors_by_kind = self._tensors_by_kind()
        for slice_id, content in slice_states.items():
            tensors = self.read_slice_state(slice_id, content)
            for kind, values, in_slice in self._parts_of_slice(slice_id, tensors_by_kind):
                values.copy_(tensors[kind][in_slice])
        self.optimizer.sync_parameters()

    def read_slice_state(self, slice_id: int, content: bytearray) -> dict[str, Tensor]:
        """The tensors of a slice that a server has sent. Raises a `BadMessageError` if one is missing."""
        tensors = parameter_store.read_slice_state(self.partition, slice_id, content)
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
    resume_point = restore_newest_checkpoint(training)
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
        with open_rank_monitor(job, training.group, folder, callbacks) as monitor:
            coordinator.log_membership = lambda text: monitor.on_event(WarningIssued(text=text))
            outcome = run_training(job, training, resume_point, monitor, stop, train_step.step)
            coordinator.close([*servers, *(f"w{index}" for index in range(workers))])
        return outcome
