"""The tensors, or shards of them, that several ranks hold, and must hold with the same bits."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.step_plan.plan import StepPlan

CopyKind = Literal["parameters", "gradients", "states"]  # States: masters and moments


class IdenticalCopies(NamedTuple):
    """Tensors of which each group of ranks holds the same shards: at a step's start, at its norm, or after it."""

    kind: CopyKind
    names: tuple[str, ...]
    rank_groups: RankGroups


def copies_in_plan(plan: StepPlan) -> Iterator[IdenticalCopies]:
    """The copies of all trained and frozen parameters. A trained parameter that is cut into rows is its master."""
    sharded = set[str]()
    for group in plan.groups:
        names, frozen = group.group.names, group.group.frozen
        sharded.update(names, frozen)
        unit = next((unit for unit in group.units if unit.members), None)
        if unit is not None:
            yield from _copies(plan, "gradients", names, shard_of=partial(unit.shard_at, "norm"))
            yield from _copies(plan, "states", names, shard_of=partial(unit.shard_at, "update"))
            if group.group.unit_kind == "bucket":
                yield from _copies(plan, "parameters", names)
        yield from _copies(plan, "parameters", frozen, shard_of=group.group.sharding.shard_of_rank)
    frozen = tuple(tensor.name for tensor in plan.inventory.tensors if tensor.kind == "frozen")
    yield from _copies(plan, "parameters", tuple(name for name in frozen if name not in sharded))


def _copies(
    plan: StepPlan, kind: CopyKind, names: tuple[str, ...], *, shard_of: Callable[[int], int | None] = lambda rank: None
) -> Iterator[IdenticalCopies]:
    """The ranks with the same part of each tensor and the same shard of it, by their positions in the sum group."""
    group = next(
        (group for group in plan.groups if {*names[:1]}.issubset((*group.group.names, *group.group.frozen))), None
    )
    split_alike, copied_alike = dict[object, list[str]](), dict[RankGroups, list[str]]()
    for name in names:
        split_alike.setdefault(plan.specs[name].pattern, []).append(name)
    for alike in split_alike.values():
        ranks: dict[object, list[int]] = {}
        for rank, number in plan.specs[alike[0]].class_of_rank.items():
            position = group.position(rank) if group else None
            ranks.setdefault((number, None if position is None else shard_of(position)), []).append(rank)
        copied_alike.setdefault(tuple(map(tuple, ranks.values())), []).extend(alike)
    for rank_groups, alike in copied_alike.items():
        yield IdenticalCopies(kind, tuple(alike), rank_groups)
