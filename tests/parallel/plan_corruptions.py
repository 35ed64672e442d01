"""Mistakes of every kind in the units of a plan, their actions and the shards of each rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from sharded_inventory import PLANS, planned_again
from sharding_corruptions import Corrupted, corruption, groups_of, in_one

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import MOMENTS, CommUnitAction, UnitSchedule, make_unit_schedule
from motet.parallel.step_plan.plan import StepPlan
from parallel.symbolic_execution import SYMBOLIC_ACTIONS

Actions = list[CommUnitAction]


def with_units(plan: StepPlan, old: SyncGroupPlan, units: Sequence[CommUnit]) -> Corrupted:
    groups = tuple(replace(each, units=tuple(units)) if each is old else each for each in plan.groups)
    return Corrupted(replace(plan, groups=groups), old.group.names)


def choose_unit(plan: StepPlan, random: Random) -> tuple[SyncGroupPlan, int]:
    group = random.choice(plan.groups)
    return group, random.choice([i for i, unit in enumerate(group.units) if unit.members])


def with_unit(plan: StepPlan, group: SyncGroupPlan, index: int, **changes: Any) -> Corrupted:
    units = list(group.units)
    units[index] = replace(units[index], **changes)
    return with_units(plan, group, units)


def with_schedule(plan: StepPlan, random: Random, change: Callable[[Actions], object]) -> Corrupted:
    """Another schedule of one unit, or of all units with the same schedule."""
    group, index = choose_unit(plan, random)
    actions, old = list(group.units[index].schedule), group.units[index].schedule
    change(actions)
    if random.random() < 0.3:
        return with_unit(plan, group, index, schedule=tuple(actions))
    new: UnitSchedule = tuple(actions)
    return with_units(plan, group, [replace(u, schedule=new) if u.schedule is old else u for u in group.units])


def with_action(
    plan: StepPlan, random: Random, change: Callable[[CommUnitAction], CommUnitAction], *, of: str = ""
) -> Corrupted | None:
    """A change of one action, or of one of this kind."""

    def changed(actions: Actions) -> None:
        if choices := [i for i, action in enumerate(actions) if action.kind.endswith(of)]:
            index = random.choice(choices)
            actions[index] = change(actions[index])

    return with_schedule(plan, random, changed)


@corruption
def action_missing(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_schedule(plan, random, lambda actions: actions.pop(random.randrange(len(actions))))


@corruption
def action_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(actions: Actions) -> None:
        actions.insert(random.randrange(len(actions)), random.choice(actions))

    return with_schedule(plan, random, change)


@corruption
def actions_swapped(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Also their moments, so that they happen in the other order."""

    def change(actions: Actions) -> None:
        a, b = random.sample(range(len(actions)), 2)
        x, y = actions[a], actions[b]
        is_moved = random.random() < 0.5
        actions[a] = replace(y, moment=x.moment) if is_moved else y
        actions[b] = replace(x, moment=y.moment) if is_moved else x

    return with_schedule(plan, random, change)


