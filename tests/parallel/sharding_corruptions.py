"""Mistakes of every kind in a sharded step, made by a random generator.

A corruption takes a step and returns a changed one with the names that its message must contain, one of them, or None
where the layout has nothing to change.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from sharded_inventory import sharded_step

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.model_sharding import BoundaryComm, DimensionSplit, ModelSharding, ShardRule
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.sharding_check import ShardedStep
from motet.parallel.sync_groups import SyncGroup

Corrupted = tuple[ShardedStep, tuple[str, ...]] | None
Corruption = Callable[[str, ShardedStep, Random], Corrupted]
CORRUPTIONS: dict[str, Corruption] = {}


def corruption(function: Corruption) -> Corruption:
    CORRUPTIONS[function.__name__] = function
    return function


def with_group(step: ShardedStep, old: SyncGroup, new: SyncGroup) -> Corrupted:
    groups = tuple(new if group is old else group for group in step.sync_groups)
    return replace(step, sync_groups=groups), old.names


def change_ranks(groups: RankGroups, random: Random, change: Callable[[list[int]], list[int]]) -> RankGroups:
    index = random.randrange(len(groups))
    return tuple(tuple(change(list(ranks))) if i == index else ranks for i, ranks in enumerate(groups))


def in_sums_or_copies(step: ShardedStep, random: Random, change: Callable[[list[int]], list[int]]) -> Corrupted:
    group, kind = random.choice(step.sync_groups), random.choice(["sum_groups", "copy_groups"])
    changed = change_ranks(getattr(group, kind), random, change)
    changed = tuple(ranks for ranks in changed if ranks)
    return with_group(step, group, replace(group, **{kind: changed})) if changed else None


@corruption
def rank_missing(_: str, step: ShardedStep, random: Random) -> Corrupted:
    def change(ranks: list[int]) -> list[int]:
        ranks.pop(random.randrange(len(ranks)))
        return ranks

    return in_sums_or_copies(step, random, change)


@corruption
def rank_doubled(_: str, step: ShardedStep, random: Random) -> Corrupted:
    return in_sums_or_copies(step, random, lambda ranks: sorted([*ranks, random.choice(ranks)]))


@corruption
def rank_wrong(_: str, step: ShardedStep, random: Random) -> Corrupted:
    def change(ranks: list[int]) -> list[int]:
        ranks[random.randrange(len(ranks))] = random.randrange(step.dims.ranks)
        return sorted(ranks)

    return in_sums_or_copies(step, random, change)


@corruption
def ranks_in_another_order(_: str, step: ShardedStep, random: Random) -> Corrupted:
    return in_sums_or_copies(step, random, lambda ranks: random.sample(ranks, len(ranks)))


@corruption
def ranks_swapped_between_groups(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group, kind = random.choice(step.sync_groups), random.choice(["sum_groups", "copy_groups"])
    ranks = [rank for ranks in getattr(group, kind) for rank in ranks]
    a, b = random.choices(ranks, k=2)
    swapped = {a: b, b: a}
    changed = tuple(tuple(sorted(swapped.get(r, r) for r in ranks)) for ranks in getattr(group, kind))
    return with_group(step, group, replace(group, **{kind: changed}))


@corruption
def sums_halved(_: str, step: ShardedStep, random: Random) -> Corrupted:
    """Each half adds for itself, which is consistent in itself."""
    group = random.choice(step.sync_groups)
    count = group.sharding.ranks // 2
    if not count:
        return None
    halves = tuple(half for ranks in group.sum_groups for half in (ranks[:count], ranks[count:]))
    pairs = [(i, j) for i in range(len(halves)) for j in range(i) if i // 2 == j // 2]
    copies = tuple(tuple(sorted(pair)) for i, j in pairs for pair in zip(halves[i], halves[j], strict=True))
    if any(len(ranks) > 1 for ranks in group.copy_groups):
        return None
    sharding = replace(group.sharding, ranks=count)
    return with_group(step, group, replace(group, sum_groups=halves, copy_groups=copies, sharding=sharding))


@corruption
def sums_merged(_: str, step: ShardedStep, random: Random) -> Corrupted:
    """Copies add the same gradient once more, each of them a shard of its own."""
    choices = [group for group in step.sync_groups if len(group.sum_groups) > 1]
    if not choices:
        return None
    group = random.choice(choices)
    ranks = tuple(sorted(rank for ranks in group.sum_groups for rank in ranks))
    sharding, copies = replace(group.sharding, ranks=len(ranks)), tuple((rank,) for rank in ranks)
    return with_group(step, group, replace(group, sum_groups=(ranks,), copy_groups=copies, sharding=sharding))


@corruption
def counted_twice(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    copies = random.choice(group.copy_groups)
    if len(copies) < 2:
        return None
    others = tuple(ranks for ranks in group.copy_groups if ranks is not copies)
    return with_group(step, group, replace(group, copy_groups=(*others, copies[:1], copies[1:])))


@corruption
def counted_never(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    if len(group.copy_groups) < 2:
        return None
    first, second, *others = random.sample(group.copy_groups, len(group.copy_groups))
    return with_group(step, group, replace(group, copy_groups=(tuple(sorted(first + second)), *others)))


@corruption
def copy_forgotten(_: str, step: ShardedStep, random: Random) -> Corrupted:
    """A copy that does not count in the norm belongs to no copy group."""
    group = random.choice(step.sync_groups)
    changed = change_ranks(group.copy_groups, random, lambda ranks: ranks[: max(1, len(ranks) - 1)])
    return with_group(step, group, replace(group, copy_groups=changed))


@corruption
def shards_of_another_number_of_ranks(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    ranks = max(1, group.sharding.ranks + random.choice([-1, 1, 2]))
    return with_group(step, group, replace(group, sharding=replace(group.sharding, ranks=ranks)))


@corruption
def group_of_another_stage(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    return with_group(step, group, replace(group, stages=random.choice([(0,), (1,), (0, 1)])))


@corruption
def tensor_missing(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    name = random.choice(group.names)
    changed = with_group(step, group, replace(group, names=tuple(n for n in group.names if n != name)))
    return changed and (changed[0], (name,))


@corruption
def tensor_doubled(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group, name = random.choice(step.sync_groups), random.choice(step.inventory.trained).name
    changed = with_group(step, group, replace(group, names=(*group.names, name)))
    return changed and (changed[0], (name,))


@corruption
def tensors_swapped_between_groups(_: str, step: ShardedStep, random: Random) -> Corrupted:
    a, b = random.choices(step.sync_groups, k=2)
    x, y = random.choice(a.names), random.choice(b.names)
    swapped = {x: y, y: x}
    groups = tuple(replace(g, names=tuple(swapped.get(name, name) for name in g.names)) for g in step.sync_groups)
    return replace(step, sync_groups=groups), (x, y)


def with_specs(step: ShardedStep, name: str, specs: dict[int, ShardSpec]) -> Corrupted:
    return replace(step, specs={**step.specs, name: specs}), (name,)


@corruption
def span_off_by_one(_: str, step: ShardedStep, random: Random) -> Corrupted:
    name = random.choice(step.inventory.tensors).name
    rank, spec = random.choice(list(step.specs[name].items()))
    dim = random.randrange(len(spec.shape))
    first, stop = spec.spans[dim][0]
    moved = random.choice([(first + 1, stop), (first, stop - 1), (first + 1, stop + 1), (first, stop + 1)])
    spans = tuple((moved, *spans[1:]) if i == dim else spans for i, spans in enumerate(spec.spans))
    return with_specs(step, name, {**step.specs[name], rank: replace(spec, spans=spans)})


@corruption
def spans_swapped_between_ranks(_: str, step: ShardedStep, random: Random) -> Corrupted:
    """All ranks with two indices of tensor parallelism hold the shards of one another."""
    name = random.choice(step.inventory.tensors).name
    specs, size = step.specs[name], step.dims.size("tp")
    a, b = random.choices(range(size), k=2)
    swapped = {a: b, b: a}
    index = {rank: rank % size for rank in specs}
    return with_specs(step, name, {r: specs[r - i + swapped.get(i, i)] for r, i in index.items()})


@corruption
def shard_missing(_: str, step: ShardedStep, random: Random) -> Corrupted:
    name = random.choice(step.inventory.tensors).name
    rank = random.choice(list(step.specs[name]))
    return with_specs(step, name, {r: spec for r, spec in step.specs[name].items() if r != rank})


@corruption
def shard_on_a_wrong_rank(_: str, step: ShardedStep, random: Random) -> Corrupted:
    name, rank = random.choice(step.inventory.tensors).name, random.randrange(step.dims.ranks)
    spec = random.choice(list(step.specs[name].values()))
    return with_specs(step, name, {**step.specs[name], rank: spec})


def with_rule(layout: str, step: ShardedStep, name: str, rule: ShardRule, *, made_again: bool) -> Corrupted:
    sharding = replace(step.model_sharding, rules={**step.model_sharding.rules, name: rule})
    made = sharded_step(layout, sharding) if made_again else replace(step, model_sharding=sharding)
    return made, (name,)


def wrong_partial(layout: str, step: ShardedStep, random: Random, *, made_again: bool) -> Corrupted:
    name, over = random.choice(step.inventory.trained).name, random.choice([d for d, _ in step.dims.sizes if d != "pp"])
    rule = step.model_sharding.rule(name)
    changed = tuple(sorted({*rule.partial_over} ^ {over}))
    return with_rule(layout, step, name, replace(rule, partial_over=changed), made_again=made_again)


@corruption
def partial_over_wrong(layout: str, step: ShardedStep, random: Random) -> Corrupted:
    return wrong_partial(layout, step, random, made_again=False)


@corruption
def partial_over_wrong_and_groups_with_it(layout: str, step: ShardedStep, random: Random) -> Corrupted:
    return wrong_partial(layout, step, random, made_again=True)


@corruption
def split_with_a_gap(layout: str, step: ShardedStep, random: Random) -> Corrupted:
    """The parts of a split do not add up to the dimension."""
    rules, size = step.model_sharding.rules, step.dims.size("tp")
    tensor = random.choice(
        [t for t in step.inventory.tensors if t.kind == "table" or rules.get(t.name, ShardRule()).splits]
    )
    rule = step.model_sharding.rule(tensor.name)
    split = rule.splits[0] if rule.splits else DimensionSplit(0, "tp")
    parts = split.parts or (tensor.shape[split.dim],)
    changed = replace(split, parts=(*parts[:-1], max(split.unit, parts[-1] - split.unit * size)))
    return with_rule(layout, step, tensor.name, replace(rule, splits=(changed,)), made_again=True)


def with_stages(step: ShardedStep, random: Random) -> ModelSharding:
    """A block is in no stage, or in two."""
    first, second = step.model_sharding.stages
    changed = random.choice([(first, range(second.start + 1, second.stop)), (range(first.stop + 1), second)])
    return replace(step.model_sharding, stages=changed)


@corruption
def block_in_no_stage_or_two(_: str, step: ShardedStep, random: Random) -> Corrupted:
    if not step.model_sharding.stages:
        return None
    return replace(step, model_sharding=with_stages(step, random)), ("blocks.1.",)


@corruption
def block_in_two_stages_and_groups_with_it(layout: str, step: ShardedStep, random: Random) -> Corrupted:
    if not step.model_sharding.stages:
        return None
    sharding = with_stages(step, random)
    return (sharded_step(layout, sharding), ("blocks.1.",)) if 1 in sharding.stages[0] else None


def with_comms(step: ShardedStep, random: Random, change: Callable[[BoundaryComm], list[BoundaryComm]]) -> Corrupted:
    comms = step.model_sharding.boundary_comms
    if not comms:
        return None
    index = random.randrange(len(comms))
    changed = (*comms[:index], *change(comms[index]), *comms[index + 1 :])
    near = tuple(".".join(comm.module.split(".")[:2]) for comm in comms[max(0, index - 1) : index + 2])
    return replace(step, model_sharding=replace(step.model_sharding, boundary_comms=changed)), near


@corruption
def conjugate_missing(_: str, step: ShardedStep, random: Random) -> Corrupted:
    return with_comms(step, random, lambda comm: [])


@corruption
def conjugate_wrong(_: str, step: ShardedStep, random: Random) -> Corrupted:
    operation = random.choice(["copy", "sum", "gather", "scatter", "split", "exchange"])
    return with_comms(step, random, lambda comm: [replace(comm, operation=operation)])


@corruption
def conjugate_doubled(_: str, step: ShardedStep, random: Random) -> Corrupted:
    return with_comms(step, random, lambda comm: [comm, comm])


@corruption
def scattered_along_another_dimension(_: str, step: ShardedStep, random: Random) -> Corrupted:
    def change(comm: BoundaryComm) -> list[BoundaryComm]:
        return [replace(comm, dim=2) if comm.operation in ("gather", "scatter") else comm]

    return with_comms(step, random, change)


@corruption
def block_ends_otherwise(_: str, step: ShardedStep, random: Random) -> Corrupted:
    entries = step.model_sharding.activations
    outputs = [index for index, entry in enumerate(entries) if entry.side == "output"]
    if not outputs:
        return None
    entry = entries[index := random.choice(outputs)]
    changed = (*entries[:index], replace(entry, splits=((2, "tp"),)), *entries[index + 1 :])
    return replace(step, model_sharding=replace(step.model_sharding, activations=changed)), (entry.module,)


@corruption
def row_missing_or_doubled(_: str, step: ShardedStep, random: Random) -> Corrupted:
    rank, rows = random.randrange(step.dims.ranks), list(step.rows_by_rank)
    start, stop = random.choice(rows[rank]).start, random.choice(rows[rank]).stop
    rows[rank] = random.choice([(*rows[rank], range(start, stop)), rows[rank][1:], (*rows[rank], range(8, 9))])
    return replace(step, rows_by_rank=tuple(rows)), (f"{rank}",)


@corruption
def metric_twice_or_never(_: str, step: ShardedStep, random: Random) -> Corrupted:
    metric, rank = random.choice(["loss", "targets", "tokens", "rows"]), random.randrange(step.dims.ranks)
    ranks = set(step.reporters[metric]) ^ {rank}
    return replace(step, reporters={**step.reporters, metric: tuple(sorted(ranks))}), (metric,)


@corruption
def sum_group_doubled(_: str, step: ShardedStep, random: Random) -> Corrupted:
    group = random.choice(step.sync_groups)
    return with_group(step, group, replace(group, sum_groups=(*group.sum_groups, random.choice(group.sum_groups))))


@corruption
def region_without_communication(_: str, step: ShardedStep, random: Random) -> Corrupted:
    """Both ends of a region are missing, so that its ranks split tensors and add nothing."""
    comms = step.model_sharding.boundary_comms
    if not comms:
        return None
    index = random.randrange(2, len(comms) - 2, 2)
    sharding = replace(step.model_sharding, boundary_comms=(*comms[:index], *comms[index + 2 :]))
    return replace(step, model_sharding=sharding), (comms[index].module,)
