"""The groups of a layout on the hosts of a cluster, and the time of their collectives."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple, Protocol

from motet.parallel.data_parallel.zero import StageAction
from motet.parallel.layout import Layout
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.rank_placement import group_placement

GroupName = Literal["tp", "cp", "ep", "shards", "replicas", "expert shards", "pp", "near"]


class CollectiveCosts(Protocol):
    """The time of a collective of a group, of which `ranks_per_host` are on one host."""

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """Seconds if all like groups of the hosts execute it."""


class ParameterCounts(NamedTuple):
    """Parameters that a rank holds, if none are in shards."""

    dense: float
    experts: float


@dataclass(frozen=True)
class GroupTimes:
    """Times of collectives by the name of the group. Ranks of `tp` are neighbours, then those of `cp`, `dp`, `pp`."""

    layout: Layout
    devices_per_host: int
    costs: CollectiveCosts
    shards: int = 1  # Ranks of data and context parallelism over which gradients are scattered

    @cached_property
    def _placements(self) -> Mapping[str, tuple[int, int]]:
        layout = self.layout
        degrees = layout.pp, layout.dp, layout.cp, layout.tp
        experts = layout.ep, layout.expert_tp
        return _placements(degrees, experts, shards=self.shards, devices_per_host=self.devices_per_host)

    def placement(self, name: GroupName) -> tuple[int, int]:
        """(Ranks of the group, ranks of it on one host)."""
        return self._placements[name]

    def seconds(self, collective: str, size_bytes: float, name: GroupName) -> float:
        """The time of a collective; none in a group of one rank."""
        if not size_bytes:
            return 0.0
        ranks, per_host = self.placement(name)
        if ranks == 1:
            return 0.0
        return self.costs.seconds(collective, size_bytes, ranks=ranks, ranks_per_host=per_host)

    def action_s(
        self, action: StageAction, counts: ParameterCounts, width: float, *, is_scattered: bool, pieces: int = 1
    ) -> float:
        """The time of an action on parameters of `width` bytes, in as many pieces unless it adds up shards.

        Gradients of experts are complete after the first sum: ranks that hold the same experts are one group.
        """
        assert action.over is not None
        collective, size = action.kind.replace("_", "-"), width * counts.dense
        if is_scattered:
            return self.seconds(collective, size / self.shards, action.over)
        seconds = pieces * self.seconds(collective, size / pieces, action.over)
        return seconds + self.seconds(collective, width * counts.experts, "expert shards")


@lru_cache(maxsize=1 << 14)  # Layouts that are compared have few different ones
def _placements(
    degrees: tuple[int, int, int, int], experts: tuple[int, int], *, shards: int, devices_per_host: int
) -> Mapping[str, tuple[int, int]]:
    """The placement of the groups of activations, of gradients and of experts."""
    pp, dp, cp, tp = degrees
    views = (
        (("pp", pp), ("replicas", dp * cp // shards), ("shards", shards), ("rest", tp)),
        (
            ("pp", pp),
            ("expert shards", max(1, dp * cp * tp // prod(experts))),
            ("ep", experts[0]),
            ("rest", experts[1]),
        ),
        (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)),
    )
    return {
        # A message has two ends
        name: group_placement(ParallelDims(sizes), name, devices_per_host, neighbours=2 if name == "pp" else None)
        for sizes in views
        for name, _ in sizes
    }
