"""Which Program carries each sum and gather: the one that the settings name, or the cheapest for its size."""

from collections.abc import Callable
from functools import cache
from typing import Literal

from motet.collectives.algorithms import build
from motet.collectives.cost.alpha_beta import RankGroups
from motet.collectives.cost.cheapest_algorithm import cheapest
from motet.collectives.program import Program
from motet.parallel.communication import AUTO, BACKEND, CommunicationSettings, cluster_of, joined
from motet.parallel.layout import Layout

Over = Literal["shards", "replicas", "near"]
"""The ranks that share a copy, those that hold the same shard, and neighbours that share a second copy."""


class Routes:
    """Of one layout. On a cluster, what all sets of ranks do at once is what is costed: they share its links."""

    def __init__(self, settings: CommunicationSettings, layout: Layout) -> None:
        self._settings = settings
        self._cluster = None if settings.cluster is None else cluster_of(settings.cluster, layout.dp)
        together = joined(settings, layout)
        self._sets: dict[Over, RankGroups] = {
            "shards": together.shares,
            "replicas": together.replicas,
            "near": together.near,
        }
        self.program: Callable[[str, Over, int], Program | None] = cache(self._program)
        """(collective, over which ranks, bytes of the whole) -> a Program, or None for the backend's own way."""

    def ranks(self, over: Over) -> int:
        """How many do it together."""
        return len(self._sets[over][0]) if self._sets[over] else 1

    def number(self, over: Over, rank: int) -> int:
        """That of one of all ranks among its own."""
        return next(one.index(rank) for one in self._sets[over] if rank in one)

    def _program(self, collective: str, over: Over, size: int) -> Program | None:
        name, ranks = self._settings.algorithm(collective), self.ranks(over)
        if name == BACKEND or ranks == 1:
            return None
        if self._cluster is None:
            return build(collective, name, ranks)
        names = None if name == AUTO else (name,)
        return cheapest(collective, max(size, 1), self._cluster, names, self._sets[over]).program
