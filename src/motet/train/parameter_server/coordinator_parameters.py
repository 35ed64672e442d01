"""What the servers keep of a run, as the desk has it: to begin with, for a checkpoint, and to judge the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.data_parallel.buckets import BucketParameter, build_buckets
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.data_parallel.zero import MIB
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.parameter_store import (
    ParameterPartition,
    deserialize_tensors,
    serialize_tensors,
)
from motet.parallel.parameter_server.protocol.parameter_slices import partition_buckets
from motet.parallel.parameter_server.server_settings import compression_from_settings
from motet.precision.recipe import RECIPES
from motet.train.job import Job
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer, group_parameters


def build_partition(module: nn.Module, job: Job) -> ParameterPartition:
    """The same in every process."""
    server, recipe = job.layout.server, RECIPES[job.precision.recipe]
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, job.optimizer)
    group_indices = {name: number for number, members in enumerate(groups.values()) for name in members}
    max_numel = max(1, int(server.slice_mib * MIB / DTYPE_BYTES[recipe.compute]))
    buckets = build_buckets({name: (group_indices[name], p.numel()) for name, p in named.items()}, 1, max_numel)
    slices = partition_buckets(buckets, max_numel, server.count)
    compression = compression_from_settings(server, job.run.seed)
    return ParameterPartition(buckets, slices, recipe, tuple(groups), compression, server.delay_compensation)


@dataclass
class CoordinatorParameterCopy:
    """The masters and moments of an `Updater`, as the pieces of a plan."""

    partition: ParameterPartition
    optimizer: ShardedOptimizer
    _coordinator: CoordinatorProcess | None = None
    _version: int = 0  # The updates in it
    _skips_fetch: bool = False  # What it has is wanted, not what the servers have

    def attach(self, coordinator: CoordinatorProcess) -> None:
        """It is what the servers have begun with."""
        self._coordinator, self._version = coordinator, coordinator.state_machine.update_count

    def refresh(self) -> None:
        """Fetch what the servers have, unless it is known."""
        assert self._coordinator
        if self._version != self._coordinator.state_machine.update_count and not self._skips_fetch:
            content = self._coordinator.fetch_slice_states()
            self._version = self._coordinator.state_machine.update_count
            self.load_slice_states(content)

    def stored_slice_state(self, slice_id: int) -> memoryview:
        """What it has of a piece, for the server, however old that is."""
        self._skips_fetch = True
        try:
            return self._encoded_slice_state(slice_id)
        finally:
            self._skips_fetch = False

    def _encoded_slice_state(self, slice_id: int) -> memoryview:
        flat_range = self.partition.slices[slice_id].flat_range
        tensors: dict[str, Tensor] = {}
        for kind, named in self._state_by_kind().items():
            if isinstance(named, Tensor):
                tensors[kind] = named
                continue
            values = torch.zeros(flat_range.stop - flat_range.start, dtype=next(iter(named.values())).dtype)
            for member, first, stop in self._members_of_slice(slice_id):
                values[first - flat_range.start : stop - flat_range.start] = named[member.name][
                    first - member.start : stop - member.start
                ]
            tensors[kind] = values
        return serialize_tensors(tensors)

    def load_slice_states(self, slice_states: Mapping[int, bytearray]) -> None:
        """Become what the servers have."""
        kinds = self._state_by_kind()
        for slice_id, content in slice_states.items():
            flat_range = self.partition.slices[slice_id].flat_range
            for kind, values in deserialize_tensors(content).items():
                named = kinds[kind]
                if isinstance(named, Tensor):
                    named.copy_(values)
                    continue
                for member, first, stop in self._members_of_slice(slice_id):
                    named[member.name][first - member.start : stop - member.start] = values[
                        first - flat_range.start : stop - flat_range.start
                    ]
        self.optimizer.sync_parameters()

    def _state_by_kind(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Kind -> name -> a view of its numbers in a row; or a count."""
        tensors_by_kind: dict[str, dict[str, Tensor] | Tensor] = {}
        for state_name, value in self.optimizer.state().items():
            kind, slash, name = state_name.partition("/")
            if not slash:
                assert isinstance(value, Tensor)
                tensors_by_kind[kind] = value
            elif isinstance(value, LocalShard):
                named = tensors_by_kind.setdefault(kind, {})
                assert isinstance(named, dict)
                named[name] = value.values
        return tensors_by_kind

    def _members_of_slice(self, slice_id: int) -> Iterator[tuple[BucketParameter, int, int]]:
        """(member, from, to) in the flat tensors, of what is in a piece."""
        parameter_slice = self.partition.slices[slice_id]
        for member in self.partition.buckets[parameter_slice.bucket_id].members:
            first, stop = (
                max(member.start, parameter_slice.flat_range.start),
                min(member.stop, parameter_slice.flat_range.stop),
            )
            if first < stop:
                yield member, first, stop
