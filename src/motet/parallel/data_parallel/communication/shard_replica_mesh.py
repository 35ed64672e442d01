"""The process groups of data parallelism: shard groups, replica groups, and their secondary ones."""

from dataclasses import dataclass, replace

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.communication.communication_settings import CommunicationGroups
from motet.parallel.process.process_group import RankGroup, new_process_group


@dataclass(frozen=True)
class ShardReplicaMesh:
    """The groups of one rank: rank = replica x shards + shard, so neighbouring ranks share a copy of the model."""

    shard_group: RankGroup  # Ranks that together hold one copy of what is sharded
    replica_group: RankGroup  # Ranks that hold the same shard
    secondary_shard_group: RankGroup | None = None  # Ranks that hold a secondary copy between forward and backward
    secondary_replica_group: RankGroup | None = None  # Ranks of the shard group that hold the same secondary shard

    @property
    def contributes_to_norm(self) -> bool:
        """Whether this rank counts in a sum over all parameters; the other replicas hold the same values."""
        return self.replica_group.rank == 0


def make_mesh(group: RankGroup, comm_groups: CommunicationGroups) -> ShardReplicaMesh:
    """Make the process groups; every rank of the group calls this, and they end with the group."""
    primary = comm_groups.shard_groups, comm_groups.replica_groups
    secondary = comm_groups.secondary_shard_groups, comm_groups.secondary_replica_groups
    return ShardReplicaMesh(*(_make_subgroup(group, each) for each in (*primary, *secondary) if each))


def _make_subgroup(group: RankGroup, rank_groups: RankGroups) -> RankGroup:
    """This rank's subgroup. Every rank makes all subgroups, in the same order."""
    if len(rank_groups) == 1 or len(rank_groups[0]) == 1:
        return group if len(rank_groups) == 1 else RankGroup(0, 1, None, group.device)
    process_groups = {ranks: new_process_group(group, ranks) for ranks in rank_groups}
    ranks = next(ranks for ranks in rank_groups if group.rank in ranks)
    return replace(group, rank=ranks.index(group.rank), world=len(ranks), process_group=process_groups[ranks])
