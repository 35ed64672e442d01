"""Mistakes of every kind in a sharded step, made by a random generator.

A corruption takes a step and returns a changed one with the names that its message must contain, one of them, or None
where the layout has nothing to change.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

from sharded_inventory import make_plan, planned_again

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.model_sharding import DimensionSplit, ModelSharding, ShardRule
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.sync_groups import METRIC_REPORTERS, SyncGroup


class Corrupted(NamedTuple):
    """A changed plan, names of which its message must contain one, and rows of the table of metrics."""

    plan: StepPlan
    names: tuple[str, ...]
    reporters: Mapping[str, Mapping[str, int]] = {}


Corruption = Callable[[str, StepPlan, Random], Corrupted | None]
CORRUPTIONS: dict[str, Corruption] = {}


def corruption(function: Corruption) -> Corruption:
    CORRUPTIONS[function.__name__] = function
    return function


def groups_of(plan: StepPlan) -> list[SyncGroup]:
    return [each.group for each in plan.groups]


def with_group(plan: StepPlan, old: SyncGroup, new: SyncGroup) -> Corrupted:
    groups = tuple(replace(each, group=new) if each.group is old else each for each in plan.groups)
    return Corrupted(replace(plan, groups=groups), old.names)


def in_one(random: Random, change: Callable[[list[int]], list[int]]) -> Callable[[RankGroups], RankGroups]:
    """Change the ranks of one group."""

    def changed(groups: RankGroups) -> RankGroups:
        index = random.randrange(len(groups))
        made = (tuple(change(list(ranks))) if i == index else ranks for i, ranks in enumerate(groups))
        return tuple(ranks for ranks in made if ranks)

    return changed


def in_sums_or_copies(
    plan: StepPlan, random: Random, change: Callable[[RankGroups], RankGroups | None]
) -> Corrupted | None:
    """Change the sum groups of a group, or the copies of one of its tensors or of all."""
    group, kind = random.choice(groups_of(plan)), random.choice(["sums", "copies of all", "copies of one"])
    if kind == "sums":
        changed = change(group.sum_groups)
        return with_group(plan, group, replace(group, sum_groups=changed)) if changed else None
    return in_copies(plan, group, random, change, is_of_one=kind.endswith("one"))


def in_copies(
    plan: StepPlan,
    group: SyncGroup,
    random: Random,
    change: Callable[[RankGroups], RankGroups | None],
    *,
    is_of_one: bool = False,
) -> Corrupted | None:
    """Change the copies of one tensor of a group, and of those with the same copies."""
    chosen = random.choice(group.names)
    old, changed = group.copy_groups[chosen], change(group.copy_groups[chosen])
    names = [chosen] if is_of_one else [name for name in group.names if group.copy_groups[name] == old]
    if not changed:
        return None
    planted = with_group(
        plan, group, replace(group, copy_groups={**group.copy_groups, **dict.fromkeys(names, changed)})
    )
    return planted._replace(names=tuple(names) if group.unit_kind == "rows" else group.names)


@corruption
def rank_missing(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(ranks: list[int]) -> list[int]:
        ranks.pop(random.randrange(len(ranks)))
        return ranks

    return in_sums_or_copies(plan, random, in_one(random, change))


@corruption
def rank_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return in_sums_or_copies(plan, random, in_one(random, lambda ranks: sorted([*ranks, random.choice(ranks)])))


@corruption
def rank_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(ranks: list[int]) -> list[int]:
        ranks[random.randrange(len(ranks))] = random.randrange(plan.dims.ranks)
        return sorted(ranks)

    return in_sums_or_copies(plan, random, in_one(random, change))


@corruption
def ranks_in_another_order(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return in_sums_or_copies(plan, random, in_one(random, lambda ranks: random.sample(ranks, len(ranks))))


@corruption
def ranks_swapped_between_groups(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(groups: RankGroups) -> RankGroups:
        a, b = random.choices([rank for ranks in groups for rank in ranks], k=2)
        swapped = {a: b, b: a}
        return tuple(tuple(sorted(swapped.get(rank, rank) for rank in ranks)) for ranks in groups)

    return in_sums_or_copies(plan, random, change)


@corruption
def sums_halved(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Each half adds for itself, which is consistent in itself."""
    group = random.choice(groups_of(plan))
    count, is_odd = divmod(group.sharding.ranks, 2)
    if not count or is_odd:
        return None
    halves = tuple(half for ranks in group.sum_groups for half in (ranks[:count], ranks[count:]))
    pairs = [(i, j) for i in range(len(halves)) for j in range(i) if i // 2 == j // 2]
    copies = tuple(tuple(sorted(pair)) for i, j in pairs for pair in zip(halves[i], halves[j], strict=True))
    if any(len(ranks) > 1 for groups in group.copy_groups.values() for ranks in groups):
        return None
    sharding = replace(group.sharding, ranks=count, shards=min(count, group.sharding.shards), secondary_shards=None)
    new = replace(group, sum_groups=halves, copy_groups=dict.fromkeys(group.names, copies), sharding=sharding)
    return Corrupted(planned_again(layout, plan, group, new), group.names)


@corruption
def sums_merged(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Copies add the same gradient once more, each of them a shard of its own."""
    choices = [group for group in groups_of(plan) if len(group.sum_groups) > 1]
    if not choices:
        return None
    group = random.choice(choices)
    ranks = tuple(sorted(rank for ranks in group.sum_groups for rank in ranks))
    sharding, copies = replace(group.sharding, ranks=len(ranks)), tuple((rank,) for rank in ranks)
    new = replace(group, sum_groups=(ranks,), copy_groups=dict.fromkeys(group.names, copies), sharding=sharding)
    return Corrupted(planned_again(layout, plan, group, new), group.names)


@corruption
def counted_twice(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(groups: RankGroups) -> RankGroups | None:
        copies = random.choice(groups)
        others = tuple(ranks for ranks in groups if ranks is not copies)
        return (*others, copies[:1], copies[1:]) if len(copies) > 1 else None

    return in_copies(plan, random.choice(groups_of(plan)), random, change)


@corruption
def counted_never(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(groups: RankGroups) -> RankGroups | None:
        if len(groups) < 2:
            return None
        first, second, *others = random.sample(groups, len(groups))
        return (tuple(sorted(first + second)), *others)

    return in_copies(plan, random.choice(groups_of(plan)), random, change)


@corruption
def copy_forgotten(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A copy that does not count in the norm belongs to no copy group."""
    change = in_one(random, lambda ranks: ranks[: max(1, len(ranks) - 1)])
    return in_copies(plan, random.choice(groups_of(plan)), random, change)


@corruption
def shards_of_another_number_of_ranks(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group = random.choice(groups_of(plan))
    ranks = max(1, group.sharding.ranks + random.choice([-1, 1, 2]))
    return with_group(plan, group, replace(group, sharding=replace(group.sharding, ranks=ranks)))


@corruption
def group_of_another_stage(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group = random.choice(groups_of(plan))
    return with_group(plan, group, replace(group, stages=random.choice([(0,), (1,), (0, 1)])))


@corruption
def tensor_missing(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group = random.choice(groups_of(plan))
    name = random.choice(group.names)
    changed = with_group(plan, group, replace(group, names=tuple(n for n in group.names if n != name)))
    return changed and changed._replace(names=(name,))


@corruption
def tensor_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group, name = random.choice(groups_of(plan)), random.choice(plan.inventory.trained).name
    changed = with_group(plan, group, replace(group, names=(*group.names, name)))
    return changed and changed._replace(names=(name,))


@corruption
def tensors_swapped_between_groups(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    a, b = random.choices(groups_of(plan), k=2)
    x, y = random.choice(a.names), random.choice(b.names)
    swapped = {x: y, y: x}
    for group in {id(a): a, id(b): b}.values():
        names = tuple(swapped.get(name, name) for name in group.names)
        copies = {swapped.get(name, name): copies for name, copies in group.copy_groups.items()}
        plan = with_group(plan, group, replace(group, names=names, copy_groups=copies)).plan
    return Corrupted(plan, (x, y))


def with_rule(layout: str, plan: StepPlan, name: str, rule: ShardRule, *, made_again: bool) -> Corrupted | None:
    sharding = replace(plan.model_sharding, rules={**plan.model_sharding.rules, name: rule})
    made = make_plan(layout, sharding) if made_again else replace(plan, model_sharding=sharding)
    return Corrupted(made, (name,))


def wrong_partial(layout: str, plan: StepPlan, random: Random, *, made_again: bool) -> Corrupted | None:
    name, over = random.choice(plan.inventory.trained).name, random.choice([d for d, _ in plan.dims.sizes if d != "pp"])
    rule = plan.model_sharding.rule(name)
    changed = tuple(sorted({*rule.partial_over} ^ {over}))
    if made_again and over == "dp" and any(group.sharding.shards > 1 for group in groups_of(plan)):
        return None  # No plan has more shards than ranks
    return with_rule(layout, plan, name, replace(rule, partial_over=changed), made_again=made_again)


@corruption
def partial_over_wrong(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return wrong_partial(layout, plan, random, made_again=False)


@corruption
def partial_over_wrong_and_groups_with_it(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return wrong_partial(layout, plan, random, made_again=True)


@corruption
def split_with_a_gap(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """The parts of a split do not add up to the dimension."""
    rules, size = plan.model_sharding.rules, plan.dims.size("tp")
    tensor = random.choice(
        [t for t in plan.inventory.tensors if t.kind == "table" or rules.get(t.name, ShardRule()).splits]
    )
    rule = plan.model_sharding.rule(tensor.name)
    split = rule.splits[0] if rule.splits else DimensionSplit(0, "tp")
    parts = split.parts or (tensor.shape[split.dim],)
    changed = replace(split, parts=(*parts[:-1], max(split.unit, parts[-1] - split.unit * size)))
    return with_rule(layout, plan, tensor.name, replace(rule, splits=(changed,)), made_again=True)


def with_stages(plan: StepPlan, random: Random) -> ModelSharding:
    """A block is in no stage, or in two."""
    first, second = plan.model_sharding.stages
    changed = random.choice([(first, range(second.start + 1, second.stop)), (range(first.stop + 1), second)])
    return replace(plan.model_sharding, stages=changed)


@corruption
def block_in_no_stage_or_two(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    if not plan.model_sharding.stages:
        return None
    return Corrupted(replace(plan, model_sharding=with_stages(plan, random)), ("blocks.1.",))


@corruption
def block_in_two_stages_and_groups_with_it(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    if not plan.model_sharding.stages:
        return None
    sharding = with_stages(plan, random)
    return Corrupted(make_plan(layout, sharding), ("blocks.1.",)) if 1 in sharding.stages[0] else None


@corruption
def row_missing_or_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    rank, rows = random.randrange(plan.dims.ranks), list(plan.rows_by_rank)
    start, stop = random.choice(rows[rank]).start, random.choice(rows[rank]).stop
    rows[rank] = random.choice([(*rows[rank], range(start, stop)), rows[rank][1:], (*rows[rank], range(8, 9))])
    return Corrupted(replace(plan, rows_by_rank=tuple(rows)), ("row",))


@corruption
def rows_of_another_rank(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Two ranks read the rows of one another, also where only one of them is of a tensor-parallel group."""
    a, b = random.sample(range(plan.dims.ranks), 2)
    rows = list(plan.rows_by_rank)
    rows[a], rows[b] = rows[b], rows[a]
    return Corrupted(replace(plan, rows_by_rank=tuple(rows)), ("row",))


@corruption
def metric_twice_or_never(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    metric, over = random.choice(["loss", "targets", "tokens", "rows"]), random.choice(plan.dims.sizes)[0]
    coordinates = dict(METRIC_REPORTERS[metric])
    if coordinates.pop(over, None) is None:
        coordinates[over] = 0
    return Corrupted(plan, (metric,), {metric: coordinates})


@corruption
def outer_steps_of_other_ranks(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    ranks = random.sample(range(len(plan.rows_by_rank)), len(plan.rows_by_rank))
    half = len(ranks) // 2
    groups = random.choice([(tuple(sorted(ranks[:half])), tuple(sorted(ranks[half:]))), plan.outer_groups[1:]])
    return Corrupted(replace(plan, outer_groups=groups), tuple(t.name for t in plan.inventory.trained))


@corruption
def sum_group_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group = random.choice(groups_of(plan))
    return with_group(plan, group, replace(group, sum_groups=(*group.sum_groups, random.choice(group.sum_groups))))
