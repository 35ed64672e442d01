"""The algorithm of each reduction and gather: the one that the settings name, or the cheapest for its size."""

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

GroupName = Literal["shards", "replicas", "near"]  # Shard groups, replica groups, secondary shard groups


class CollectiveAlgorithmSelector:
    """Algorithms of one layout. On a cluster, all groups communicate in parallel and share its links in the cost."""

    def __init__(self, settings: CommunicationSettings, layout: Layout) -> None:
        self._settings = settings
        self._cluster = None if settings.cluster is None else communication_cluster(settings.cluster, layout.dp)
        groups = resolve_communication_groups(settings, layout)
        self._rank_groups: dict[GroupName, RankGroups] = {
            "shards": groups.shard_groups,
            "replicas": groups.replica_groups,
            "near": groups.secondary_shard_groups,
        }
        # (collective, group, bytes of the unsharded buffer) -> a Program, or None for the backend's choice.
        self.program: Callable[[str, GroupName, int], Program | None] = cache(self._select_program)

    def group_size(self, group_name: GroupName) -> int:
        return len(self._rank_groups[group_name][0]) if self._rank_groups[group_name] else 1

    def rank_in_group(self, group_name: GroupName, rank: int) -> int:
        return next(ranks.index(rank) for ranks in self._rank_groups[group_name] if rank in ranks)

    def _select_program(self, collective: str, group_name: GroupName, size: int) -> Program | None:
        name, ranks = self._settings.algorithm(collective), self.group_size(group_name)
        if name == BACKEND or ranks == 1:
            return None
        if self._cluster is None:
            return build(collective, name, ranks)
        names = None if name == AUTO else (name,)
        return cheapest(collective, max(size, 1), self._cluster, names, self._rank_groups[group_name]).program