@corruption
def action_moved(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """An action stands elsewhere in the list, which says who updates what."""

    def change(actions: Actions) -> None:
        action = actions.pop(random.randrange(len(actions)))
        actions.insert(random.randint(0, len(actions)), action)

    return with_schedule(plan, random, change)


@corruption
def action_at_another_moment(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_action(plan, random, lambda action: replace(action, moment=random.choice(MOMENTS)))


@corruption
def action_on_another_tensor(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(action: CommUnitAction) -> CommUnitAction:
        is_change = action.over is not None  # No action but a collective has a tensor
        return replace(action, tensor="parameters" if is_change and action.tensor == "gradients" else "gradients")

    return with_action(plan, random, change)


@corruption
def action_of_another_kind(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_action(plan, random, lambda action: replace(action, kind=random.choice(list(SYMBOLIC_ACTIONS))))


def another_rank(groups: RankGroups, random: Random) -> RankGroups:
    """A rank too many, too few, or in the place of another."""
    ranks = [rank for each in groups for rank in each]

    def change(group: list[int]) -> list[int]:
        index, other = random.randrange(len(group)), random.choice(ranks)
        return random.choice([[*group, other], [*group[:index], *group[index + 1 :]], [other, *group[1:]]])

    return in_one(random, change)(groups)


def permuted(groups: RankGroups, random: Random) -> RankGroups:
    ranks = [rank for each in groups for rank in each]
    shuffled = iter(random.sample(ranks, len(ranks)))
    return tuple(tuple(next(shuffled) for _ in each) for each in groups)


def cut_otherwise(groups: RankGroups, random: Random) -> RankGroups:
    """Groups of another size, or in columns instead of rows."""
    ranks = sorted(rank for each in groups for rank in each)
    size = random.choice([n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0])
    rows = tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))
    return random.choice([rows, tuple(zip(*rows, strict=True))])


def groups_of_other_ranks(plan: StepPlan, random: Random, field: str = "rank_groups", of: str = "") -> Corrupted | None:
    change = random.choice([another_rank, permuted, cut_otherwise])

    def changed(action: CommUnitAction) -> CommUnitAction:
        groups = getattr(action, field)
        return replace(action, **{field: change(groups, random)}) if groups else action

    return with_action(plan, random, changed, of=of)


@corruption
def action_of_other_ranks(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return groups_of_other_ranks(plan, random)


@corruption
def gather_of_other_ranks(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return groups_of_other_ranks(plan, random, of="all_gather")


@corruption
def two_level_groups_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return groups_of_other_ranks(
        plan, random, random.choice(["intra_groups", "inter_groups"]), "two_level_reduce_scatter"
    )


@corruption
def secondary_groups_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Ranks that keep a secondary shard, or that gather it too."""

    def change(actions: Actions) -> None:
        groups = next((action.rank_groups for action in actions if action.over == "near"), ())
        new = random.choice([another_rank, permuted, cut_otherwise])(groups, random) if groups else ()
        kept = random.choice([True, False])
        for i, action in enumerate(actions):
            if action.over == "near" and (kept or action.kind == "keep_secondary"):
                actions[i] = replace(action, rank_groups=new)

    return with_schedule(plan, random, change)


@corruption
def norm_counted_twice(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """All ranks count, or the same ranks again, or only the first."""

    def change(action: CommUnitAction) -> CommUnitAction:
        ranks = {rank for each in action.rank_groups for rank in each}
        everyone = tuple(sorted(ranks | {0, 1} if len(ranks) > 1 else ranks))  # A sync group may be of one rank
        return replace(action, rank_groups=random.choice([(everyone,), action.rank_groups * 2, ((0,),)]))

    return with_action(plan, random, change, of="norm")


@corruption
def sum_over_other_groups(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """An action names other groups than those that it has ranks of."""
    return with_action(plan, random, lambda action: replace(action, over=random.choice(["shards", "replicas", "near"])))


@corruption
def unit_of_another_stage(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Its actions are right, and not those of the other buckets."""
    group, index = choose_unit(plan, random)
    ranks, shards = group.group.sharding.ranks, group.units[index].shards
    if group.units[index].kind != "bucket" or group.units[index].owner is not None:
        return None
    settings = CommunicationSettings(overlap=random.choice(["backward", "forward"]))
    sharding = DataParallelSharding(ranks, 2, random.randrange(3) if shards > 1 else 0, shards)
    return with_unit(plan, group, index, schedule=make_unit_schedule(settings, sharding))


def with_shards(
    plan: StepPlan, random: Random, change: Callable[[list[tuple[int, int]], int], object]
) -> Corrupted | None:
    group, index = choose_unit(plan, random)
    spans, which = list(group.units[index].spans), random.randrange(len(group.units[index].spans))
    ranges = list(spans[which].shard_ranges)
    change(ranges, random.randrange(len(ranges)))
    spans[which] = spans[which]._replace(shard_ranges=tuple(ranges))
    return with_unit(plan, group, index, spans=tuple(spans))


@corruption
def bound_off_by_one(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """The end of a shard, its start, or the end of one together with the start of the next."""

    def change(ranges: list[tuple[int, int]], shard: int) -> None:
        by, kind = random.choice([-8, -1, 1, 8]), random.randrange(3)
        first, stop = ranges[shard]
        ranges[shard] = (first + by, stop) if kind == 0 else (first, stop + by)
        if kind == 2 and shard + 1 < len(ranges):
            ranges[shard + 1] = stop + by, ranges[shard + 1][1]

    return with_shards(plan, random, change)


@corruption
def shards_swapped(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    def change(ranges: list[tuple[int, int]], shard: int) -> None:
        other = random.randrange(len(ranges))
        ranges[shard], ranges[other] = ranges[other], ranges[shard]

    return with_shards(plan, random, change)


@corruption
def span_moved(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group, index = choose_unit(plan, random)
    spans, which = list(group.units[index].spans), random.randrange(len(group.units[index].spans))
    span, by = spans[which], random.choice([-32, -1, 1, 32])
    spans[which] = random.choice([span._replace(start=span.start + by), span._replace(length=span.length + by)])
    return with_unit(plan, group, index, spans=tuple(spans))


@corruption
def owner_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """An owner of a bucket that is another rank, or none."""
    group, index = choose_unit(plan, random)
    unit, owner = group.units[index], random.choice([None, *range(4)])
    if not isinstance(unit.contents, Bucket):
        return None
    length = unit.contents.length
    ranges = tuple((0, length if shard == owner else 0) for shard in range(unit.shards))
    spans = (unit.spans[0]._replace(shard_ranges=ranges),) if owner is not None and owner >= unit.shards else unit.spans
    return with_unit(plan, group, index, contents=replace(unit.contents, owner=owner), spans=spans)


def with_members(plan: StepPlan, random: Random, change: Callable[[list[Any], int], object]) -> Corrupted:
    group, index = choose_unit(plan, random)
    contents = group.units[index].contents
    members = list(contents.members)
    change(members, random.randrange(len(members)))
    return with_unit(plan, group, index, contents=replace(contents, members=tuple(members)))


@corruption
def member_missing(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    return with_members(plan, random, lambda members, index: members.pop(index))


@corruption
def member_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A member is twice in its unit, or in another one too."""
    others = [member for unit in plan.comm_units for member in unit.members]
    return with_members(plan, random, lambda members, i: members.insert(i, random.choice([members[i], *others])))


@corruption
def member_changed(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """It is shifted, longer or shorter, of another optimizer group or another name."""
    names = [tensor.name for tensor in plan.inventory.trained]

    def change(members: list[Any], index: int) -> None:
        member, by = members[index], random.choice([-32, -1, 1, 32])
        members[index] = replace(
            member,
            **random.choice(
                [
                    {"start": member.start + by},
                    {"numel": max(0, member.numel + by)},
                    {"optimizer_group": member.optimizer_group + by},
                    {"name": random.choice(names)},
                ]
            ),
        )

    return with_members(plan, random, change)


@corruption
def members_swapped(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Two members have the places of one another."""

    def change(members: list[Any], index: int) -> None:
        a, b = members[index], random.choice(members)
        swapped = {a.name: b.name, b.name: a.name}
        members[:] = [replace(member, name=swapped.get(member.name, member.name)) for member in members]

    return with_members(plan, random, change)


@corruption
def unit_missing_or_doubled(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group, index = choose_unit(plan, random)
    units = list(group.units)
    units[index : index + 1] = random.choice([[], [units[index]] * 2])
    return with_units(plan, group, units)


@corruption
def shape_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """A plan is made of a shape that the shards do not have."""
    group = random.choice(plan.groups)
    name = random.choice(list(group.shapes))
    shape = random.choice([group.shapes[name][::-1], (2, *group.shapes[name]), group.shapes[name][1:]])
    groups = tuple(replace(g, shapes={**g.shapes, name: shape}) if g is group else g for g in plan.groups)
    return Corrupted(replace(plan, groups=groups), (name,))


@corruption
def unit_kind_wrong(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    group, index = choose_unit(plan, random)
    return with_unit(plan, group, index, kind=random.choice(["bucket", "block", "root"]))


@corruption
def one_group_becomes_two(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """FSDP2 shards a module once, and ranks start the collectives of two groups in any order."""
    choices = [group for group in groups_of(plan) if len(group.names) > 1]
    if not choices:
        return None
    group = random.choice(choices)
    count = random.randrange(1, len(group.names))
    both = []
    for names in (group.names[:count], group.names[count:]):
        made = planned_again(layout, plan, group, replace(group, names=names))
        both += [each for each in made.groups if each.group.names == names]
    others = [each for each in plan.groups if each.group is not group]
    return Corrupted(replace(plan, groups=(*both, *others)), group.names)


@corruption
def a_codec_mixes_copies_with_others(layout: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """Buckets are made as if all tensors had the same copies."""
    choices = [group for group in groups_of(plan) if len(set(group.copy_groups.values())) > 1]
    if PLANS[layout].compress is None or not choices:
        return None
    group = random.choice(choices)
    same = dict.fromkeys(group.names, group.copy_groups[group.names[0]])
    mixed = planned_again(layout, plan, group, replace(group, copy_groups=same))
    old = next(each for each in mixed.groups if each.group.copy_groups is same)
    groups = tuple(replace(each, group=group) if each is old else each for each in mixed.groups)
    return Corrupted(replace(mixed, groups=groups), group.names)


@corruption
def states_in_another_place(_: str, plan: StepPlan, random: Random) -> Corrupted | None:
    """The host updates masters, and nothing travels to it."""
    return Corrupted(replace(plan, states=random.choice(["host", "disk"])), plan.groups[0].group.names)
