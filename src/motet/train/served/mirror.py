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
from motet.train.optimizer import Updater, group_parameters


def plan_of(module: nn.Module, job: Job) -> ParameterPartition:
    """The same in every process."""
    server, recipe = job.layout.server, RECIPES[job.precision.recipe]
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, job.optimizer)
    numbers = {name: number for number, members in enumerate(groups.values()) for name in members}
    most = max(1, int(server.slice_mib * MIB / DTYPE_BYTES[recipe.compute]))
    buckets = build_buckets({name: (numbers[name], p.numel()) for name, p in named.items()}, 1, most)
    pieces = partition_buckets(buckets, most, server.count)
    packing = compression_from_settings(server, job.run.seed)
    return ParameterPartition(buckets, pieces, recipe, tuple(groups), packing, server.delay_compensation)


@dataclass
class Mirror:
    """The masters and moments of an `Updater`, as the pieces of a plan."""

    plan: ParameterPartition
    updater: Updater
    _office: CoordinatorProcess | None = None
    _known: int = 0
    """The updates in it."""
    _as_it_is: bool = False
    """What it has is wanted, not what the servers have."""

    def follow(self, office: CoordinatorProcess) -> None:
        """It is what the servers have begun with."""
        self._office, self._known = office, office.state_machine.update_count

    def refresh(self) -> None:
        """Fetch what the servers have, unless it is known."""
        assert self._office
        if self._known != self._office.state_machine.update_count and not self._as_it_is:
            content = self._office.fetch_slice_states()
            self._known = self._office.state_machine.update_count
            self.take(content)

    def piece(self, number: int) -> memoryview:
        """What it has of a piece, for the server, however old that is."""
        self._as_it_is = True
        try:
            return self._packed(number)
        finally:
            self._as_it_is = False

    def _packed(self, number: int) -> memoryview:
        place = self.plan.slices[number].flat_range
        found: dict[str, Tensor] = {}
        for kind, named in self._kinds().items():
            if isinstance(named, Tensor):
                found[kind] = named
                continue
            values = torch.zeros(place.stop - place.start, dtype=next(iter(named.values())).dtype)
            for member, first, stop in self._inside(number):
                values[first - place.start : stop - place.start] = named[member.name][
                    first - member.start : stop - member.start
                ]
            found[kind] = values
        return serialize_tensors(found)

    def take(self, pieces: Mapping[int, bytearray]) -> None:
        """Become what the servers have."""
        kinds = self._kinds()
        for number, content in pieces.items():
            place = self.plan.slices[number].flat_range
            for kind, values in deserialize_tensors(content).items():
                named = kinds[kind]
                if isinstance(named, Tensor):
                    named.copy_(values)
                    continue
                for member, first, stop in self._inside(number):
                    named[member.name][first - member.start : stop - member.start] = values[
                        first - place.start : stop - place.start
                    ]
        self.updater.publish()

    def _kinds(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Kind -> name -> a view of its numbers in a row; or a count."""
        found: dict[str, dict[str, Tensor] | Tensor] = {}
        for key, part in self.updater.state().items():
            kind, slash, name = key.partition("/")
            if not slash:
                assert isinstance(part, Tensor)
                found[kind] = part
            elif isinstance(part, LocalShard):
                named = found.setdefault(kind, {})
                assert isinstance(named, dict)
                named[name] = part.values
        return found

    def _inside(self, number: int) -> Iterator[tuple[BucketParameter, int, int]]:
        """(member, from, to) in the flat tensors, of what is in a piece."""
        piece = self.plan.slices[number]
        for member in self.plan.buckets[piece.bucket_id].members:
            first, stop = max(member.start, piece.flat_range.start), min(member.stop, piece.flat_range.stop)
            if first < stop:
                yield member, first, stop
