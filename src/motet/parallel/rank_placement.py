"""The places of the ranks of a layout on the hosts of a cluster, and the links over which their groups communicate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from motet.cluster.cluster import Cluster
from motet.parallel.model_sharding import PIPELINE_DIMENSION
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.step_plan.plan import StepPlan


@dataclass(frozen=True)
class RankPlace:
    """One rank, the device that it runs on, and the blocks that it holds."""

    rank: int
    host: int
    device: int  # Its number on the host
    coordinates: Mapping[str, int]  # Its index in each dimension of several ranks
    stages: tuple[int, ...]
    blocks: tuple[range, ...]  # Blocks of each stage; empty without a pipeline


@dataclass(frozen=True)
class GroupLinks:
    """The slowest way between neighbouring ranks of some groups."""

    crosses_hosts: bool
    bandwidth_Bps: float  # noqa: N815 - a unit


@dataclass(frozen=True)
class PlacedGroups:
    """Groups of ranks that communicate for one purpose."""

    purpose: str
    groups: tuple[tuple[int, ...], ...]
    links: GroupLinks


def rank_places(plan: StepPlan, cluster: Cluster) -> tuple[RankPlace, ...]:
    """The place of each rank: the first ranks are on the first host."""
    sharding, places = plan.model_sharding, []
    for rank in range(plan.dims.ranks):
        host, device = divmod(rank, cluster.devices_per_host)
        stages = stages_of_rank(plan, rank)
        blocks = tuple(sharding.stages[stage] for stage in stages)
        places.append(RankPlace(rank, host, device, _coordinates(plan.dims, rank), stages, blocks))
    return tuple(places)


def stages_of_rank(plan: StepPlan, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds."""
    sharding, dims = plan.model_sharding, plan.dims
    place = dims.coordinates(rank).get(PIPELINE_DIMENSION, 0)
    return tuple(stage for stage in range(len(sharding.stages)) if sharding.rank_of_stage(stage, dims) == place)


def rank_groups(plan: StepPlan, cluster: Cluster) -> tuple[PlacedGroups, ...]:
    """The groups of each dimension, innermost first, and groups that add up the gradients of several stages."""
    by_purpose = {name: plan.dims.groups(name) for name, size in reversed(plan.dims.sizes) if size > 1}
    for group in (each.group for each in plan.groups):
        if len(group.stages) > 1 and group.names:
            stages = " and ".join(map(str, group.stages))
            by_purpose[f"gradients of stages {stages}"] = group.sum_groups
    return tuple(PlacedGroups(purpose, groups, group_links(groups, cluster)) for purpose, groups in by_purpose.items())


def group_placement(
    dims: ParallelDims, name: str, devices_per_host: int, *, neighbours: int | None = None
) -> tuple[int, int]:
    """(Ranks of a group of a dimension, or that many neighbours in it; the number of them on a host)."""
    size, hosts = neighbours or dims.size(name), -(-dims.ranks // devices_per_host)
    on_host = max(1, devices_per_host // dims.stride(name))
    return size, min(size, max(on_host, -(-size // hosts)))  # Some hosts have more where a stride does not divide them


def group_links(groups: Sequence[Sequence[int]], cluster: Cluster) -> GroupLinks:
    """The slowest way between neighbouring ranks of any of the groups."""
    pairs = [pair for ranks in groups for pair in pairwise(ranks)]
    routes = {link for pair in pairs for link in cluster.route(*pair)}
    hosts = ((a // cluster.devices_per_host, b // cluster.devices_per_host) for a, b in pairs)
    slowest = min((cluster.link(name).bandwidth_Bps.value for name in routes), default=float("inf"))
    return GroupLinks(any(a != b for a, b in hosts), float(slowest))


def _coordinates(dims: ParallelDims, rank: int) -> dict[str, int]:
    """The index of a rank in each dimension of several ranks, outermost first."""
    indices = dims.coordinates(rank)
    return {name: indices[name] for name, size in dims.sizes if size > 1}
