"""Local SGD and DiLoCo: replicas take steps on their own, and an outer optimizer makes one model of them now and then.

    anchor      what the replicas agreed on last; the same bits on every replica
    difference  anchor - master, what a replica has learned since; its mean is the outer optimizer's gradient
    merged      master := anchor after that step; after a delay, mix x master + (1 - mix) x anchor

All are kept as this rank keeps its masters, so a meeting joins the ranks that hold the same shard, whatever the stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.collectives.execute.api import WorkHandle, all_gather, sum_scalars
from motet.parallel.communication import CommunicationSettings, joined, undeferred
from motet.parallel.data import agree_on_buffers, saved_buffers
from motet.parallel.differences import Differences
from motet.parallel.group import Group
from motet.parallel.layout import Layout
from motet.parallel.meetings import OuterSettings, Schedule, cut_fragments
from motet.parallel.mesh import Mesh, make_mesh
from motet.parallel.spread import Piece, Spread


@dataclass(frozen=True)
class Replicas:
    """The ranks as replicas that train apart; each is a world of its own between meetings."""

    everyone: Group
    mesh: Mesh
    layout: Layout
    """Of everyone."""

    @property
    def count(self) -> int:
        return self.mesh.replicas.world

    @property
    def me(self) -> int:
        """The number of this rank's replica."""
        return self.mesh.replicas.rank

    @property
    def own(self) -> tuple[Group, Layout]:
        """The ranks of this replica, and how they share the work of a step."""
        return self.mesh.shards, replace(self.layout, dp=self.layout.shards)


def set_apart(group: Group, layout: Layout, communication: CommunicationSettings) -> Replicas:
    """Called by every rank of the group."""
    mesh = make_mesh(group, joined(undeferred(communication), layout))
    if mesh.replicas is group and group.world > 1:  # sums may be underway while everyone agrees on something else
        mesh = Mesh(mesh.shards, replace(group, process_group=dist.new_group(list(range(group.world)))))
    return Replicas(group, mesh, layout)


class Agreement(NamedTuple):
    """What all replicas know after a meeting."""

    stop: bool
    """Some rank was asked to stop."""
    skipped: int
    """The most steps in a row that a replica has left out since the meeting before."""


