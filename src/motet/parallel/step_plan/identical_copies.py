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
        sharded.update(group.group.names, group.group.frozen)
        unit = next((unit for unit in group.units if unit.members), None)
        if unit is not None:
            yield _copies(plan, "gradients", group.group.names, shard_of=partial(unit.shard_at, "norm"))
            yield _copies(plan, "states", group.group.names, shard_of=partial(unit.shard_at, "update"))
            if group.group.unit_kind == "bucket":
                yield _copies(plan, "parameters", group.group.names)
        if group.group.frozen:
            yield _copies(plan, "parameters", group.group.frozen, shard_of=group.group.sharding.shard_of_rank)
    by_holders: dict[object, list[str]] = {}
    for tensor in plan.inventory.tensors:
        if tensor.kind == "frozen" and tensor.name not in sharded:
            by_holders.setdefault(tuple(plan.specs[tensor.name].items()), []).append(tensor.name)
    for names in by_holders.values():
        yield _copies(plan, "parameters", tuple(names))


def _copies(
    plan: StepPlan, kind: CopyKind, names: tuple[str, ...], *, shard_of: Callable[[int], int | None] = lambda rank: None
) -> IdenticalCopies:
    """The ranks with the same part of the model and the same shard of it, by their positions in the sum group."""
    group = next((group for group in plan.groups if names[0] in (*group.group.names, *group.group.frozen)), None)
    ranks: dict[object, list[int]] = {}
    for rank, spec in plan.specs[names[0]].items():
        position = group.position(rank) if group else None
        ranks.setdefault((spec, None if position is None else shard_of(position)), []).append(rank)
    return IdenticalCopies(kind, names, tuple(map(tuple, ranks.values())))
