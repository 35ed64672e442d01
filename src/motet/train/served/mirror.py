"""What the servers keep of a run, as the desk has it: to begin with, for a checkpoint, and to judge the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motet.core.dtypes import DTYPE_BYTES
from motet.parallel.buckets import Member, cut_buckets
from motet.parallel.placement import MIB
from motet.parallel.server.office import Office
from motet.parallel.server.pieces import cut_pieces
from motet.parallel.server.settings import packing_of
from motet.parallel.server.shelf import Plan, pack, unpack
from motet.parallel.spread import Piece
from motet.precision.recipe import RECIPES
from motet.train.job import Job
from motet.train.optimizer import Updater, group_parameters


def plan_of(module: nn.Module, job: Job) -> Plan:
    """The same in every process."""
    server, recipe = job.layout.server, RECIPES[job.precision.recipe]
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = group_parameters(named, job.optimizer)
    numbers = {name: number for number, members in enumerate(groups.values()) for name in members}
    most = max(1, int(server.piece_mib * MIB / DTYPE_BYTES[recipe.compute]))
    buckets = cut_buckets({name: (numbers[name], p.numel()) for name, p in named.items()}, 1, most)
    pieces = cut_pieces(buckets, most, server.count)
    packing = packing_of(server, job.run.seed)
    return Plan(buckets, pieces, recipe, tuple(groups), packing, server.delay_compensation)


@dataclass
class Mirror:
    """The masters and moments of an `Updater`, as the pieces of a plan."""

    plan: Plan
    updater: Updater
    _office: Office | None = None
    _known: int = 0
    """The updates in it."""
    _as_it_is: bool = False
    """What it has is wanted, not what the servers have."""

    def follow(self, office: Office) -> None:
        """It is what the servers have begun with."""
        self._office, self._known = office, office.desk.updates

    def refresh(self) -> None:
        """Fetch what the servers have, unless it is known."""
        assert self._office
        if self._known != self._office.desk.updates and not self._as_it_is:
            content = self._office.fetch()
            self._known = self._office.desk.updates
            self.take(content)

    def piece(self, number: int) -> memoryview:
        """What it has of a piece, for the server, however old that is."""
        self._as_it_is = True
        try:
            return self._packed(number)
        finally:
            self._as_it_is = False

    def _packed(self, number: int) -> memoryview:
        place = self.plan.pieces[number].place
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
        return pack(found)

    def take(self, pieces: Mapping[int, bytearray]) -> None:
        """Become what the servers have."""
        kinds = self._kinds()
        for number, content in pieces.items():
            place = self.plan.pieces[number].place
            for kind, values in unpack(content).items():
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
            elif isinstance(part, Piece):
                named = found.setdefault(kind, {})
                assert isinstance(named, dict)
                named[name] = part.values
        return found

    def _inside(self, number: int) -> Iterator[tuple[Member, int, int]]:
        """(member, from, to) in the flat tensors, of what is in a piece."""
        piece = self.plan.pieces[number]
        for member in self.plan.buckets[piece.bucket].members:
            first, stop = max(member.start, piece.place.start), min(member.stop, piece.place.stop)
            if first < stop:
                yield member, first, stop
