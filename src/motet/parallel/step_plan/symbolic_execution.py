"""Execution of a unit's schedule on multisets of contributors: each rank holds a shard or all, and sums of some ranks.

A mistake is a `UnitScheduleError`, which does not know yet which elements the unit has.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.data_parallel.unit_schedule import CommUnitAction, UnitSchedule
from motet.parallel.data_parallel.zero import ActionKind, Moment


class UnitScheduleError(Exception):
    """A mistake in a schedule, whatever the unit; `{}` in the text stands for the elements of the shard."""

    def __init__(self, shard: int | None, text: str) -> None:
        self.shard = shard
        super().__init__(text)


def _require(is_right: bool, shard: int | None, text: str) -> None:
    if not is_right:
        raise UnitScheduleError(shard, text)


class ShardCoverageRequirement(NamedTuple):
    """Ranks that together must hold each element once, and the messages otherwise."""

    action_kind: ActionKind
    held_shards: tuple[tuple[int | None, int], ...]  # (shard that a rank holds, None for all of the unit; the rank)
    gap: str
    twice: str


@dataclass
class SymbolicRankStates:
    """The states of all ranks."""

    shard_of_rank: list[int | None]
    sum_of_rank: list[int]  # Index into `contributors`; those below the number of ranks are local gradients
    contributors: list[Counter[int]]
    sum_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    is_updated: bool = False
    is_norm_counted: bool = False
    is_summed_each_microbatch: bool = False
    shards_after_step: list[int | None] = field(default_factory=list)  # Of the parameters
    primary_groups: RankGroups = ()  # Of the gather for the forward, where parameters are sharded
    # By the shards that the ranks hold: ranks that hold the same are checked once, for their update if there is one.
    coverage_requirements: dict[tuple[int | None, ...], ShardCoverageRequirement] = field(default_factory=dict)

    def combine_sums(self, ranks: Iterable[int]) -> int:
        """Index of the sum of what these ranks hold."""
        key = tuple(sorted(self.sum_of_rank[rank] for rank in ranks))
        if key not in self.sum_ids:
            total: Counter[int] = Counter()
            for index in key:
                total.update(self.contributors[index])
            self.sum_ids[key] = len(self.contributors)
            self.contributors.append(total)
        return self.sum_ids[key]

    def require_coverage(self, kind: ActionKind, ranks: Sequence[int], *, gap: str, twice: str) -> None:
        """Require that these ranks hold each element once."""
        key = tuple(self.shard_of_rank[rank] for rank in ranks)
        known = self.coverage_requirements.get(key)
        if known is None or known.action_kind != kind == "update":
            held = tuple(zip(key, ranks, strict=True))
            self.coverage_requirements[key] = ShardCoverageRequirement(kind, held, gap, twice)

    def require_each_rank_once(self, groups: RankGroups, predicate: str) -> None:
        times = Counter(rank for ranks in groups for rank in ranks)
        for rank, shard in enumerate(self.shard_of_rank):
            _require(times[rank] == 1, shard, f"rank {rank} {predicate} {times[rank]} times, not once")

    def require_complete_sums(self, ranks: Iterable[int]) -> None:
        """Require that what these ranks hold is the sum over all ranks, each once."""
        everyone, first_ranks = range(len(self.shard_of_rank)), dict[int, int]()
        for rank in ranks:
            first_ranks.setdefault(self.sum_of_rank[rank], rank)
        for index, rank in first_ranks.items():
            _require_complete_sum(self.contributors[index], everyone, rank=rank, shard=self.shard_of_rank[rank])


# Actions in the order in which they happen to a gradient and then to the parameter, and when each may happen.
_ORDER: tuple[Moment, ...] = ("microbatch", "last_microbatch", "step", "forward", "backward")
_MOMENTS: dict[ActionKind, tuple[tuple[Moment, ...], tuple[Moment, ...]]] = {  # (of buckets, of FSDP units)
    "reduce_scatter": (("microbatch", "last_microbatch"), ("microbatch",)),
    "two_level_reduce_scatter": ((), ("microbatch",)),
    "tree_reduce_scatter": (("microbatch",), ("microbatch",)),
    "reduce": (("microbatch", "last_microbatch"), ()),
    "all_reduce": (("microbatch", "last_microbatch"), ("last_microbatch",)),
    "tree_all_reduce": (("last_microbatch",), ("last_microbatch",)),
    "norm": (("step",), ("step",)),
    "update": (("step",), ("step",)),
    "all_gather": (("step",), ("forward", "backward")),
    "broadcast": (("step",), ()),
    "keep_secondary": ((), ("backward",)),
}


def execute_symbolically(schedule: UnitSchedule, ranks: int, *, is_bucket: bool) -> SymbolicRankStates:
    """Execute the actions of a schedule in order; raise at the first mistake."""
    states = SymbolicRankStates([None] * ranks, list(range(ranks)), [Counter([rank]) for rank in range(ranks)])
    for action in schedule:
        moments = _MOMENTS[action.kind][not is_bucket]
        _require(action.moment in moments, None, f"{action.kind} of {{}} cannot happen in {action.moment!r}")
    for moment in _ORDER:
        actions = [action for action in schedule if action.moment == moment]
        if moment == "forward":
            states.shards_after_step = states.shard_of_rank
        elif moment == "backward" and actions:
            states.shard_of_rank = states.shards_after_step
        for action in actions:
            _ACTIONS[action.kind](states, action)
        for rank, shard in enumerate(states.shard_of_rank if moment in ("forward", "backward") else ()):
            text = f"rank {rank} does not get the updated {{}} for {moment}, but has only its shard {shard}"
            _require(shard is None, None, text)
    _require(states.is_updated, None, "nobody updates {}")
    return states


def _reduce_scatter(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require_gradients(states, action)
    is_first = max(states.sum_of_rank) < len(states.sum_of_rank)
    _require(is_first, None, f"{action.kind} of {{}} must come before every other sum")
    states.require_each_rank_once(action.rank_groups, "sums {}")
    states.is_summed_each_microbatch = action.moment == "microbatch"
    for ranks, total in [(ranks, states.combine_sums(ranks)) for ranks in action.rank_groups]:
        for shard, rank in enumerate(ranks):
            states.shard_of_rank[rank], states.sum_of_rank[rank] = shard if len(ranks) > 1 else None, total


def _all_reduce(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require_gradients(states, action)
    is_scattered = action.moment != "microbatch" or None not in states.shard_of_rank
    _require(is_scattered, None, "an all_reduce of {} in each micro-batch must follow a reduce-scatter")
    states.require_each_rank_once(action.rank_groups, "sums {}")
    for ranks, total in [(ranks, states.combine_sums(ranks)) for ranks in action.rank_groups]:
        shard = states.shard_of_rank[ranks[0]]
        for rank in ranks:
            text = f"rank {ranks[0]} adds {{}} to another shard, which rank {rank} holds"
            _require(states.shard_of_rank[rank] == shard, shard, text)
            states.sum_of_rank[rank] = total


def _require_gradients(states: SymbolicRankStates, action: CommUnitAction) -> None:
    wanted = "parameters" if states.is_updated else "gradients"
    text = f"{action.kind} communicates {action.tensor} of {{}} where ranks hold {wanted}"
    _require(action.tensor == wanted, None, text)


def _count_in_norm(states: SymbolicRankStates, action: CommUnitAction) -> None:
    ranks = [rank for ranks in action.rank_groups for rank in ranks]
    _require(not states.is_norm_counted, None, "the norm counts {} twice")
    states.require_complete_sums(ranks)
    states.require_coverage("norm", ranks, gap="the norm leaves {} out", twice="the norm counts {} twice")
    states.is_norm_counted = True


def _update(states: SymbolicRankStates, action: CommUnitAction) -> None:
    _require(not states.is_updated, None, "a step updates {} twice")
    _require(states.is_norm_counted, None, "a step updates {} before their norm is known")
    states.require_each_rank_once(action.rank_groups, "updates {}")
    states.require_complete_sums(range(len(states.shard_of_rank)))
    for ranks in action.rank_groups:
        copy = f"of the copy of {format_ranks(ranks)}"
        states.require_coverage("update", ranks, gap=f"nobody {copy} updates {{}}", twice=f"two {copy} update {{}}")
    states.is_updated = True


def _all_gather(states: SymbolicRankStates, action: CommUnitAction) -> None:
    groups = action.rank_groups
    _require_gradients(states, action)
    states.require_each_rank_once(groups, "gathers {}")
    if not states.is_updated:
        states.require_complete_sums(range(len(states.shard_of_rank)))
        keeps_all = not states.is_summed_each_microbatch
        _require(keeps_all, None, "sums of {} are gathered where ranks keep shards of them")
    for ranks in groups:
        for position, rank in enumerate(ranks):
            shard = states.shard_of_rank[rank]
            text = f"rank {ranks[0]} gathers shard {shard} of rank {rank} in the place of {{}}"
            _require(shard == position, position, text)
        who, gap = format_ranks(ranks), "do not gather {}"
        if action.over == "shards":
            states.require_coverage("all_gather", ranks, gap=f"{who} {gap}", twice=f"{who} gather {{}} twice")
    states.primary_groups = states.primary_groups or groups
    states.shard_of_rank = [None] * len(states.shard_of_rank)


def _positions(groups: RankGroups) -> dict[int, tuple[tuple[int, ...], int]]:
    """Rank -> (its group, its position there)."""
    return {rank: (ranks, position) for ranks in groups for position, rank in enumerate(ranks)}


def _keep_secondary(states: SymbolicRankStates, action: CommUnitAction) -> None:
    states.require_each_rank_once(action.rank_groups, "keeps a secondary shard of {}")
    gathered, shards = _positions(states.primary_groups), list(states.shard_of_rank)
    for ranks in action.rank_groups:
        for position, rank in enumerate(ranks):
            text = f"ranks {ranks[0]} and {rank} share a secondary copy of {{}}, but not a primary one"
            _require(rank in gathered and gathered[rank][0] == gathered[ranks[0]][0], None, text)
            shards[rank] = position
    states.shard_of_rank = shards


def _two_level_reduce_scatter(states: SymbolicRankStates, action: CommUnitAction) -> None:
    """Sums over the intra groups, then over the inter groups; each rank gets the total of its shard."""
    intra, primary = _positions(action.intra_groups), _positions(action.rank_groups)
    for groups in (action.intra_groups, action.inter_groups):
        states.require_each_rank_once(groups, "sums {} in two levels")
    _reduce_scatter(states, action)
    for ranks in action.inter_groups:
        everyone, shard = primary[ranks[0]]
        contributors = Counter(other for rank in ranks for other in intra[rank][0])
        _require_complete_sum(contributors, everyone, rank=ranks[0], shard=shard)
        for position, rank in enumerate(ranks):
            (others, intra_position), (_, shard) = intra[rank], primary[rank]
            is_same = position * len(others) + intra_position == shard
            _require(is_same, shard, f"rank {rank} gets another shard than {{}} of a two-level sum")


_ACTIONS: dict[ActionKind, Callable[[SymbolicRankStates, CommUnitAction], None]] = {
    "reduce_scatter": _reduce_scatter,
    "two_level_reduce_scatter": _two_level_reduce_scatter,
    "tree_reduce_scatter": _reduce_scatter,
    "reduce": _reduce_scatter,
    "all_reduce": _all_reduce,
    "tree_all_reduce": _all_reduce,
    "norm": _count_in_norm,
    "update": _update,
    "all_gather": _all_gather,
    "broadcast": _all_gather,
    "keep_secondary": _keep_secondary,
}


def _require_complete_sum(contributors: Counter[int], everyone: Sequence[int], *, rank: int, shard: int | None) -> None:
    if len(contributors) == len(everyone) and all(contributors[other] == 1 for other in everyone):
        return
    missing = [other for other in everyone if not contributors[other]]
    repeated = [other for other, times in sorted(contributors.items()) if times > 1]
    problem = f"misses {format_ranks(missing)}" if missing else f"counts {format_ranks(repeated)} more than once"
    raise UnitScheduleError(shard, f"the sum of {{}} on rank {rank} {problem}")


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7`, or a list that is cut after eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"ranks {shown}"
