"""The process groups of data parallelism: shard groups, replica groups, and their secondary ones."""

from dataclasses import dataclass, replace

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.communication.communication_settings import CommunicationGroups
from motet.parallel.process.process_group import RankGroup, new_process_group


@dataclass(frozen=True)
class ShardReplicaMesh:
    """The groups of one rank: rank = replica x shards + shard, so neighbouring ranks share a copy of the model."""

    shard_group: RankGroup  # Ranks that together hold one copy of the sharded state
    replica_group: RankGroup  # Ranks that hold the same shard
    secondary_shard_group: RankGroup | None = None  # Ranks that hold a secondary copy between forward and backward
    secondary_replica_group: RankGroup | None = None  # Ranks of the shard group that hold the same secondary shard


def make_mesh(group: RankGroup, comm_groups: CommunicationGroups) -> ShardReplicaMesh:
    """Make the process groups; every rank of the group calls this, and they end with the group."""
    mesh = make_meshes(group, (tuple(range(group.world)),), comm_groups)
    assert mesh is not None
    return mesh


def make_meshes(group: RankGroup, sum_groups: RankGroups, comm_groups: CommunicationGroups) -> ShardReplicaMesh | None:
    """The process groups of this rank if it is in one of `sum_groups`, in which `comm_groups` number the ranks.

    Every rank of the group calls this, and makes its own process groups.
    """
    sum_group, everyone = join_subgroup(group, sum_groups), (tuple(range(len(sum_groups[0]))),)
    primary = comm_groups.shard_groups, comm_groups.replica_groups
    secondary = comm_groups.secondary_shard_groups, comm_groups.secondary_replica_groups
    subgroups = [
        sum_group
        if each == everyone
        else join_subgroup(group, tuple(tuple(ranks[i] for i in inner) for ranks in sum_groups for inner in each))
        for each in (*primary, *secondary)
        if each
    ]
    return None if sum_group is None else ShardReplicaMesh(*(subgroup for subgroup in subgroups if subgroup))


def join_subgroup(group: RankGroup, rank_groups: RankGroups) -> RankGroup | None:
    """This rank's subgroup, if it is in one. Every rank of the group calls this, and makes one process group at most.

    So a rank makes as many calls as there are dimensions along which ranks communicate, whatever the number of ranks.
    """
    if rank_groups == (tuple(range(group.world)),):
        return group
    ranks = next((ranks for ranks in rank_groups if group.rank in ranks), None)
    subgroup = ranks or rank_groups[0]
    process_group = new_process_group(group, subgroup) if len(subgroup) > 1 else None
    if ranks is None:
        return None
    return replace(group, rank=ranks.index(group.rank), world=len(ranks), process_group=process_group)
