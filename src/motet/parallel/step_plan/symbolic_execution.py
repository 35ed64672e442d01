"""The course of a portion, played on multisets of contributors: each rank has a shard of it or all, and sums of some.

What is wrong is a `FaultError`, which does not know yet what elements the portion has.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motet.collectives.cost.alpha_beta import RankGroups
from motet.parallel.step_plan.plan import ActionKind, CommUnitAction, UnitSchedule

HeldShard = tuple[int | None, int]  # The number of the shard that a rank has, None being all of it; and the rank


class UnitScheduleError(Exception):
    """What is wrong with a course, whatever the portion. `{}` in the text stands for what of it is concerned."""

    def __init__(self, shard: int | None, text: str) -> None:
        self.shard = shard
        super().__init__(text)


@dataclass(frozen=True)
class ShardCoverageRequirement:
    """Some ranks that together have each element once; what is wrong otherwise."""

    action_kind: ActionKind
    held_shards: tuple[HeldShard, ...]
    gap_message: str
    overlap_message: str


@dataclass
class SymbolicRankStates:
    """All ranks, as they stand."""

    shard_of_rank: list[int | None]
    # What each has of the sums, as a number; those below the number of ranks are their own gradients.
    sum_of_rank: list[int]
    contributors: list[Counter[int]]
    sum_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    is_updated: bool = False
    # By the shards that they have: ranks that have the same are asked once, for their update if there is one.
    coverage_requirements: dict[tuple[int | None, ...], ShardCoverageRequirement] = field(default_factory=dict)

    def combine_sums(self, sums: Iterable[int]) -> int:
        key = tuple(sorted(sums))
        if key not in self.sum_ids:
            total: Counter[int] = Counter()
            for content in key:
                total.update(self.contributors[content])
            self.sum_ids[key] = len(self.contributors)
            self.contributors.append(total)
        return self.sum_ids[key]

    def require_coverage(
        self, action_kind: ActionKind, ranks: Sequence[int], gap_message: str, overlap_message: str
    ) -> None:
        """That these ranks have each element once."""
        key = tuple(self.shard_of_rank[rank] for rank in ranks)
        if (
            key not in self.coverage_requirements
            or self.coverage_requirements[key].action_kind != action_kind == "update"
        ):
            self.coverage_requirements[key] = ShardCoverageRequirement(
                action_kind, tuple(zip(key, ranks, strict=True)), gap_message, overlap_message
            )


def execute_symbolically(schedule: UnitSchedule, ranks: int) -> SymbolicRankStates:
    states = SymbolicRankStates([None] * ranks, list(range(ranks)), [Counter([rank]) for rank in range(ranks)])
    for index, action in enumerate(schedule):
        _ACTIONS[action.kind](states, action, schedule[:index])
    stale_rank = next((rank for rank, number in enumerate(states.shard_of_rank) if number is not None), None)
    if stale_rank is not None:
        raise UnitScheduleError(
            None,
            f"rank {stale_rank} is not given {{}} as updated, but has its shard {states.shard_of_rank[stale_rank]} alone",
        )
    if not states.is_updated:
        raise UnitScheduleError(None, "nobody updates {}")
    return states


def _reduce_scatter(states: SymbolicRankStates, action: CommUnitAction, earlier: UnitSchedule) -> None:
    for ranks, total in _sum_each_group(states, action.rank_groups):
        for shard, rank in enumerate(ranks):
            if states.shard_of_rank[rank] is not None:
                raise UnitScheduleError(
                    states.shard_of_rank[rank], f"rank {rank} has a shard alone where all of {{}} is to be summed"
                )
            states.shard_of_rank[rank], states.sum_of_rank[rank] = shard, total


def _all_reduce(states: SymbolicRankStates, action: CommUnitAction, earlier: UnitSchedule) -> None:
    for ranks, total in _sum_each_group(states, action.rank_groups):
        for rank in ranks:
            if states.shard_of_rank[rank] != states.shard_of_rank[ranks[0]]:
                text = f"rank {ranks[0]} adds {{}} to another shard, which rank {rank} has"
                raise UnitScheduleError(states.shard_of_rank[ranks[0]], text)
            states.sum_of_rank[rank] = total


def _sum_each_group(states: SymbolicRankStates, groups: RankGroups) -> list[tuple[tuple[int, ...], int]]:
    """(ranks, what they have together)"""
    return [(ranks, states.combine_sums([states.sum_of_rank[rank] for rank in ranks])) for ranks in groups]


def _count_in_norm(states: SymbolicRankStates, action: CommUnitAction, earlier: UnitSchedule) -> None:
    ranks = [rank for ranks in action.rank_groups for rank in ranks]
    _require_complete_sums(states, ranks)
    states.require_coverage("norm", ranks, "the norm leaves {} out", "the norm counts {} twice")


def _update(states: SymbolicRankStates, action: CommUnitAction, earlier: UnitSchedule) -> None:
    if states.is_updated:
        raise UnitScheduleError(None, "a step updates {} twice")
    _require_each_rank_once(states, action.rank_groups, "updates {}")
    _require_complete_sums(states, range(len(states.shard_of_rank)))
    for ranks in action.rank_groups:
        copy = f"of the copy of {format_ranks(ranks)}"
        states.require_coverage("update", ranks, f"nobody {copy} updates {{}}", f"two {copy} update {{}}")
    states.is_updated = True


def _all_gather(states: SymbolicRankStates, action: CommUnitAction, earlier: UnitSchedule) -> None:
    """Of what was updated, or of sums that everybody is to update with."""
    _require_each_rank_once(states, action.rank_groups, "is given {}")
    if not states.is_updated:
        _require_complete_sums(states, range(len(states.shard_of_rank)))
    for ranks in action.rank_groups:
        for shard, rank in enumerate(ranks):
            if states.shard_of_rank[rank] != shard:
                text = (
                    f"rank {ranks[0]} is given shard {states.shard_of_rank[rank]} of rank {rank} in the place of {{}}"
                )
                raise UnitScheduleError(shard, text)
        states.require_coverage(
            "gather", ranks, f"{format_ranks(ranks)} are not given {{}}", f"{format_ranks(ranks)} are given {{}} twice"
        )
        for rank in ranks:
            states.shard_of_rank[rank] = None


def _keep_secondary(states: SymbolicRankStates, action: CommUnitAction, earlier_actions: UnitSchedule) -> None:
    _require_each_rank_once(states, action.rank_groups, "has a part of a second copy of {}")
    shard_group_of = {
        rank: ranks
        for earlier in earlier_actions
        if earlier.kind == "gather"
        for ranks in earlier.rank_groups
        for rank in ranks
    }
    for ranks in action.rank_groups:
        stranger = next((rank for rank in ranks if shard_group_of[rank] != shard_group_of[ranks[0]]), None)
        if stranger is not None:
            raise UnitScheduleError(
                None, f"ranks {ranks[0]} and {stranger} share a second copy of {{}}, but not a first"
            )


def _two_level_reduce(states: SymbolicRankStates, action: CommUnitAction, earlier_actions: UnitSchedule) -> None:
    """Over those that share a second copy, then over these: each rank gets the sum of all, of its own shard."""
    groups_by_kind = {earlier.kind: earlier.rank_groups for earlier in earlier_actions}
    secondary_position = {rank: (ranks, place) for ranks in groups_by_kind["keep"] for place, rank in enumerate(ranks)}
    shard_position = {rank: (ranks, place) for ranks in groups_by_kind["gather"] for place, rank in enumerate(ranks)}
    _require_each_rank_once(states, action.rank_groups, "sums {} in two levels")
    for ranks in action.rank_groups:
        everyone, shard = shard_position[ranks[0]]
        _require_all_contributors(
            ranks[0], shard, Counter(other for rank in ranks for other in secondary_position[rank][0]), everyone
        )
        for place, rank in enumerate(ranks):
            others, secondary_index = secondary_position[rank]
            if place * len(others) + secondary_index != shard_position[rank][1]:
                raise UnitScheduleError(
                    shard_position[rank][1], f"rank {rank} gets another shard than {{}} of a sum in two levels"
                )


_ACTIONS = {
    "scatter": _reduce_scatter,
    "sum": _all_reduce,
    "norm": _count_in_norm,
    "update": _update,
    "gather": _all_gather,
    "keep": _keep_secondary,
    "levels": _two_level_reduce,
}


def _require_each_rank_once(states: SymbolicRankStates, groups: RankGroups, what: str) -> None:
    times = Counter(rank for ranks in groups for rank in ranks)
    for rank, shard in enumerate(states.shard_of_rank):
        if times[rank] != 1:
            raise UnitScheduleError(shard, f"rank {rank} {what} {times[rank]} times, not once")


def _require_complete_sums(states: SymbolicRankStates, ranks: Iterable[int]) -> None:
    """What these have is the sum of what all ranks give, each once."""
    checked_sums: set[int] = set()
    all_ranks = range(len(states.shard_of_rank))
    for rank in ranks:
        if states.sum_of_rank[rank] not in checked_sums:
            _require_all_contributors(
                rank, states.shard_of_rank[rank], states.contributors[states.sum_of_rank[rank]], all_ranks
            )
            checked_sums.add(states.sum_of_rank[rank])


def _require_all_contributors(
    rank: int, shard: int | None, contributors: Counter[int], all_ranks: Sequence[int]
) -> None:
    if len(contributors) == len(all_ranks) and all(contributors[one] == 1 for one in all_ranks):
        return
    missing = [one for one in all_ranks if not contributors[one]]
    repeated = [one for one, times in sorted(contributors.items()) if times > 1]
    text = (
        f"lacks the share of {format_ranks(missing)}"
        if missing
        else f"has the share of {format_ranks(repeated)} more than once"
    )
    raise UnitScheduleError(shard, f"the sum of {{}} on rank {rank} {text}")


def format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"ranks {shown}"
