"""The coordinator's copy of the parameters: for the start of a run, checkpoints and evaluations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.parameter_server.process.coordinator_process import CoordinatorProcess
from motet.parallel.parameter_server.process.parameter_store import (
    ParameterPartition,
    deserialize_tensors,
    serialize_tensors,
)
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer

# Kind of state -> a view of each parameter's flat values by name; or a count that all parameters share.
StateByKind = dict[str, dict[str, Tensor] | Tensor]


@dataclass
class CoordinatorParameterCopy:
    """The master parameters and moments of the coordinator's optimizer, cut into slices."""

    partition: ParameterPartition
    optimizer: ShardedOptimizer
    version: int
    _skips_fetch: bool = False  # While the copy itself is read, however old it is

    def refresh(self, coordinator: CoordinatorProcess) -> None:
        """Fetch the parameters from the servers, unless the copy is up to date."""
        if self.version != coordinator.state_machine.update_count and not self._skips_fetch:
            content = coordinator.fetch_slice_states()
            self.version = coordinator.state_machine.update_count
            self.load_slice_states(content)

    def stored_slice_state(self, slice_id: int) -> memoryview:
        """The serialized state of a slice at the version of the copy."""
        self._skips_fetch = True
        try:
            state_by_kind = self._state_by_kind()
        finally:
            self._skips_fetch = False
        tensors: dict[str, Tensor] = {}
        for kind, named in state_by_kind.items():
            if isinstance(named, Tensor):
                tensors[kind] = named
                continue
            values = torch.zeros(self.partition.slices[slice_id].numel, dtype=next(iter(named.values())).dtype)
            for name, in_member, in_slice in self._members_of_slice(slice_id):
                values[in_slice] = named[name][in_member]
            tensors[kind] = values
        return serialize_tensors(tensors)

    def load_slice_states(self, slice_states: Mapping[int, bytearray]) -> None:
        """Load the state of slices from the servers."""
        state_by_kind = self._state_by_kind()
        for slice_id, content in slice_states.items():
            for kind, values in deserialize_tensors(content).items():
                named = state_by_kind[kind]
                if isinstance(named, Tensor):
                    named.copy_(values)
                    continue
                for name, in_member, in_slice in self._members_of_slice(slice_id):
                    named[name][in_member] = values[in_slice]
        self.optimizer.sync_parameters()

    def _state_by_kind(self) -> StateByKind:
        state_by_kind: StateByKind = {}
        for state_name, value in self.optimizer.state().items():
            kind, slash, name = state_name.partition("/")
            if not slash:
                assert isinstance(value, Tensor)
                state_by_kind[kind] = value
            elif isinstance(value, LocalShard):
                named = state_by_kind.setdefault(kind, {})
                assert isinstance(named, dict)
                named[name] = value.values
        return state_by_kind

    def _members_of_slice(self, slice_id: int) -> Iterator[tuple[str, slice, slice]]:
        """(name, range in the parameter, range in the slice) of each parameter in a slice."""
        parameter_slice = self.partition.slices[slice_id]
        flat = parameter_slice.flat_range
        for member in self.partition.buckets[parameter_slice.bucket_id].members:
            first, stop = max(member.start, flat.start), min(member.stop, flat.stop)
            if first < stop:
                in_member = slice(first - member.start, stop - member.start)
                yield member.name, in_member, slice(first - flat.start, stop - flat.start)
