"""The groups that data parallelism works with: ranks that share one copy, and ranks that hold the same shard of it."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.errors import InputError
from motet.parallel.communication import Joined
from motet.parallel.group import Group


@dataclass(frozen=True)
class Mesh:
    """As one rank sees it. Neighbours share a copy: rank = replica x shards + shard."""

    shards: Group
    """The ranks with which this one shares a copy of what is sharded."""
    replicas: Group
    """The ranks that hold the same shard as this one."""
    near: Group | None = None
    """Of `shards`, the neighbours that share a second copy between forward and backward."""
    far: Group | None = None
    """Of `shards`, those that hold the same part of such a copy as this one."""

    @property
    def counts(self) -> bool:
        """Whether this rank's share of a sum over all parameters counts, and not another replica's."""
        return self.replicas.rank == 0


def make_mesh(group: Group, together: Joined) -> Mesh:
    """Called by every rank of the group. The parts end with it."""
    shards, replicas = _mine(group, together.shares), _mine(group, together.replicas)
    if not together.near:
        return Mesh(shards, replicas)
    if group.process_group is not dist.group.WORLD:
        raise InputError(
            f"layout.secondary_group = {len(together.near[0])} cannot be had where replicas train apart; leave it out, "
            "or outer.every"
        )
    return Mesh(shards, replicas, _mine(group, together.near), _mine(group, together.far))


def _mine(group: Group, sets: RankGroups) -> Group:
    """This rank's part of the group. Every rank makes every part, in one order."""
    if len(sets) == 1:
        return group
    if len(sets[0]) == 1:
        return Group(0, 1, None, group.device)
    made = [dist.new_group(list(ranks)) for ranks in sets]
    number = next(number for number, ranks in enumerate(sets) if group.rank in ranks)
    ranks = sets[number]
    return replace(group, rank=ranks.index(group.rank), world=len(ranks), process_group=made[number])
