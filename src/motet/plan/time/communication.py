"""The groups of a layout on the hosts of a cluster, and the time of their collectives."""

from dataclasses import dataclass
from typing import Literal, Protocol

from motet.plan.planned_layout import PlannedLayout

GroupName = Literal["tp", "cp", "ep", "dp", "shards", "replicas", "expert shards", "pp"]


class CollectiveCosts(Protocol):
    """The time of a collective of a group, of which `ranks_per_host` are on one host."""

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """Seconds if all like groups of the hosts execute it."""


@dataclass(frozen=True)
class GroupTimes:
    """Times of collectives by the name of the group. Ranks of `tp` are neighbours, then those of `cp`, `dp`, `pp`."""

    layout: PlannedLayout
    devices_per_host: int
    costs: CollectiveCosts

    def placement(self, name: GroupName) -> tuple[int, int]:
        """(Ranks of the group, ranks of it on one host)."""
        layout = self.layout
        tp, replica = layout.tp, layout.shard_group or layout.dp
        sizes: dict[GroupName, tuple[int, int]] = {  # (size, distance of neighbours in ranks)
            "tp": (tp, 1),
            "cp": (layout.cp, tp),
            "ep": (layout.ep, max(1, tp // layout.expert_tp) if tp <= layout.ep else tp),
            "dp": (layout.dp * layout.cp, tp),
            "shards": (replica * layout.cp, tp),
            "replicas": (layout.dp // replica, tp * layout.cp * replica),
            "expert shards": (
                max(1, layout.dp * layout.cp * tp // (layout.ep * layout.expert_tp)),
                layout.ep * layout.expert_tp,
            ),
            "pp": (2, tp * layout.cp * layout.dp),
        }
        size, stride = sizes[name]
        if name == "ep":
            stride = layout.expert_tp  # Experts are split over neighbouring ranks of tensor and data parallelism
        hosts = -(-layout.ranks // self.devices_per_host)
        most = max(1, self.devices_per_host // stride)
        return size, min(size, max(most, -(-size // hosts)))  # Some hosts have more where a stride does not divide them

    def seconds(self, collective: str, size_bytes: float, name: GroupName) -> float:
        """The time of a collective; none in a group of one rank."""
        ranks, per_host = self.placement(name)
        if ranks == 1 or not size_bytes:
            return 0.0
        return self.costs.seconds(collective, size_bytes, ranks=ranks, ranks_per_host=per_host)
