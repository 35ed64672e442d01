"""A schedule on fewer ranks, which stand for all: a rank is a point of a grid, and actions treat all rows of it alike.

The ranks of a sum group are replicas x secondary groups x secondary shards. The groups of the sharding are the lines
and planes of this grid, and those of its corner. A schedule over such groups cannot tell one index from another, except
the first. So it is executed with as few indices along each axis as keep unequal sizes of groups unequal.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.unit_schedule import UnitKind, UnitSchedule

GridSizes = tuple[int, int, int]  # Replicas, secondary groups of a shard group, secondary shards
_ENOUGH = 3  # Indices along an axis: the first, and two others
_MAX_SIZE = 13  # Enough for the sizes 3, 4 and their product


@dataclass(frozen=True)
class UnitWork:
    """The actions on a unit, and whatever decides if they are right."""

    schedule: UnitSchedule
    shards: int
    kind: UnitKind
    sharding: DataParallelSharding
    has_owner: bool = False


def on_representative_ranks(work: UnitWork) -> tuple[UnitWork, tuple[int, ...]] | None:
    """(The work of the ranks that stand for all, their positions), or None if some action is over other groups."""
    sharding = work.sharding
    sizes = _grid_sizes(sharding)
    small_sizes = None if sizes is None else _smaller_sizes(sizes)
    if sizes is None or small_sizes is None:
        return None
    replicas, outer, inner = small_sizes
    small = replace(
        sharding,
        ranks=prod(small_sizes),
        shards=outer * inner,
        secondary_shards=inner if sharding.secondary_shards else None,
    )
    families = list(zip(_families(sharding), _families(small), strict=True))
    groups = {id(g): g for a in work.schedule for g in (a.rank_groups, a.intra_groups, a.inter_groups)}
    small_groups = {
        key: next((fewer for all_groups, fewer in families if all_groups == each), None) for key, each in groups.items()
    }
    shards = {sharding.ranks: small.ranks, sharding.shards: small.shards, 1: 1}.get(work.shards)
    if shards is None:
        return None
    schedule = []
    for action in work.schedule:
        ranks, intra, inter = (
            small_groups[id(g)] for g in (action.rank_groups, action.intra_groups, action.inter_groups)
        )
        if ranks is None or intra is None or inter is None:
            return None
        schedule.append(replace(action, rank_groups=ranks, intra_groups=intra, inter_groups=inter))
    members = tuple(
        (replica * sizes[1] + group) * sizes[2] + shard
        for replica, group, shard in product(range(replicas), range(outer), range(inner))
    )
    return replace(work, schedule=tuple(schedule), shards=shards, sharding=small), members


def _families(sharding: DataParallelSharding) -> Iterator[RankGroups]:
    """Groups of ranks that have one index in common or several, and the ranks at the first index of others."""
    shards, replicas = sharding.shard_groups, sharding.replica_groups
    yield from (shards, replicas, sharding.secondary_shard_groups, sharding.secondary_replica_groups)
    yield (tuple(ranks[0] for ranks in replicas),)
    yield (tuple(ranks[0] for ranks in shards),)
    yield (tuple(range(sharding.ranks)),)
    yield tuple((rank,) for rank in range(sharding.ranks))
    yield ()


def _grid_sizes(sharding: DataParallelSharding) -> GridSizes | None:
    inner = sharding.secondary_shards or 1
    if sharding.ranks % sharding.shards or sharding.shards % inner:
        return None
    return sharding.ranks // sharding.shards, sharding.shards // inner, inner


@cache
def _smaller_sizes(sizes: GridSizes) -> GridSizes | None:
    """The fewest indices along each axis with which the same groups have equally many ranks."""
    replicas, outer, inner = (range(min(size, _ENOUGH), min(size, _MAX_SIZE) + 1) for size in sizes)
    choices = (each for each in product(replicas, outer, inner) if _equal_sizes(each) == _equal_sizes(sizes))
    return min(choices, key=prod, default=None)


def _equal_sizes(sizes: GridSizes) -> tuple[bool, ...]:
    """Which of the numbers of ranks of a group are equal."""
    replicas, outer, inner = sizes
    numbers = (1, replicas, outer, inner, outer * inner, replicas * outer * inner)
    return tuple(a == b for a in numbers for b in numbers)
