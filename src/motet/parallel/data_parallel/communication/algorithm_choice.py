"""Which Program carries each sum and gather: the one that the settings name, or the cheapest for its size."""

from collections.abc import Callable
from functools import cache
from typing import Literal

from motet.collectives.algorithms import build
from motet.collectives.cost.alpha_beta import RankGroups
from motet.collectives.cost.cheapest_algorithm import cheapest
from motet.collectives.program import Program
from motet.parallel.data_parallel.communication.communication_settings import (
    AUTO,
    BACKEND,
    CommunicationSettings,
    communication_cluster,
    resolve_communication_groups,
)
from motet.parallel.layout import Layout

# The ranks that share a copy, those that hold the same shard, and neighbours that share a second copy.
GroupName = Literal["shards", "replicas", "near"]


class CollectiveAlgorithmSelector:
    """Of one layout. On a cluster, what all sets of ranks do at once is what is costed: they share its links."""

    def __init__(self, settings: CommunicationSettings, layout: Layout) -> None:
        self._settings = settings
        self._cluster = None if settings.cluster is None else communication_cluster(settings.cluster, layout.dp)
        comm_groups = resolve_communication_groups(settings, layout)
        self._rank_sets: dict[GroupName, RankGroups] = {
            "shards": comm_groups.shard_groups,
            "replicas": comm_groups.replica_groups,
            "near": comm_groups.secondary_shard_groups,
        }
        # (collective, over which ranks, bytes of the whole) -> a Program, or None for the backend's own way.
        self.program: Callable[[str, GroupName, int], Program | None] = cache(self._select_program)

    def group_size(self, group_name: GroupName) -> int:
        """How many do it together."""
        return len(self._rank_sets[group_name][0]) if self._rank_sets[group_name] else 1

    def rank_in_group(self, group_name: GroupName, rank: int) -> int:
        """That of one of all ranks among its own."""
        return next(one.index(rank) for one in self._rank_sets[group_name] if rank in one)

    def _select_program(self, collective: str, group_name: GroupName, size: int) -> Program | None:
        name, ranks = self._settings.algorithm(collective), self.group_size(group_name)
        if name == BACKEND or ranks == 1:
            return None
        if self._cluster is None:
            return build(collective, name, ranks)
        names = None if name == AUTO else (name,)
        return cheapest(collective, max(size, 1), self._cluster, names, self._rank_sets[group_name]).program
