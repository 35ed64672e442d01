"""The rules of a step plan about ranks, rank by rank: the check by classes of ranks must agree with this definition.

Nothing here uses that ranks with the same coordinates do the same. It takes ranks x tensors, so worlds are small.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, combinations
from math import prod

from motet.parallel.model_sharding import TensorInfo
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.check import METRIC_SHARES
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import reports


def ranks_by(
    plan: StepPlan, key: Callable[[int], object], ranks: Mapping[int, object] | range
) -> list[tuple[int, ...]]:
    groups: dict[object, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(key(rank), []).append(rank)
    return [tuple(each) for each in groups.values()]


def indices(plan: StepPlan, rank: int, *left_out: str) -> tuple[int, ...]:
    return tuple(index for name, index in plan.dims.coordinates(rank).items() if name not in left_out)


def specs_of(plan: StepPlan, tensor: TensorInfo) -> dict[int, ShardSpec]:
    made = {r: plan.model_sharding.spec(tensor, plan.dims.coordinates(r), plan.dims) for r in range(plan.dims.ranks)}
    return {rank: spec for rank, spec in made.items() if spec is not None}


def shards_tile(plan: StepPlan) -> bool:
    for tensor in plan.inventory.tensors:
        specs = specs_of(plan, tensor)
        for ranks in ranks_by(plan, lambda r: indices(plan, r, "pp", "tp"), range(plan.dims.ranks)):
            shards = {specs[rank] for rank in ranks if rank in specs}
            if any(a.overlaps(b) for a, b in combinations(shards, 2)):
                return False
            if sum(spec.numel for spec in shards) < prod(tensor.shape):
                return False
    return True


def sums_are_complete(plan: StepPlan) -> bool:
    for group in plan.groups:
        for tensor in (t for t in plan.inventory.tensors if t.name in group.group.names):
            specs, partial = specs_of(plan, tensor), {*plan.model_sharding.partial_over(tensor)}
            partial -= {"pp"} if group.group.sharding.reproducible_batch_size else set()
            wanted = ranks_by(plan, lambda r: (specs[r], indices(plan, r, *partial)), specs)  # noqa: B023
            sizes = {len(ranks) for ranks in group.group.sum_groups}
            if Counter(group.group.sum_groups) != Counter(wanted) or sizes != {group.group.sharding.ranks}:
                return False
            if group.group.stages != plan.model_sharding.stages_of(tensor):
                return False
    return True


def copies_are_copies(plan: StepPlan) -> bool:
    for group in plan.groups:
        positions = {rank: index for ranks in group.group.sum_groups for index, rank in enumerate(ranks)}
        for tensor in (t for t in plan.inventory.tensors if t.name in group.group.names):
            specs = specs_of(plan, tensor)
            wanted = ranks_by(plan, lambda r: (specs[r], positions.get(r)), specs)  # noqa: B023
            if Counter(group.group.copy_groups.get(tensor.name, ())) != Counter(wanted):
                return False
    return True


def rows_are_read_once(plan: StepPlan) -> bool:
    for ranks in ranks_by(plan, lambda rank: indices(plan, rank, "pp", "cp", "tp"), range(plan.dims.ranks)):
        if any(plan.rows_by_rank[rank] != plan.rows_by_rank[ranks[0]] for rank in ranks):
            return False
    if any(len(rows) > plan.microbatches for rows in plan.rows_by_rank):
        return False
    first = [rank for rank in range(plan.dims.ranks) if not any(indices(plan, rank, "dp"))]
    count = len(plan.rows_by_rank) // plan.dims.ranks
    readers = [replica * plan.dims.ranks + rank for replica in range(count) for rank in first]
    times = Counter(chain.from_iterable(chain.from_iterable(plan.rows_by_rank[rank] for rank in readers)))
    return times == Counter(range(plan.batch_sequences))


def metrics_are_reported_once(plan: StepPlan) -> bool:
    for metric, shares in METRIC_SHARES.items():
        others = [name for name, _ in plan.dims.sizes if name not in shares]
        for ranks in ranks_by(plan, lambda rank: indices(plan, rank, *others), range(plan.dims.ranks)):  # noqa: B023
            if sum(reports(metric, plan.dims.coordinates(rank), plan.dims) for rank in ranks) != 1:
                return False
    return True


RULES_OF_EVERY_RANK: Mapping[str, Callable[[StepPlan], bool]] = {
    rule.__name__: rule
    for rule in (
        shards_tile,
        sums_are_complete,
        copies_are_copies,
        rows_are_read_once,
        metrics_are_reported_once,
    )
}
