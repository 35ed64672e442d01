"""The groups that data parallelism works with: ranks that share one copy, and ranks that hold the same shard of it."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from motet.parallel.group import Group
from motet.parallel.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """As one rank sees it. Neighbours share a copy: rank = replica x shards + shard."""

    shards: Group
    """The ranks with which this one shares a copy of what is sharded."""
    replicas: Group
    """The ranks that hold the same shard as this one."""


def make_mesh(group: Group, layout: Layout) -> Mesh:
    """Called by every rank of the group. The parts end with it."""
    size, world = layout.shards, group.world
    rows = [list(range(first, first + size)) for first in range(0, world, size)]
    columns = [list(range(first, world, size)) for first in range(size)]
    return Mesh(_mine(group, rows), _mine(group, columns))


def _mine(group: Group, sets: list[list[int]]) -> Group:
    """This rank's part of the group. Every rank makes every part, in one order."""
    if len(sets) == 1:
        return group
    if len(sets[0]) == 1:
        return Group(0, 1, None, group.device)
    made = [dist.new_group(ranks) for ranks in sets]
    number = next(number for number, ranks in enumerate(sets) if group.rank in ranks)
    ranks = sets[number]
    return replace(group, rank=ranks.index(group.rank), world=len(ranks), process_group=made[number])