class Outer:
    """The outer optimizer of this rank's shards. It counts steps, and holds the meetings that are due."""

    def __init__(
        self,
        module: nn.Module,
        spread: Spread,
        replicas: Replicas,
        settings: OuterSettings,
        communication: CommunicationSettings,
    ) -> None:
        assert settings.every is not None
        self.replicas = replicas
        self.steps = 0
        self._module, self._spread = module, spread
        self._schedule = Schedule(settings.every, settings.fragments, settings.delay)
        self._mix = settings.mix
        averages = settings.optimizer == "average"
        self._rate, self._momentum = (1.0, 0.0) if averages else (settings.learning_rate, settings.momentum)
        pieces = spread.pieces(spread.masters)
        in_order = [name for name, _ in module.named_parameters() if name in pieces]
        self._fragments = cut_fragments({n: pieces[n].shape.numel() for n in in_order}, settings.fragments)
        self._anchors = [self._masters(number) for number in range(settings.fragments)]
        self._sums = Differences(communication, replicas.layout, replicas.mesh.replicas, self._anchors)
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors] if self._momentum else []
        self._meetings: list[_Meeting] = []
        self._left = [0] * settings.fragments
        """The step after which each fragment left last."""
        self._row = self._worst = 0
        """Steps in a row that were left out: now, and at most since the last meeting."""

    def advance(self, finite: bool, stop: bool) -> Agreement | None:
        """Count a step, and do what is due after it. None when no meeting ends here."""
        self.steps += 1
        self._row = 0 if finite else self._row + 1
        self._worst = max(self._worst, self._row)
        leaving = self._schedule.leaving(self.steps)
        if leaving:
            self._leave(leaving, stop)
        return self._merge([m for m in self._meetings if m.left + self._schedule.delay <= self.steps])

    def finish(self) -> Agreement | None:
        """Merge everything now, after the last step of all: replicas are one model then. None: they were already."""
        first = self._merge(self._meetings)
        rest = [number for number, left in enumerate(self._left) if left != self.steps]
        if not rest:
            return first
        self._leave(rest, stop=False)
        second = self._merge(self._meetings)
        assert second is not None
        return second if first is None else Agreement(first.stop, max(first.skipped, second.skipped))

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the model of every replica is the anchor, with the first rank's buffers."""
        self._spread.settle()
        buffers = list(saved_buffers(self._module).values())
        own = [self._masters(number) for number in range(len(self._fragments))]
        before = [buffer.clone() for buffer in buffers]
        self._write(self._anchors)
        agree_on_buffers(self._module, self.replicas.everyone)
        try:
            yield
        finally:
            self._write(own)
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)

    # --- what a checkpoint holds -------------------------------------------------------------------

    def stands(self) -> dict[str, int]:
        """What must be the same for a run to go on exactly."""
        when = self._schedule
        return {
            "replicas": self.replicas.count, "every": when.every, "fragments": when.fragments, "delay": when.delay
        }  # fmt: skip

    def state(self) -> dict[str, Piece]:
        """What the replicas have agreed on, by name, as views: the anchors, momenta, and means that wait to be merged.

        The anchors have the names of the masters: who knows nothing of replicas takes them for the model.
        """
        for meeting in self._meetings:
            meeting.conclude(self.replicas)
        kinds: dict[str, Mapping[int, Tensor]] = {
            "master": dict(enumerate(self._anchors)),
            "outer/momentum": dict(enumerate(self._momenta)),
            "outer/mean": {number: mean for m in self._meetings for number, mean in m.sums.items()},
        }
        return {f"{kind}/{name}": piece for kind, flats in kinds.items() for name, piece in self._pieces(flats)}

    def carried(self) -> dict[str, Piece]:
        """What compression has lost of this replica's differences, by name, as views."""
        return dict(self._pieces(dict(enumerate(self._sums.errors))))

    def _pieces(self, flats: Mapping[int, Tensor]) -> Iterator[tuple[str, Piece]]:
        """Flat tensors of fragments, cut into what this rank keeps of the parameters."""
        own = self._spread.pieces(self._spread.masters)
        for number, flat in flats.items():
            names = self._fragments[number]
            for name, values in zip(names, flat.split([own[n].values.numel() for n in names]), strict=True):
                yield name, own[name]._replace(values=values)

    def stand_at(self, steps: int, stored: Mapping[str, object]) -> None:
        """Before a state is written to: as it was after so many steps. `stored`: the names of the checkpoint."""
        self.steps, self._meetings, self._left = steps, [], [steps] * len(self._left)
        for left, numbers in self._schedule.underway(steps):
            waiting = [n for n in numbers if f"outer/mean/{self._fragments[n][0]}" in stored]
            sums = {number: torch.zeros_like(self._anchors[number]) for number in waiting}
            if waiting:
                self._meetings.append(_Meeting(left, sums, finite=True, agreement=Agreement(False, 0)))

    def set_out(self, steps: int) -> None:
        """After masters were written to: all replicas begin there."""
        self.steps, self._meetings, self._left = steps, [], [steps] * len(self._left)
        self._anchors = [self._masters(number) for number in range(len(self._fragments))]

    # --- meetings ----------------------------------------------------------------------------------

    def _leave(self, numbers: Sequence[int], stop: bool) -> None:
        """Begin to sum the differences of these fragments, and to tell everyone how this rank stands."""
        self._spread.settle()
        who = self.replicas
        device = who.everyone.device
        differences = {n: torch.sub(self._anchors[n], self._masters(n)) for n in numbers}
        broken = float(not all(difference.isfinite().all() for difference in differences.values()))
        finite = not sum_scalars([broken], who.mesh.shards, device)[0]
        if not finite:  # a replica that is lost teaches nothing, and starts again from the anchor
            for difference in differences.values():
                difference.zero_()
        works = [self._sums.start(number, difference, self.steps) for number, difference in differences.items()]
        row = torch.tensor([stop, self._worst, finite], dtype=torch.float64, device=device)
        table = row.new_empty(who.everyone.world * len(row))
        works.append(all_gather(table, row, who.everyone, async_op=True))
        self._meetings.append(_Meeting(self.steps, differences, finite, works, table, row))
        for number in numbers:
            self._left[number] = self.steps
        self._worst = 0

    def _merge(self, meetings: Sequence["_Meeting"]) -> Agreement | None:
        """End these meetings."""
        if not meetings:
            return None
        self._spread.settle()
        for meeting in meetings:
            meeting.conclude(self.replicas)
            keeps = self._mix if meeting.finite and meeting.left < self.steps else 0.0
            for number, mean in meeting.sums.items():
                if meeting.replicas:
                    self._update(number, mean)
                self._write_fragment(number, self._anchors[number], keeps)
        self._meetings = [m for m in self._meetings if m not in meetings]
        self._spread.publish()
        agree_on_buffers(self._module, self.replicas.everyone)
        told = [meeting.agreement for meeting in meetings if meeting.agreement]
        return Agreement(any(a.stop for a in told), max(a.skipped for a in told))

    def _update(self, number: int, mean: Tensor) -> None:
        """SGD with Nesterov momentum, of which the mean difference is the gradient."""
        if self._momentum:
            momentum = self._momenta[number].mul_(self._momentum).add_(mean)
            mean = mean.add(momentum, alpha=self._momentum)
        self._anchors[number].sub_(mean, alpha=self._rate)

    def _masters(self, number: int) -> Tensor:
        """Those of a fragment, one after another: a copy."""
        pieces = self._spread.pieces(self._spread.masters)
        return torch.cat([pieces[name].values for name in self._fragments[number]])

    def _write(self, flats: Sequence[Tensor]) -> None:
        """Give the model of this replica these masters."""
        self._spread.settle()
        for number, flat in enumerate(flats):
            self._write_fragment(number, flat)
        self._spread.publish()
        self._spread.settle()

    def _write_fragment(self, number: int, flat: Tensor, keeps: float = 0.0) -> None:
        """`keeps`: the weight of what is there."""
        pieces = self._spread.pieces(self._spread.masters)
        own = [pieces[name].values for name in self._fragments[number]]
        for values, given in zip(own, flat.split([v.numel() for v in own]), strict=True):
            if keeps:
                values.lerp_(given, 1.0 - keeps)
            else:
                values.copy_(given)


@dataclass(eq=False)
class _Meeting:
    """Of some fragments, underway or waiting to be merged."""

    left: int
    """The step after which it began."""
    sums: dict[int, Tensor]
    """Of differences, by fragment; their means once it is concluded."""
    finite: bool
    """This replica's differences were."""
    works: Sequence[WorkHandle] = ()
    table: Tensor | None = None
    """Of all ranks: asked to stop, most steps left out in a row, differences finite."""
    row: Tensor | None = None
    """This rank's; kept while it travels."""
    agreement: Agreement | None = None
    replicas: int = 1
    """Those that had something to say."""

    def conclude(self, who: Replicas) -> None:
        """Wait until everything has come."""
        if self.agreement is not None:
            return
        for work in self.works:
            work.wait()
        assert self.table is not None
        rows = self.table.view(who.everyone.world, -1).cpu()
        stop, skipped = rows[:, 0].max().item(), rows[:, 1].max().item()
        self.replicas = int(rows[:, 2].sum().item()) // who.layout.shards
        self.agreement = Agreement(stop > 0, int(skipped))
        for total in self.sums.values():
            total.div_(max(1, self.replicas))
