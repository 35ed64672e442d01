"""The groups that data parallelism works with: ranks that share one copy, and ranks that hold the same shard of it."""

from dataclasses import dataclass, replace

import torch.distributed as dist

from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import CommunicationGroups
from motet.parallel.process.process_group import RankGroup


@dataclass(frozen=True)
class ShardReplicaMesh:
    """As one rank sees it. Neighbours share a copy: rank = replica x shards + shard."""

    shard_group: RankGroup  # The ranks with which this one shares a copy of what is sharded
    replica_group: RankGroup  # The ranks that hold the same shard as this one
    # Of `shards`, the neighbours that share a second copy between forward and backward.
    secondary_shard_group: RankGroup | None = None
    # Of `shards`, those that hold the same part of such a copy as this one.
    secondary_replica_group: RankGroup | None = None

    @property
    def contributes_to_norm(self) -> bool:
        """Whether this rank's share of a sum over all parameters counts, and not another replica's."""
        return self.replica_group.rank == 0


def make_mesh(group: RankGroup, comm_groups: CommunicationGroups) -> ShardReplicaMesh:
    """Called by every rank of the group. The parts end with it."""
    shard_group, replica_group = (
        _make_subgroup(group, comm_groups.shard_groups),
        _make_subgroup(group, comm_groups.replica_groups),
    )
    if not comm_groups.secondary_shard_groups:
        return ShardReplicaMesh(shard_group, replica_group)
    if group.process_group is not dist.group.WORLD:
        raise InputError(
            f"layout.secondary_group = {len(comm_groups.secondary_shard_groups[0])} cannot be had where replicas train apart; leave it out, "
            "or outer.every"
        )
    return ShardReplicaMesh(
        shard_group,
        replica_group,
        _make_subgroup(group, comm_groups.secondary_shard_groups),
        _make_subgroup(group, comm_groups.secondary_replica_groups),
    )


def _make_subgroup(group: RankGroup, rank_sets: RankGroups) -> RankGroup:
    """This rank's part of the group. Every rank makes every part, in one order."""
    if len(rank_sets) == 1:
        return group
    if len(rank_sets[0]) == 1:
        return RankGroup(0, 1, None, group.device)
    process_groups = [dist.new_group(list(ranks)) for ranks in rank_sets]
    set_index = next(number for number, ranks in enumerate(rank_sets) if group.rank in ranks)
    ranks = rank_sets[set_index]
    return replace(group, rank=ranks.index(group.rank), world=len(ranks), process_group=process_groups[set_index])
